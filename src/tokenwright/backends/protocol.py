"""Backend: what computes batches of one model. Kernels: the few operations that a decoder is made of.

Kernels are optimisations, never meaning.

Shapes: T tokens of the step, H query heads, G KV heads, D head size. Activations have one dtype throughout;
sums, norms and the softmax are at least fp32 inside.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tokenwright.backends.packed import Packed
from tokenwright.cache import ChunkRows, KVStore, KVView
from tokenwright.engine import Batch
from tokenwright.models.rotary import Rotation
from tokenwright.models.taps import Tap, ignore


@dataclass(frozen=True, slots=True)
class Dense:
    """A weight [out, in] and perhaps a bias [out], as torch keeps them."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Some outputs' weights [n, in], of ids [n]."""
        return self.weight[ids]

    @property
    def numel(self) -> int:
        """Weights, without the bias."""
        return self.weight.numel()

    @property
    def nbytes(self) -> int:
        """Bytes of weight and bias."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


Linear = Packed | Dense


@dataclass(slots=True)  # not frozen: that would take longer to make, in each step
class Logits:
    """Rows of logits [W, vocabulary] in fp32 and, of each row, its argmax and logsumexp, if the kernels computed them.

    best: the index of the largest logit, the lowest of equals. log_totals: log(sum(exp)), NaN where a logit is not
    finite.
    """

    rows: torch.Tensor
    best: tuple[int, ...] = ()
    log_totals: tuple[float, ...] = ()


class Backend(Protocol):
    """A model over one KV store: batches go in, logits come out, and the K and V of all tokens land in the store."""

    store: KVStore

    def __call__(self, batch: Batch, tap: Tap = ignore) -> Logits:
        """The logits of the batch's `logits_rows`, in their order; `tap` is called at every site on the way."""


class Kernels(Protocol):
    """What a device must be able to do."""

    def linear(self, x: torch.Tensor, weight: Linear) -> torch.Tensor:
        """[T, in] -> [T, out]."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension."""

    def activate(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """act(x) for one of silu, gelu, gelu_tanh, relu."""

    def gated(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """[T, 2 m], the gates before the values -> act(gates) * values [T, m]."""

    def rotate(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """[T, heads, D] turned by its rows' angles, in the rotate-half order."""

    def store(self, view: KVView, slots: Sequence[torch.Tensor], k: torch.Tensor, v: torch.Tensor) -> None:
        """Write K and V [T, G, D] into the slots [T] of each group that the layer is in."""

    def attention(
        self,
        q: torch.Tensor,
        view: KVView,
        chunks: Sequence[ChunkRows],
        scale: float,
        sink_q: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T, H, D] -> [T, H, D]: each row over the positions up to its own that the layer's reach allows.

        K and V are read back from the view, the step's own included. Where there is a `sink_q` [T, H, D], keys of
        sinks meet it instead of `q`.
        """
