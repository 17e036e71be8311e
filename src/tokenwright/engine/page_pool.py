"""The page pool knows which pages of the KV memory are free, cached or in use, and by how many sequences.

A page is a fixed number of token slots in all layers of a group. Before a sequence writes to a page that others read,
the memory copies it.

    in use   refcounts {3: 2, 0: 1}   in how many page tables a page stands
    cached   {2, 4}                   in no table, but found by its hash (prefix_index.py); evicted when no page is free
    free     [9, 8, 6, 5]             no contents

    free + cached + in use = all pages; free + cached = available
"""

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice, takewhile
from typing import Any, Protocol

from tokenwright.engine.layer_group import AttentionWindow, Group, PageTable, PageTables, StateWindow
from tokenwright.engine.page_events import EvictionLog, PageListener


class Memory(Protocol):
    """The KV memory behind the pages. The engine stores the result of `read` and does not look inside."""

    def copy(self, group: int, source: int, target: int) -> None: ...

    def read(self, group: int, pages: list[int]) -> Any:
        """A copy of the contents of pages, outside the KV memory."""

    def write(self, group: int, pages: list[int], contents: Any) -> None:
        """Write contents that `read` returned to other pages, in the same order. Threads may write different pages."""


class NullMemory:
    def copy(self, group: int, source: int, target: int) -> None: ...

    def read(self, group: int, pages: list[int]) -> None: ...

    def write(self, group: int, pages: list[int], contents: Any) -> None: ...


class GroupPool:
    """The pages of one group of layers, and the hashes by which the contents of some are found."""

    def __init__(self, group: Group, log: EvictionLog | None = None) -> None:
        self.group = group
        self.log = log or EvictionLog()
        self.reads_all = group.window == AttentionWindow()
        self.free = list(range(group.pages - 1, -1, -1))  # a stack: the page freed last is in the processor's cache
        self.cached: OrderedDict[int, int] = OrderedDict()  # page: number of its release; the first is evicted first
        self.released = 0
        self.refcounts: Counter[int] = Counter()
        self.hashes: dict[int, bytes] = {}  # of pages with cached contents; a writer evicts or copies such a page
        self.index: dict[bytes, int] = {}  # the inverse
        self.tails: dict[bytes, Counter[int]] = {}  # of partly filled pages behind a hash: their lengths, counted
        self.tail_of: dict[bytes, tuple[bytes, int]] = {}  # by a tail's hash: the hash before it, its length
        self.evicted: Callable[[bytes], None] | None = None  # called with the hash of each full page that leaves

    @property
    def available(self) -> int:
        return len(self.free) + len(self.cached)

    def has_older(self, age: int, need: int) -> bool:
        """Whether `need` pages are free, or cached and released before a page of this age."""
        older = takewhile(lambda released: released < age, self.cached.values())
        return need <= len(self.free) + sum(1 for _ in islice(older, need))

    def allocate(self) -> int:
        if self.free:
            page = self.free.pop()
        else:
            page, _ = self.cached.popitem(last=False)
            self.evict(page)
        self.refcounts[page] = 1
        return page

    def incref(self, page: int) -> None:
        self.cached.pop(page, None)
        self.refcounts[page] += 1

    def decref(self, page: int) -> None:
        self.refcounts[page] -= 1
        if self.refcounts[page]:
            return
        self.refcounts.pop(page)  # faster than `del`, which Counter implements in Python
        if page in self.hashes:
            self.released += 1
            self.cached[page] = self.released
        else:
            self.free.append(page)

    def cache_page(self, page: int, page_hash: bytes) -> int:
        """Index a page by the hash of its contents; return the page that has the hash already, if there is one."""
        assert self.hashes.get(page, page_hash) == page_hash, "a page has one hash until it is evicted"
        known = self.index.setdefault(page_hash, page)
        if known == page:
            self.hashes[page] = page_hash
        else:
            self.incref(known)
            self.decref(page)
        return known

    def cache_tail(self, page: int, page_hash: bytes, before: bytes, length: int) -> int:
        """`cache_page` for a page with `length` filled slots, which follows the page with the hash `before`.

        A page with another hash keeps it: its sequence was forked in the middle of the parent's page.
        """
        if self.hashes.get(page, page_hash) != page_hash:
            return page
        if page_hash not in self.index:
            self.tail_of[page_hash] = before, length
            self.tails.setdefault(before, Counter())[length] += 1
        return self.cache_page(page, page_hash)

    def evict(self, page: int) -> None:
        page_hash = self.hashes.pop(page)
        del self.index[page_hash]
        if page_hash in self.tail_of:
            before, length = self.tail_of.pop(page_hash)
            self.tails[before][length] -= 1
            self.tails[before] += Counter()  # keeps what is above 0
            if not self.tails[before]:
                del self.tails[before]
        else:
            self.log.add(page_hash)
            if self.evicted is not None:
                self.evicted(page_hash)

    def clear(self, table: PageTable) -> None:
        """Empty a table, the last page first: the end of a text is evicted before its beginning."""
        for page in table.drain():
            self.decref(page)


class PagePool:
    """The pages of all groups, each with `page_size` token slots.

    `windowed` are the numbers of the groups with a window, `states` of those whose pages hold recurrent states.
    """

    def __init__(self, groups: Sequence[Group], page_size: int, memory: Memory | None = None) -> None:
        assert groups and all(group.pages > 0 for group in groups) and page_size > 0, "the pool has pages with slots"
        self.page_size = page_size
        self.groups = tuple(groups)
        self.memory: Memory = memory or NullMemory()
        self.evictions = EvictionLog()
        self.group_pools = [GroupPool(group, self.evictions) for group in groups]
        self.windowed = [number for number, group in enumerate(groups) if group.window.size is not None]
        self.states = [number for number, group in enumerate(groups) if isinstance(group.window, StateWindow)]
        self.listener: PageListener | None = None

    def listen(self, listener: PageListener) -> None:
        """Report every full page that is cached or evicted from now on; none may be cached yet."""
        assert not any(pool.index for pool in self.group_pools), "a listener hears of every page from the first on"
        self.listener = listener
        for number, pool in enumerate(self.group_pools):
            pool.evicted = partial(listener.evicted, number)

    @property
    def pages(self) -> int:
        return sum(group.pages for group in self.groups)

    @property
    def available(self) -> int:
        return sum(pool.available for pool in self.group_pools)

    @property
    def cached(self) -> int:
        return sum(len(pool.cached) for pool in self.group_pools)

    def tables(self) -> PageTables:
        return [PageTable() for _ in self.groups]

    def max_pages(self, tokens: int, chunk: int) -> list[int]:
        """The most pages of each group that `tokens` tokens use at a time, computed at most `chunk` at once."""
        return [group.window.max_pages(tokens, chunk, self.page_size) for group in self.groups]

    def shareable_pages(self, tokens: int) -> list[int]:
        """The full pages of each group that sequences with the same first `tokens` tokens share until they end.

        A model with states shares none: a preempted sequence starts again at one of the few states that are cached.
        """
        if self.states:
            return [0] * len(self.groups)
        full = tokens - tokens % self.page_size
        windows = [group.window for group in self.groups]
        return [0 if window.size is not None else window.max_pages(full, 1, self.page_size) for window in windows]

    def fits(self, needs: Iterable[list[int]]) -> bool:
        """Whether the whole pool has the pages that several sequences need at the same time."""
        totals = [sum(column) for column in zip(*needs, strict=True)]
        return all(total <= group.pages for total, group in zip(totals, self.groups, strict=True))

    def longest(self, most: int, chunk: int) -> int:
        """The most tokens, up to `most`, of one text that the whole pool holds."""
        return bisect_left(range(1, most), True, key=lambda tokens: not self.fits([self.max_pages(tokens, chunk)])) + 1

    def reserve(self, tables: PageTables, start: int, stop: int, ahead: int) -> bool:
        """Allocate what computing [start, stop) reads and writes; in groups without a window, up to `ahead` >= stop.

        The tables cover `start` already. All or nothing: False means that too few pages are available.

            | read only, shared or not | copied if shared or cached | allocated            |
            0                          start                        ^ end of the table     stop .. ahead
        """
        for table in tables:
            if table.reserved < ahead:
                break
        else:
            return True  # the common case of a decode step
        work: list[tuple[int, list[int], list[int], list[int]]] = []
        for number, (pool, table) in enumerate(zip(self.group_pools, tables, strict=True)):
            if table.reserved >= ahead:
                continue
            missing, shared, cached = self._to_reserve(pool, table, start, stop, ahead)
            left = pool.available - len(missing) - len(shared)
            if left < 0:
                return False
            work.append((number, missing, shared + cached[:left], cached[left:]))
        written = range(start // self.page_size, -(-stop // self.page_size))
        for number, missing, copied, evicted in work:
            pool, table = self.group_pools[number], tables[number]
            for page in evicted:  # no page is left for a copy
                pool.evict(table[page])
            table.update((page, pool.allocate()) for page in missing)
            for page in copied:
                self._copy(number, table, page)
            complete = all(page in table for page in written)  # a long chunk writes only some pages of states
            table.reserved = written.stop * self.page_size if complete else 0
        return True

    def needed(self, tables: PageTables, start: int, stop: int) -> list[int]:
        """The most pages of each group that `reserve` takes."""
        pairs = zip(self.group_pools, tables, strict=True)
        return [sum(map(len, self._to_reserve(pool, table, start, stop, stop))) for pool, table in pairs]

    def _to_reserve(
        self, pool: GroupPool, table: PageTable, start: int, stop: int, ahead: int
    ) -> tuple[list[int], list[int], list[int]]:
        """The pages to allocate, those to copy because others use them, and those that only the index has."""
        first, last = start // self.page_size, -(-stop // self.page_size)
        window = pool.group.window
        if pool.reads_all:
            needed = [range(first, -(-ahead // self.page_size))]
        else:
            end = stop if window.size is not None else ahead
            spans = window.pages(start, end, self.page_size)
            needed = [range(max(first, span.start), span.stop) for span in spans]
        missing = [page for span in needed for page in span if page not in table]
        written = [page for page in range(first, last) if page in table]
        shared = [page for page in written if pool.refcounts[table[page]] > 1]
        cached = [page for page in written if page not in shared and table[page] in pool.hashes]
        return missing, shared, cached

    def _copy(self, number: int, table: PageTable, page: int) -> None:
        pool = self.group_pools[number]
        target = pool.allocate()
        try:
            self.memory.copy(number, table[page], target)
        except BaseException:
            pool.decref(target)
            raise
        pool.decref(table[page])
        table[page] = target

    def trim(self, tables: PageTables, computed: int) -> None:
        """Release the expired pages between sinks and window, which no later token reads."""
        for number in self.windowed:
            pool, table = self.group_pools[number], tables[number]
            expired_pages = pool.group.window.expired_pages(computed, self.page_size)
            if number in self.states:
                page = expired_pages.stop
                while len(table) > 1 and page > 0:
                    page -= 1
                    if page in table:
                        pool.decref(table.pop(page))
                continue
            stop = min(expired_pages.stop, len(table.pages))
            first = stop
            while first > expired_pages.start and first - 1 in table:
                first -= 1
            for page in range(first, stop):
                pool.decref(table.pop(page))

    def cut(self, tables: PageTables, computed: int) -> None:
        """Release the pages after the first `computed` tokens, which only rejected drafts have used."""
        for pool, table in zip(self.group_pools, tables, strict=True):
            start = pool.group.window.start
            stop = -(-computed // self.page_size) if computed > start else start // self.page_size
            while len(table.pages) > stop:
                pool.decref(table.popitem()[1])

    def rewind(self, tables: PageTables) -> None:
        """Prepare for computing the text again from its start, where the windows' pages are not needed."""
        for number in self.windowed:
            self.group_pools[number].clear(tables[number])
        for table in tables:
            table.reserved = 0

    def release(self, tables: PageTables) -> None:
        for pool, table in zip(self.group_pools, tables, strict=True):
            pool.clear(table)

    def fork(self, tables: PageTables, tokens: int | None = None) -> PageTables:
        """Tables with the same pages, or with those that a row after the first `tokens` reads; copied on write."""
        if tokens is None:
            forks = [table.copy() for table in tables]
        else:
            forks = [
                PageTable({page: table[page] for span in spans for page in span})
                for table, spans in zip(tables, self._read_after(tokens), strict=True)
            ]
        for pool, table, fork in zip(self.group_pools, tables, forks, strict=True):
            for page in fork.values():
                pool.incref(page)
            table.reserved = 0
        return forks

    def shared(self, tables: PageTables) -> list[int]:
        pairs = zip(self.group_pools, tables, strict=True)
        return [sum(pool.refcounts[page] > 1 for page in table.values()) for pool, table in pairs]

    def covers(self, tables: PageTables, computed: int) -> bool:
        """Whether the tables have every page that a row after `computed` tokens reads."""
        return all(
            page in table
            for table, spans in zip(tables, self._read_after(computed), strict=True)
            for span in spans
            for page in span
        )

    def _read_after(self, computed: int) -> list[list[range]]:
        return [group.window.pages(computed, computed, self.page_size) for group in self.groups]
