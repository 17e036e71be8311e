"""The cache never changes the text: ways of running x kinds of models x cache formats x greedy and seeded.

Every two of these meet, once with the reference kernels, whose sums are in fp64, and once with native kernels, where
formats of weights are one factor more and rows are equal to the bit. The full cross is a sweep; in it the formats of
weights go by turns, so that each meets every way, kind and format.
"""

from itertools import combinations, product
from pathlib import Path

import pytest

from tests.backends.native import needs_native, threads
from tests.equality import ways
from tests.equality.harness import FORMATS, KINDS, MIXED, SAMPLINGS, WAYS, WEIGHTS, Case, alone, compare
from tests.pairwise import pairwise

assert ways.LATE  # imported for what it registers

ALL = (*FORMATS, MIXED)

PAIRS = pairwise(list(KINDS), ALL, list(WAYS), list(SAMPLINGS))
NATIVE_PAIRS = pairwise(list(KINDS), ALL, list(WAYS), list(SAMPLINGS), WEIGHTS)
CROSS = list(product(KINDS, ALL, WAYS, SAMPLINGS))
BY_TURNS = [
    (kind, kv, way, sampling, WEIGHTS[(i + j + k) % len(WEIGHTS)])
    for (i, kind), (j, kv), (k, way), sampling in product(enumerate(KINDS), enumerate(ALL), enumerate(WAYS), SAMPLINGS)
]


@pytest.mark.parametrize(("kind", "kv", "way", "sampling"), PAIRS)
def test_the_text_is_the_naive_ones(kind: str, kv: str, way: str, sampling: str, tmp_path: Path) -> None:
    WAYS[way](Case(kind, kv, sampling), tmp_path)


@needs_native
@pytest.mark.parametrize(("kind", "kv", "way", "sampling", "weights"), NATIVE_PAIRS)
def test_with_native_kernels_to_the_bit(
    kind: str, kv: str, way: str, sampling: str, weights: str, tmp_path: Path
) -> None:
    WAYS[way](Case(kind, kv, sampling, weights), tmp_path)


@pytest.mark.sweep
@pytest.mark.parametrize(("kind", "kv", "way", "sampling"), CROSS)
def test_the_full_cross(kind: str, kv: str, way: str, sampling: str, tmp_path: Path) -> None:
    WAYS[way](Case(kind, kv, sampling), tmp_path)


@needs_native
@pytest.mark.sweep
@pytest.mark.parametrize(("kind", "kv", "way", "sampling", "weights"), BY_TURNS)
def test_the_full_cross_with_native_kernels(
    kind: str, kv: str, way: str, sampling: str, weights: str, tmp_path: Path
) -> None:
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
    names = (KINDS, ALL, WAYS, SAMPLINGS, WEIGHTS)
    for cells, given in ((PAIRS, 4), (NATIVE_PAIRS, 5), (BY_TURNS, 5)):
        for one, other in combinations(range(given), 2):
            assert {(cell[one], cell[other]) for cell in cells} == set(product(names[one], names[other]))
