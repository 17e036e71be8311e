"""An op of sizes alone, which no backend has: for what counts bytes and work of any layout, and for refusals."""

from collections.abc import Mapping
from dataclasses import dataclass

from tokenwright.config import LayerKV
from tokenwright.models.op import Matrix, Op, Shape


@dataclass(frozen=True)
class Sized(Op):
    """Attention of a KV layout and window, and the FLOP for one row and one token that it attends to."""

    tensors: Mapping[str, Shape]
    layer: LayerKV | None = None
    pair: int = 0

    @property
    def shapes(self) -> dict[str, Shape]:
        return dict(self.tensors)

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return ()

    @property
    def kv(self) -> LayerKV | None:
        return self.layer

    @property
    def pair_flops(self) -> int:
        return self.pair
