"""MLX's affine quantisation: w = scale * code + bias, each group of inputs with a scale and a bias of its own.

A bias is any number, and the zeros of our forms are whole steps; so matrices are decoded.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tokenwright.arrays import Floats
from tokenwright.checkpoints.files.safetensors import Stored
from tokenwright.checkpoints.quantised.codecs import Decoded, Parts

_WORD = 32  # bits


@dataclass(frozen=True, slots=True)
class Mlx(Decoded):
    """Codes of `bits` bits in groups of `group` inputs, with scales and biases [out, groups]."""

    bits: int
    group: int
    small: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return f"MLX int{self.bits}"

    def shape(self, parts: Mapping[str, Stored]) -> tuple[int, ...] | None:
        words, scales, biases = parts["weight"], parts["scales"], parts["biases"]
        if words.dtype != "U32" or len(words.shape) != 2 or scales.shape != biases.shape or len(scales.shape) != 2:
            return None
        out, inner = words.shape[0], scales.shape[1] * self.group
        return (out, inner) if scales.shape[0] == out and words.shape[1] * _WORD == inner * self.bits else None

    def numbers(self, parts: Parts) -> Floats:
        words = np.ascontiguousarray(parts["weight"])
        out = len(words)
        if _WORD % self.bits == 0:
            shifts = np.arange(0, _WORD, self.bits, dtype=np.int32)
            codes = (words.view(np.int32)[..., None] >> shifts) & ((1 << self.bits) - 1)  # [out, words, each]
        else:  # a code may begin in one word and end in the next
            each = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little").reshape(out, -1, self.bits)
            codes = each @ (1 << np.arange(self.bits, dtype=np.uint8))
        wide = (np.repeat(parts[name].astype(np.float32), self.group, 1) for name in ("scales", "biases"))
        scales, biases = wide
        return codes.reshape(out, -1).astype(np.float32) * scales + biases
