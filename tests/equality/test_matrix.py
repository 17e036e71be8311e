"""The cache never changes the text: every way of running x every kind of model x every format x greedy and seeded.

With native kernels that is whole, and equal to the bit; the formats of weights go by turns, so that each meets every
way, kind and format. The reference, whose sums are in fp64 and slow, does a third in which every two of way, kind and
format meet.
"""

from itertools import combinations, product
from pathlib import Path

import pytest

from tests.equality import ways
from tests.equality.harness import FORMATS, KINDS, MIXED, SAMPLINGS, WAYS, WEIGHTS, Case, alone, compare
from tests.kernels.native import needs_native, threads

assert ways.LATE  # imported for what it registers

ALL = (*FORMATS, MIXED)


CELLS = [
    (i + j + k, (kind, kv, way))
    for (i, kind), (j, kv), (k, way) in product(enumerate(KINDS), enumerate(ALL), enumerate(WAYS))
]
THIRD = [cell for turn, cell in CELLS if turn % 3 == 0]
BY_TURNS = [(*cell, WEIGHTS[turn % len(WEIGHTS)]) for turn, cell in CELLS]


@pytest.mark.parametrize(("kind", "kv", "way"), THIRD)
def test_the_text_is_the_naive_ones(kind: str, kv: str, way: str, tmp_path: Path) -> None:
    for sampling in SAMPLINGS:
        WAYS[way](Case(kind, kv, sampling), tmp_path)


@needs_native
@pytest.mark.parametrize(("kind", "kv", "way", "weights"), BY_TURNS)
def test_with_native_kernels_to_the_bit(kind: str, kv: str, way: str, weights: str, tmp_path: Path) -> None:
    for sampling in SAMPLINGS:
        WAYS[way](Case(kind, kv, sampling, weights), tmp_path)


@needs_native
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("kv", ALL)
def test_threads_change_nothing(kv: str, weights: str) -> None:
    """The oracle has one thread."""
    case = Case("window + sinks", kv, "seeded", weights)
    oracle = case.naive()
    for count in (2, 3):
        with threads(count):
            compare(case, "two and three threads", alone(case, case.bench(budget=7)), oracle)


def test_every_two_of_the_names_meet() -> None:
    names = (KINDS, ALL, WAYS, WEIGHTS)
    for cells, given in ((THIRD, 3), (BY_TURNS, 4)):
        for one, other in combinations(range(given), 2):
            assert {(cell[one], cell[other]) for cell in cells} == set(product(names[one], names[other]))
