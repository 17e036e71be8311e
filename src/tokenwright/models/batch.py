"""A step as tensors: what the decoder's parts read beside the weights and the cache."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tokenwright.config import ModelConfig, Rope
from tokenwright.kernels import Rotation, Span
from tokenwright.models.parts import RotaryTable


@dataclass(frozen=True, slots=True)
class Batch:
    """The T tokens of one step, the rows of all chunks one after another."""

    tokens: torch.Tensor  # [T] ids
    positions: torch.Tensor  # [T]
    slots: torch.Tensor  # [T] where their K and V go
    spans: tuple[Span, ...]  # one for each chunk
    rotation: Rotation  # [T, D]; empty under learned positions


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk as the batch needs it: `tokens` from position `start` on, in `pages`, of a text up to `limit`."""

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    limit: int


class Batcher:
    """Builds batches for one model and page size on one device."""

    def __init__(self, config: ModelConfig, page_size: int, device: torch.device) -> None:
        self.page_size = page_size
        self.device = device
        rope = config.positions
        self.table = RotaryTable(rope, config.head_size, device) if isinstance(rope, Rope) else None

    def __call__(self, pieces: Sequence[Piece]) -> Batch:
        spans: list[Span] = []
        places: list[torch.Tensor] = []
        slots: list[torch.Tensor] = []
        row = 0
        for piece in pieces:
            positions = torch.arange(piece.start, piece.start + len(piece.tokens))
            pages = torch.tensor(piece.pages)
            places.append(positions)
            slots.append(pages[positions // self.page_size] * self.page_size + positions % self.page_size)
            spans.append(Span(range(row, row + len(piece.tokens)), piece.start, pages.to(self.device)))
            row += len(piece.tokens)
        return Batch(
            tokens=torch.tensor([token for piece in pieces for token in piece.tokens]).to(self.device),
            positions=torch.cat(places).to(self.device),
            slots=torch.cat(slots).to(self.device),
            spans=tuple(spans),
            rotation=self._rotation(pieces, places),
        )

    def _rotation(self, pieces: Sequence[Piece], places: Sequence[torch.Tensor]) -> Rotation:
        if self.table is None:
            empty = torch.empty(0)
            return Rotation(empty, empty)
        parts = [self.table.rows(where, piece.limit) for piece, where in zip(pieces, places, strict=True)]
        return Rotation(torch.cat([part.cos for part in parts]), torch.cat([part.sin for part in parts]))  # [T, D]
