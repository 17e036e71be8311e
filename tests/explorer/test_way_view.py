"""The way into a cell: its numbers are those of the cache and of the row, and follow from each other."""

import math
from collections.abc import Iterator

import pytest
import torch

from tokenwright import LLM, RequestError
from tokenwright.explorer.panels.way import WayView
from tokenwright.explorer.views.block_view import way
from tokenwright.llm.run import Run
from tokenwright.trace.frame_codec import decode_weights

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
    return run.look(lambda replay, text: way(replay, text, last, layer, head, position), last)


@pytest.mark.parametrize(("layer", "head", "position"), [(0, 0, 0), (4, 3, 7), (5, 7, 15)])
def test_each_number_follows_from_those_before_it(run: Run, layer: int, head: int, position: int) -> None:
    view = seen(run, 5, layer, head, position)
    size = run.engine.facts.config.head_size
    assert len(view.query) == len(view.key) == len(view.value) == len(view.mixed) == size
    assert view.products == pytest.approx([q * k for q, k in zip(view.query, view.key, strict=True)])
    assert view.dot == pytest.approx(sum(view.products))
    assert view.scale == pytest.approx(1 / math.sqrt(size))
    assert view.score == pytest.approx(view.dot * view.scale)
    expected = run.reference(5, layer, head)
    row = decode_weights(run.attention(5, layer, head).codes)
    assert view.weight == row[position], "the same number as in every other view"
    assert [read.weight for read in view.reads] == [row[read.position] for read in view.reads]
    one, other = view.reads[:2]  # the softmax keeps the differences of the scores
    ratio = math.log(expected[one.position] / expected[other.position])
    assert ratio == pytest.approx(one.score - other.score, abs=1e-3)
    values = torch.tensor([seen(run, 5, layer, head, at).value for at in range(len(expected))])
    assert (torch.tensor(expected) @ values).tolist() == pytest.approx(view.mixed, abs=1e-4)


def test_a_position_outside_the_window_is_refused() -> None:
    with LLM("stories", trace=True, pages=64, window=8) as llm:
        run = llm.run(PROMPT, max_tokens=4, seed=1, ignore_eos=True)
        while not run.ended:
            run.step()
        with pytest.raises(RequestError, match="outside its window"):
            seen(run, 3, 0, 0, 1)
