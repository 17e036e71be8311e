"""The operations that the op-by-op decoder calls, over tensors, and the weights that they take.

All kernels compute the same function as the reference; an implementation may only be faster.

Shapes: T tokens of the step, H query heads, G KV heads, D head size. Activations have one dtype throughout;
sums, norms and the softmax are at least fp32 inside.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tokenwright.backends.adapters import Make
from tokenwright.backends.packed import Packed
from tokenwright.backends.protocol import Scored
from tokenwright.backends.torch.border import TensorRotation, tensor
from tokenwright.cache import ChunkRows, KVView, StateView
from tokenwright.models.experts import Routing
from tokenwright.models.recurrent import Recurrence


@dataclass(frozen=True, slots=True)
class Dense:
    """A weight [out, in] and an optional bias [out], as tensors."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def split(self, count: int) -> "list[Dense]":
        """`count` weights of equally many outputs, one after another, as views."""
        biases = [None] * count if self.bias is None else list(self.bias.view(count, -1))
        return [Dense(*pair) for pair in zip(self.weight.chunk(count), biases, strict=True)]

    @property
    def numel(self) -> int:
        """The number of weights, without the bias."""
        return self.weight.numel()

    @property
    def nbytes(self) -> int:
        """Bytes of weight and bias."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


Linear = Packed | Dense


class Kernels(Protocol):
    """The operations that a device must implement."""

    def linear(self, x: torch.Tensor, weight: Linear) -> torch.Tensor:
        """[T, in] -> [T, out]."""

    def rows(self, weight: Linear, ids: torch.Tensor) -> torch.Tensor:
        """The weights [n, in] of the outputs `ids` [n]."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension."""

    def activate(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """act(x) for one of silu, gelu, gelu_tanh, relu, relu2."""

    def gated(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """[T, 2 m], gates then values -> act(gates) * values [T, m]."""

    def route(
        self, logits: torch.Tensor, routing: Routing, correction: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts that each row of a router's logits [T, out] chooses, and their weights.

        correction: the biases [experts] of their ranks.
        Returns the experts' numbers [T, k] in ascending order, int64, and their weights [T, k]; if there is a shared
        gate, [T, k + 1], the last is that of the shared expert.
        """

    def soft_cap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        """cap tanh(x / cap), for every number."""

    def rotate(self, x: torch.Tensor, rotation: TensorRotation) -> torch.Tensor:
        """[T, heads, D] rotated by each row's angles, in the rotate-half order."""

    def store(self, view: KVView, slots: Sequence[torch.Tensor], k: torch.Tensor, v: torch.Tensor) -> None:
        """Write K and V [T, G, D] into the slots [T] of each of the layer's groups.

        In a layer with a latent K is the whole row, and V its first part.
        """

    def attention(
        self,
        q: torch.Tensor,
        view: KVView,
        chunks: Sequence[ChunkRows],
        scoring: Scored,
        sink_q: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T, H, D] -> [T, H, value size]: each row attends to the positions up to its own, within the window.

        The kernel reads all K and V from the view, this step's included. With `sink_q` [T, H, D], it scores the
        keys of sinks with `sink_q` instead of `q`.
        """

    def weighted(self, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """x sigmoid(gates), for every number."""

    def recur(
        self,
        projected: torch.Tensor,
        of: Recurrence,
        tensors: Mapping[str, torch.Tensor],
        view: StateView,
        chunks: Sequence[ChunkRows],
    ) -> torch.Tensor:
        """[T, out] -> [T, width]: what a recurrence makes of its projected rows; it reads and writes the states.

        tensors: the recurrence's, by their names without the layer's.
        """


def dense(dtype: torch.dtype, device: str) -> Make:
    """Makes weights for kernels over tensors."""
    return lambda weight: Dense(tensor(weight).to(device, dtype))
