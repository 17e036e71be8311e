"""Codecs of published formats: they decode a matrix, or give one of our packed forms where that loses nothing."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from tokenwright.arrays import Array, Bytes, Floats
from tokenwright.checkpoints.files.safetensors import Stored
from tokenwright.formats import WeightFormat

WORD = 32  # bits of a packed word
# Keys of a config.json that describe its weights, with the default method.
DEFAULTS = {"quantization": "mlx", "quantization_config": "", "compression_config": "compressed-tensors"}
Parts = Mapping[str, Array]


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
    """A matrix that is stored as several tensors."""

    parts: Mapping[str, Stored]
    codec: MatrixCodec
    form: WeightFormat | None  # holds it without loss


def described_at(settings: Mapping[str, Any]) -> str | None:
    """The key of a config.json that describes quantised weights, if there is one."""
    return next((one for one in DEFAULTS if isinstance(settings.get(one), dict) and settings[one]), None)
