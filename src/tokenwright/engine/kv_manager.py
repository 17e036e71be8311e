"""Finds, shares and frees the pages of sequences."""

from collections.abc import Iterable

from tokenwright.engine.layer_group import PageTable, PageTables
from tokenwright.engine.page_pool import PagePool
from tokenwright.engine.pins import Pins
from tokenwright.engine.prefix_index import PrefixIndex
from tokenwright.engine.request import Sequence
from tokenwright.engine.step import Chunk


class KVManager:
    """Gives sequences their pages and takes them back; keeps their `computed` and `reused` in step.

    `saved_states` holds, by sequence, the recurrent states before a chunk with drafts until its commit.
    """

    def __init__(self, pool: PagePool, prefixes: PrefixIndex | None = None, pins: Pins | None = None) -> None:
        self.pool = pool
        self.prefixes = prefixes or PrefixIndex(pool)
        self.pins = Pins(self.prefixes) if pins is None else pins
        self.saved_states: dict[int, PageTables] = {}

    def cached_prefix(self, sequence: Sequence) -> int:
        """The number of a sequence's first tokens that need not be computed, because their pages are cached."""
        if not sequence.shares:
            return 0
        return self.prefixes.match_prefix(sequence.prefix_hashes, sequence.tokens, sequence.skippable)

    def loadable_prefix(self, sequence: Sequence) -> int:
        """The most tokens that a waiting sequence need not compute: cached, or held by the page tier."""
        if not sequence.shares:
            return sequence.computed
        found, prefixes = self.cached_prefix(sequence), self.prefixes
        if prefixes.tier is None:
            return found
        text = sequence.prefix_hashes, sequence.tokens, sequence.skippable
        return max(found, prefixes.match_prefix(*text, tails=False, tier=prefixes.tier))

    def restore(self, sequence: Sequence, cached: int) -> int | None:
        """Read a prefix's pages from the page tier, for about a step's time; return how many tokens are cached then.

        None: call it again in the next step. `cached` tokens were cached before.
        """
        if self.prefixes.tier is None or not sequence.shares:
            return cached
        tokens, done = self.prefixes.restore(sequence.prefix_hashes, sequence.tokens, sequence.skippable)
        sequence.counts.restored += tokens
        sequence.counts.declined = self.prefixes.declined
        return self.cached_prefix(sequence) if done else None

    def attach(self, sequence: Sequence, cached: int) -> None:
        """Give a sequence without pages the cached pages of its first `cached` tokens."""
        self.prefixes.attach_prefix(sequence.tables, sequence.prefix_hashes, sequence.tokens, cached)
        sequence.computed = cached
        sequence.counts.reused += cached
        if not sequence.counts.preemptions:
            sequence.counts.prefix_hit = cached
        if cached and len(self.pins):
            self.pins.used(sequence.prefix_hashes, cached, sequence.request.retention.owner)
        self.pass_marks(sequence)

    def pass_marks(self, sequence: Sequence) -> None:
        while (mark := sequence.mark) is not None and mark.at <= sequence.computed:
            hashes, tokens, pinned = sequence.prefix_hashes, sequence.tokens, 0
            if sequence.shares:
                if self.pool.windowed and mark.at == sequence.computed and sequence.pages:
                    self.prefixes.cache_tail(sequence.tables, hashes, tokens, mark.at)
                pinned = self.pins.pin(hashes, tokens, mark, sequence.request.retention)
            sequence.counts.pinned.append(pinned)

    def attach_cached(self, sequence: Sequence) -> None:
        self.attach(sequence, self.cached_prefix(sequence))

    def prefix_grows(self, chunks: Iterable[Chunk], sequence: Sequence, cached: int) -> bool:
        """Whether `chunks` compute the page that follows the `cached` tokens of a sequence's prefix."""
        size = self.pool.page_size
        page = cached // size
        if not sequence.shares or page >= sequence.skippable // size:
            return False
        wanted = sequence.prefix_hashes.hashes[page]
        return any(
            wanted in chunk.sequence.prefix_hashes.extend(chunk.sequence.tokens)[chunk.start // size : stop // size]
            for chunk in chunks
            if chunk.sequence.shares and (stop := chunk.sequence.cacheable(chunk.stop)) // size > chunk.start // size
        )

    def cache_pages(self, sequence: Sequence, start: int, stop: int) -> None:
        stop = sequence.cacheable(stop)
        if sequence.cache and sequence.request.share and start < stop:
            self.prefixes.cache_pages(sequence.tables, sequence.prefix_hashes, sequence.tokens, start, stop)

    def reserve_drafts(self, sequence: Sequence, start: int, stop: int) -> bool:
        """Reserve pages for a chunk with drafts. It writes to copies of its first states, which are saved."""
        if self.pool.states:
            self.saved_states[sequence.id] = self._states(sequence.tables, start)
        if self.pool.reserve(sequence.tables, start, stop, stop):
            return True
        self._release_states(sequence)
        return False

    def _states(self, tables: PageTables, tokens: int) -> PageTables:
        """Page tables that hold the states after the first `tokens`, so that the sequence rewrites copies of them."""
        pool, states = self.pool, self.pool.tables()
        for number in pool.states:
            for [page] in pool.groups[number].window.pages(tokens, tokens, pool.page_size):
                states[number][page] = tables[number][page]
                pool.group_pools[number].incref(tables[number][page])
            tables[number].reserved = 0
        return states

    def _restore_states(self, sequence: Sequence, start: int, stop: int) -> int:
        """Go back to the last states at or before token `stop`; return how many tokens they cover.

        These are states that the chunk from `start` on left at the end of a full page, or else those it began with.
        """
        pool, tables = self.pool, sequence.tables
        full = stop // pool.page_size
        if full * pool.page_size > start and all(full - 1 in tables[number] for number in pool.states):
            return full * pool.page_size
        for number in pool.states:
            pool.group_pools[number].clear(tables[number])
            tables[number] = self.saved_states[sequence.id][number]
            self.saved_states[sequence.id][number] = PageTable()
        return start

    def release_saved_states(self) -> None:
        """Release the states saved for a step that was never committed."""
        while self.saved_states:
            self.pool.release(self.saved_states.popitem()[1])

    def _release_states(self, sequence: Sequence) -> None:
        if (saved := self.saved_states.pop(sequence.id, None)) is not None:
            self.pool.release(saved)

    def roll_back(self, sequence: Sequence, known: int) -> None:
        """Keep the rows of the accepted drafts after `known` tokens; a recurrent state may go back to before them."""
        counts, start = sequence.counts, known - 1
        counts.drafted += sequence.computed - known
        stop = min(sequence.computed, len(sequence.tokens) - 1)
        counts.accepted += stop - known
        if stop < sequence.computed and sequence.id in self.saved_states:
            stop = self._restore_states(sequence, start, stop)
        self._release_states(sequence)
        sequence.computed = stop
        self.cache_pages(sequence, start, stop)
        self.pool.trim(sequence.tables, stop)
        self.pool.cut(sequence.tables, stop)

    def cache_tail(self, sequence: Sequence) -> None:
        """Index the last page of a sequence that ends, though it is not full."""
        if sequence.shares and sequence.pages and not sequence.request.retention.explicit:
            self.prefixes.cache_tail(sequence.tables, sequence.prefix_hashes, sequence.tokens, sequence.computed)
            self.prefixes.use(sequence.prefix_hashes)

    def share(self, parent: Sequence, child: Sequence, shared: int) -> bool:
        """Let a child use its parent's pages of the first `shared` tokens. False: the parent lacks some.

        A parent that has computed more may have released expired pages of a window, or rewritten its states.
        """
        computed = min(parent.computed, shared)
        if self.pool.states and computed < parent.computed:
            return False
        if not (parent.cache and child.cache and self.pool.covers(parent.tables, computed)):
            return False
        child.tables = self.pool.fork(parent.tables, computed)
        if len(parent.tokens) == shared:  # else its later pages have other hashes
            child.prefix_hashes = parent.prefix_hashes.fork()
        child.computed = child.counts.reused = computed
        return True

    def drop(self, sequence: Sequence) -> None:
        self.free(sequence)
        sequence.computed = 0

    def free(self, sequence: Sequence) -> None:
        self.pool.release(sequence.tables)
        self._release_states(sequence)
