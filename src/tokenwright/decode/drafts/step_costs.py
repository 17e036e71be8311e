"""The cost of a step by its number of rows, relative to a step of one row. The proposer weighs drafts against it.

It is a table and not a clock, so that equal requests get equal drafts.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from types import MappingProxyType

ROWS = (1, 2, 4, 8, 16, 32)
# By instruction set and format of the weights. Those for 8 rows, int8 and AVX2 were measured on qwen05's shape
# with two threads; the others are estimates. "wide": AVX-512 and AMX; "": other kernels, as torch's.
COSTS: Mapping[tuple[str, str], tuple[float, ...]] = MappingProxyType(
    {
        ("wide", "bfloat16"): (1.0, 1.05, 1.1, 1.2, 1.4, 2.1),
        ("wide", "int8"): (1.0, 1.08, 1.2, 1.42, 1.9, 3.0),
        ("wide", "int4"): (1.0, 1.15, 1.4, 1.9, 2.7, 4.6),
        ("avx2", "bfloat16"): (1.0, 1.15, 1.4, 2.0, 3.5, 7.0),
        ("avx2", "int8"): (1.0, 1.25, 1.7, 2.8, 5.2, 10.0),
        ("avx2", "int4"): (1.0, 1.35, 2.0, 3.4, 6.4, 12.5),
        ("", ""): (1.0, 1.5, 2.4, 4.2, 7.8, 15.0),
    }
)
# The lowest costs for models whose weights stay in the processor's caches, measured on stories in three formats.
SMALL = (1.0, 1.05, 1.25, 1.75, 2.8, 5.0)
LIKE = {"amx": "wide", "avx512": "wide", "avxvnni": "avx2"}  # instruction sets with the costs of another
FAR = 3.0  # the cost of reading a byte of K and V, in bytes of weights, which are read in order


@dataclass(frozen=True)
class StepCosts:
    """The cost of a step by its number of rows; between the points it is interpolated."""

    points: Mapping[int, float]
    context: float = 0.0  # of a token of context, for each row that reads it
    states: float = 0.0  # of copying the recurrent states of a text with drafts

    @cached_property
    def _lines(self) -> tuple[list[int], list[float]]:
        rows = sorted(self.points)
        return rows, [self.points[count] for count in rows]

    def of(self, rows: float) -> float:
        """The cost of a step of `rows` >= 1 rows, without reading the cache."""
        counts, costs = self._lines
        right = min(max(1, bisect_right(counts, rows)), len(counts) - 1)
        low, high = counts[right - 1], counts[right]
        return costs[right - 1] + (costs[right] - costs[right - 1]) * (rows - low) / (high - low)

    def times(self, factor: float) -> "StepCosts":
        points = {rows: cost * factor for rows, cost in self.points.items()}
        return StepCosts(points, self.context * factor, self.states * factor)


def costs_of(
    kernels: str,
    weights: str,
    read: Callable[[int], float],
    context: float,
    states: float = 0.0,
    *,
    small: bool = False,
) -> StepCosts:
    """The costs of a model whose steps were not measured.

    read(rows): the number of weights that a step reads. context, states: bytes of K and V of a token, and of the states
    of a text, in bytes of the weights. small: the processor's caches hold the weights.
    """
    wide = LIKE.get(kernels, kernels)
    name = weights if (wide, weights) in COSTS else "int8"
    table = COSTS.get((wide, name), COSTS["", ""])
    costs = zip(ROWS, map(max, table, SMALL) if small else table, strict=True)
    return StepCosts({rows: cost * read(rows) / read(1) for rows, cost in costs}, FAR * context, FAR * states)


def measured(times: Mapping[int, float], context: float, states: float = 0.0) -> StepCosts:
    """The costs of measured steps; more rows never cost less. context, states: as in `costs_of`."""
    rows = sorted(times)
    rising = accumulate((times[count] / times[1] for count in rows), max)
    return StepCosts(dict(zip(rows, rising, strict=True)), FAR * context, FAR * states)
