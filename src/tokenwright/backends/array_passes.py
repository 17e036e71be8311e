"""Runs a model op by op to look inside. Attention weights are computed in NumPy: kernels keep no attention matrix."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenwright.arrays import Floats
from tokenwright.backends.protocol import Scored
from tokenwright.cache import ChunkRows, KVPart, KVStore, KVView, Side
from tokenwright.engine import Batch
from tokenwright.models.taps import Tap


class ArrayPasses(ABC):
    decoder: Any

    @abstractmethod
    def run(self, batch: Batch, store: KVStore, tap: Tap, *, stored: bool = True) -> None:
        """Compute under a tap, which gets arrays. stored=False: K and V go to scratch slots."""

    @abstractmethod
    def logits(self, x: Floats) -> Floats:
        """Logits [n, vocabulary] of rows [n, width] of the residual stream."""

    @abstractmethod
    def decoded(self, side: Side, slots: NDArray[np.int64]) -> Floats:
        """The rows [n, G, D] of slots of K or V, in fp32."""

    def scoring(self, layer: int, head: int | None = None) -> Scored:
        """How a layer, or one of its heads, computes attention scores from q k; sink logits are an array."""
        found: Scored = self.decoder.scorings[layer]
        return found if head is None else found.of_head(head)

    def cached(self, view: KVView, chunk: ChunkRows, group: int) -> tuple[Floats, Floats, NDArray[np.int64]]:
        """Keys [t, D] and values [t, v] of a KV head that a chunk reads, fp32, and their positions [t]."""
        parts = view.head(group).parts
        keys, values = self._read(chunk, parts, [part.k for part in parts]), [part.v for part in parts]
        return keys[:, 0], self._read(chunk, parts, values)[:, 0], _positions(chunk, parts)

    def weights(
        self, view: KVView, chunk: ChunkRows, queries: Floats, sink_queries: Floats | None, scoring: Scored
    ) -> Floats:
        """Weights [H, n, stop], fp32, of queries [n, H, D] at a chunk's first rows; 0 at masked positions.

        sink_queries: for the keys of sinks.
        """
        keys, positions = self._read(chunk, view.parts, [part.k for part in view.parts]), _positions(chunk, view.parts)
        if view.spec.unbiased and scoring.key_bias is not None:
            keys = keys + scoring.key_bias.at(positions)
        window = view.spec.window
        scores = _scores(queries, keys)  # [G, R, n, t]
        if sink_queries is not None:
            first = slice(window.sinks)  # every row reads the first positions up to its own
            scores[..., first] = _scores(sink_queries, keys[first])
        rows = np.arange(chunk.start, chunk.start + len(queries))[:, None]
        hidden = positions > rows if chunk.ends is None else positions >= chunk.ends[: len(queries), None]
        if window.size is not None:
            hidden |= (positions <= rows - window.size) & (positions >= window.sinks)
        scores = scores.reshape(queries.shape[1], len(queries), len(positions)) * np.float32(scoring.scale)
        if scoring.cap is not None:
            scores = np.tanh(scores / np.float32(scoring.cap)) * np.float32(scoring.cap)
        scores[:, hidden] = -np.inf
        learned = None if scoring.sink_logits is None else scoring.sink_logits.astype(np.float32)[:, None]  # [H, 1]
        most = scores.max(-1) if learned is None else np.maximum(scores.max(-1), learned)
        powers = np.exp(scores - most[..., None])
        totals = powers.sum(-1) + (0 if learned is None else np.exp(learned - most))
        whole = np.zeros((*scores.shape[:2], chunk.stop), np.float32)
        whole[:, :, positions] = powers / totals[..., None]
        return whole

    def _read(self, chunk: ChunkRows, parts: Sequence[KVPart], sides: Sequence[Side]) -> Floats:
        each = zip(parts, sides, strict=True)
        return np.concatenate([self.decoded(side, chunk.slots[part.group]) for part, side in each])


def _positions(chunk: ChunkRows, parts: Sequence[KVPart]) -> NDArray[np.int64]:
    return np.concatenate([chunk.positions[part.group] for part in parts])


def _scores(queries: Floats, keys: Floats) -> Floats:
    """q k [G, H / G, n, t] of rows [n, H, D] and keys [t, G, D]."""
    rows = queries.reshape(len(queries), keys.shape[1], -1, queries.shape[2]).transpose(1, 2, 0, 3)  # [G, R, n, D]
    scores: Floats = rows @ keys.transpose(1, 2, 0)[:, None]
    return scores
