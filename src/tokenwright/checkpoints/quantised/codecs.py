"""Codecs of published formats decode a matrix, or give one of our packed forms if that loses nothing."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tokenwright.arrays import Array, Bytes, Floats
from tokenwright.checkpoints.files.safetensors import Stored
from tokenwright.formats import WeightFormat

WORD = 32  # bits of a packed word
# Keys of a config.json that describe its weights, with the default method.
DEFAULTS = {"quantization": "mlx", "quantization_config": "", "compression_config": "compressed-tensors"}
Parts = Mapping[str, Array]


def unpacked(words: Array, bits: int, *, cut: bool = True) -> Array:
    """Unsigned numbers of int32 words [..., n], the lowest bits first, in int16. cut: one may lie in two words."""
    shape = words.shape[:-1]
    if WORD % bits and cut:
        each = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=-1, bitorder="little")
        return each.reshape(*shape, -1, bits) @ (1 << np.arange(bits, dtype=np.int16))
    shifts = np.arange(0, WORD - bits + 1, bits, dtype=np.int32)
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).astype(np.int16).reshape(*shape, -1)


class MatrixCodec(Protocol):
    @property
    def title(self) -> str: ...

    @property
    def small(self) -> tuple[str, ...]:
        """Tensors besides the codes, read when a folder is opened to find `form`."""

    def shape(self, parts: Mapping[str, Stored]) -> tuple[int, ...] | None:
        """[out, in], or None if the shapes of the tensors do not fit together."""

    def form(self, small: Parts, inner: int) -> WeightFormat | None:
        """The packed form that holds the matrix without loss, or None. Raises ValueError for impossible values."""

    def numbers(self, parts: Parts) -> Floats:
        """[out, in] in fp32."""

    def codes(self, parts: Parts, form: WeightFormat) -> tuple[Bytes, Array]:
        """Codes [out, in] (uint8) and scales [out, in / group] (float16) of `form`, as `Packed` stores them."""


class Decoded:
    def form(self, small: Parts, inner: int) -> WeightFormat | None:  # noqa: ARG002  (the answer of others depends on it)
        return None

    def codes(self, parts: Parts, form: WeightFormat) -> tuple[Bytes, Array]:  # noqa: ARG002
        raise AssertionError("no packed form was offered")


@dataclass(frozen=True, slots=True)
class Compound(Stored):
    parts: Mapping[str, Stored]
    codec: MatrixCodec
    form: WeightFormat | None  # holds it without loss


@dataclass(frozen=True, slots=True)
class Concatenated(Decoded):
    title: str  # their dtype
    turned: frozenset[str] = frozenset()  # parts that are transposed first
    small: tuple[str, ...] = ()

    def shape(self, parts: Mapping[str, Stored]) -> tuple[int, ...]:
        each = [part.shape[::-1] if name in self.turned else part.shape for name, part in parts.items()]
        return sum(one[0] for one in each), *each[0][1:]

    def numbers(self, parts: Parts) -> Floats:
        each = [part.T if name in self.turned else part for name, part in parts.items()]
        return np.concatenate(each).astype(np.float32)


def concatenated(parts: Mapping[str, Stored], turned: frozenset[str] = frozenset()) -> Compound:
    first, nbytes = next(iter(parts.values())), sum(one.nbytes for one in parts.values())
    codec = Concatenated(first.dtype, turned)
    return Compound(first.file, first.dtype, codec.shape(parts), first.start, nbytes, parts, codec, None)


def described_at(settings: Mapping[str, Any]) -> str | None:
    """The key of a config.json that describes quantised weights, if there is one."""
    return next((one for one in DEFAULTS if isinstance(settings.get(one), dict) and settings[one]), None)
