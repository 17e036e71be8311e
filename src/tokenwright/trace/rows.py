"""Rows of attention, read back from the cache: what one head reads at one position.

Fused kernels keep no attention matrix. A row needs only its query and the keys that are in the cache, so it is
computed again when somebody asks, by the reference kernel.
"""

from collections.abc import Sequence

import torch

from tokenwright.backends import ReferenceKernels
from tokenwright.cache import Keys, KVView
from tokenwright.trace.schema import AttentionRow

_KERNELS = ReferenceKernels()


def attention_row(
    view: KVView,
    keys: Sequence[Keys],
    query: torch.Tensor,
    sink_query: torch.Tensor | None,
    group: int,
    position: int,
) -> torch.Tensor:
    """Weights [position + 1], fp32, of one query [D] over the keys of one KV head (`group`); 0 where it reads nothing.

    keys: what the row reads, for each group of the store. sink_query: the query [D] that meets the keys of sinks.
    """
    k, positions = _KERNELS.keys(view.head(group), keys)  # [t, 1, D], [t]
    others = None if sink_query is None else sink_query[None, None]
    scale = len(query) ** -0.5
    weights = _KERNELS.weights(query[None, None], k, positions, position, view.spec.window, scale, others)
    row = torch.zeros(position + 1, device=query.device)
    row[positions] = weights[0, 0, 0]
    return row


def coded(weights: torch.Tensor, layer: int, head: int) -> AttentionRow:
    """A row as it is sent."""
    codes = (weights.clamp(0, 1).sqrt() * 255).round().to(torch.uint8).cpu()
    return AttentionRow(layer, head, int(weights.argmax()), codes.numpy().tobytes())
