"""The operations that the op-by-op decoder calls, over tensors or arrays, and the weights that they take.

Activations have one dtype throughout; sums, norms and the softmax are at least fp32 inside.
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

Values = Any  # a tensor of torch, or an array of NumPy
Turns = Any  # a `TensorRotation`, or a `Rotation`


def library_of(x: Values) -> Any:
    """The module of `x`, torch or NumPy; callers use functions that both have."""
    return np if isinstance(x, np.ndarray) else sys.modules["torch"]


def in_fp32(x: Values) -> Values:
    library = library_of(x)
    return library.asarray(x, dtype=library.float32)


@dataclass(frozen=True, slots=True)
class Dense:
    """A weight [out, in] and a bias [out]."""

    weight: Values
    bias: Values | None = None

    def split(self, count: int) -> "list[Dense]":
        biases = [None] * count if self.bias is None else list(self.bias.reshape(count, -1))
        rows = self.weight.reshape(count, -1, self.weight.shape[-1])
        return [Dense(*pair) for pair in zip(rows, biases, strict=True)]

    @property
    def numel(self) -> int:
        return math.prod(self.weight.shape)

    @property
    def nbytes(self) -> int:
        own: int = self.weight.nbytes
        return own if self.bias is None else own + self.bias.nbytes


Linear = Packed | Dense


class Kernels(Protocol):
    """The operations that a device must implement; an implementation may only be faster than the reference."""

    def own(self, weight: Array | Values) -> Values:
        """The weight in the form that these kernels use."""

    def linear(self, x: Values, weight: Linear) -> Values:
        """[T, in] -> [T, out]."""

    def rows(self, weight: Linear, ids: Values) -> Values:
        """The weights [n, in] of the outputs `ids` [n]."""

    def rms_norm(self, x: Values, weight: Values, eps: float) -> Values:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""

    def layer_norm(self, x: Values, weight: Values, bias: Values, eps: float) -> Values:
        """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension."""

    def activate(self, x: Values, activation: str) -> Values:
        """act(x) for silu, gelu, gelu_tanh, relu, relu2, quick_gelu."""

    def xielu(self, x: Values, facts: Sequence[float]) -> Values:
        """xIELU. facts [3]: the curvatures above and below 0, and the slope there."""

    def sparse(self, x: Values, deviations: float) -> Values:
        """max(x - mean - deviations * standard deviation, 0) over the last dimension."""

    def restored(self, x: Values, like: Values) -> Values:
        """x times the root mean square of `like` over its own, at least 1e-5, over the last dimension."""

    def gated(self, x: Values, activation: str) -> Values:
        """[T, 2 m], gates then values -> act(gates) * values [T, m]."""

    def route(self, logits: Values, routing: Routing, correction: Values | None = None) -> tuple[Values, Values]:
        """The experts [T, k], ascending int64, that rows of a router's logits [T, out] choose, and their weights.

        correction: the biases [experts] of their ranks. The weights are [T, k], or with a shared gate [T, k + 1].
        """

    def soft_cap(self, x: Values, cap: float) -> Values:
        """cap tanh(x / cap)."""

    def rotate(self, x: Values, rotation: Turns) -> Values:
        """[T, heads, D] rotated by each row's angles, in the rotate-half order."""

    def store(self, view: KVView, slots: Sequence[Values], k: Values, v: Values) -> None:
        """Write K and V [T, G, D] into the slots [T] of each group; of a latent V is K's first part."""

    def attention(
        self, q: Values, view: KVView, chunks: Sequence[ChunkRows], scoring: Scored, sink_q: Values | None = None
    ) -> Values:
        """[T, H, D] -> [T, H, value size]: rows attend to the positions up to their own, within the window.

        Reads all K and V from the view, this step's included. sink_q [T, H, D]: the queries for the keys of sinks.
        """

    def weighted(self, x: Values, gates: Values) -> Values:
        """x sigmoid(gates)."""

    def recur(
        self,
        projected: Values,
        of: Recurrence,
        tensors: Mapping[str, Values],
        view: StateView,
        chunks: Sequence[ChunkRows],
    ) -> Values:
        """[T, out] -> [T, width], with the states. tensors: by names without the layer's."""
