"""Looking at a past step again: what a head read at a position, from the cache or from the tokens alone.

Nothing that is looked at changes: a row that is run again writes its K and V to the store's scratch slot and reads
those that have been in the cache since its own step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tokenwright.cache import KVStore, LayerSpec, Window
from tokenwright.config import ModelConfig
from tokenwright.models.batch import Batcher, Piece
from tokenwright.models.decoder import Decoder
from tokenwright.trace.rows import attention_row
from tokenwright.trace.sites import Site, Tap, ignore

PAGE_SIZE = 64  # of the stores made here
ROWS = 512  # computed at a time, where a text is computed anew


@dataclass(frozen=True, slots=True)
class Text:
    """Tokens in a store. `limit`: the most that the text may come to, which some rotations depend on."""

    tokens: tuple[int, ...]
    limit: int
    store: KVStore
    pages: Sequence[int]


class Looker:
    """Rows of attention of one model, for any layer, head and position.

    It is as thread-safe as the stores it is given: who shares one with an engine calls between two steps.
    """

    def __init__(self, config: ModelConfig, decoder: Decoder, specs: Sequence[LayerSpec], device: torch.device) -> None:
        self.config = config
        self.decoder = decoder
        self.specs = tuple(specs)
        self.device = device
        self._last: Text | None = None  # whose cache was built here last; it lies beside the memory of the pool

    @torch.inference_mode()
    def row(self, text: Text, position: int, layer: int, head: int) -> torch.Tensor:
        """Weights [position + 1] of one head at `position` of a text whose K and V lie in its store up to there."""
        queries: list[torch.Tensor] = []

        def tap(site: Site, at: int, value: torch.Tensor) -> None:
            if (site, at) == (Site.QUERY, layer):
                queries.append(value[0, head])

        piece = Piece([text.tokens[position]], position, text.pages, text.limit)
        batch = Batcher(self.config, text.store.page_size, self.device)([piece])
        batch = replace(batch, slots=torch.full_like(batch.slots, text.store.scratch))
        self.decoder.forward(batch, text.store, tap)
        view, pages = text.store.view(layer), batch.spans[0].pages
        return attention_row(view, pages, queries[0], self._group(head), position)

    def rebuilt(self, tokens: Sequence[int], limit: int) -> Text:
        """A text whose pages are gone, with a cache of its own. The last one is kept, for the next question."""
        last = self._last
        if last is None or last.limit != limit or last.tokens[: len(tokens)] != tuple(tokens):
            last = self._last = self._computed(tokens, limit, ignore)
        return last

    @torch.inference_mode()
    def reference(self, tokens: Sequence[int], limit: int, layer: int, head: int) -> list[float]:
        """What `row` must be at the last of `tokens`, by the definition: all computed anew, softmax(q k) in fp64.

        It reads no page of the engine, so it can judge what was read from there.
        """
        queries: list[torch.Tensor] = []
        keys: list[torch.Tensor] = []

        def tap(site: Site, at: int, value: torch.Tensor) -> None:
            if (site, at) == (Site.QUERY, layer):
                queries.append(value[-1, head].double())
            elif (site, at) == (Site.KEY, layer):
                keys.append(value[:, self._group(head)].double())

        self._computed(tokens, limit, tap)
        scores = torch.cat(keys) @ queries[-1] / self.config.head_size**0.5  # [t]
        reach = self.specs[layer].reach
        if isinstance(reach, Window):
            scores[: max(0, len(tokens) - reach.tokens)] = -torch.inf
        weights: list[float] = scores.softmax(-1).tolist()
        return weights

    @torch.inference_mode()
    def _computed(self, tokens: Sequence[int], limit: int, tap: Tap) -> Text:
        pages = range(-(-len(tokens) // PAGE_SIZE))
        store = KVStore(self.specs, len(pages), PAGE_SIZE, self.device)
        batcher = Batcher(self.config, PAGE_SIZE, self.device)
        for start in range(0, len(tokens), ROWS):
            chunk = tokens[start : start + ROWS]
            batch = batcher([Piece(chunk, start, pages[: -(-(start + len(chunk)) // PAGE_SIZE)], limit)])
            self.decoder.forward(batch, store, tap)
        return Text(tuple(tokens), limit, store, pages)

    def _group(self, head: int) -> int:
        """The KV head that a query head reads."""
        return head * self.config.kv_heads // self.config.heads
