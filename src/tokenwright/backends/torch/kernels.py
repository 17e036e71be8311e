"""The operations that the op-by-op decoder calls, over tensors of torch or arrays, and the weights that they take.

All kernels compute the same function as the reference; an implementation may only be faster.

Shapes: T tokens of the step, H query heads, G KV heads, D head size. Activations have one dtype throughout;
sums, norms and the softmax are at least fp32 inside.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tokenwright.arrays import Array
from tokenwright.backends.packed import Packed
from tokenwright.backends.protocol import Scored
from tokenwright.cache import ChunkRows, KVView, StateView
from tokenwright.models.experts import Routing
from tokenwright.models.recurrent import Recurrence

Values = Any  # a tensor of torch, or an array of NumPy: whichever the kernels compute with
Turns = Any  # a `TensorRotation`, or a `Rotation`


def library_of(x: Values) -> Any:
    """torch or NumPy: the module with the functions over `x`, of which only such are called that both have."""
    return np if isinstance(x, np.ndarray) else sys.modules["torch"]


def in_fp32(x: Values) -> Values:
    """`x` in fp32; itself if it is."""
    library = library_of(x)
    return library.asarray(x, dtype=library.float32)


@dataclass(frozen=True, slots=True)
class Dense:
    """A weight [out, in] and an optional bias [out]."""

    weight: Values
    bias: Values | None = None

    def split(self, count: int) -> "list[Dense]":
        """`count` weights of equally many outputs, one after another, as views."""
        biases = [None] * count if self.bias is None else list(self.bias.reshape(count, -1))
        return [
            Dense(*pair) for pair in zip(self.weight.reshape(count, -1, self.weight.shape[-1]), biases, strict=True)
        ]

    @property
    def numel(self) -> int:
        """The number of weights, without the bias."""
        return math.prod(self.weight.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of weight and bias."""
        own: int = self.weight.nbytes
        return own if self.bias is None else own + self.bias.nbytes


Linear = Packed | Dense


class Kernels(Protocol):
    """The operations that a device must implement."""

    def own(self, weight: Array | Values) -> Values:
        """A weight as these kernels take it."""

    def linear(self, x: Values, weight: Linear) -> Values:
        """[T, in] -> [T, out]."""

    def rows(self, weight: Linear, ids: Values) -> Values:
        """The weights [n, in] of the outputs `ids` [n]."""

    def rms_norm(self, x: Values, weight: Values, eps: float) -> Values:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""

    def layer_norm(self, x: Values, weight: Values, bias: Values, eps: float) -> Values:
        """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension."""

    def activate(self, x: Values, activation: str) -> Values:
        """act(x) for one of silu, gelu, gelu_tanh, relu, relu2."""

    def xielu(self, x: Values, facts: Sequence[float]) -> Values:
        """xIELU of each number: facts [3] are its curvatures above and below 0, and its slope there."""

    def sparse(self, x: Values, deviations: float) -> Values:
        """max(x - mean - deviations * standard deviation, 0) over the last dimension."""

    def restored(self, x: Values, like: Values) -> Values:
        """x as large as `like`: of its root of the mean square over the last dimension. That of x is at least 1e-5."""

    def gated(self, x: Values, activation: str) -> Values:
        """[T, 2 m], gates then values -> act(gates) * values [T, m]."""

    def route(self, logits: Values, routing: Routing, correction: Values | None = None) -> tuple[Values, Values]:
        """The experts that each row of a router's logits [T, out] chooses, and their weights.

        correction: the biases [experts] of their ranks.
        Returns the experts' numbers [T, k] in ascending order, int64, and their weights [T, k]; if there is a shared
        gate, [T, k + 1], the last is that of the shared expert.
        """

    def soft_cap(self, x: Values, cap: float) -> Values:
        """cap tanh(x / cap), for every number."""

    def rotate(self, x: Values, rotation: Turns) -> Values:
        """[T, heads, D] rotated by each row's angles, in the rotate-half order."""

    def store(self, view: KVView, slots: Sequence[Values], k: Values, v: Values) -> None:
        """Write K and V [T, G, D] into the slots [T] of each of the layer's groups.

        In a layer with a latent K is the whole row, and V its first part.
        """

    def attention(
        self, q: Values, view: KVView, chunks: Sequence[ChunkRows], scoring: Scored, sink_q: Values | None = None
    ) -> Values:
        """[T, H, D] -> [T, H, value size]: each row attends to the positions up to its own, within the window.

        The kernel reads all K and V from the view, this step's included. With `sink_q` [T, H, D], it scores the
        keys of sinks with `sink_q` instead of `q`.
        """

    def weighted(self, x: Values, gates: Values) -> Values:
        """x sigmoid(gates), for every number."""

    def recur(
        self,
        projected: Values,
        of: Recurrence,
        tensors: Mapping[str, Values],
        view: StateView,
        chunks: Sequence[ChunkRows],
    ) -> Values:
        """[T, out] -> [T, width]: what a recurrence makes of its projected rows; it reads and writes the states.

        tensors: the recurrence's, by their names without the layer's.
        """
