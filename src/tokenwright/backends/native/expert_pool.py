"""The bounded memory of experts in a file, for the kernels (`cpp/step/expert_pool.h`).

A failed read ends the texts that need the expert; the next text tries it again.
"""

import ctypes
import logging
import os
from collections.abc import Mapping
from typing import Any
from weakref import finalize

from tokenwright.arrays import ALIGNMENT, aligned_bytes, place_of, populate
from tokenwright.backends.layout import Weights
from tokenwright.backends.native.structs import CExpertCounts, CExpertFile, CExpertLayer
from tokenwright.backends.packed import OnDisk, Packed, packed_sizes
from tokenwright.errors import EngineError, RequestError
from tokenwright.models.combined import mixtures
from tokenwright.models.experts import Experts
from tokenwright.models.graph import Graph
from tokenwright.units import binary, enough

log = logging.getLogger(__name__)

THREADS = 4  # for reading: one read at a time does not use a disk's full speed


class ExpertPool:
    """The experts of a graph in `memory` bytes. Raises RequestError if that is too little, OSError without the file."""

    def __init__(self, library: ctypes.CDLL, graph: Graph, weights: Weights, memory: int) -> None:
        ops = mixtures(graph)
        layers = [_stretches(op.experts, weights[op.up.name], weights[op.down.name]) for op in ops]
        size = max(sum(map(_aligned, sizes)) for _, sizes in layers)
        chosen, self.total = max(op.chosen for op in ops), sum(op.experts for op in ops)
        self.slots = min(memory // size, self.total)
        if self.slots < 2 * chosen:
            raise RequestError(
                f"expert_memory {binary(memory)} holds {self.slots} of the model's experts, and a token meets {chosen} "
                f"in a layer; give at least {enough(2 * chosen * size)}",
                "expert_memory",
            )
        self._disk = _disk_of(weights[ops[0].up.name])
        self.nbytes = self.slots * size
        held = aligned_bytes(self.nbytes)
        populate(held)  # so that the KV cache is not sized by what this will take
        self._counts = CExpertCounts()
        descriptor = os.open(self._disk.file, os.O_RDONLY | os.O_CLOEXEC)
        facts = (descriptor, len(ops), max(op.experts for op in ops), THREADS, self.slots, size, place_of(held))
        made: int | None = library.tw_experts_new(ctypes.byref(CExpertFile(*facts, ctypes.addressof(self._counts))))
        finalize(self, _close, library, made, descriptor, (held, self._counts)).atexit = False
        assert made is not None, "a pool is small"
        self._layers = {
            op.up.name: CExpertLayer(made, index, *_arrays(*layer))
            for index, (op, layer) in enumerate(zip(ops, layers, strict=True))
        }

    def layer(self, op: Experts) -> int:
        return ctypes.addressof(self._layers[op.up.name])

    @property
    def counts(self) -> Mapping[str, int]:
        return {name: getattr(self._counts, name) for name, _ in self._counts._fields_}

    def fault(self, error: int) -> EngineError:
        why = os.strerror(error) if error > 0 else "it ends too early"
        log.error("an expert cannot be read from %s: %s", self._disk.file, why)
        return self._disk.fault(why)


def _disk_of(one: Any) -> OnDisk:
    assert isinstance(one, Packed) and one.on_disk is not None, "experts lie in the file"
    return one.on_disk


def _stretches(experts: int, *pair: Any) -> tuple[list[int], list[int]]:
    places, sizes = [], []
    for one in pair:
        codes, scales = packed_sizes(one.out // experts, one.inner, one.form)
        places += [_disk_of(one).codes, _disk_of(one).scales]
        sizes += [codes, 2 * scales]
    return places, sizes


def _arrays(places: list[int], sizes: list[int]) -> list[Any]:
    in_slot = [sum(map(_aligned, sizes[:i])) for i in range(len(sizes))]
    return [(ctypes.c_int64 * len(one))(*one) for one in (places, sizes, in_slot)]


def _aligned(size: int) -> int:
    return size + -size % ALIGNMENT


def _close(library: ctypes.CDLL, pool: int | None, descriptor: int, written: object) -> None:  # noqa: ARG001
    """End the threads that read into the arrays `written`, which it keeps alive until then."""
    library.tw_experts_free(pool)
    os.close(descriptor)
