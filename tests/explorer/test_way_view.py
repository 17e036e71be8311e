"""The way into a cell: its numbers are those of the cache and of the row, and follow from each other."""

import cmath
import math
from collections.abc import Iterator

import pytest
import torch

from tests.trace.definition import row_of_run
from tokenwright import LLM, RequestError
from tokenwright.config import Rope
from tokenwright.explorer.panels.block import SHOWN, WayView, block_view, way_view
from tokenwright.llm.run import Run

PROMPT = "Once upon a time, there was a little fox who"


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with LLM("stories", trace=True, pages=64, dtype="float32") as llm:
        run = llm.run(PROMPT, max_tokens=8, seed=1, ignore_eos=True)
        while not run.ended:
            run.step()
        yield run


def seen(run: Run, step: int, layer: int, head: int, position: int) -> WayView:
    last = run.last_position(step)
    return run.look(lambda replay, text: way_view(replay, text, last, layer, head, position), last)


@pytest.mark.parametrize(("layer", "head", "position"), [(0, 0, 0), (4, 3, 7), (5, 7, 15)])
def test_each_number_follows_from_those_before_it(run: Run, layer: int, head: int, position: int) -> None:
    view = seen(run, 5, layer, head, position)
    size = run.engine.facts.config.head_size
    assert len(view.query) == len(view.key) == len(view.value) == len(view.mixed) == size
    assert view.products == pytest.approx([q * k for q, k in zip(view.query, view.key, strict=True)])
    assert view.dot == pytest.approx(sum(view.products))
    assert view.scale == pytest.approx(1 / math.sqrt(size))
    assert view.score == pytest.approx(view.dot * view.scale)
    expected = row_of_run(run, 5, layer, head)
    assert view.weight == pytest.approx(expected[position], rel=1e-3), "not rounded to a byte"
    assert [read.weight for read in view.reads] == pytest.approx(
        [expected[read.position] for read in view.reads], rel=1e-3
    )
    one, other = view.reads[:2]  # the softmax keeps the differences of the scores
    ratio = math.log(expected[one.position] / expected[other.position])
    assert ratio == pytest.approx(one.score - other.score, abs=1e-3)
    values = torch.tensor([seen(run, 5, layer, head, at).value for at in range(len(expected))])
    assert (torch.tensor(expected) @ values).tolist() == pytest.approx(view.mixed, abs=1e-4)


def test_a_key_is_turned_by_its_position(run: Run) -> None:
    """Before its rotation a key of the first layer depends only on its token, wherever that stands."""
    tokens = run.tokens
    first, second = next((at, tokens.index(one, at + 1)) for at, one in enumerate(tokens) if one in tokens[at + 1 :])
    one, other = (seen(run, 7, 0, 3, position) for position in (first, second))
    assert one.key != pytest.approx(other.key, abs=0.1)
    assert one.plain == pytest.approx(other.plain, abs=1e-4)
    rope, half = run.engine.facts.config.positions, len(one.key) // 2
    assert isinstance(rope, Rope)
    for view, position in ((one, first), (other, second)):
        assert view.angles == pytest.approx([position * rope.theta ** (-i / half) for i in range(half)], rel=1e-5)
        for i, angle in enumerate(view.angles):
            turned = complex(view.plain[i], view.plain[i + half]) * cmath.exp(1j * angle)
            assert turned == pytest.approx(complex(view.key[i], view.key[i + half]), abs=1e-4)
            asks = complex(view.plain_query[i], view.plain_query[i + half])
            asks *= cmath.exp(1j * view.reader * rope.theta ** (-i / half))  # by its own position
            assert asks == pytest.approx(complex(view.query[i], view.query[i + half]), abs=1e-4)


def test_the_stream_is_the_sum_of_what_was_added(run: Run) -> None:
    last = run.last_position(5)
    view = run.look(lambda replay, text: block_view(replay, text, last, 3), last)
    stages = {stage.name: stage.numbers for stage in view.stages}
    assert len(stages["hidden"]) == SHOWN
    parts = zip(stages["input"], stages["output"], stages["mlp_output"], strict=True)
    assert stages["result"] == pytest.approx([sum(part) for part in parts], abs=1e-5)
    after = run.look(lambda replay, text: block_view(replay, text, last, 4), last)
    assert after.stages[0].numbers == stages["result"]


def test_a_position_outside_the_window_is_refused() -> None:
    with LLM("stories", trace=True, pages=64, window=8) as llm:
        run = llm.run(PROMPT, max_tokens=4, seed=1, ignore_eos=True)
        while not run.ended:
            run.step()
        with pytest.raises(RequestError, match="outside its window"):
            seen(run, 3, 0, 0, 1)
