"""Rotary positions: the frequencies of each scaling rule, and cos and sin of the angles at given positions."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokenwright.arrays import Floats, padded
from tokenwright.config import DynamicScaling, LinearScaling, Llama3Scaling, LongScaling, NoScaling, Rope, YarnScaling

Doubles = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Rotation:
    """cos and sin of every row's angles: [T, D] each, fp32; both halves of D are equal. 1 and 0 where nothing turns."""

    cos: Floats
    sin: Floats

    @property
    def halves(self) -> Floats:
        """The cosines, then the sines, of one half of a head: [T, D]."""
        half = self.cos.shape[1] // 2
        return np.concatenate((self.cos[:, :half], self.sin[:, :half]), 1)


class RotaryTable:
    """cos and sin, from angles in fp64. limit: a text's maximum length; it fixes dynamic scaling and LongRoPE."""

    def __init__(self, rope: Rope, head_size: int) -> None:
        self.rope = rope
        self.rotated = rope.rotated or head_size
        self.still = (head_size - self.rotated) // 2  # pairs that do not turn
        by_length = isinstance(rope.scaling, DynamicScaling | LongScaling)
        self._fixed = None if by_length else self._frequencies(rope.theta)
        self._axes = axes_of(rope, self.rotated // 2)

    def rows(self, positions: NDArray[np.int64], limit: int) -> Rotation:
        """positions: [n], or [3, n] in time, height and width."""
        frequencies = self._by_length(limit) if self._fixed is None else self._fixed
        each = np.ascontiguousarray(positions[self._axes].T) if positions.ndim == 2 else positions[:, None]
        angles = each.astype(np.float64) * frequencies  # [n, rotated / 2]
        scaling = self.rope.scaling
        factor = scaling.attention_factor if isinstance(scaling, YarnScaling | LongScaling) else 1.0
        return Rotation(self._whole(np.cos(angles) * factor, 1.0), self._whole(np.sin(angles) * factor, 0.0))

    def _whole(self, half: Doubles, still: float) -> Floats:
        """Repeat [n, rotated / 2] for both halves of a head: [n, D] in fp32."""
        half = padded(half, half.shape[1] + self.still, still)  # [n, D / 2]
        return np.concatenate((half, half), -1).astype(np.float32)

    def _frequencies(self, theta: float) -> Doubles:
        # Python's power is rounded rightly more often than numpy's.
        over = self.rope.spread or self.rotated
        plain = np.array([theta ** -(at / over) for at in range(0, self.rotated, 2)])  # [rotated / 2]
        match self.rope.scaling:
            case NoScaling() | DynamicScaling() | LongScaling():
                return plain
            case LinearScaling(factor):
                return plain / factor
            case Llama3Scaling() as scaling:
                return llama3_frequencies(plain, scaling)
            case YarnScaling() as scaling:
                return _yarn(plain, theta, self.rotated, scaling)

    def _by_length(self, limit: int) -> Doubles:
        scaling = self.rope.scaling
        if isinstance(scaling, LongScaling):
            factors = scaling.short if limit <= scaling.original_context else scaling.long
            return self._frequencies(self.rope.theta) / np.array(factors, np.float64)
        assert isinstance(scaling, DynamicScaling), "no other scaling depends on the length"
        length = max(limit, scaling.original_context)
        stretch = scaling.factor * length / scaling.original_context - (scaling.factor - 1)
        return self._frequencies(self.rope.theta * stretch ** (self.rotated / (self.rotated - 2)))


def axes_of(rope: Rope, pairs: int) -> NDArray[np.int64]:
    """The axis, 0 to 2, with whose position each pair turns."""
    if not rope.interleaved:
        return np.repeat(np.arange(len(rope.sections)), rope.sections) if rope.sections else np.zeros(pairs, np.int64)
    axes = np.zeros(pairs, np.int64)
    for axis in (1, 2):
        axes[axis : 3 * rope.sections[axis] : 3] = axis
    return axes


def llama3_frequencies(plain: Doubles, scaling: Llama3Scaling) -> Doubles:
    """Llama 3.1: stretch wavelengths beyond original / low, keep those below original / high, blend in between."""
    turns = scaling.original_context * plain / (2 * math.pi)
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = smooth.clip(0, 1)
    mixed: Doubles = (1 - smooth) * plain / scaling.factor + smooth * plain
    return mixed


def _yarn(plain: Doubles, theta: float, size: int, scaling: YarnScaling) -> Doubles:
    """YaRN (arXiv 2309.00071, section 3.2): a ramp over dimensions, extrapolation (fast) to interpolation (slow)."""

    def dimension(turns: float) -> float:  # whose angle makes `turns` full turns
        return size * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = ((np.arange(size // 2, dtype=np.float64) - low) / max(high - low, 0.001)).clip(0, 1)
    mixed: Doubles = plain * (1 - ramp) + plain / scaling.factor * ramp
    return mixed
