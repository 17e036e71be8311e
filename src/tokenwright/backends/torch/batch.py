"""A step as tensors: what the decoder's parts read beside the weights and the cache."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tokenwright.backends import Rotation, Span
from tokenwright.cache import KVStore, Table
from tokenwright.config import ModelConfig, Rope
from tokenwright.engine import Chunk
from tokenwright.engine.window import Reach
from tokenwright.models.rotary import RotaryTable


@dataclass(frozen=True, slots=True)
class Batch:
    """The T tokens of one step, the rows of all chunks one after another."""

    tokens: torch.Tensor  # [T] ids
    positions: torch.Tensor  # [T]
    slots: tuple[torch.Tensor, ...]  # for each group, [T]: where their K and V go
    spans: tuple[Span, ...]  # one for each chunk
    rotation: Rotation  # [T, D]; empty under learned positions
    sink_rotations: Mapping[Reach, Rotation]  # [T, D], for each reach with sinks: how a query meets their keys


@dataclass(frozen=True, slots=True)
class Piece:
    """What a batch needs of a chunk, for who has no engine: `tokens` from position `start` on, of a text up to `limit`.

    `tables`: for each group the pages of what is read and written, by their numbers in the text.
    """

    tokens: Sequence[int]
    start: int
    tables: Sequence[Table]
    limit: int

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


class Batcher:
    """Builds batches for one model over one store, on the store's device."""

    def __init__(self, config: ModelConfig, store: KVStore) -> None:
        self.store = store
        rope = config.positions
        self.table = RotaryTable(rope, config.head_size, store.device) if isinstance(rope, Rope) else None
        self.sinking = {spec.reach for spec in store.specs if spec.reach.sinks}

    def __call__(self, pieces: Sequence[Piece | Chunk]) -> Batch:
        places = [torch.arange(piece.start, piece.stop) for piece in pieces]
        return Batch(
            tokens=torch.tensor([token for piece in pieces for token in piece.tokens]).to(self.store.device),
            positions=torch.cat(places).to(self.store.device),
            slots=tuple(self._slots(group, pieces) for group in range(len(self.store.groups))),
            spans=self._spans(pieces),
            rotation=self._rotation(pieces, places),
            sink_rotations={reach: self._sink_rotation(reach, pieces, places) for reach in self.sinking},
        )

    def _slots(self, group: int, pieces: Sequence[Piece | Chunk]) -> torch.Tensor:
        each = [self.store.slots(group, piece.tables[group], range(piece.start, piece.stop)) for piece in pieces]
        return torch.cat(each).to(self.store.device)  # [T]

    def _spans(self, pieces: Sequence[Piece | Chunk]) -> tuple[Span, ...]:
        spans: list[Span] = []
        row = 0
        for piece in pieces:
            rows = range(row, row + len(piece.tokens))
            spans.append(Span(rows, piece.start, self.store.keys(piece.tables, piece.start, piece.stop)))
            row = rows.stop
        return tuple(spans)

    def _rotation(self, pieces: Sequence[Piece | Chunk], places: Sequence[torch.Tensor]) -> Rotation:
        if self.table is None:
            empty = torch.empty(0)
            return Rotation(empty, empty)
        parts = [self.table.rows(where, piece.limit) for piece, where in zip(pieces, places, strict=True)]
        return Rotation(torch.cat([part.cos for part in parts]), torch.cat([part.sin for part in parts]))  # [T, D]

    def _sink_rotation(self, reach: Reach, pieces: Sequence[Piece | Chunk], places: Sequence[torch.Tensor]) -> Rotation:
        """Each row as if it stood right behind the sinks and a full window: there the text it reads would end."""
        assert reach.window is not None, "sinks lie before a window"
        return self._rotation(pieces, [where.clamp(max=reach.sinks + reach.window - 1) for where in places])
