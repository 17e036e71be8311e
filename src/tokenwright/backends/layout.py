"""The memory layout of weights: each matrix in its format, all else (norms, positions) in fp32."""

from collections.abc import Collection, Mapping
from math import exp, log1p, prod
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenwright.arrays import Array, empty
from tokenwright.backends.packed import Packed, packed_sizes
from tokenwright.formats import WEIGHT_GROUPS, WeightFormat
from tokenwright.models.combined import mixtures
from tokenwright.models.graph import Graph
from tokenwright.models.op import XIELU, Matrix
from tokenwright.models.split import Cuts

Weights = dict[str, Array | Packed]

FINER = WeightFormat("int8", WEIGHT_GROUPS["int8"])  # of the embedding and the head under int4

_ROUTING = (".routing", ".router", ".shared_gate", ".coefficients")


def format_of(name: str, form: WeightFormat) -> WeightFormat:
    """The format of a matrix for weights in `form`. Routers stay float32: a wrong choice of expert is a large error."""
    if form.quantised and name.endswith(_ROUTING):
        return WeightFormat("float32")
    return FINER if form.name == "int4" and name in ("embed", "head", "layer_inputs.table") else form


Formats = Mapping[str, WeightFormat]  # the formats of matrices, and parts of them, that differ from the model's
_NONE: Formats = MappingProxyType({})


def empty_weights(graph: Graph, form: WeightFormat, kept: Formats = _NONE, without: Collection[str] = ()) -> Weights:
    """Allocate Packed matrices in a resolved format (not native), but for those `without`, and dense fp32 arrays."""
    weights: Weights = {}
    for name, matrix in graph.matrices.items():
        bias = np.zeros(matrix.out, np.float32) if matrix.bias else None
        own = matrix.out, matrix.inner, form_of(matrix, form, kept)
        no_bytes = empty(0, np.uint8), empty(0, np.float16)
        weights[name] = Packed.over(*own, *no_bytes, bias) if name in without else Packed.empty(*own, bias)
    for name in graph.dense:
        weights[name] = empty(graph.shapes[name])
    return weights


def xielu_of(name: str, weights: Mapping[str, Any]) -> tuple[float, float, float]:
    """The learned curvatures of xIELU above and below 0, and its slope there."""
    above, below, slope = (float(weights[f"{name}.{one}.weight"][0]) for one in XIELU)
    return log1p(exp(above)), slope + log1p(exp(below)), slope


def form_of(matrix: Matrix, form: WeightFormat, kept: Formats = _NONE) -> WeightFormat:
    return _kept_as(matrix.parts[0][0], matrix.name, form, kept)


def _kept_as(part: str, name: str, form: WeightFormat, kept: Formats) -> WeightFormat:
    return kept.get(part) or format_of(name, form)


def weight_bytes(graph: Graph, form: WeightFormat, kept: Formats = _NONE) -> int:
    total = 4 * sum(prod(graph.shapes[name]) for name in graph.dense)
    for matrix in graph.matrices.values():
        found = form_of(matrix, form, kept)
        codes, scales = packed_sizes(matrix.out, matrix.inner, found)
        total += codes + 2 * scales + 4 * matrix.out * (matrix.bias + found.factors)
    return total


def expert_bytes(graph: Graph, form: WeightFormat, kept: Formats = _NONE) -> int:
    """The bytes of the experts, which need not be in memory."""
    matrices = (matrix for op in mixtures(graph) for matrix in (op.up, op.down))
    sizes = (packed_sizes(one.out, one.inner, form_of(one, form, kept)) for one in matrices)
    return sum(codes + 2 * scales for codes, scales in sizes)


def read_bytes(graph: Graph, form: WeightFormat, rows: int, kept: Formats = _NONE) -> int:
    """Bytes of weights that a step of `rows` tokens reads: all but embedding tables."""
    matrices, total = {f"{part}.weight": name for name, one in graph.matrices.items() for part, _ in one.parts}, 0
    for name, shape in graph.read(rows).items():
        if name in matrices:
            out, inner = shape
            kind = _kept_as(name.removesuffix(".weight"), matrices[name], form, kept)
            codes, scales = packed_sizes(out, inner, kind)
            total += codes + 2 * scales + 4 * out * kind.factors
        else:
            total += 4 * prod(shape)
    return total


def nbytes(weights: Mapping[str, Array | Packed]) -> int:
    """The bytes of weights; a tensor with two names counts once."""
    return sum(one.nbytes for one in {id(one): one for one in weights.values()}.values())


def unpacked(graph: Graph, weights: Weights) -> dict[str, Array]:
    found: dict[str, Array] = {}
    for name, matrix in graph.matrices.items():
        packed = weights[name]
        assert isinstance(packed, Packed), "matrices are packed"
        rows, first = packed.unpack(), 0
        for part, out in matrix.parts:
            found[f"{part}.weight"] = rows[first : first + out]
            if packed.bias is not None:
                found[f"{part}.bias"] = packed.bias[first : first + out]
            first += out
    for name in graph.dense:
        dense = weights[name]
        assert not isinstance(dense, Packed), "norms and positions are dense"
        found[name] = dense
    return {name: found[name] for name in graph.shapes}


def cut_weights(weights: Weights, cuts: Cuts) -> Weights:
    """A rank's weights. Tensors that are not cut are shared, not copied."""
    return {name: _rows(one, cuts[name].rows) if name in cuts else one for name, one in weights.items()}


def _rows(one: Array | Packed, rows: NDArray[np.int64]) -> Array | Packed:
    return one.cut(rows) if isinstance(one, Packed) else np.ascontiguousarray(one[rows])
