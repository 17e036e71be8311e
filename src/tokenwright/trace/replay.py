"""Replay of a past step: one head's attention row, from the cache or the tokens. Its K and V go to scratch slots."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from tokenwright.arrays import Array, Floats
from tokenwright.backends.device import CPU, Device
from tokenwright.backends.kv_sizing import memory_of
from tokenwright.backends.protocol import Passes
from tokenwright.backends.runner import passes_over
from tokenwright.cache import ChunkRows, KVStore, LayerSpec
from tokenwright.config import ModelConfig
from tokenwright.decode.logits_processors import softmax
from tokenwright.engine import one_chunk
from tokenwright.engine.layer_group import PageTable
from tokenwright.models.taps import Site, Tap, ignore

PAGE_SIZE = 64  # tokens, of the stores made here
ROWS = 512  # of one forward pass, where replay recomputes a text


@dataclass(frozen=True, slots=True)
class ReplayedText:
    """limit: the text's maximum length, for its rotations."""

    tokens: tuple[int, ...]
    limit: int
    store: KVStore
    tables: Sequence[PageTable]

    def holds(self, position: int, rows: int = 1) -> bool:
        """Whether the store has all pages that `rows` rows from `position` on read."""
        size = self.store.page_size
        return all(
            page in table
            for group, table in zip(self.store.groups, self.tables, strict=True)
            for pages in group.window.pages(position, position + rows, size)
            for page in pages
        )


class AttentionReplay:
    """Replays attention rows of one model. A caller that shares a store with an engine calls between two steps."""

    def __init__(self, config: ModelConfig, decoder: Any, specs: Sequence[LayerSpec], device: Device = CPU) -> None:
        self.config = config
        self.decoder = decoder
        self.specs = tuple(specs)
        self.device = device
        self._last: ReplayedText | None = None

    @cached_property
    def passes(self) -> Passes:
        return passes_over(self.decoder)

    def row(self, text: ReplayedText, position: int, layer: int, head: int) -> Floats:
        """Weights [position + 1], fp32, of one head at `position`, whose pages the text must hold."""
        chunk = self.replayed(text, position, seen := QueryTap(layer))
        return self.head_row(text, chunk, seen, layer, head)

    def rows(self, text: ReplayedText, position: int) -> Floats:
        """As `row`, of all heads of all layers: [L, H, position + 1]."""
        chunk, heads = self.replayed(text, position, seen := QueryTap()), range(self.config.heads)
        found = [self.head_row(text, chunk, seen, layer, head) for layer in sorted(seen.queries) for head in heads]
        return np.stack(found).reshape(len(seen.queries), len(heads), -1)

    def head_row(self, text: ReplayedText, chunk: ChunkRows, seen: "QueryTap", layer: int, head: int) -> Floats:
        view, group, scoring = text.store.view(layer), self.group(layer, head), self.passes.scoring(layer, head)
        return self.passes.row(view, chunk, *seen.last(layer, head), group, scoring)

    def replayed(self, text: ReplayedText, position: int, tap: Tap, rows: int = 1) -> ChunkRows:
        """Run `rows` rows from `position` on again under a tap. Returns the slots that they read."""
        tokens = text.tokens[position : position + rows]
        self.passes.run(one_chunk(tokens, position, text.tables, text.limit), text.store, tap, stored=False)
        return text.store.chunk_rows([table.pages for table in text.tables], range(rows), position)

    def rebuilt(self, tokens: Sequence[int], limit: int) -> ReplayedText:
        """A text whose pages were freed, recomputed in its own cache; the last one is kept."""
        last = self._last
        if last is None or last.limit != limit or last.tokens[: len(tokens)] != tuple(tokens):
            last = self._last = self.computed(tokens, limit, ignore)
        return last

    def computed(self, tokens: Sequence[int], limit: int, tap: Tap) -> ReplayedText:
        table = PageTable({page: page for page in range(-(-len(tokens) // PAGE_SIZE))})
        store = KVStore(self.specs, len(table), PAGE_SIZE, memory_of(self.device))
        tables = [table] * len(store.groups)
        for start in range(0, len(tokens), ROWS):
            self.passes.run(one_chunk(tokens[start : start + ROWS], start, tables, limit), store, tap)
        return ReplayedText(tuple(tokens), limit, store, tables)

    def reference(self, tokens: Sequence[int], limit: int, layer: int, head: int) -> list[float]:
        """The expected `row` at the last of `tokens`: everything recomputed, softmax(q k) in fp64."""
        spec = self.specs[layer]
        seen, group, source = QueryTap(layer), self.group(layer, head), layer - (spec.source or 0)
        keys: list[Array] = []

        def tap(site: Site, at: int, value: Floats) -> None:
            seen(site, at, value)
            if (site, at) == (Site.KEY, source):
                keys.append(value[:, group].copy())

        self.computed(tokens, limit, tap)
        query, sink_query = seen.last(layer, head)
        read = self.passes.kept(spec, np.concatenate(keys))  # [t, D]
        places, scoring = np.arange(len(tokens)), self.passes.scoring(layer, head)
        if spec.unbiased and scoring.key_bias is not None:
            read = read + scoring.key_bias.of_group(group).at(places)[:, 0]
        scores = read @ query.astype(np.float64)  # [t]
        sinks = places < spec.window.sinks
        if sink_query is not None:
            scores = np.where(sinks, read @ sink_query.astype(np.float64), scores)
        size = len(tokens) if spec.window.size is None else spec.window.size
        hidden = ~sinks & (places < len(tokens) - size)
        scores *= scoring.scale
        if scoring.cap is not None:
            scores = scoring.cap * np.tanh(scores / scoring.cap)
        scores[hidden] = -np.inf
        if scoring.sink_logits is not None:
            scores = np.concatenate((scores, scoring.sink_logits.astype(np.float64)))
        weights: list[float] = softmax(scores)[: len(tokens)].tolist()
        return weights

    def group(self, layer: int, head: int) -> int:
        return head * self.specs[layer].layout.kv_heads // self.config.heads


class StreamTap:
    """Keeps the first residual stream before the first layer and after each one, of all passes that it sees.

    After a layer this is the last one that it shows. At the end it is the stream that the head reads.
    """

    def __init__(self) -> None:
        self._passes: list[dict[int, Floats]] = []  # by layer, -1 for the embedding: [T, width]

    def __call__(self, site: Site, layer: int, value: Floats) -> None:
        if site is Site.EMBEDDING:
            self._passes.append({-1: value.copy()})
        elif site in (Site.ATTENTION, Site.MLP):
            self._passes[-1][layer] = value.copy()
        elif site is Site.MERGED:
            self._passes[-1][max(self._passes[-1])] = value.copy()

    def streams(self) -> Floats:
        """[L + 1, T, width], fp32."""
        found: Floats = np.concatenate([np.stack([one[i] for i in sorted(one)]) for one in self._passes], 1)
        return found.astype(np.float32, copy=False)


@dataclass(slots=True)
class QueryTap:
    """Keeps the queries [T, H, D] of each layer, or only of `layer`, of the last pass; sinks: those for their keys."""

    layer: int | None = None
    queries: dict[int, Floats] = field(default_factory=dict)
    sinks: dict[int, Floats] = field(default_factory=dict)

    def __call__(self, site: Site, layer: int, value: Floats) -> None:
        if self.layer in (None, layer) and site in (Site.QUERY, Site.SINK_QUERY):
            (self.queries if site is Site.QUERY else self.sinks)[layer] = value.copy()

    def last(self, layer: int, head: int) -> tuple[Floats, Floats | None]:
        """A head's query [D] of the last row, and that for the keys of sinks."""
        sinks = self.sinks.get(layer)
        return self.queries[layer][-1, head], None if sinks is None else sinks[-1, head]
