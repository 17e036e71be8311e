"""The pages of sequences: how they are found, shared, swapped and freed.

It puts the page pool, the prefix index and the swap space, none of which knows a sequence, to work for the scheduler's.
"""

from collections.abc import Iterable

from tokenwright.engine.page_pool import PagePool
from tokenwright.engine.prefix_index import PrefixIndex
from tokenwright.engine.request import Sequence
from tokenwright.engine.step import Chunk
from tokenwright.engine.swap import SwapSpace


class KVManager:
    """Gives sequences their pages and takes them back; keeps their `computed`, `reused` and `swapped` in step."""

    def __init__(self, pool: PagePool, prefixes: PrefixIndex | None = None, swap: SwapSpace | None = None) -> None:
        self.pool = pool
        self.prefixes = prefixes or PrefixIndex(pool)
        self.swap = swap or SwapSpace(pool)

    def cached_prefix(self, sequence: Sequence) -> int:
        """How many of a sequence's first tokens need not be computed, because their pages are cached."""
        if not sequence.shares or sequence.swapped is not None:
            return 0
        return self.prefixes.match_prefix(sequence.prefix_hashes, sequence.tokens, sequence.skippable)

    def restore(self, sequence: Sequence, cached: int) -> int | None:
        """Read pages of a sequence's prefix from the page tier, if there is one: the tokens that are cached then.

        None: more pages are to be read in the next step. cached: the tokens that are cached without it.
        """
        if self.prefixes.tier is None or not sequence.shares or sequence.swapped is not None:
            return cached
        tokens, done = self.prefixes.restore(sequence.prefix_hashes, sequence.tokens, sequence.skippable)
        sequence.counts.restored += tokens
        return self.cached_prefix(sequence) if done else None

    def attach(self, sequence: Sequence, cached: int) -> None:
        """Give a sequence without pages the cached pages of its first `cached` tokens."""
        self.prefixes.attach_prefix(sequence.tables, sequence.prefix_hashes, sequence.tokens, cached)
        sequence.computed = cached
        sequence.counts.reused += cached
        if not sequence.counts.preemptions:
            sequence.counts.prefix_hit = cached

    def attach_cached(self, sequence: Sequence) -> None:
        self.attach(sequence, self.cached_prefix(sequence))

    def comes_with(self, chunks: Iterable[Chunk], sequence: Sequence, cached: int) -> bool:
        """Whether `chunks` compute the next page of a sequence's prefix, behind the `cached` tokens of it."""
        size = self.pool.page_size
        page = cached // size
        if not sequence.shares or sequence.swapped is not None or page >= sequence.skippable // size:
            return False
        wanted = sequence.prefix_hashes.hashes[page]
        return any(
            wanted in chunk.sequence.prefix_hashes.extend(chunk.text)[chunk.start // size : chunk.stop // size]
            for chunk in chunks
            if chunk.sequence.shares and chunk.stop // size > chunk.start // size
        )

    def cache_pages(self, sequence: Sequence, start: int, stop: int) -> None:
        """Let others find the pages that computing [start, stop) has filled."""
        if sequence.cache and sequence.request.share:  # `shares`
            self.prefixes.cache_pages(sequence.tables, sequence.prefix_hashes, sequence.tokens, start, stop)

    def roll_back(self, sequence: Sequence, known: int) -> None:
        """Keep of the drafts computed from `known` on those that were written, but for a text's last token."""
        counts = sequence.counts
        counts.drafted += sequence.computed - known
        stop = sequence.computed = min(sequence.computed, len(sequence.tokens) - 1)
        counts.accepted += stop - known
        self.cache_pages(sequence, known, stop)
        self.pool.trim(sequence.tables, stop)
        self.pool.cut(sequence.tables, stop)

    def cache_tail(self, sequence: Sequence) -> None:
        """Let others find the last page of a sequence that ends, though it is not full."""
        if sequence.shares and sequence.pages:
            self.prefixes.cache_tail(sequence.tables, sequence.prefix_hashes, sequence.tokens, sequence.computed)
            self.prefixes.use(sequence.prefix_hashes)

    def share(self, parent: Sequence, child: Sequence, shared: int) -> bool:
        """Put a child on its parent's pages of the first `shared` tokens. False: the parent does not have them all.

        A parent that has gone further may have released some of them, behind an attention window; and its states have
        gone further with it.
        """
        computed = min(parent.computed, shared)
        if self.pool.states and computed < parent.computed:
            return False
        if not (parent.cache and child.cache and self.pool.covers(parent.tables, computed)):
            return False
        child.tables = self.pool.fork(parent.tables, computed)
        if len(parent.tokens) == shared:  # else its pages from there on have other hashes
            child.prefix_hashes = parent.prefix_hashes.fork()
        child.computed = child.counts.reused = computed
        return True

    def swap_out(self, sequence: Sequence) -> None:
        """Swap the pages of a sequence out, if it has computed any and there is room; else it is left as it is."""
        if sequence.computed and sequence.cache:
            sequence.swapped = self.swap.swap_out(sequence.tables)

    def swap_in(self, sequence: Sequence) -> bool:
        """Give a sequence its swapped pages back, if it has some. False: it has to be computed."""
        if sequence.swapped is None:
            return False
        if not self.swap.swap_in(sequence.tables, sequence.swapped):  # the memory has failed
            self.drop(sequence)
            return False
        sequence.swapped = None
        sequence.counts.reused += sequence.computed
        return True

    def drop(self, sequence: Sequence) -> None:
        """Free all pages of a sequence that goes on: it is to be computed again."""
        self.free(sequence)
        sequence.computed = 0

    def free(self, sequence: Sequence) -> None:
        """Release all pages of a sequence, swapped ones too."""
        self.pool.release(sequence.tables)
        if sequence.swapped is not None:
            self.swap.discard(sequence.swapped)
            sequence.swapped = None

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Prove that pages and swapped bytes are what all `sequences` have, and that each has what it reads."""
        everyone = list(sequences)
        self.pool.check([sequence.tables for sequence in everyone])
        swapped = sum(sequence.swapped.nbytes for sequence in everyone if sequence.swapped)
        assert swapped == self.swap.used, "what is swapped out belongs to a sequence"
        for sequence in everyone:
            if sequence.swapped is None:
                assert self.pool.covers(sequence.tables, sequence.computed), "what is computed and read has a page"
                assert self.pool.writable(sequence.tables, sequence.computed), "nobody else reads what is written to"
