"""Replays a past step for one head's attention row, from the cache or the tokens. Its K and V go to scratch slots."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from tokenwright.arrays import Floats
from tokenwright.backends.array_passes import ArrayPasses
from tokenwright.backends.device import CPU, Device
from tokenwright.backends.kv_sizing import memory_of
from tokenwright.backends.runner import passes_over
from tokenwright.backends.towers.picture_memory import PictureMemory
from tokenwright.cache import ChunkRows, KVStore, LayerSpec
from tokenwright.config import ModelConfig
from tokenwright.engine import one_chunk
from tokenwright.engine.layer_group import PageTable
from tokenwright.engine.pictures import Spans, common, longest, read_ends, uncut
from tokenwright.models.taps import Site, Tap, ignore

PAGE_SIZE = 64  # tokens, of the stores made here
ROWS = 512  # of one forward pass, where replay recomputes a text


@dataclass(frozen=True, slots=True)
class ReplayedText:
    """A text whose K and V are in a store. limit: its maximum length, for rotations. spans: its pictures."""

    tokens: tuple[int, ...]
    limit: int
    store: KVStore
    tables: Sequence[PageTable]
    spans: Spans = ()

    def chunk(self, position: int, rows: int = 1) -> ChunkRows:
        """`rows` rows from `position` on, and the others of a picture that they read; the slots that all read."""
        stop = (read_ends(self.spans, position, position + rows) or [position + rows])[-1]
        chunk = self.store.chunk_rows([table.pages for table in self.tables], range(stop - position), position)
        ends = read_ends(self.spans, position, stop)
        return replace(chunk, ends=None if ends is None else np.array(ends))

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

    def __init__(
        self,
        config: ModelConfig,
        decoder: Any,
        specs: Sequence[LayerSpec],
        device: Device = CPU,
        pictures: PictureMemory | None = None,
    ) -> None:
        self.config = config
        self.pictures = pictures
        self.decoder = decoder
        self.specs = tuple(specs)
        self.device = device
        self._last: ReplayedText | None = None

    @cached_property
    def passes(self) -> ArrayPasses:
        return passes_over(self.decoder)

    def row(self, text: ReplayedText, position: int, layer: int, head: int) -> Floats:
        """Weights [position + 1], fp32, of one head at `position`, whose pages the text must hold."""
        chunk = self.replayed(text, position, seen := QueryTap(layer))
        found: Floats = self.weights(text, chunk, seen, layer, head)[0, 0]
        return found

    def rows(self, text: ReplayedText, position: int) -> Floats:
        """As `row`, of all heads of all layers: [L, H, position + 1]."""
        chunk = self.replayed(text, position, seen := QueryTap())
        return np.stack([self.weights(text, chunk, seen, layer)[:, 0] for layer in sorted(seen.queries)])

    def weights(
        self, text: ReplayedText, chunk: ChunkRows, seen: "QueryTap", layer: int, head: int | None = None
    ) -> Floats:
        """Weights [H, rows, stop], fp32, of a chunk whose queries a tap has seen: of all heads, or of one."""
        heads, sinks = slice(None) if head is None else slice(head, head + 1), seen.sinks.get(layer)
        view, scoring = text.store.view(layer), self.passes.scoring(layer, head)
        if head is not None:
            group = self.group(layer, head)
            view, scoring = view.head(group), scoring.of_group(group)
        others = None if sinks is None else sinks[:, heads]
        return self.passes.weights(view, chunk, seen.queries[layer][:, heads], others, scoring)

    def replayed(self, text: ReplayedText, position: int, tap: Tap, rows: int = 1) -> ChunkRows:
        """Run `rows` rows from `position` on again under a tap. Returns the slots that they read."""
        chunk = text.chunk(position, rows)
        self._run(text, position, chunk.stop, lambda site, layer, value: tap(site, layer, value[:rows]), stored=False)
        return chunk

    def _run(self, text: ReplayedText, start: int, stop: int, tap: Tap, *, stored: bool) -> None:
        batch = one_chunk(text.tokens[start:stop], start, text.tables, text.limit, text.spans)
        if batch.pictures:
            assert self.pictures is not None, "pictures are refused where there is no tower"
            self.pictures.insert(batch)
        self.passes.run(batch, text.store, tap, stored=stored)

    def rebuilt(self, tokens: Sequence[int], limit: int, spans: Spans = ()) -> ReplayedText:
        """A text whose pages were freed, recomputed in its own cache; the last one is kept."""
        last, count = self._last, len(tokens)
        same = last is not None and last.limit == limit and last.tokens[:count] == tuple(tokens)
        if last is None or not same or not common(last.spans, spans, count):
            last = self._last = self.computed(tokens, limit, ignore, spans)
        return last

    def computed(self, tokens: Sequence[int], limit: int, tap: Tap, spans: Spans = ()) -> ReplayedText:
        table = PageTable({page: page for page in range(-(-len(tokens) // PAGE_SIZE))})
        store = KVStore(self.specs, len(table), PAGE_SIZE, memory_of(self.device))
        text = ReplayedText(tuple(tokens), limit, store, [table] * len(store.groups), spans)
        start, most = 0, max(ROWS, longest(spans))
        while start < len(tokens):
            stop = uncut(spans, start, min(start + most, len(tokens)))
            self._run(text, start, stop, tap, stored=True)
            start = stop
        return text

    def group(self, layer: int, head: int) -> int:
        return head * self.specs[layer].layout.kv_heads // self.config.heads


class StreamTap:
    """Keeps the first residual stream before the first layer and after each layer, of all passes that it sees.

    After the last layer it is the stream that the head reads.
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
