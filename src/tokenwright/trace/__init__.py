"""Looking at a run: what a step costs, from shapes alone."""

from tokenwright.trace.cost import Cost, CostModel

__all__ = ["Cost", "CostModel"]
