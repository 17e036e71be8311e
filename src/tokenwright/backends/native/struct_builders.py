"""Fills structs of the native library. A struct points into arrays, which it does not keep alive."""

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import c_void_p

import numpy as np
from numpy.typing import NDArray

from tokenwright.arrays import Array, Floats, address
from tokenwright.backends.key_bias import BlockRotations
from tokenwright.backends.native import structs
from tokenwright.backends.packed import Packed
from tokenwright.cache import ChunkRows, KVPart, KVView, Side, StateView
from tokenwright.formats import TABLES
from tokenwright.models.experts import Routing
from tokenwright.models.recurrent import GATES, PHASES, RULES, Recurrence

_TABLES = {name: np.tile(np.array(one) + 128, 4).astype(np.uint8) for name, one in TABLES.items()}


class ChunkArray:
    """The `CChunkRows` for kernels that Python calls one by one: page size 1, so that page tables hold slots.

    chunks: rows, first position, and each group's slots [positions]. ends [rows]: of the positions that rows read.
    """

    def __init__(
        self,
        chunks: Sequence[tuple[range, int, tuple[NDArray[np.int32], ...]]],
        ends: Sequence[NDArray[np.int64] | None] = (),
    ) -> None:
        self._ends = ends or [None] * len(chunks)
        self._tables = [table for _, _, tables in chunks for table in tables]  # kept alive for the pointers
        self._pointers = [(c_void_p * len(tables))(*map(address, tables)) for _, _, tables in chunks]
        found = [
            structs.CChunkRows(rows.start, len(rows), start, None, ctypes.addressof(pointers), address(ends))
            for (rows, start, _), pointers, ends in zip(chunks, self._pointers, self._ends, strict=True)
        ]
        self._chunks = (structs.CChunkRows * len(chunks))(*found)
        self.address = ctypes.addressof(self._chunks)


def slots_by_position(chunk: ChunkRows) -> tuple[NDArray[np.int32], ...]:
    """For each group the slots [positions]; -1 at positions that the chunk does not read."""
    return _by_position(chunk.slots, chunk.positions)


def states_by_position(chunk: ChunkRows) -> tuple[NDArray[np.int32], ...]:
    """As `slots_by_position`, for the pages of the states behind each token."""
    first = 0 if chunk.start else 1
    return _by_position([one[first:] for one in chunk.slots], [one[first:] - 1 for one in chunk.positions])


def _by_position(slots: Sequence[Array], positions: Sequence[Array]) -> tuple[NDArray[np.int32], ...]:
    tables = tuple(np.full(int(one[-1]) + 1 if len(one) else 0, -1, np.int32) for one in positions)
    for table, places, values in zip(tables, positions, slots, strict=True):
        table[places] = values
    return tables


def matrix(packed: Packed) -> structs.CMatrix:
    places = (address(packed.codes), address(packed.scales), address(packed.bias))
    scaling = (packed.super, packed.minima)
    more = {"table": address(_TABLES.get(packed.format)), "factors": address(packed.factors)}
    form = structs.FORMATS[packed.format]
    return structs.CMatrix(packed.out, packed.inner, form, packed.group, *places, *scaling, **more)


def routing_of(routing: Routing, correction: int | None = None) -> structs.CRouting:
    """The struct of a routing. correction: the address of the biases of the experts' ranks."""
    groups = (routing.groups, routing.chosen_groups, routing.group_best)
    scores = structs.SCORES[routing.scores]
    facts = (scores, routing.renormalise, routing.shared_gate, *groups, routing.factor, correction)
    return structs.CRouting(routing.experts, routing.chosen, *facts)


def turned(of: Recurrence, tensors: Mapping[str, Floats]) -> dict[str, Floats]:
    """Tensors in the kernels' form: taps [taps, channels], and for a scan -exp(A) [K, V]."""
    found = {name: np.ascontiguousarray(one.T if name == "conv.weight" else one) for name, one in tensors.items()}
    if of.rule == "scan":
        found["a_log.weight"] = np.ascontiguousarray(-np.exp(found["a_log.weight"], dtype=np.float32).T)
    return found


def recurrence_of(of: Recurrence, places: Mapping[str, int | None], norm: structs.CNorm) -> structs.CRecurrence:
    """The struct of a recurrence. places: the addresses of its tensors, by names without the layer's."""
    at, weights = of.places, 0 if of.norm is None else of.norm.size
    shared = of.norm is not None and of.norm.parts == 1 and weights == of.value_size
    return structs.CRecurrence(
        RULES.index(of.rule),
        PHASES.index(of.phase),
        *(of.channels, of.taps, of.activated),
        *(at.conv, at.query, at.key, at.value, at.before, at.gate, at.beta, at.decay),
        *(of.heads, of.key_heads, of.key_size, of.value_size),
        *(of.heads if shared else 1 if of.norm is None else of.norm.parts, not shared, of.gate_first),
        *(places.get(name) for name in ("conv.weight", "conv.bias", "a_log.weight", "dt.weight", "skip.weight")),
        *(of.least_step, of.most_step, of.beta_factor, of.in_turn),
        *(of.key_decays, GATES.index(of.gated_by), norm),
    )


def state_layer(view: StateView) -> structs.CKVLayer:
    memory = structs.CKVTensor(structs.FORMATS["float32"], address(view.memory), None)
    part = structs.CPart(0, -1, view.group, view.memory.shape[1] * view.memory.itemsize, memory, memory)
    return structs.CKVLayer(0, (structs.CPart * 2)(part), 0, 0, None)


def kv_layer(view: KVView, sink_rotation: int | None = None) -> structs.CKVLayer:
    """The struct of a layer's KV memory. sink_rotation: the address of the rotation of queries beyond the window."""
    parts = [
        structs.CPart(
            *(part.window.start, -1 if part.window.stop is None else part.window.stop, part.group),
            *(part.bytes_per_token, *kv_tensors(part)),
        )
        for part in view.parts
    ]
    window = view.spec.window
    return structs.CKVLayer(len(parts), (structs.CPart * 2)(*parts), window.size or 0, window.sinks, sink_rotation)


def point_to_rotations(layer: structs.CKVLayer, blocks: Floats, rotations: BlockRotations) -> None:
    layer.block_rotation, layer.place_rotation = address(blocks), address(rotations.places)


def kv_tensors(part: KVPart) -> tuple[structs.CKVTensor, structs.CKVTensor]:
    """The structs of K and V; for a latent both have the same rows."""
    k = kv_tensor(part.k)
    return k, k if part.v.size < part.k.size else kv_tensor(part.v)


def kv_tensor(side: Side) -> structs.CKVTensor:
    codes, *scales = side.memory
    return structs.CKVTensor(structs.FORMATS[side.codec.name], address(codes), address(scales[0]) if scales else None)
