"""Covering arrays: few rows in which every two values of different factors meet."""

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

Row = tuple[Any, ...]
Pair = tuple[tuple[int, Any], tuple[int, Any]]


def pairs(row: Iterable[tuple[int, Any]]) -> set[Pair]:
    """The pairs of values of a row, or of a part of it, given as (factor, value) in the order of factors."""
    return set(combinations(row, 2))


def pairwise(*factors: Sequence[Any]) -> list[Row]:
    """Rows with a value of each of two or more factors, in which every two values of different factors meet.

    The same factors give the same rows. Greedy: a row begins with a pair that is missing and takes, factor by factor,
    the value that brings the most missing pairs with it; of equals the one used least. The fewest rows possible are the
    product of the two largest factors.
    """
    missing = {
        ((i, a), (j, b)) for (i, one), (j, other) in combinations(enumerate(factors), 2) for a, b in product(one, other)
    }
    used = {(factor, value): 0 for factor, values in enumerate(factors) for value in values}
    rows = []
    for start in ordered(factors):
        if start not in missing:
            continue
        row = dict(start)
        for factor, values in enumerate(factors):
            if factor not in row:
                row[factor] = best(row, factor, values, missing, used)
        cells = sorted(row.items())
        missing -= pairs(cells)
        for cell in cells:
            used[cell] += 1
        rows.append(tuple(value for _, value in cells))
    return rows


def ordered(factors: Sequence[Sequence[Any]]) -> Iterable[Pair]:
    """All pairs, those of the largest two factors first."""
    sizes = [len(values) for values in factors]
    for i, j in sorted(combinations(range(len(factors)), 2), key=lambda two: -sizes[two[0]] * sizes[two[1]]):
        for a, b in product(factors[i], factors[j]):
            yield (i, a), (j, b)


def best(row: dict[int, Any], factor: int, values: Sequence[Any], missing: set[Pair], used: dict[Any, int]) -> Any:
    """The value of a factor that brings the most missing pairs into a row begun; of equals the one used least."""

    def gain(value: Any) -> tuple[int, int]:
        cells = [tuple(sorted(((factor, value), cell), key=lambda one: one[0])) for cell in row.items()]
        return sum(cell in missing for cell in cells), -used[factor, value]

    return max(values, key=gain)
