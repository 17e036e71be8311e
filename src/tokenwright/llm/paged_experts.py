"""Open a mixture whose experts stay in a file: a bounded pool holds those that routers named lately and often."""

import logging

from tokenwright.backends.adapters import Beside
from tokenwright.backends.device import CPU, free_memory
from tokenwright.backends.kv_sizing import MOST_KV_MEMORY, refuse_weights
from tokenwright.backends.layout import Formats, expert_bytes, nbytes, weight_bytes
from tokenwright.backends.native.expert_pool import ExpertPool
from tokenwright.backends.native.native_kernels import NativeKernels
from tokenwright.backends.native.program import NativeDecoder
from tokenwright.checkpoints.folder import Checkpoint, Report
from tokenwright.checkpoints.packing.packer import load_paged
from tokenwright.checkpoints.packing.weight_cache import WeightCache
from tokenwright.formats import DType, WeightFormat
from tokenwright.models.graph import Graph
from tokenwright.units import binary

log = logging.getLogger(__name__)

ALONE = "expert_memory is for mixtures of experts, computed on the CPU by one process and native kernels; leave it out"
SPARE = 16  # one part of the free memory in so many is for all else


def found_memory(graph: Graph, form: WeightFormat, kept: Formats) -> int:
    """Bytes for experts, where the weights do not fit the free memory: what the others and a KV cache leave; else 0."""
    free, total = free_memory(CPU), weight_bytes(graph, form, kept)
    if free is None or total <= free:
        return 0
    left = free - free // SPARE - min(free // 8, MOST_KV_MEMORY) - (total - expert_bytes(graph, form, kept))
    if left > 0:
        log.warning(
            "the model needs %s, and %s are free: its experts stay in a file, and %s hold some of them (expert_memory)",
            *map(binary, (total, free, left)),
        )
    return max(0, left)


def paged_decoder(
    checkpoint: Checkpoint,
    form: WeightFormat,
    dtype: DType,
    native: NativeKernels,
    adapters: Beside,
    memory: int,
    report: Report | None,
) -> NativeDecoder:
    """Raises CapacityError if the pool and the other weights do not fit, RequestError for too small a pool."""
    graph, kept = checkpoint.graph, checkpoint.kept(form)
    own = (checkpoint.packed or form).resolved(dtype)
    experts = expert_bytes(graph, own, kept)
    refuse_weights(weight_bytes(graph, own, kept) - experts + min(memory, experts), CPU, str(own))
    weights = load_paged(checkpoint, form, dtype, WeightCache.default(), report)
    pool = ExpertPool(native.library, graph, weights, memory)
    log.info("%s of weights in memory, %d of %d experts", binary(nbytes(weights)), pool.slots, pool.total)
    return NativeDecoder(graph, native, weights, adapters, pool=pool)
