"""Replay of a past step: the attention row of one head at one position, from the cache or only from the tokens.

Replay changes no page: a replayed row writes its K and V to the store's scratch slots, and reads those that its own
step left in the cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tokenwright.backends.torch.decoder import Decoder
from tokenwright.backends.torch.observe import attention_row
from tokenwright.backends.torch.tensor_batch import Batcher
from tokenwright.cache import ChunkRows, KVStore, LayerSpec
from tokenwright.config import ModelConfig
from tokenwright.engine import one_chunk
from tokenwright.engine.page_table import PageTable
from tokenwright.models.taps import Site, Tap, ignore

PAGE_SIZE = 64  # tokens, of the stores made here
ROWS = 512  # of one forward pass, where replay recomputes a text


@dataclass(frozen=True, slots=True)
class ReplayedText:
    """Tokens in a store. `limit`: the maximum length of the text, on which some rotations depend.

    `tables`: one page table for each group, by page numbers of the text.
    """

    tokens: tuple[int, ...]
    limit: int
    store: KVStore
    tables: Sequence[PageTable]

    def holds(self, position: int, rows: int = 1) -> bool:
        """Whether the store has all pages that `rows` rows from `position` on read; some may have expired."""
        size = self.store.page_size
        return all(
            page in table
            for group, table in zip(self.store.groups, self.tables, strict=True)
            for pages in group.window.pages(position, position + rows, size)
            for page in pages
        )


class AttentionReplay:
    """Replays attention rows of one model, for any layer, head and position.

    It is as thread-safe as its stores: a caller that shares a store with an engine calls between two steps.
    """

    def __init__(self, config: ModelConfig, decoder: Decoder, specs: Sequence[LayerSpec], device: torch.device) -> None:
        self.config = config
        self.decoder = decoder
        self.specs = tuple(specs)
        self.device = device
        self._last: ReplayedText | None = None  # recomputed last, with a cache outside the pool's memory

    @torch.inference_mode()
    def row(self, text: ReplayedText, position: int, layer: int, head: int) -> torch.Tensor:
        """Weights [position + 1], fp32, of one head at `position`; the text must hold the pages that it reads."""
        seen = _Queries(layer, head)
        chunk = self.replayed(text, position, seen)
        view, group, scoring = text.store.view(layer), self.group(head), self.decoder.scorings[layer].of_head(head)
        return attention_row(view, chunk, seen.query, seen.sink_query, group, scoring)

    @torch.inference_mode()
    def rows(self, text: ReplayedText, position: int) -> torch.Tensor:
        """As `row`, of all heads of all layers: [L, H, position + 1]."""
        queries: dict[int, torch.Tensor] = {}
        sinks: dict[int, torch.Tensor] = {}

        def tap(site: Site, layer: int, value: torch.Tensor) -> None:
            if site is Site.QUERY:
                queries[layer] = value[-1]  # [H, D]
            elif site is Site.SINK_QUERY:
                sinks[layer] = value[-1]  # [H, D]

        chunk = self.replayed(text, position, tap)
        found = []
        for layer, query in sorted(queries.items()):
            view, sink, scoring = text.store.view(layer), sinks.get(layer), self.decoder.scorings[layer]
            for head in range(self.config.heads):
                other = None if sink is None else sink[head]
                row = attention_row(view, chunk, query[head], other, self.group(head), scoring.of_head(head))
                found.append(row)
        return torch.stack(found).view(len(queries), self.config.heads, -1)

    @torch.inference_mode()
    def replayed(self, text: ReplayedText, position: int, tap: Tap, rows: int = 1) -> ChunkRows:
        """Run `rows` rows from `position` on again under a tap, and store nothing. Returns the slots that they read."""
        tokens = text.tokens[position : position + rows]
        batch = Batcher(self.decoder.graph, text.store)(one_chunk(tokens, position, text.tables, text.limit))
        scratch = (torch.full_like(slots, text.store.scratch(group)) for group, slots in enumerate(batch.slots))
        self.decoder.forward(replace(batch, slots=tuple(scratch)), text.store, tap)
        return batch.chunks[0]

    def rebuilt(self, tokens: Sequence[int], limit: int) -> ReplayedText:
        """A text whose pages were freed, recomputed in a cache of its own. The last one is kept for the next call."""
        last = self._last
        if last is None or last.limit != limit or last.tokens[: len(tokens)] != tuple(tokens):
            last = self._last = self._computed(tokens, limit, ignore)
        return last

    @torch.inference_mode()
    def reference(self, tokens: Sequence[int], limit: int, layer: int, head: int) -> list[float]:
        """The expected `row` at the last of `tokens`, by definition: everything recomputed, softmax(q k) in fp64.

        It reads no page of the engine, so it can verify a row that does.
        """
        seen, group = _Queries(layer, head), self.group(head)
        keys: list[torch.Tensor] = []

        def tap(site: Site, at: int, value: torch.Tensor) -> None:
            seen(site, at, value)
            if (site, at) == (Site.KEY, layer):
                keys.append(value[:, group])

        self._computed(tokens, limit, tap)
        spec = self.specs[layer]
        read = _as_kept(spec, torch.cat(keys))  # [t, D]
        scores, places = read @ seen.query.double(), torch.arange(len(tokens), device=self.device)  # [t]
        sinks = places < spec.window.sinks
        if seen.sink_query is not None:
            scores = torch.where(sinks, read @ seen.sink_query.double(), scores)
        size = len(tokens) if spec.window.size is None else spec.window.size
        hidden = ~sinks & (places < len(tokens) - size)
        scoring = self.decoder.scorings[layer].of_head(head)
        scores *= scoring.scale
        if scoring.cap is not None:
            scores = scoring.cap * (scores / scoring.cap).tanh()
        scores = scores.masked_fill(hidden, -torch.inf)
        if scoring.sink_logits is not None:
            scores = torch.cat((scores, scoring.sink_logits.double()))
        weights: list[float] = scores.softmax(-1)[: len(tokens)].tolist()
        return weights

    @torch.inference_mode()
    def _computed(self, tokens: Sequence[int], limit: int, tap: Tap) -> ReplayedText:
        table = PageTable({page: page for page in range(-(-len(tokens) // PAGE_SIZE))})
        store = KVStore(self.specs, len(table), PAGE_SIZE, self.device)
        tables = [table] * len(store.groups)
        batcher = Batcher(self.decoder.graph, store)
        for start in range(0, len(tokens), ROWS):
            rows = one_chunk(tokens[start : start + ROWS], start, tables, limit)
            self.decoder.forward(batcher(rows), store, tap)
        return ReplayedText(tuple(tokens), limit, store, tables)

    def group(self, head: int) -> int:
        """The KV head that a query head reads."""
        return head * self.config.kv_heads // self.config.heads


class _Queries:
    """A tap that keeps the query of one head at the last row."""

    def __init__(self, layer: int, head: int) -> None:
        self.layer, self.head = layer, head
        self.query = torch.empty(0)  # [D]
        self.sink_query: torch.Tensor | None = None  # [D], where the layer has one

    def __call__(self, site: Site, layer: int, value: torch.Tensor) -> None:
        if (site, layer) == (Site.QUERY, self.layer):
            self.query = value[-1, self.head]
        elif (site, layer) == (Site.SINK_QUERY, self.layer):
            self.sink_query = value[-1, self.head]


def _as_kept(spec: LayerSpec, keys: torch.Tensor) -> torch.Tensor:
    """Keys [t, D] of a whole text, encoded and decoded as in the cache, in fp64."""
    kept = []
    for part in spec.parts:
        places = part.stored(range(len(keys)))
        encoded = part.k.encode(keys[places.start : places.stop])
        kept.append(part.k.decode(encoded, keys.shape[-1], torch.float64))
    return torch.cat(kept)
