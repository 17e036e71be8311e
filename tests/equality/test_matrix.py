"""The cache never changes the text: every way of running x every kind of model x every format x greedy and seeded."""

from itertools import product
from pathlib import Path

import pytest

from tests.equality import ways
from tests.equality.harness import FORMATS, KINDS, MIXED, SAMPLINGS, WAYS, Case

assert ways.LATE  # imported for what it registers


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("kind", "kv"), [*product(KINDS, FORMATS), *((kind, MIXED) for kind in KINDS)])
def test_the_text_is_the_naive_ones(kind: str, kv: str, way: str, tmp_path: Path) -> None:
    for sampling in SAMPLINGS:
        WAYS[way](Case(kind, kv, sampling), tmp_path)
