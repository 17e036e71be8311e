"""Latent attention with the native kernels: the same bits however a text's positions are shared out."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from tests.backends.native import KERNELS, each_isa, needs_native, threads
from tests.backends.test_program import Bench, decoder
from tests.models.fixtures import make_checkpoint
from tests.oracle.harness import prompt_of
from tokenwright.backends.native.program import NativeDecoder
from tokenwright.backends.runner import backend_over
from tokenwright.checkpoints.folder import Checkpoint
from tokenwright.checkpoints.packing.packer import load_packed
from tokenwright.formats import WeightFormat

KEPT = {  # how a row is kept, the window, the sinks
    "float32": ("float32", None, 0),
    "bfloat16": ("bfloat16", None, 0),
    "bfloat16, sinks": ("bfloat16", 40, 5),
    "int8, a window": ("int8", 45, 0),
    "int4 but first": ("int4,first=20", None, 0),
}
# The rows [FIRST, LENGTH) lie on both sides of a stretch of 256 positions, and the last windows begin behind it.
FIRST, LENGTH, ALONE = 240, 310, (255, 256, 257, 309)

pytestmark = needs_native


@cache
def layer(isa: str) -> NativeDecoder:
    """One layer with a dense MLP: nearly all the work is attention's."""
    with TemporaryDirectory() as folder:
        path, _ = make_checkpoint(Path(folder) / "model", "deepseek3", changes={"num_hidden_layers": 1})
        opened = Checkpoint.open(path)
        weights = load_packed(opened, WeightFormat("float32"), "float32")
    return NativeDecoder(opened.graph, KERNELS[isa].native, weights)


def begun(isa: str, kept: str, text: tuple[int, ...]) -> Bench:
    """A bench whose memory has the rows before FIRST, by the same kernels in every case: AMX may be emulated."""
    bench = Bench(layer(isa), KEPT[kept])
    plain = backend_over(layer(list(KERNELS)[-1]), bench.store)
    mine, bench.backend = bench.backend, plain
    bench.whole([bench.chunk(0, text, 0, FIRST)])
    bench.backend = mine
    return bench


@each_isa
@pytest.mark.parametrize("kept", KEPT)
def test_a_row_that_threads_share_is_the_row_of_a_chunk(isa: str, kept: str) -> None:
    """As part of a chunk, alone by stretches, beside another text, and by the kernels one by one."""
    text, other = prompt_of(LENGTH, 1), prompt_of(30, 2)
    whole, bench = begun(isa, kept, text), begun(isa, kept, text)
    with threads(1):
        right = whole.whole([whole.chunk(0, text, FIRST, LENGTH)]).rows
    done = FIRST
    for last in ALONE:
        if done < last:
            with threads(2):
                bench.whole([bench.chunk(0, text, done, last)])
        step = [bench.chunk(0, text, last, last + 1), bench.chunk(1, other, 0, 1)]
        with threads(3):
            shared = bench.whole(step).rows
        assert torch.equal(shared[0], right[last - FIRST])
        assert torch.equal(bench.by_parts(step).rows[0], right[last - FIRST])
        done = last + 1


@each_isa
def test_a_chunk_without_rows_changes_nothing(isa: str) -> None:
    """Beside another chunk it takes none of its rows, and a step of it alone has no work, of experts either."""
    made = decoder("deepseek3", "float32", isa)
    text, other = prompt_of(20, 1), prompt_of(3, 2)
    alone, beside = (Bench(made, KEPT["float32"]) for _ in range(2))
    right = alone.whole([alone.chunk(1, other, 0, 3)]).rows
    for bench in (alone, beside):
        bench.whole([bench.chunk(0, text, 0, 20)])
    empty = beside.chunk(0, text, 20, 20)
    assert torch.equal(beside.whole([empty, beside.chunk(1, other, 0, 3)]).rows, right)
    for count in (1, 2, 3):
        with threads(count):
            assert not len(beside.whole([empty]).rows)
    assert torch.equal(beside.whole([beside.chunk(1, other, 0, 3)]).rows, right)
