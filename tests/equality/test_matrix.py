"""The cache never changes the text: ways of running x kinds of models x cache formats x greedy and seeded.

With native kernels, where rows are equal to the bit, every two of these meet, and formats of weights are one factor
more. A cell of the reference kernels, whose sums are in fp64, takes eight times as long: there each kind meets every
format and sampling, and each way every format, sampling and `Kind.keeps`, but not every kind, and CI takes its part
of these cells. The full cross is a
sweep; in it the formats of weights go by turns, so that each meets every way, kind and format.
"""

from itertools import combinations, product
from pathlib import Path

import pytest

from tests.backends.native import needs_native, threads
from tests.equality import ways
from tests.equality.harness import FORMATS, MIXED, SAMPLINGS, WAYS, WEIGHTS, Case, alone, compare
from tests.equality.kinds import KINDS, NEWEST
from tests.pairwise import pairwise
from tests.profiles import some

assert ways.LATE  # imported for what it registers

ALL = (*FORMATS, MIXED)
NAMED, SAMPLED = list(WAYS), list(SAMPLINGS)

NATIVE_PAIRS = pairwise(list(KINDS), ALL, NAMED, SAMPLED, WEIGHTS)
BY_TURNS = [
    (kind, kv, NAMED[n % len(NAMED)], SAMPLED[(n + n // 30) % len(SAMPLED)])
    for n, (kind, kv) in enumerate(product(sorted(KINDS, key=lambda kind: KINDS[kind].keeps), ALL))
]
REFERENCE = some(BY_TURNS, 9)  # 9 has no divisor in common with 5 formats, 14 ways and 4 samplings: all are there

BY_TURNS_OF_THE_NEWEST = [
    (kind, kv, NAMED[n % len(NAMED)], SAMPLED[n % len(SAMPLED)], WEIGHTS[(n + n // 5) % len(WEIGHTS)])
    for n, (kind, kv) in enumerate(product(NEWEST, ALL))
]


@pytest.mark.parametrize(("kind", "kv", "way", "sampling"), REFERENCE)
def test_the_text_is_the_naive_ones(kind: str, kv: str, way: str, sampling: str, tmp_path: Path) -> None:
    WAYS[way](Case(kind, kv, sampling), tmp_path)


@needs_native
@pytest.mark.parametrize(("kind", "kv", "way", "sampling", "weights"), [*NATIVE_PAIRS, *BY_TURNS_OF_THE_NEWEST])
def test_with_native_kernels_to_the_bit(
    kind: str, kv: str, way: str, sampling: str, weights: str, tmp_path: Path
) -> None:
    WAYS[way](Case(kind, kv, sampling, weights), tmp_path)


@pytest.mark.sweep
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_full_cross(kind: str, way: str, tmp_path: Path) -> None:
    for kv, sampling in product(ALL, SAMPLINGS):
        WAYS[way](Case(kind, kv, sampling), folder_of(tmp_path, kv, sampling))


@needs_native
@pytest.mark.sweep
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_full_cross_with_native_kernels(kind: str, way: str, tmp_path: Path) -> None:
    first = list(KINDS).index(kind) + NAMED.index(way)
    for (i, kv), sampling in product(enumerate(ALL), SAMPLINGS):
        weights = WEIGHTS[(first + i) % len(WEIGHTS)]
        WAYS[way](Case(kind, kv, sampling, weights), folder_of(tmp_path, kv, sampling))


def folder_of(folder: Path, kv: str, sampling: str) -> Path:
    """An empty folder for each cell of a test."""
    made = folder / f"{ALL.index(kv)}-{sampling}"
    made.mkdir()
    return made


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


def test_the_newest_kinds_meet_every_format_and_together_every_way() -> None:
    kinds, formats, ways_, _, weights = (set(column) for column in zip(*BY_TURNS_OF_THE_NEWEST, strict=True))
    assert (kinds, formats, ways_, weights) == (set(NEWEST), set(ALL), set(WAYS), set(WEIGHTS))


def test_every_two_of_the_names_meet() -> None:
    names = (KINDS, ALL, WAYS, SAMPLINGS, WEIGHTS)
    for one, other in combinations(range(5), 2):
        assert {(cell[one], cell[other]) for cell in NATIVE_PAIRS} == set(product(names[one], names[other]))


def test_the_part_of_the_reference_has_all_ways_formats_and_samplings() -> None:
    kept = {kind.keeps for kind in KINDS.values()}
    cells = [(KINDS[kind].keeps, *more) for kind, *more in REFERENCE]
    assert [set(column) for column in zip(*cells, strict=True)] == [kept, set(ALL), set(WAYS), set(SAMPLINGS)]


def test_the_reference_meets_every_two_but_kinds_and_ways() -> None:
    kept = {kind.keeps for kind in KINDS.values()}
    cells = [(KINDS[kind].keeps, kind, *more) for kind, *more in BY_TURNS]
    names = (kept, KINDS, ALL, WAYS, SAMPLINGS)
    for one, other in set(combinations(range(5), 2)) - {(0, 1), (1, 3)}:
        assert {(cell[one], cell[other]) for cell in cells} == set(product(names[one], names[other]))
