"""Codes attention rows (the weights of one head at one position) for the page; figures of all heads at a step."""

import math

import numpy as np

from tokenwright.arrays import Floats
from tokenwright.decode.logits_processors import Doubles
from tokenwright.trace.schema import AttentionRow, HeadMasses

LOCAL = 8  # positions, the row's own included


def coded(weights: Floats, layer: int, head: int) -> AttentionRow:
    """One byte per position, round(255 sqrt(weight))."""
    codes = (np.sqrt(weights) * 255 + 0.5).astype(np.uint8)
    return AttentionRow(layer, head, int(weights.argmax()), codes.tobytes())


def masses(rows: Floats, step: int) -> HeadMasses:
    """The attention of the heads of all layers, from their rows [L, H, t] at a step."""
    flat = rows.reshape(-1, rows.shape[-1]).astype(np.float64)  # [L H, t]
    even = math.log(max(2, flat.shape[-1]))
    logs = np.log(flat, where=flat > 0, out=np.zeros_like(flat))
    entropy = -(flat * logs).sum(-1) / even
    sink, local = flat[:, 0], flat[:, -LOCAL:].sum(-1)
    return HeadMasses(step, _rounded(sink), _rounded(local), _rounded(entropy.clip(0, 1)))


def _rounded(measure: Doubles) -> tuple[float, ...]:
    return tuple(round(value, 6) for value in measure.tolist())
