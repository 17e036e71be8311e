"""What one layer keeps for each token: layout x reach x precision, three axes that compose.

Allocation, accounting and display all read the bytes from here. The engine has one layout today (heads) and stores
K and V in the dtype they are computed in; the planner counts the latent layout and the other codecs as well.
"""

from dataclasses import dataclass

from tokenwright.cache.codec import CODECS, Codec
from tokenwright.config import DType, ModelConfig


@dataclass(frozen=True, slots=True)
class Heads:
    """K and V of `kv_heads` heads (G) of `head_size` numbers (D) each."""

    kv_heads: int
    head_size: int

    def bytes_per_token(self, k: Codec, v: Codec) -> int:
        """Bytes of K and V of one token; each head is a row of its own."""
        return self.kv_heads * (k.nbytes(self.head_size) + v.nbytes(self.head_size))


@dataclass(frozen=True, slots=True)
class Latent:
    """One vector for all heads (MLA, arXiv 2405.04434): `rank` numbers (R) of K and V, `rope` of the rotated key."""

    rank: int
    rope: int

    def bytes_per_token(self, k: Codec, v: Codec) -> int:
        """Bytes of the one vector, which is K and V in one: `k` and `v` must be the same."""
        assert k == v, "a latent has one codec"
        return k.nbytes(self.rank) + k.nbytes(self.rope)


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
        return self.layout.bytes_per_token(CODECS[self.dtype], CODECS[self.dtype])


def layer_specs(config: ModelConfig, dtype: DType) -> tuple[LayerSpec, ...]:
    """One spec for each layer of the model."""
    layout = Heads(config.kv_heads, config.head_size)
    return tuple(LayerSpec(layout, Full() if window is None else Window(window), dtype) for window in config.windows)
