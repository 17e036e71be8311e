"""Attention over the paged cache: project, norm, rotate, store, attend, project back."""

from collections.abc import Callable

import torch

from tokenwright.backends import Kernels
from tokenwright.backends.layout import Weights
from tokenwright.backends.torch.batch import TorchBatch
from tokenwright.backends.torch.parts import dense, linear
from tokenwright.cache import KVView
from tokenwright.config import Learned, ModelConfig
from tokenwright.models.rotary import Rotation
from tokenwright.models.taps import Site, Tap

HeadPart = Callable[[torch.Tensor], torch.Tensor]


def _keep(x: torch.Tensor, *_: object) -> torch.Tensor:
    return x


class Attention:
    """One layer's attention. Its K and V go to the view that is passed in, never into itself."""

    def __init__(self, config: ModelConfig, kernels: Kernels, weights: Weights, layer: int) -> None:
        name = f"layers.{layer}.attention"
        self.kernels = kernels
        self.layer = layer
        self.head_size = config.head_size
        self.heads = [config.heads, config.kv_heads, config.kv_heads]
        self.scale = config.head_size**-0.5
        self.qkv = linear(weights, f"{name}.qkv", f"{name}.q", f"{name}.k", f"{name}.v")
        self.out = linear(weights, f"{name}.o")
        self.q_norm = self._head_norm(config, weights, f"{name}.q_norm")
        self.k_norm = self._head_norm(config, weights, f"{name}.k_norm")
        self.rotates = config.rotary[layer] and not isinstance(config.positions, Learned)
        self.rotate: Callable[[torch.Tensor, Rotation], torch.Tensor] = kernels.rotate if self.rotates else _keep

    def _head_norm(self, config: ModelConfig, weights: Weights, name: str) -> HeadPart:
        if not config.qk_norm:
            return _keep
        weight, eps = dense(weights, f"{name}.weight"), config.norm_eps
        return lambda x: self.kernels.rms_norm(x, weight, eps)

    def __call__(self, x: torch.Tensor, batch: TorchBatch, view: KVView, tap: Tap) -> torch.Tensor:
        """[T, width] -> [T, width]."""
        projected = self.kernels.linear(x, self.qkv).view(len(x), -1, self.head_size)  # [T, H + 2 G, D]
        q, k, v = torch.split(projected, self.heads, dim=1)  # [T, H, D], [T, G, D], [T, G, D]
        plain = self.q_norm(q)
        q = self.rotate(plain, batch.rotation)
        k = self.rotate(self.k_norm(k), batch.rotation)
        tap(Site.QUERY, self.layer, q)
        sink_q = self._sink_query(plain, batch, view, tap)
        tap(Site.KEY, self.layer, k)
        tap(Site.VALUE, self.layer, v)
        self.kernels.store(view, batch.slots, k, v)
        mixed = self.kernels.attention(q, view, batch.chunks, self.scale, sink_q)  # [T, H, D]
        return self.kernels.linear(mixed.flatten(1), self.out)  # [T, width]

    def _sink_query(self, q: torch.Tensor, batch: TorchBatch, view: KVView, tap: Tap) -> torch.Tensor | None:
        """The queries [T, H, D] that meet the keys of sinks, where they are turned by another angle."""
        if not (self.rotates and view.spec.window.sinks):
            return None
        turned = self.rotate(q, batch.sink_rotations[view.spec.window])
        tap(Site.SINK_QUERY, self.layer, turned)
        return turned
