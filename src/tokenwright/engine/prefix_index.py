"""The prefix index finds pages by a hash over the text that they hold, so that equal prefixes are computed once.

A page is cached once all its slots are computed; a text's last page, its tail, when the text ends. Its hash is a sha256
over the hash of the page before it and its own tokens: equal hashes mean equal K and V. The root hash contains a secret
of the process, so no client can look for a collision; a router's replicas share one secret, and so their hashes.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from itertools import accumulate
from secrets import token_bytes
from struct import pack
from typing import Any

from tokenwright.engine.layer_group import PageTable, PageTables
from tokenwright.engine.page_events import CachedPage, PageTier
from tokenwright.engine.page_pool import GroupPool, PagePool
from tokenwright.engine.pictures import Spans, content

_SECRET = token_bytes(32)


@dataclass(slots=True)
class PrefixHashes:
    """The hashes of a text's full pages. Texts of different `root`s share no pages."""

    root: bytes
    page_size: int
    hashes: list[bytes] = field(default_factory=list)
    pictures: Spans = ()

    def extend(self, tokens: Sequence[int]) -> list[bytes]:
        """The hashes of all full pages of `tokens`, a text that begins as in earlier calls."""
        hashes, size = self.hashes, self.page_size
        for page in range(len(hashes), len(tokens) // size):
            hashes.append(self._hash(hashes[-1] if hashes else self.root, tokens, page * size, (page + 1) * size))
        return hashes

    def hash(self, tokens: Sequence[int], page: int, stop: int) -> bytes:
        """The hash of a page of the text up to `stop`: a full page, or the tail that ends there."""
        if (page + 1) * self.page_size <= stop:
            return self.hashes[page]
        return self._hash(self.before(page), tokens, page * self.page_size, stop)

    def before(self, page: int) -> bytes:
        return self.hashes[page - 1] if page else self.root

    def fork(self) -> "PrefixHashes":
        return PrefixHashes(self.root, self.page_size, list(self.hashes), self.pictures)

    def _hash(self, before: bytes, tokens: Sequence[int], start: int, stop: int) -> bytes:
        seen = content(self.pictures, start, stop) if self.pictures else b""
        return sha256(before + pack(f"<{stop - start}I", *tokens[start:stop]) + seen).digest()


class PrefixIndex:
    """Finds, caches and attaches the pages of a pool by hash.

    All hashes depend on `seed`, the cache specs, and on `secret`. `declined` counts the tokens that the last `restore`
    left in the tier, because computing them is faster.
    """

    def __init__(
        self, pool: PagePool, seed: bytes = b"", secret: bytes = _SECRET, tier: PageTier | None = None
    ) -> None:
        self.pool = pool
        self.seed = seed
        self.secret = secret
        self.tier = tier
        self.declined = 0

    def hashes(self, salt: bytes = b"", pictures: Spans = ()) -> PrefixHashes:
        """The hashes of an empty text. Texts of different salts never share pages."""
        framed = len(self.seed).to_bytes(8, "little") + self.seed + salt
        return PrefixHashes(sha256(self.secret + framed).digest(), self.pool.page_size, pictures=pictures)

    def cache_pages(
        self, tables: PageTables, hashes: PrefixHashes, tokens: Sequence[int], start: int, stop: int
    ) -> None:
        size = self.pool.page_size
        first, full = start // size, stop // size
        if first == full:
            return
        hashes.extend(tokens)
        for number, (pool, table) in enumerate(zip(self.pool.group_pools, tables, strict=True)):
            window = pool.group.window
            pages = [page for page in range(first, full) if page in table and window.cached(page, size)]
            self._cache(number, table, pages, hashes, tokens)

    def _cache(
        self, number: int, table: PageTable, pages: Sequence[int], hashes: PrefixHashes, tokens: Sequence[int]
    ) -> None:
        pool, listener, found, size = self.pool.group_pools[number], self.pool.listener, hashes.hashes, hashes.page_size
        for page in pages:
            if listener is not None and found[page] not in pool.index:
                text = tuple(tokens[page * size : (page + 1) * size])
                listener.cached(number, CachedPage(found[page], hashes.before(page), page == 0, text))
            table[page] = pool.cache_page(table[page], found[page])
        self._offer(number, table, pages, found)

    def _offer(self, number: int, table: PageTable, pages: Sequence[int], found: Sequence[bytes]) -> None:
        if self.tier is None or not pages:
            return
        hashes = [found[page] for page in pages]
        wanted = self.tier.wanted(number, hashes)
        if wanted:
            try:
                contents = self.pool.memory.read(number, [table[pages[index]] for index in wanted])
            except (RuntimeError, MemoryError):  # no memory for a copy
                return
            self.tier.write(number, [hashes[index] for index in wanted], contents)

    def cache_tail(self, tables: PageTables, hashes: PrefixHashes, tokens: Sequence[int], stop: int) -> None:
        """Cache the partly filled last page of a text, computed up to `stop`; or the state after a full page."""
        page, length = divmod(stop, self.pool.page_size)
        hashes.extend(tokens)
        if not length:
            for number in self.pool.states:
                if page - 1 in tables[number]:  # absent if the cache was just switched on
                    self._cache(number, tables[number], [page - 1], hashes, tokens)
        else:
            tail = hashes.hash(tokens, page, stop)
            for pool, table in zip(self.pool.group_pools, tables, strict=True):
                if page in table:
                    table[page] = pool.cache_tail(table[page], tail, hashes.before(page), length)

    def match_prefix(
        self,
        hashes: PrefixHashes,
        tokens: Sequence[int],
        limit: int | None = None,
        *,
        tails: bool = True,
        tier: PageTier | None = None,
    ) -> int:
        """The length of the longest prefix that need not be computed: every group has what the next row reads.

        `limit` is the longest that may be found, by default without the last token, whose row is needed. Pages of
        `tier` count as well.
        """
        found, limit = hashes.extend(tokens), len(tokens) - 1 if limit is None else limit
        size, pools = self.pool.page_size, self.pool.group_pools
        pages = limit // size
        there = [[page_hash in pool.index for page_hash in found[:pages]] for pool in pools]
        if tier is not None:
            for number, row in enumerate(there):
                lacking = [page for page, cached in enumerate(row) if not cached]
                held = tier.held(number, [found[page] for page in lacking])
                for page, one in zip(lacking, held, strict=True):
                    row[page] = one
        runs = [_runs(row) for row in there]
        for pool, row in zip(pools, there, strict=True):
            if pool.reads_all and not all(row[:pages]):
                pages = row.index(False)
        for page in range(pages, -1, -1):
            at, before = page * size, hashes.before(page)
            lengths = {n for pool in pools for n in pool.tails.get(before, ())} if tails else set[int]()
            for length in sorted(lengths, reverse=True):
                if at + length <= limit and self._has_prefix(hashes, tokens, at + length, runs):
                    return at + length
            if page and self._has_prefix(hashes, tokens, at, runs):
                return at
        return 0

    def _has_prefix(
        self, hashes: PrefixHashes, tokens: Sequence[int], length: int, runs: Sequence[Sequence[int]]
    ) -> bool:
        """Whether every group has what a row at `length` reads. `runs`: for each group, `_runs` of its full pages."""
        size = self.pool.page_size
        tail = length // size
        for run, pool in zip(runs, self.pool.group_pools, strict=True):
            for span in pool.group.window.pages(length, length, size):
                full = len(span)
                if span and span.stop > tail:
                    if hashes.hash(tokens, tail, length) not in pool.index:
                        return False
                    full -= 1
                if full and run[span.start + full - 1] < full:
                    return False
        return True

    def attach_prefix(self, tables: PageTables, hashes: PrefixHashes, tokens: Sequence[int], length: int) -> None:
        """Put the pages that a row at `length` reads, a result of `match_prefix`, into empty tables."""
        for pool, table in zip(self.pool.group_pools, tables, strict=True):
            for span in pool.group.window.pages(length, length, self.pool.page_size):
                for page in span:
                    table[page] = pool.index[hashes.hash(tokens, page, length)]
                    pool.incref(table[page])

        if self.tier is not None:  # offer pages again that it had no time to write, or has removed
            for number, table in enumerate(tables):
                full = [page for page in table if (page + 1) * self.pool.page_size <= length]
                self._offer(number, table, full, hashes.hashes)

    def ages(self, salt: bytes, tokens: Sequence[int], pictures: Spans = ()) -> list[int]:
        """For each group, the release number of the last cached page of a text; 0: none."""
        found, hashes = [], self.hashes(salt, pictures)
        length = self.match_prefix(hashes, tokens, len(tokens))
        for pool in self.pool.group_pools:
            last = [span[-1] for span in pool.group.window.pages(length, length, self.pool.page_size) if span][-1:]
            pages = [pool.index[hashes.hash(tokens, page, length)] for page in last]
            found.append(pool.cached.get(pages[0], pool.released + 1) if pages else 0)
        return found

    def restore(self, hashes: PrefixHashes, tokens: Sequence[int], limit: int) -> tuple[int, bool]:
        """Read pages of a prefix from the tier into cached pages, if that takes less time than computing them.

        A call reads for about a step's time. Returns by how many tokens the cached prefix has grown, and whether all is
        read.
        """
        self.declined = 0
        if self.tier is None:
            return 0, True
        before = self.match_prefix(hashes, tokens, limit)
        if limit - before < self.pool.page_size:
            return 0, True
        length = self.match_prefix(hashes, tokens, limit, tails=False, tier=self.tier)
        found = hashes.hashes[: length // self.pool.page_size]
        missing = self._to_restore(found)
        nbytes = sum(len(pages) * group.page_bytes for pages, group in zip(missing, self.pool.groups, strict=True))
        if length <= before or not nbytes:
            return 0, True
        if not self.tier.worth_reading(length - before, nbytes):
            self.declined = length - before
            return 0, True
        complete = True
        try:
            for number, pages in enumerate(missing):
                if pages and complete:
                    read = partial(self.tier.read, number, [found[page] for page in pages], self.pool.memory)
                    complete = self._insert(number, pages, found, hashes, tokens, read) == len(pages)
        except (RuntimeError, MemoryError):  # the KV memory has failed: the tokens are computed
            return 0, True
        return max(0, self.match_prefix(hashes, tokens, limit) - before), complete

    def _to_restore(self, found: Sequence[bytes]) -> list[list[int]]:
        """The uncached pages of each group that the row after a text reads; none if too few pages are available."""
        missing = []
        for pool in self.pool.group_pools:
            read = self._read_after(pool, found)
            missing.append([page for page in read if found[page] not in pool.index])
            cached = sum(page in pool.cached for page in self._present(pool, found).values())
            if len(missing[-1]) > pool.available - cached:
                return [[] for _ in self.pool.group_pools]
        return missing

    def _insert(
        self,
        number: int,
        missing: Sequence[int],
        found: Sequence[bytes],
        hashes: PrefixHashes,
        tokens: Sequence[int],
        write: Callable[[list[int]], Sequence[int]],
    ) -> int:
        """Cache the `missing` pages of a text whose indices `write(places)` returns. Pages that it reads stay."""
        pool = self.pool.group_pools[number]
        table = PageTable(self._present(pool, found))
        for page in table.values():
            pool.incref(page)
        places = [pool.allocate() for _ in missing]
        table.update(zip(missing, places, strict=True))
        try:
            done = [missing[index] for index in write(places)]
            self._cache(number, table, done, hashes, tokens)
            return len(done)
        finally:
            pool.clear(table)  # those that were not written become free again

    def use(self, hashes: PrefixHashes) -> None:
        if self.tier is not None:
            for number in range(len(self.pool.groups)):
                self.tier.used(number, hashes.hashes)

    def can_admit(
        self,
        hashes: PrefixHashes,
        tokens: Sequence[int],
        length: int,
        needs: Sequence[int],
        preemptible: Sequence[PageTables] = (),
    ) -> bool:
        """Whether each group has `needs` pages for a text with a cached prefix once `preemptible` tables are freed."""
        for number, (pool, need) in enumerate(zip(self.pool.group_pools, needs, strict=True)):
            spans = pool.group.window.pages(length, length, self.pool.page_size)
            found = {pool.index[hashes.hash(tokens, page, length)] for span in spans for page in span}
            given = Counter(page for tables in preemptible for page in tables[number].values())
            freed = {page for page, times in given.items() if pool.refcounts[page] == times}
            if need - sum(page in pool.refcounts for page in found - freed) > pool.available + len(freed):
                return False
        return True

    def find_pages(self, hashes: PrefixHashes, tokens: Sequence[int]) -> tuple[int, list[dict[int, int]]]:
        """The tokens of the longest prefix in full pages, and for each group {page of the text: page of the pool}."""
        length = self.match_prefix(hashes, tokens, len(tokens), tails=False)
        found = hashes.hashes[: length // self.pool.page_size]
        return length, [
            {page: pool.index[page_hash] for page, page_hash in enumerate(found) if page_hash in pool.index}
            for pool in self.pool.group_pools
        ]

    def missing_pages(
        self, hashes: PrefixHashes, tokens: Sequence[int], pages: Sequence[Sequence[int]]
    ) -> list[list[int]] | None:
        """Which of a text's `pages` of each group are not cached yet.

        If too few pages are available, only those that the row after the text reads. None: too few even for these.
        """
        found, missing = hashes.extend(tokens), []
        for row, pool in zip(pages, self.pool.group_pools, strict=True):
            present = self._present(pool, found)
            room = pool.available - sum(page in pool.cached for page in present.values())
            fresh = [page for page in row if found[page] not in pool.index]
            if len(fresh) > room:
                read = set(self._read_after(pool, found))
                fresh = [page for page in fresh if page in read]
            if len(fresh) > room:
                return None
            missing.append(fresh)
        return missing

    def insert_pages(
        self, hashes: PrefixHashes, tokens: Sequence[int], pages: Sequence[Sequence[int]], contents: Sequence[Any]
    ) -> None:
        """Write contents into the `missing_pages` and cache them."""
        found = hashes.extend(tokens)
        for number, row in enumerate(pages):

            def write(places: list[int], number: int = number) -> Sequence[int]:
                self.pool.memory.write(number, places, contents[number])
                return range(len(places))

            self._insert(number, row, found, hashes, tokens, write)

    def _present(self, pool: GroupPool, found: Sequence[bytes]) -> dict[int, int]:
        return {page: pool.index[found[page]] for page in self._read_after(pool, found) if found[page] in pool.index}

    def _read_after(self, pool: GroupPool, found: Sequence[bytes]) -> list[int]:
        length = len(found) * self.pool.page_size
        return [page for span in pool.group.window.pages(length, length, self.pool.page_size) for page in span]


def _runs(present: Sequence[bool]) -> list[int]:
    """For each element, how many in a row up to and including it are true."""
    return list(accumulate(present, lambda run, there: run + 1 if there else 0, initial=0))[1:]
