"""Latent attention with the native kernels: the same bits however a text's positions are shared out."""

import pytest
import torch

from tests.backends.native import each_isa, needs_native, threads
from tests.backends.test_program import Bench, decoder
from tests.oracle.harness import prompt_of

KEPT = {  # how a row is kept, the window, the sinks
    "float32": ("float32", None, 0),
    "bfloat16": ("bfloat16", None, 0),
    "bfloat16, a window": ("bfloat16", 290, 5),
    "int8": ("int8", None, 0),
    "int4": ("int4,first=20", 300, 0),
}
LENGTH, LAST = 340, (255, 256, 257, 300, 339)  # beyond a stretch of 256 positions; rows that are computed alone

pytestmark = needs_native


@each_isa
@pytest.mark.parametrize("kept", KEPT)
def test_a_row_that_threads_share_is_the_row_of_a_chunk(isa: str, kept: str) -> None:
    """As part of the whole text, alone by stretches, beside another text, and by the kernels one by one."""
    made = decoder("deepseek3", "float32", isa)
    text, other = prompt_of(LENGTH, 1), prompt_of(30, 2)
    whole = Bench(made, "deepseek3", KEPT[kept])
    with threads(1):
        right = whole.whole([whole.chunk(0, text, 0, LENGTH)]).rows
    bench = Bench(made, "deepseek3", KEPT[kept])
    done = 0
    for last in LAST:
        if done < last:
            with threads(2):
                bench.whole([bench.chunk(0, text, done, last)])
        step = [bench.chunk(0, text, last, last + 1), bench.chunk(1, other, 0, 1)]
        with threads(3):
            shared = bench.whole(step).rows
        assert torch.equal(shared[0], right[last])
        assert torch.equal(bench.by_parts(step).rows[0], right[last])
        done = last + 1


@each_isa
def test_a_chunk_without_rows_changes_nothing(isa: str) -> None:
    """Beside another chunk it takes none of its rows, and a step of it alone has no work, of experts either."""
    made = decoder("deepseek3", "float32", isa)
    text, other = prompt_of(20, 1), prompt_of(3, 2)
    alone, beside = (Bench(made, "deepseek3", KEPT["float32"]) for _ in range(2))
    right = alone.whole([alone.chunk(1, other, 0, 3)]).rows
    for bench in (alone, beside):
        bench.whole([bench.chunk(0, text, 0, 20)])
    empty = beside.chunk(0, text, 20, 20)
    assert torch.equal(beside.whole([empty, beside.chunk(1, other, 0, 3)]).rows, right)
    for count in (1, 2, 3):
        with threads(count):
            assert not len(beside.whole([empty]).rows)
    assert torch.equal(beside.whole([beside.chunk(1, other, 0, 3)]).rows, right)
