"""What the tests of the GPU's kernels share: the adapter, a device with altered shaders, and backends beside the CPU's.

They run on whatever adapter there is; without a card Mesa's software driver (lavapipe) executes the shaders.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.equality.harness import checkpoint_of
from tests.equality.kinds import ALL_KINDS
from tokenwright.arrays import Floats
from tokenwright.backends.native.native_kernels import find_kernels
from tokenwright.backends.native.program import NativeBackend, NativeDecoder
from tokenwright.cache import KVStore, layer_specs
from tokenwright.checkpoints.folder import Checkpoint
from tokenwright.checkpoints.packing.packer import load_packed
from tokenwright.engine import Batch, one_chunk
from tokenwright.engine.layer_group import PageTable
from tokenwright.formats import KVFormat, WeightFormat

pytest.importorskip("wgpu", reason="the extra gpu is not installed")

from tokenwright.backends.wgpu.gpu import Gpu, open_gpu
from tokenwright.backends.wgpu.gpu_backend import GpuBackend, GpuDecoder
from tokenwright.backends.wgpu.gpu_memory import GpuMemory
from tokenwright.errors import RequestError

PAGE, PAGES = 16, 8
REFUSED = {  # the kinds of models that need what no kernel computes, with what is named
    "latent": "LatentAttention",
    "delta rules": "Recurrent",
    "states alone": "Recurrent",
    "residual streams": "Laurel",
    "shared keys and values": "LayerInputs",
    "state spaces beside": "Recurrent",
}


@cache
def there() -> bool:
    try:
        open_gpu(None)
    except RequestError:
        return False
    return True


needs_gpu = pytest.mark.skipif(not there() or find_kernels() is None, reason="no GPU adapter, or no native kernels")


class AlteredGpu(Gpu):
    """A device whose shaders are changed: in the kernel `name`, `text` becomes `other`."""

    def __init__(self, name: str, text: str, other: str) -> None:
        import wgpu

        self.fault = name, text, other
        super().__init__(wgpu.gpu.request_adapter_sync(power_preference="high-performance"))

    def altered(self, name: str, text: str) -> str:
        where, before, after = self.fault
        if name != where:
            return text
        assert before in text, "the fault is planted in what is there"
        return text.replace(before, after)


def checkpoint(kind: str) -> Checkpoint:
    return Checkpoint.open("stories") if kind == "stories" else checkpoint_of(kind)[0]


def weights_of(kind: str, form: str) -> dict[str, Any]:
    return load_packed(checkpoint(kind), WeightFormat.parse(form), "float32")


def pair(kind: str, form: str = "float32", kv: str = "native", pages: int = PAGES) -> tuple[GpuBackend, NativeBackend]:
    """A model on the GPU and on the CPU."""
    window, sinks = (None, 0) if kind == "stories" else (ALL_KINDS[kind].window, ALL_KINDS[kind].sinks)
    graph, gpu, kernels = checkpoint(kind).graph, open_gpu(None), find_kernels()
    assert kernels is not None, "tests are marked needs_gpu"
    dtype, kv = (kv, "native") if kv in ("bfloat16", "float16") else ("float32", kv)
    # A GPU's engine stores the keys of quantised caches with their biases.
    specs = [replace(one, unbiased=False) for one in layer_specs(graph, dtype, KVFormat.parse(kv), window, sinks)]
    ours = GpuDecoder(graph, gpu, weights_of(kind, form))
    theirs = NativeDecoder(graph, kernels, weights_of(kind, form))
    stores = KVStore(specs, pages, PAGE, GpuMemory(gpu)), KVStore(specs, pages, PAGE)
    return GpuBackend(ours, stores[0]), NativeBackend(theirs, stores[1])


def chunk(groups: int, tokens: Sequence[int], start: int = 0, first_page: int = PAGES - 1) -> Batch:
    """Tokens of a text whose pages lie backwards in memory."""
    table = PageTable({page: first_page - page for page in range(-(-(start + len(tokens)) // PAGE))})
    return one_chunk(tokens, start, [table] * groups, 512)


def rounding(inner: int, rows: Floats) -> Floats:
    """The allowed difference of logits [n, V], for each row: sums of `inner` products, whose inputs are such sums."""
    allowed: Floats = inner * 2.0**-22 * np.abs(rows).max(1)
    return allowed


def fill(buffer: Any, byte: int) -> None:
    open_gpu(None).write(buffer, 0, np.full(buffer.size, byte, np.uint8))


def counted(gpu: Gpu, run: Callable[[], object]) -> tuple[int, int]:
    """The submissions of a function, and the bytes that it read back."""
    before = gpu.submissions, gpu.read_bytes
    run()
    return gpu.submissions - before[0], gpu.read_bytes - before[1]
