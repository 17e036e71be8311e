"""A matrix that is stored as several tensors. `published.py` has the codecs, imported only where there are some."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenwright.checkpoints.files.safetensors import Stored
from tokenwright.checkpoints.quantised.codecs import MatrixCodec
from tokenwright.formats import WeightFormat

# Where a config.json describes its weights, and the method unless it says one.
DEFAULTS = {"quantization": "mlx", "quantization_config": "", "compression_config": "compressed-tensors"}


@dataclass(frozen=True, slots=True)
class Compound(Stored):
    """A matrix that is stored as several tensors; `nbytes` is the sum of theirs."""

    parts: Mapping[str, Stored]
    codec: MatrixCodec
    form: WeightFormat | None  # holds it without loss


def described_at(settings: Mapping[str, Any]) -> str | None:
    """The key of a config.json that describes quantised weights, of whatever tool; None without one."""
    return next((one for one in DEFAULTS if isinstance(settings.get(one), dict) and settings[one]), None)
