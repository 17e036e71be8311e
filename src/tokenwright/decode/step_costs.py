"""What a step costs by the number of its rows, in costs of a step of one row: what drafts are weighed against.

A table, not a clock: equal requests get equal drafts, however busy the machine is.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class StepCosts:
    """points: the cost of steps of some numbers of rows, of 1 and at least one more; others lie on lines between them.

    context: what one token of context adds to the cost of each row that reads it.
    """

    points: Mapping[int, float]
    context: float = 0.0

    @cached_property
    def _lines(self) -> tuple[list[int], list[float]]:
        rows = sorted(self.points)
        return rows, [self.points[count] for count in rows]

    def of(self, rows: int) -> float:
        """The cost of a step of so many rows, at least 1, without what they read of the cache."""
        counts, costs = self._lines
        right = min(max(1, bisect_right(counts, rows)), len(counts) - 1)
        low, high = counts[right - 1], counts[right]
        return costs[right - 1] + (costs[right] - costs[right - 1]) * (rows - low) / (high - low)
