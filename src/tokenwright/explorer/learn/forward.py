"""A forward pass op by op with the model's kernels, around which `agree` plants its faults."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from tokenwright.arrays import Floats
from tokenwright.backends.kv_sizing import memory_of
from tokenwright.backends.runner import passes_over
from tokenwright.cache import ChunkRows, KVStore, layer_specs
from tokenwright.engine import one_chunk
from tokenwright.engine.layer_group import PageTable
from tokenwright.explorer.learn.work import PAGE, CheckWork
from tokenwright.models.taps import Site, Tap, ignore

STREAM = (Site.EMBEDDING, Site.ATTENTION, Site.MLP)  # these show the residual stream


class ForwardPass:
    """One text of at most `limit` tokens; K and V in fp32. fault: a key of FAULTS, planted in every chunk."""

    def __init__(self, work: CheckWork, limit: int, fault: str = "") -> None:
        self.work = work
        self.limit = limit
        loaded = work.llm.loaded
        self.passes = passes_over(loaded.decoder, FAULTS[fault])
        pages = -(-limit // PAGE)
        self.store = KVStore(layer_specs(loaded.facts.graph, "float32"), pages, PAGE, memory_of(loaded.facts.device))
        self.tables = [PageTable({page: page for page in range(pages)})] * len(self.store.groups)

    def rows(self, tokens: Sequence[int], start: int, tap: Tap = ignore, *, further: bool = False) -> Floats:
        """Logits [n, vocabulary] from position `start` on. further (a fault): positions, not slots, are 1 too high."""
        self.work.check()
        stream: list[Floats] = []

        def keep(site: Site, layer: int, value: Floats) -> None:
            if site in STREAM:
                stream[:] = [value]
            tap(site, layer, value)

        store: Any = Earlier(self.store) if further else self.store
        self.passes.run(one_chunk(tokens, start + further, self.tables, self.limit), store, keep)
        return self.passes.logits(stream[0])

    def weights(self, layer: int, queries: Floats) -> Floats:
        """The attention weights [H, t, t] of a layer's queries [t, H, D] over a whole cached text."""
        chunk = self.store.chunk_rows([table.pages for table in self.tables], range(len(queries)), 0)
        return self.passes.weights(self.store.view(layer), chunk, queries, None, self.passes.scoring(layer))


class Around:
    """The base of a planted fault: another object, and what differs from it."""

    def __init__(self, right: Any) -> None:
        self.right = right

    def __getattr__(self, name: str) -> Any:
        return getattr(self.right, name)


class RotatedTwice(Around):
    def rotate(self, x: Any, rotation: Any) -> Any:
        return self.right.rotate(self.right.rotate(x, rotation), rotation)


class Unmasked(Around):
    """Kernels without the causal mask in a chunk: each row attends to what the last one attends to."""

    def attention(self, q: Any, view: Any, chunks: Sequence[ChunkRows], *others: Any) -> Any:
        each = [
            replace(chunk, rows=range(row, row + 1), start=chunk.stop - 1) for chunk in chunks for row in chunk.rows
        ]
        return self.right.attention(q, view, each, *others)


class Earlier(Around):
    """A store that keeps K and V of each position in the slot of the one before."""

    def slots(self, group: int, pages: Any, positions: range) -> NDArray[Any]:
        found: NDArray[Any] = self.right.slots(group, pages, range(positions.start - 1, positions.stop - 1))
        return found

    def chunk_rows(self, tables: Any, rows: range, start: int) -> ChunkRows:
        found: ChunkRows = self.right.chunk_rows(tables, rows, start - 1)
        return found


FAULTS: Mapping[str, Callable[[Any], Any] | None] = {"": None, "twice": RotatedTwice, "unmasked": Unmasked}
