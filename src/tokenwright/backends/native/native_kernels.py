"""The native kernels: C++ for the processor's instruction set, over arrays and packed weights, in fp32.

A row's result depends only on that row, to the bit.
"""

import ctypes
import logging
import platform
import weakref
from collections.abc import Callable, Mapping, Sequence
from ctypes import byref, c_double, c_int64
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tokenwright.arrays import DTYPES, Array, Floats, address, empty, place_of
from tokenwright.backends.device import kernel_threads
from tokenwright.backends.native import library as lib
from tokenwright.backends.native import struct_builders, structs
from tokenwright.backends.packed import Packed
from tokenwright.backends.protocol import Scored
from tokenwright.cache import ChunkRows, KVView, StateView
from tokenwright.environment import ISAS, Environment
from tokenwright.errors import CapacityError, RequestError
from tokenwright.models.experts import Routing
from tokenwright.models.recurrent import Recurrence
from tokenwright.models.rotary import Rotation

if TYPE_CHECKING:
    from tokenwright.backends.torch.kernels import Linear

log = logging.getLogger(__name__)

_FORMATS = {dtype: structs.FORMATS[name] for name, dtype in DTYPES.items()}


class Workspace:
    """Scratch memory of the kernels, which grows. One call at a time uses `address`, others use temporary memory."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.address: int | None = library.tw_workspace_new()  # None: memory is exhausted, and every call fails
        weakref.finalize(self, library.tw_workspace_free, self.address).atexit = False


class NativeKernels:
    """Implements `Kernels` over arrays. isa: one of ISAS."""

    def __init__(self, library: ctypes.CDLL, isa: str) -> None:
        self.library = library
        self.isa = isa
        self.handle: int | None = library.tw_kernels(isa.encode())
        if self.handle is None:
            raise RequestError(
                f"this processor, or this build, has no {isa} kernels; use {' or '.join(usable(library))}"
            )
        self._workspace = Workspace(library)

    def own(self, weight: Array) -> Array:
        return weight

    def rows(self, weight: "Linear", ids: NDArray[np.int64]) -> Floats:
        return only_packed(weight).rows(ids)

    def linear(self, x: Floats, weight: "Linear") -> Floats:
        weight = only_packed(weight)
        rows = np.ascontiguousarray(x)
        y = empty((len(x), weight.out))
        places = (byref(struct_builders.matrix(weight)), len(rows), address(rows), address(y), kernel_threads.count)
        self.compute(self.library.tw_linear, *places)
        return y

    def rms_norm(self, x: Floats, weight: Floats, eps: float) -> Floats:
        return self._norm(x, structs.CNorm(address(weight), None, eps))

    def layer_norm(self, x: Floats, weight: Floats, bias: Floats, eps: float) -> Floats:
        return self._norm(x, structs.CNorm(address(weight), address(bias), eps))

    def _norm(self, x: Floats, by: structs.CNorm) -> Floats:
        rows, size = np.ascontiguousarray(x), x.shape[-1]
        y = empty(rows.shape)
        self.library.tw_norm(self.handle, byref(by), rows.size // size, size, address(rows), address(y))
        return y

    def activate(self, x: Floats, activation: str) -> Floats:
        return self._each(self.library.tw_activate, x, structs.ACTIVATIONS[activation])

    def xielu(self, x: Floats, facts: Sequence[float]) -> Floats:
        numbers = np.array(facts, np.float32)
        return self._each(self.library.tw_xielu, x, address(numbers))

    def _each(self, function: Callable[..., None], x: Floats, fact: int | None) -> Floats:
        rows, y = np.ascontiguousarray(x), empty(x.shape)
        function(self.handle, fact, rows.size, address(rows), address(y))
        return y

    def sparse(self, x: Floats, deviations: float) -> Floats:
        y: Floats = np.array(x, order="C")
        self.library.tw_sparsify(len(y), y.shape[1], deviations, address(y))
        return y

    def restored(self, x: Floats, like: Floats) -> Floats:
        y, by = np.array(x, order="C"), np.ascontiguousarray(like)
        self.library.tw_restore(len(y), y.shape[1], address(by), address(y))
        return y

    def gated(self, x: Floats, activation: str) -> Floats:
        rows, size = np.ascontiguousarray(x), x.shape[-1] // 2
        y = empty((*x.shape[:-1], size))
        kind = structs.ACTIVATIONS[activation]
        self.library.tw_gated(self.handle, kind, y.size // size, size, address(rows), address(y))
        return y

    def route(
        self, logits: Floats, routing: Routing, correction: Floats | None = None
    ) -> tuple[NDArray[np.int64], Floats]:
        scores = np.array(logits, order="C")
        ids = empty((len(logits), routing.chosen), np.int64)
        weights = empty((len(logits), routing.chosen + routing.shared_gate))
        places = (address(scores), address(ids), address(weights))
        biases = None if correction is None else np.ascontiguousarray(correction, np.float32)
        self.library.tw_route(byref(struct_builders.routing_of(routing, address(biases))), len(logits), *places)
        return ids, weights

    def soft_cap(self, x: Floats, cap: float) -> Floats:
        y: Floats = np.array(x, order="C")
        self.library.tw_soft_cap(self.handle, cap, y.size, address(y))
        return y

    def rotate(self, x: Floats, rotation: Rotation) -> Floats:
        rows, turns, y = np.ascontiguousarray(x), rotation.halves, empty(x.shape)
        places = (address(turns), address(rows), address(y))
        self.library.tw_rotate(self.handle, len(rows), x.shape[1], x.shape[2], *places)
        return y

    def store(self, view: KVView, slots: Sequence[NDArray[np.int64]], k: Floats, v: Floats) -> None:
        keys, values = np.ascontiguousarray(k), np.ascontiguousarray(v)
        heads = structs.CHeads(0, k.shape[1], k.shape[2], v.shape[2], 0, 0)
        for part in view.parts:  # rows that a part does not store go to scratch slots
            whole = structs.CPart(0, -1, 0, part.bytes_per_token, *struct_builders.kv_tensors(part))
            layer = structs.CKVLayer(1, (structs.CPart * 2)(whole), 0, 0, None)
            array = struct_builders.ChunkArray([(range(len(k)), 0, (slots[part.group].astype(np.int32),))])
            self.library.tw_store_kv(
                self.handle, byref(layer), byref(heads), 1, array.address, 1, address(keys), address(values)
            )

    def attention(
        self, q: Floats, view: KVView, chunks: Sequence[ChunkRows], scoring: Scored, sink_q: Floats | None = None
    ) -> Floats:
        rows, sinks = np.ascontiguousarray(q), None if sink_q is None else np.ascontiguousarray(sink_q)
        layout = view.spec.layout
        out = empty((*q.shape[:2], layout.value_size))
        width, out_width = q.shape[1] * q.shape[2], q.shape[1] * layout.value_size
        layer, bias = struct_builders.kv_layer(view), scoring.key_bias if view.spec.unbiased else None
        if bias is not None:
            blocks = bias.rotations.blocks(max(chunk.stop for chunk in chunks))
            struct_builders.point_to_rotations(layer, blocks, bias.rotations)
        read_rows = [(chunk.rows, chunk.start, struct_builders.slots_by_position(chunk)) for chunk in chunks]
        array = struct_builders.ChunkArray(read_rows, [chunk.ends for chunk in chunks])
        learned = None if scoring.sink_logits is None else np.ascontiguousarray(scoring.sink_logits, np.float32)
        sizes = (layout.kv_heads, layout.key_size, layout.value_size)
        numbers = None if bias is None else address(bias.numbers)
        heads = structs.CHeads(q.shape[1], *sizes, scoring.scale, scoring.cap or 0, address(learned), numbers)
        ends = (address(rows), address(sinks), address(out))
        queries = structs.CQueries(0, 0, 0, 0, *ends, width, width, out_width)
        read = (byref(layer), byref(heads), len(chunks), array.address, 1)
        self.compute(self.library.tw_attend, *read, byref(queries), kernel_threads.count)
        return out

    def weighted(self, x: Floats, gates: Floats) -> Floats:
        y, by = np.array(x, order="C"), np.ascontiguousarray(gates)
        self.library.tw_weigh(self.handle, y.size, address(by), address(y))
        return y

    def recur(
        self,
        projected: Floats,
        of: Recurrence,
        tensors: Mapping[str, Floats],
        view: StateView,
        chunks: Sequence[ChunkRows],
    ) -> Floats:
        rows, mixed = np.array(projected, order="C"), empty((len(projected), of.width))
        kept = struct_builders.turned(of, tensors)
        norm = structs.CNorm() if of.norm is None else structs.CNorm(address(kept["norm.weight"]), None, of.norm.eps)
        struct = struct_builders.recurrence_of(of, {name: address(one) for name, one in kept.items()}, norm)
        array = struct_builders.ChunkArray(
            [(chunk.rows, chunk.start, struct_builders.states_by_position(chunk)) for chunk in chunks]
        )
        read = (byref(struct_builders.state_layer(view)), byref(struct), len(chunks), array.address, 1)
        ends = (rows.shape[1], address(rows), address(mixed), kernel_threads.count)
        self.compute(self.library.tw_recur, *read, *ends)
        return mixed

    def summarise(self, logits: Floats) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """The argmax (the lowest among equals) and logsumexp (NaN if a logit is not finite) of each row [V]."""
        rows, vocab = logits.shape
        best, totals = (c_int64 * rows)(), (c_double * rows)()
        places = (address(logits), ctypes.addressof(best), ctypes.addressof(totals))
        self.compute(self.library.tw_summarise, rows, vocab, *places, kernel_threads.count)
        return tuple(best), tuple(totals)

    def pack(self, packed: Packed, first: int, rows: Array, threads: int = 1) -> int:
        """`Packed.pack_rows` in C++, to the same bytes."""
        assert rows.strides[-1] == rows.itemsize or rows.shape[-1] == 1, "a row's numbers lie side by side"
        kind, stride = _FORMATS[rows.dtype], rows.strides[0] // rows.itemsize
        bad: int = self.library.tw_pack(
            self.handle, byref(struct_builders.matrix(packed)), kind, place_of(rows), stride, first, len(rows), threads
        )
        return bad

    def read(self, buffer: Array, ahead: int = 0) -> int:
        """Read a contiguous buffer once, to measure the bandwidth; return the sum of its 32-bit words.

        ahead: the distance in bytes of a prefetch; 0: none.
        """
        place, count = address(buffer), kernel_threads.count
        total: int = self.library.tw_read(self.handle, place, buffer.nbytes, ahead, count)
        return total % (1 << 32)

    def multiply(self, form: str, rounds: int) -> int:
        """Multiply in registers, `rounds` times a thread, to measure a format's peak; return all multiplications."""
        made: int = self.library.tw_multiply(self.handle, structs.FORMATS[form], rounds, kernel_threads.count)
        return made

    def compute(self, function: Callable[..., int], *arguments: Any) -> None:
        """Call a function with the kernels' handle and workspace. Raises CapacityError if it cannot grow."""
        if function(self.handle, self._workspace.address, *arguments):
            raise CapacityError("there is not enough memory for this step; compute fewer tokens at once (token_budget)")


def only_packed(weight: "Linear") -> Packed:
    """Raises RequestError for a weight that is not packed."""
    if not isinstance(weight, Packed):
        raise RequestError("native kernels compute with packed weights; load them with load_packed")
    return weight


NUMERICS = 2  # the version of the kernels' bits: stored K and V of another version are not read


def arithmetic(isa: str) -> str:
    """A name of an instruction set's arithmetic: most fuse a b + c, SSE rounds a b, AMX rounds inputs to bfloat16."""
    if isa == "amx":
        return "amx"
    return "unfused" if isa == "portable" and platform.machine() not in ("aarch64", "arm64") else "fused"


def usable(library: ctypes.CDLL) -> list[str]:
    """The instruction sets that both processor and build support, fastest first."""
    return [isa for isa in ISAS if library.tw_kernels(isa.encode()) is not None]


@cache
def find_kernels(wanted: str | None = None, isa: str | None = None) -> NativeKernels | None:
    """The native kernels for this processor; None for the reference kernels, or if none were compiled.

    wanted: native or reference. Defaults: the environment's. Raises RequestError if native ones are missing.
    """
    environment = Environment.read()
    wanted, isa = wanted or environment.kernels, isa or environment.isa
    if wanted == "reference":
        return None
    file = lib.find()
    if file is None:
        hint = "install a C++ compiler (g++ or clang++) and then Tokenwright again"
        if wanted == "native":
            raise RequestError(f"this installation has no native kernels; {hint}")
        log.warning("no native kernels were compiled, so the slow reference kernels are used; %s", hint)
        return None
    library = lib.load(file)
    return NativeKernels(library, isa or usable(library)[0])
