"""Cuts a model between two layers: native kernels compute the first layers, a GPU the others and the head."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tokenwright.backends.layout import Weights
from tokenwright.backends.native.native_kernels import find_kernels
from tokenwright.backends.native.program import NativeDecoder
from tokenwright.backends.packed import Packed
from tokenwright.backends.wgpu.gpu import HELP
from tokenwright.errors import RequestError
from tokenwright.models.graph import Graph, Head
from tokenwright.models.op import Norm, Op
from tokenwright.units import Size, binary, read_bytes

# An RMSNorm that returns its rows to the bit: no mean of squares changes this eps, so x becomes x 2^-50 2^50.
_EPS, _WEIGHT = 2.0**100, 2.0**50


def layers_before(graph: Graph, weights: Weights, wanted: Size | None) -> int:
    """The layers that the CPU computes if a GPU has the last `wanted` ones, or those whose weights fit a size.

    Raises RequestError.
    """
    if wanted is None:
        return 0
    layers, sizes = graph.layers, [0] * graph.layers
    if isinstance(wanted, str) and not wanted.strip().isdecimal():
        for op in graph.blocks:
            sizes[_layer(op)] += _nbytes([op], weights)
        room, wanted = read_bytes(wanted, "gpu_layers") - _nbytes([graph.head], weights), 0
        while wanted < layers and sum(sizes[layers - wanted - 1 :]) <= room:
            wanted += 1
        if not wanted:
            told = f"the head and a layer take {binary(sizes[-1] + _nbytes([graph.head], weights))}"
            raise RequestError(f"gpu_layers holds no layer of this model: {told}; give more, or {HELP}", "gpu_layers")
    count = int(wanted)
    if count < 1:
        raise RequestError(f"gpu_layers must be at least 1, or a size such as 8GB; for none, {HELP}", "gpu_layers")
    first = max(0, layers - count)
    if any(kv.source is not None and kv.source < first <= layer for layer, kv in enumerate(graph.kv)):
        raise RequestError("gpu_layers would part layers that share K and V; give another number", "gpu_layers")
    return first


def cut(graph: Graph, weights: Weights, first: int) -> tuple[NativeDecoder, Graph]:
    """The layers before `first`, and the graph of the others, whose weights are left in `weights`."""
    kernels = find_kernels()
    assert kernels is not None, "the GPU was proved against them"
    blocks = [[op for op in graph.blocks if (_layer(op) < first) is before] for before in (True, False)]
    same = Norm("same", "rms", graph.width, _EPS)
    before = replace(graph, blocks=tuple(blocks[0]), head=Head(same, graph.embed.table))
    own = {name: weights[name] for name in _names(before.ops) & weights.keys()}
    own["same.weight"] = np.full(graph.width, _WEIGHT, np.float32)
    after = replace(graph, blocks=tuple(blocks[1]))
    for name in weights.keys() - _names(after.ops[1:]):
        del weights[name]
    return NativeDecoder(before, kernels, own), after


def _layer(op: Op) -> int:
    return op.parts[0].layer  # type: ignore[attr-defined, no-any-return]


def _names(ops: Sequence[Op]) -> set[str]:
    return {name for op in ops for name in (*op.shapes, *(one.name for one in op.matrices))}


def _nbytes(ops: Sequence[Op], weights: Weights) -> int:
    names = {one.name for op in ops for one in op.matrices}
    return sum(one.nbytes for name, one in weights.items() if name in names and isinstance(one, Packed))
