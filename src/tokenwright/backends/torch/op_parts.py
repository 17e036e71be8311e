"""Parts of the torch backend's ops: weights by the names of the graph's matrices, norms and factors."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from tokenwright.arrays import Floats
from tokenwright.backends.key_bias import KeyBias, block_rotations
from tokenwright.backends.packed import Packed
from tokenwright.backends.torch.kernels import Dense, Kernels, Linear, Values, in_fp32, library_of
from tokenwright.models.graph import Attention
from tokenwright.models.op import Matrix, Norm

Function = Callable[[Values], Values]
Weights = dict[str, Any]  # tensors, arrays or packed weights, by our names


def linear(weights: Weights, matrix: Matrix) -> Linear:
    """A matrix: packed, or joined from its parts, which it replaces in `weights` to save memory."""
    whole = weights.get(matrix.name)
    if isinstance(whole, Packed | Dense):
        return whole
    names = [name for name, _ in matrix.parts]
    parts = [dense(weights, f"{name}.weight") for name in names]
    biases = [dense(weights, f"{name}.bias") for name in names] if matrix.bias else []
    if len(names) == 1:
        return Dense(parts[0], biases[0] if biases else None)
    for name in matrix.shapes:
        del weights[name]
    concat = library_of(parts[0]).concat
    weights[matrix.name] = found = Dense(concat(parts), concat(biases) if biases else None)
    return found


def key_bias(op: Attention, qkv: Linear) -> KeyBias | None:
    """The bias of keys if a cache may store keys without it, or None."""
    if op.rope is None or qkv.bias is None or not op.kv.biased:
        return None
    first, size = op.heads * op.head_size, op.kv_heads * op.head_size
    numbers = in_fp32(qkv.bias[first : first + size]).reshape(op.kv_heads, op.head_size)
    own = numbers if isinstance(numbers, np.ndarray) else numbers.cpu().numpy()
    return KeyBias(np.ascontiguousarray(own), block_rotations(op.rope, op.head_size))


def like(numbers: Floats, x: Values) -> Values:
    """An array in the form of `x`: itself, or a tensor of its dtype and device."""
    return numbers if isinstance(x, np.ndarray) else library_of(x).from_numpy(numbers).to(x)


def dense(weights: Weights, name: str) -> Values:
    found = weights[name]
    assert not isinstance(found, Packed), f"{name} is not packed"
    return found


def norm(of: Norm | None, kernels: Kernels, weights: Weights) -> Function:
    """A function that normalises over the last dimension; for None the identity."""
    if of is None:
        return _same
    eps = of.eps
    if not of.weighted:
        return lambda x: _plain(of, kernels, x)
    weight = dense(weights, f"{of.name}.weight")
    if of.kind == "rms":
        return lambda x: kernels.rms_norm(x, weight, eps)
    bias = dense(weights, f"{of.name}.bias") if of.bias else library_of(weight).zeros_like(weight)
    return lambda x: kernels.layer_norm(x, weight, bias, eps)


def _plain(of: Norm, kernels: Kernels, x: Values) -> Values:
    library = library_of(x)
    ones = library.ones_like(x.reshape(-1, x.shape[-1])[0])
    if of.kind == "rms":
        return kernels.rms_norm(x, ones, of.eps)
    return kernels.layer_norm(x, ones, library.zeros_like(ones), of.eps)


def over_heads(of: Norm | None, head_size: int, kernels: Kernels, weights: Weights) -> Function:
    """The norm of q or k [T, heads, D] over each head, or over all heads together."""
    if of is not None and of.parts > 1:
        weight, eps = dense(weights, f"{of.name}.weight").reshape(of.parts, head_size), of.eps
        library = library_of(weight)
        one, zero = library.ones_like(weight[0]), library.zeros_like(weight[0])
        return lambda x: kernels.layer_norm(x, one, zero, eps) * weight
    function = norm(of, kernels, weights)
    if of is None or of.size == head_size:
        return function
    return lambda x: function(by_row(x)).reshape(x.shape)


def after(post_norm: Norm | None, factor: float, kernels: Kernels, weights: Weights) -> Function:
    function, scale = norm(post_norm, kernels, weights), scaled(factor)
    return lambda x: scale(function(x))


def factors(each: Sequence[tuple[int, float]]) -> Function:
    """A function that multiplies groups of outputs, each by its factor."""
    if not each:
        return _same
    sizes, by = zip(*each, strict=True)
    return lambda x: library_of(x).concat([part * one for part, one in zip(parted(x, sizes, 1), by, strict=True)], 1)


def parted(x: Values, sizes: Sequence[int], axis: int) -> list[Values]:
    ends, before = list(accumulate(sizes)), (slice(None),) * axis
    return [x[(*before, slice(end - size, end))] for end, size in zip(ends, sizes, strict=True)]


def by_row(x: Values) -> Values:
    """[T, H, D] -> [T, H x D]."""
    return x.reshape(len(x), -1)


def scaled(factor: float) -> Function:
    return _same if factor == 1 else lambda x: x * factor


def clipped(function: Function, most: float | None) -> Function:
    return function if most is None else lambda x: library_of(x).clip(function(x), -most, most)


def sparse(function: Function, deviations: float | None, kernels: Kernels) -> Function:
    """Apply `kernels.sparse` to the gates of a function whose results are gates, then values."""
    if deviations is None:
        return function

    def gates_first(x: Values) -> Values:
        gates, values = parted(function(x), [x.shape[1] // 2] * 2, 1)
        return library_of(x).concat((kernels.sparse(gates, deviations), values), 1)

    return gates_first


def _same(x: Values, *_: object) -> Values:
    return x
