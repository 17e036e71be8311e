"""Attention rows, recomputed from the cache: the weights of one head at one position.

Fused kernels keep no attention matrix. A row needs only its query and the cached keys, so the reference kernel
recomputes it on request.
"""

import math

import torch

from tokenwright.backends import ReferenceKernels, Scored
from tokenwright.cache import ChunkRows, KVView
from tokenwright.trace.schema import AttentionRow, HeadMasses

LOCAL = 8  # positions, the row's own included, that count as local
_KERNELS = ReferenceKernels()


def attention_row(
    view: KVView,
    chunk: ChunkRows,
    query: torch.Tensor,
    sink_query: torch.Tensor | None,
    group: int,
    scoring: Scored,
) -> torch.Tensor:
    """Weights [position + 1], fp32, of one query [D] over the keys of one KV head (`group`); 0 at masked positions.

    chunk: the row alone, and the slots that it reads. sink_query: the query [D] for the keys of sinks. scoring:
    that of the one head.
    """
    k, positions = _KERNELS.keys(view.head(group), chunk)  # [t, 1, D], [t]
    others = None if sink_query is None else sink_query[None, None]
    weights = _KERNELS.weights(query[None, None], k, positions, chunk.start, view.spec.window, scoring, others)
    row = torch.zeros(chunk.stop, device=query.device)
    row[positions] = weights[0, 0, 0]
    return row


def coded(weights: torch.Tensor, layer: int, head: int) -> AttentionRow:
    """A row in its wire format: one byte per position, round(255 sqrt(weight))."""
    codes = (weights.clamp(0, 1).sqrt() * 255).round().to(torch.uint8).cpu()
    return AttentionRow(layer, head, int(weights.argmax()), codes.numpy().tobytes())


def masses(rows: torch.Tensor, step: int) -> HeadMasses:
    """What the heads of all layers did, from their rows [L, H, t] at a step."""
    flat = rows.flatten(0, 1).double()  # [L H, t]
    even = math.log(max(2, flat.shape[-1]))
    entropy = -torch.xlogy(flat, flat).sum(-1) / even
    sink, local = flat[:, 0], flat[:, -LOCAL:].sum(-1)
    return HeadMasses(step, _rounded(sink), _rounded(local), _rounded(entropy.clamp(0, 1)))


def _rounded(measure: torch.Tensor) -> tuple[float, ...]:
    return tuple(round(value, 6) for value in measure.tolist())
