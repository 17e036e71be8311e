"""The reference kernels: plain torch, on any device torch runs on. The oracle of every other kernel.

Written to be read and trusted, not to be fast. Everything is computed row by row in meaning: a row's result does
not depend on its neighbours beyond the rounding of torch's own matrix products.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.nn import functional as F

from tokenwright.cache import KVView, Window
from tokenwright.kernels.protocol import Linear, Rotation, Span

MOST_WEIGHTS = 1 << 26  # attention weights held at a time, of all heads: 256 MiB in fp32

ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


class ReferenceKernels:
    """Implements `Kernels` in torch."""

    def linear(self, x: torch.Tensor, weight: Linear) -> torch.Tensor:
        return F.linear(x, weight.weight, weight.bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return weight * scaled.to(x.dtype)

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)

    def activate(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        return ACTIVATIONS[activation](x)

    def gated(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        gates, values = x.chunk(2, dim=-1)
        return ACTIVATIONS[activation](gates) * values  # [T, m]

    def rotate(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        wide = x.float()
        first, second = wide.chunk(2, dim=-1)
        turned = wide * rotation.cos[:, None] + torch.cat((-second, first), dim=-1) * rotation.sin[:, None]
        return turned.to(x.dtype)  # [T, heads, D]

    def store(self, view: KVView, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        view.k.flatten(0, 1)[slots] = k.to(view.k.dtype)
        view.v.flatten(0, 1)[slots] = v.to(view.v.dtype)

    def attention(self, q: torch.Tensor, view: KVView, spans: Sequence[Span], scale: float) -> torch.Tensor:
        out = torch.empty_like(q)
        for span in spans:
            k = view.k[span.pages].flatten(0, 1)[: span.stop]  # [t, G, D]
            v = view.v[span.pages].flatten(0, 1)[: span.stop]  # [t, G, D]
            values = v.float().permute(1, 0, 2)[:, None]  # [G, 1, t, D]
            block = max(1, MOST_WEIGHTS // (q.shape[1] * span.stop))  # rows at a time
            for first in range(0, len(span.rows), block):
                rows = span.rows[first : first + block]
                weights = self.weights(q[rows.start : rows.stop], k, span.start + first, view, scale)  # [G, R, n, t]
                mixed = weights @ values  # [G, R, n, D]
                out[rows.start : rows.stop] = mixed.permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)  # [n, H, D]
        return out

    def weights(self, q: torch.Tensor, k: torch.Tensor, start: int, view: KVView, scale: float) -> torch.Tensor:
        """Attention weights [G, H / G, n, t], fp32, of n rows from position `start` over t keys [t, G, D]."""
        (n, _, size), (t, kv_heads, _) = q.shape, k.shape
        queries = q.float().view(n, kv_heads, -1, size).permute(1, 2, 0, 3)  # [G, R, n, D]
        scores = queries @ k.float().permute(1, 2, 0)[:, None] * scale  # [G, R, n, t]
        rows = torch.arange(start, start + n, device=q.device)[:, None]
        keys = torch.arange(t, device=q.device)[None]
        hidden = keys > rows  # [n, t]
        if isinstance(view.spec.reach, Window):
            hidden |= keys <= rows - view.spec.reach.tokens
        return scores.masked_fill_(hidden, float("-inf")).softmax(-1)
