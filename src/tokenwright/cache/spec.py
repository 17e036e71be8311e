"""What one layer keeps for each token: layout x reach x precision, three axes that compose.

Allocation, accounting and display all read the bytes from here. K and V have one layout today (heads) and are
stored in the dtype they are computed in; other layouts and codecs are further values of these axes.
"""

from dataclasses import dataclass

from tokenwright.config import DTYPE_BYTES, DType, ModelConfig


@dataclass(frozen=True, slots=True)
class Heads:
    """K and V of `kv_heads` heads (G) of `head_size` numbers (D) each."""

    kv_heads: int
    head_size: int


@dataclass(frozen=True, slots=True)
class Full:
    """A token is read by every later one."""


@dataclass(frozen=True, slots=True)
class Window:
    """A token is read by itself and by the `tokens - 1` after it."""

    tokens: int


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The KV format of one layer."""

    layout: Heads
    reach: Full | Window
    dtype: DType

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V together that this layer stores for one token."""
        return 2 * self.layout.kv_heads * self.layout.head_size * DTYPE_BYTES[self.dtype]


def layer_specs(config: ModelConfig, dtype: DType) -> tuple[LayerSpec, ...]:
    """One spec for each layer of the model."""
    layout = Heads(config.kv_heads, config.head_size)
    return tuple(LayerSpec(layout, Full() if window is None else Window(window), dtype) for window in config.windows)
