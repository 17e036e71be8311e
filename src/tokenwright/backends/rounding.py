"""Rounds groups of weights to int8 and int4: the nearest codes, and the scales."""

import numpy as np
from numpy.typing import NDArray

from tokenwright.arrays import Floats

Halves = NDArray[np.float16]
DIVISORS = tuple(-7 - k / 4 for k in range(16))  # an int4 scale is its group's extreme over one of these
_CUT = ~0xFFF  # keeps 12 of 24 significand bits, whose square is exact in fp32


def int8(groups: Floats) -> tuple[Floats, Halves]:
    """Codes 1..255 of groups [n, G, group], and scales [n, G]."""
    scales = (np.abs(groups).max(-1) / np.float32(127)).astype(np.float16)
    return _codes(groups, scales).clip(-127, 127) + 128, scales


def int4(groups: Floats) -> tuple[Floats, Halves]:
    """Codes 0..15 of groups [n, G, group], and scales [n, G] of least squared error."""
    high, low = groups.max(-1), groups.min(-1)
    extreme = np.where(high > -low, high, low) + np.float32(0)  # no -0
    best, scales = np.zeros_like(extreme), np.zeros(extreme.shape, np.float16)
    for divisor in DIVISORS:
        tried = (extreme * np.float32(1 / divisor)).astype(np.float16)
        error = _error(groups, _codes(groups, tried).clip(-8, 7) * tried.astype(np.float32)[..., None])
        better = (error < best) | (divisor == DIVISORS[0])
        best, scales = np.where(better, error, best), np.where(better, tried, scales)
    return _codes(groups, scales).clip(-8, 7) + 8, scales


def _codes(groups: Floats, scales: Halves) -> Floats:
    """round(x / scale); 0 if the scale is 0."""
    steps = scales.astype(np.float32)[..., None]
    codes: Floats = np.where(steps == 0, np.float32(0), groups / np.where(steps == 0, np.float32(1), steps)).round()
    return codes


def _error(groups: Floats, kept: Floats) -> Floats:
    """Sum of squared differences [n, G], in order. Truncated to 12 bits, their squares are exact, fused or not."""
    differences = ((groups - kept).view(np.int32) & _CUT).view(np.float32)
    squares = differences * differences
    total = np.zeros_like(groups[..., 0])
    for at in range(squares.shape[-1]):
        total = total + squares[..., at]
    return total
