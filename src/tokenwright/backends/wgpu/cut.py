"""Cuts a model between two layers: native kernels compute the first layers, a GPU the others and the head."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tokenwright.backends.layout import Weights
from tokenwright.backends.native.native_kernels import find_kernels
from tokenwright.backends.native.program import NativeDecoder
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
    layers = graph.layers
    if isinstance(wanted, str) and not wanted.strip().isdecimal():
        sizes = [_nbytes((*graph.blocks_from(layers - count), graph.head), weights) for count in range(1, layers + 1)]
        wanted = bisect_right(sizes, read_bytes(wanted, "gpu_layers"))
        if not wanted:
            told = f"the head and a layer take {binary(sizes[0])}"
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
    blocks = graph.blocks_from(first)
    same = Norm("same", "rms", graph.width, _EPS)
    before = replace(graph, blocks=graph.blocks[: -len(blocks)], head=Head(same, graph.embed.table))
    own = {name: weights[name] for name in _names(before.ops) & weights.keys()}
    own["same.weight"] = np.full(graph.width, _WEIGHT, np.float32)
    after = replace(graph, blocks=blocks)
    for name in weights.keys() - _names(after.ops[1:]):
        del weights[name]
    return NativeDecoder(before, kernels, own), after


def _names(ops: Sequence[Op]) -> set[str]:
    return {name for op in ops for name in (*op.shapes, *(one.name for one in op.matrices))}


def _nbytes(ops: Sequence[Op], weights: Weights) -> int:
    return sum(weights[name].nbytes for name in _names(ops) & weights.keys())
