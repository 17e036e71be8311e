"""Attention rows (the weights of one head at one position) as the page gets them, and what all heads did at a step."""

import math

import numpy as np
import torch

from tokenwright.trace.messages.schema import AttentionRow, HeadMasses

LOCAL = 8  # positions, the row's own included, that count as local


def coded(weights: torch.Tensor, layer: int, head: int) -> AttentionRow:
    """A row in its wire format: one byte per position, round(255 sqrt(weight))."""
    row = weights.cpu().numpy()
    codes = (np.sqrt(row) * 255 + 0.5).astype(np.uint8)
    return AttentionRow(layer, head, int(row.argmax()), codes.tobytes())


def masses(rows: torch.Tensor, step: int) -> HeadMasses:
    """The attention of the heads of all layers, from their rows [L, H, t] at a step."""
    flat = rows.flatten(0, 1).double()  # [L H, t]
    even = math.log(max(2, flat.shape[-1]))
    entropy = -torch.xlogy(flat, flat).sum(-1) / even
    sink, local = flat[:, 0], flat[:, -LOCAL:].sum(-1)
    return HeadMasses(step, _rounded(sink), _rounded(local), _rounded(entropy.clamp(0, 1)))


def _rounded(measure: torch.Tensor) -> tuple[float, ...]:
    return tuple(round(value, 6) for value in measure.tolist())
