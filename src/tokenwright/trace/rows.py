"""Rows of attention, read back from the cache: what one head reads at one position.

Fused kernels keep no attention matrix. A row needs only its query and the keys that are in the cache, so it is
computed again when somebody asks, by the reference kernel.
"""

import torch

from tokenwright.cache import KVView
from tokenwright.kernels import ReferenceKernels
from tokenwright.trace.schema import AttentionRow

_KERNELS = ReferenceKernels()


def attention_row(view: KVView, pages: torch.Tensor, query: torch.Tensor, group: int, position: int) -> torch.Tensor:
    """Weights [position + 1], fp32, of one query [D] over the keys of one KV head (`group`) in `pages` [n]."""
    k = view.k[pages, :, group].flatten(0, 1)[: position + 1, None]  # [t, 1, D]
    return _KERNELS.weights(query[None, None], k, position, view, len(query) ** -0.5)[0, 0, 0]


def coded(weights: torch.Tensor, layer: int, head: int) -> AttentionRow:
    """A row as it is sent."""
    codes = (weights.clamp(0, 1).sqrt() * 255).round().to(torch.uint8).cpu()
    return AttentionRow(layer, head, int(weights.argmax()), codes.numpy().tobytes())
