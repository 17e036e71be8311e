"""MLX's affine quantisation: w = scale * code + bias, each group of inputs with a scale and a bias of its own.

Codes lie in uint32 words along the inputs, the first in the lowest bits. A bias is any number, and the zeros of our
forms are whole steps; so matrices are decoded.
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
    """Codes of `bits` bits (4 or 8) in groups of `group` inputs, with scales and biases [out, groups]."""

    bits: int
    group: int
    small: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return f"MLX int{self.bits}"

    def shape(self, parts: Mapping[str, Stored]) -> tuple[int, ...] | None:
        words, scales, biases = parts["weight"], parts["scales"], parts["biases"]
        if words.dtype != "U32" or len(words.shape) != 2 or scales.shape != biases.shape:
            return None
        out, inner = words.shape[0], words.shape[1] * (_WORD // self.bits)
        return (out, inner) if scales.shape == (out, inner // self.group) and inner % self.group == 0 else None

    def numbers(self, parts: Parts) -> Floats:
        shifts = np.arange(0, _WORD, self.bits, dtype=np.int32)
        words = parts["weight"].view(np.int32)
        codes = (words[..., None] >> shifts) & ((1 << self.bits) - 1)  # [out, words, codes of a word]
        wide = (np.repeat(parts[name].astype(np.float32), self.group, 1) for name in ("scales", "biases"))
        scales, biases = wide
        return codes.reshape(len(words), -1).astype(np.float32) * scales + biases
