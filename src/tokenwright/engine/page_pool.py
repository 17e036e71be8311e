"""The page pool: which pages of the KV memory are free, who holds them, and what the sealed ones hold.

A page is a fixed number of token slots in all layers of a group; every group has its own pages. The pool hands out
page numbers. What stands in the pages is the memory's business (a protocol): the pool only asks it to copy a page, or
to take pages out and put them back. A sequence's page tables, one for each group, are mappings that only the pool
changes; the pages behind a window are no longer in them:

    table  {0: 3, 7: 0, 8: 7}    position p lives in page table[p // page_size], slot p % page_size
    blank  [9, 8, 6, 5]          a stack: the page freed last is used first, while it is warm
    kept   {2, 4}                sealed and held by nobody, the one let go longest ago first: found again, or used up

A page is sealed once all its slots are computed, and the last one of a text, its tail, when the text ends. Its name is
a sha256 over the tokens of the whole text up to there, so that equal names mean equal K and V: another that begins
the same way takes the page instead of computing it. Who goes on behind a tail writes to a copy of it.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from struct import pack
from typing import Any, Protocol

from tokenwright.engine.page_table import Table
from tokenwright.engine.window import Group

Tables = list[Table]  # one for each group


class Memory(Protocol):
    """What the pages are made of. Contents are the memory's own affair: they are only kept and handed back."""

    def copy(self, group: int, source: int, target: int) -> None:
        """Make the page `target` equal to `source`."""

    def read(self, group: int, pages: list[int]) -> Any:
        """A copy of the contents of pages, outside the memory."""

    def write(self, group: int, pages: list[int], contents: Any) -> None:
        """Put what `read` gave into other pages, in the same order."""


class Blank:
    """A memory for who only counts pages."""

    def copy(self, group: int, source: int, target: int) -> None: ...

    def read(self, group: int, pages: list[int]) -> None: ...

    def write(self, group: int, pages: list[int], contents: Any) -> None: ...


@dataclass(slots=True)
class PrefixHashes:
    """The names of a text's full pages, each a hash over the one before it and its own tokens."""

    root: bytes
    names: list[bytes] = field(default_factory=list)

    def upto(self, tokens: Sequence[int], page_size: int) -> list[bytes]:
        """The names of all full pages of `tokens`, which never change but only grow."""
        for page in range(len(self.names), len(tokens) // page_size):
            own = tokens[page * page_size : (page + 1) * page_size]
            before = self.names[-1] if self.names else self.root
            self.names.append(sha256(before + pack(f"<{page_size}I", *own)).digest())
        return self.names

    def name(self, tokens: Sequence[int], page: int, stop: int, page_size: int) -> bytes:
        """The name of a page of a text that holds it up to `stop`: the whole page, or the tail that ends there."""
        if (page + 1) * page_size <= stop:
            return self.names[page]
        own = tokens[page * page_size : stop]
        return sha256(self.before(page) + pack(f"<{len(own)}I", *own)).digest()

    def before(self, page: int) -> bytes:
        """The name that a page's own name is hashed over."""
        return self.names[page - 1] if page else self.root

    def fork(self) -> "PrefixHashes":
        return PrefixHashes(self.root, list(self.names))


@dataclass(frozen=True, slots=True)
class SwappedPages:
    """What a sequence's pages held, outside the pool. `pages[g]` are pages of the text, `contents[g]` theirs."""

    pages: tuple[tuple[int, ...], ...]
    contents: tuple[Any, ...]
    nbytes: int


class GroupPool:
    """The pages of one group."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.blank = list(range(group.pages - 1, -1, -1))
        self.kept: OrderedDict[int, None] = OrderedDict()
        self.holders: Counter[int] = Counter()
        self.names: dict[int, bytes] = {}  # of sealed pages
        self.index: dict[bytes, int] = {}  # the other way round
        self.tails: dict[
            bytes, Counter[int]
        ] = {}  # how long the tails are that follow a name, and how many are so long
        self.tail_of: dict[bytes, tuple[bytes, int]] = {}  # of a tail's name: what it follows, and its length

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self.blank) + len(self.kept)

    def take(self) -> int:
        """A page for somebody; what was kept longest is forgotten when no page is blank."""
        if self.blank:
            page = self.blank.pop()
        else:
            page, _ = self.kept.popitem(last=False)
            self.forget(page)
        self.holders[page] = 1
        return page

    def owned(self, table: Table, page: int) -> bool:
        """Whether a text may write to its page: nobody else holds it, or could find it."""
        found = table.pages[page] if page < len(table.pages) else Table.ABSENT
        return found >= 0 and self.holders[found] == 1 and found not in self.names

    def hold(self, page: int) -> None:
        """One holder more of a page that holds something."""
        self.kept.pop(page, None)
        self.holders[page] += 1

    def drop(self, page: int) -> None:
        """One holder less."""
        self.holders[page] -= 1
        if self.holders[page]:
            return
        del self.holders[page]
        if page in self.names:
            self.kept[page] = None
        else:
            self.blank.append(page)

    def seal(self, page: int, name: bytes) -> int:
        """Name what a page holds; answers the page that had the name before, if there is one, in its place."""
        known = self.index.setdefault(name, page)
        if known == page:
            self.names[page] = name
        else:
            self.hold(known)
            self.drop(page)
        return known

    def seal_tail(self, page: int, name: bytes, before: bytes, length: int) -> int:
        """`seal` for a page that is not full."""
        if name not in self.index:
            self.tail_of[name] = before, length
            self.tails.setdefault(before, Counter())[length] += 1
        return self.seal(page, name)

    def forget(self, page: int) -> None:
        """What a sealed page holds is not to be found any more."""
        name = self.names.pop(page)
        del self.index[name]
        if name in self.tail_of:
            before, length = self.tail_of.pop(name)
            self.tails[before][length] -= 1
            self.tails[before] += Counter()  # keep what is above 0
            if not self.tails[before]:
                del self.tails[before]

    def check(self, tables: Iterable[Table]) -> None:
        """Prove that every page is blank, kept, or held exactly as often as it stands in `tables`."""
        held = Counter(page for table in tables for page in table.values())
        assert held == self.holders, f"pages are held otherwise than in the tables: {held} and {self.holders}"
        seen = sorted([*self.blank, *self.kept, *held])
        assert seen == list(range(self.group.pages)), f"pages lost, invented or in two places: {seen}"
        assert {name: page for page, name in self.names.items()} == self.index, "an index that names other pages"
        assert not self.names.keys() & set(self.blank), "a blank page has no name"
        assert self.kept.keys() <= self.names.keys(), "what is kept has a name"
        assert self.tail_of.keys() <= self.index.keys(), "a tail has a name"
        lengths = {before: Counter(n for b, n in self.tail_of.values() if b == before) for before in self.tails}
        assert lengths == self.tails, "tails are counted otherwise than they are named"


class PagePool:
    """The pages of all groups. `page_size` is in token slots, the same everywhere.

    seed: what a page's contents depend on beside its tokens; texts under other seeds share nothing. swap: bytes that
    parked contents may take, outside the memory.
    """

    def __init__(
        self, groups: Sequence[Group], page_size: int, memory: Memory | None = None, seed: bytes = b"", swap: int = 0
    ) -> None:
        assert groups and all(group.pages > 0 for group in groups) and page_size > 0, "pages with slots"
        self.page_size = page_size
        self.groups = tuple(groups)
        self.memory: Memory = memory or Blank()
        self.seed = seed
        self.swap = swap
        self.parked = 0  # bytes
        self._shelves = [GroupPool(group) for group in groups]
        self._windowed = [number for number, group in enumerate(groups) if group.window.size is not None]

    @property
    def pages(self) -> int:
        """Pages of all groups."""
        return sum(group.pages for group in self.groups)

    @property
    def free(self) -> int:
        """Pages that nobody holds; some of them may be found again by what they hold."""
        return sum(shelf.free for shelf in self._shelves)

    @property
    def kept(self) -> int:
        """Pages that nobody holds and that hold something to be found."""
        return sum(len(shelf.kept) for shelf in self._shelves)

    def tables(self) -> Tables:
        """The tables of a sequence that holds nothing."""
        return [Table() for _ in self.groups]

    def chain(self, salt: bytes = b"") -> PrefixHashes:
        """The names' beginning for texts of one salt: who has another one never meets their pages."""
        return PrefixHashes(sha256(len(self.seed).to_bytes(8, "little") + self.seed + salt).digest())

    def most_pages(self, tokens: int, chunk: int) -> list[int]:
        """The most pages of each group that `tokens` tokens take at a time, computed `chunk` at once at most."""
        return [group.window.most_pages(tokens, chunk, self.page_size) for group in self.groups]

    def whole_pages(self, tokens: int) -> list[int]:
        """The full pages of each group that texts with the first `tokens` tokens in common can share for good."""
        full = tokens - tokens % self.page_size
        attention_windows = [group.window for group in self.groups]
        return [
            0 if window.size is not None else window.most_pages(full, 1, self.page_size) for window in attention_windows
        ]

    def holds(self, needs: Iterable[list[int]]) -> bool:
        """Whether the whole pool could hold texts side by side that take so many pages of each group."""
        totals = [sum(column) for column in zip(*needs, strict=True)]
        return all(total <= group.pages for total, group in zip(totals, self.groups, strict=True))

    def extend(self, tables: Tables, start: int, stop: int, ahead: int) -> bool:
        """Hold what computing [start, stop) reads and writes; where there is no window, up to `ahead` >= stop.

        The tables cover `start` already: only pages from there on are looked at. Pages that others hold as well, or may
        find, are copied before they are written to. All or nothing: False means that too few pages are free.
        """
        for table in tables:
            if table.ready < ahead:
                break
        else:
            return True  # nearly every step of one token
        first, last = start // self.page_size, -(-stop // self.page_size)
        jobs: list[tuple[GroupPool, Table, int, list[int], list[int], list[int]]] = []
        for number, (shelf, table) in enumerate(zip(self._shelves, tables, strict=True)):
            if table.ready >= ahead:
                continue
            window = shelf.group.window
            end = stop if window.size is not None else ahead
            needed = (range(max(first, span.start), span.stop) for span in window.pages(start, end, self.page_size))
            missing = [page for span in needed for page in span if page not in table]
            written = [page for page in range(first, last) if page in table]
            shared = [page for page in written if shelf.holders[table[page]] > 1]
            sealed = [page for page in written if page not in shared and table[page] in shelf.names]
            room = shelf.free - len(missing) - len(shared)
            if room < 0:
                return False
            jobs.append((shelf, table, number, missing, shared + sealed[:room], sealed[room:]))  # kept for others
        for shelf, table, number, missing, shared, sealed in jobs:
            for page in sealed:  # unless there is no room for a copy
                shelf.forget(table[page])
            table.update((page, shelf.take()) for page in missing)
            for page in shared:
                target = shelf.take()
                try:
                    self.memory.copy(number, table[page], target)
                except BaseException:
                    shelf.drop(target)
                    raise
                shelf.drop(table[page])
                table[page] = target
            table.ready = last * self.page_size if last - 1 in table else 0
        return True

    def trim(self, tables: Tables, computed: int) -> None:
        """Let go of what no later token reads: the pages between sinks and window.

        Those let go before were the first there, so what is left of them ends where the window begins.
        """
        for number in self._windowed:
            shelf, table = self._shelves[number], tables[number]
            expired_pages = shelf.group.window.expired_pages(computed, self.page_size)
            page = min(expired_pages.stop, len(table.pages))
            while page > expired_pages.start and page - 1 in table:
                page -= 1
            for gone in range(page, min(expired_pages.stop, len(table.pages))):
                shelf.drop(table.pop(gone))

    def rewind(self, tables: Tables) -> None:
        """Make ready for computing the text again from its start: windows lie elsewhere then."""
        for number in self._windowed:
            _empty(self._shelves[number], tables[number])
        for table in tables:
            table.ready = 0

    def release(self, tables: Tables) -> None:
        """Let go of all pages of a sequence. The end of a text is forgotten before its beginning."""
        for shelf, table in zip(self._shelves, tables, strict=True):
            _empty(shelf, table)

    def fork(self, tables: Tables) -> Tables:
        """The same pages once more; who writes to one first gets a copy."""
        for shelf, table in zip(self._shelves, tables, strict=True):
            for page in table.values():
                shelf.hold(page)
            table.ready = 0
        return [table.copy() for table in tables]

    def seal(self, tables: Tables, chain: PrefixHashes, tokens: Sequence[int], start: int, stop: int) -> None:
        """Name the pages that computing [start, stop) of `tokens` has filled."""
        first, full = start // self.page_size, stop // self.page_size
        if first == full:
            return
        names = chain.upto(tokens, self.page_size)
        for shelf, table in zip(self._shelves, tables, strict=True):
            for page in range(first, full):
                if page in table:
                    table[page] = shelf.seal(table[page], names[page])

    def seal_tail(self, tables: Tables, chain: PrefixHashes, tokens: Sequence[int], stop: int) -> None:
        """Name the page that a text of which [0, stop) is computed has not filled."""
        page, length = divmod(stop, self.page_size)
        if length:
            chain.upto(tokens, self.page_size)
            name = chain.name(tokens, page, stop, self.page_size)
            for shelf, table in zip(self._shelves, tables, strict=True):
                if page in table:
                    table[page] = shelf.seal_tail(table[page], name, chain.before(page), length)

    def match(self, chain: PrefixHashes, tokens: Sequence[int], most: int | None = None, *, tails: bool = True) -> int:
        """How many tokens from the start need not be computed: what a row behind them reads is there in every group.

        At most `most`; by default all but the last token, whose row is what the next one is chosen from. Without
        `tails` it is a number of full pages.
        """
        names, most = chain.upto(tokens, self.page_size), len(tokens) - 1 if most is None else most
        pages = most // self.page_size
        runs = [_runs([name in shelf.index for name in names[:pages]]) for shelf in self._shelves]
        for page in range(pages, -1, -1):
            at, before = page * self.page_size, chain.before(page)
            lengths = {n for shelf in self._shelves for n in shelf.tails.get(before, ())} if tails else set[int]()
            for length in sorted(lengths, reverse=True):
                if at + length <= most and self._there(chain, tokens, at + length, runs):
                    return at + length
            if page and self._there(chain, tokens, at, runs):
                return at
        return 0

    def _there(self, chain: PrefixHashes, tokens: Sequence[int], at: int, runs: Sequence[Sequence[int]]) -> bool:
        """Whether all is sealed that a row at `at` reads; `runs`: how many full pages side by side, in each group."""
        tail, size = at // self.page_size, self.page_size
        for run, shelf in zip(runs, self._shelves, strict=True):
            for span in shelf.group.window.pages(at, at, size):
                full = len(span)
                if span and span.stop > tail:
                    if chain.name(tokens, tail, at, size) not in shelf.index:
                        return False
                    full -= 1
                if full and run[span.start + full - 1] < full:
                    return False
        return True

    def find(self, chain: PrefixHashes, tokens: Sequence[int]) -> tuple[int, list[dict[int, int]]]:
        """How many tokens of a text can be spared, in full pages, and all these pages that are sealed, held or not."""
        cut = self.match(chain, tokens, len(tokens), tails=False)
        names = chain.names[: cut // self.page_size]
        return cut, [
            {page: shelf.index[name] for page, name in enumerate(names) if name in shelf.index}
            for shelf in self._shelves
        ]

    def room(
        self, chain: PrefixHashes, tokens: Sequence[int], pages: Sequence[Sequence[int]]
    ) -> list[list[int]] | None:
        """Which of a text's pages from outside are worth taking in: those that are not here yet.

        Where they do not fit, those alone that a row behind the text reads; None: too few pages are free for these.
        """
        names, found = chain.upto(tokens, self.page_size), []
        for row, shelf in zip(pages, self._shelves, strict=True):
            fresh = [page for page in row if names[page] not in shelf.index]
            if len(fresh) > shelf.free:
                read = shelf.group.window.pages(len(tokens), len(tokens), self.page_size)
                fresh = [page for page in fresh if any(page in span for span in read)]
            if len(fresh) > shelf.free:
                return None
            found.append(fresh)
        return found

    def put(
        self, chain: PrefixHashes, tokens: Sequence[int], pages: Sequence[Sequence[int]], contents: Sequence[Any]
    ) -> None:
        """Take contents in from outside, for which there is `room`: to be found by texts that begin as `tokens`."""
        names = chain.upto(tokens, self.page_size)
        for number, (row, shelf) in enumerate(zip(pages, self._shelves, strict=True)):
            table = Table()
            table.update((page, shelf.take()) for page in row)
            try:
                self.memory.write(number, list(table.values()), contents[number])
                for page in table:
                    table[page] = shelf.seal(table[page], names[page])
            finally:
                _empty(shelf, table)

    def adopt(self, tables: Tables, chain: PrefixHashes, tokens: Sequence[int], cut: int) -> None:
        """Hold the pages that a row at `cut` reads, as `match` has found them."""
        for shelf, table in zip(self._shelves, tables, strict=True):
            for span in shelf.group.window.pages(cut, cut, self.page_size):
                for page in span:
                    table[page] = shelf.index[chain.name(tokens, page, cut, self.page_size)]
                    shelf.hold(table[page])

    def lacking(
        self,
        chain: PrefixHashes,
        tokens: Sequence[int],
        cut: int,
        most: int,
        chunk: int,
        spare: Sequence[Tables] = (),
        beside: Sequence[int] | None = None,
    ) -> bool:
        """Whether too few pages are free for a text that comes to `most` tokens, whose first `cut` are found.

        `spare` are tables that would be given up for it, counted as far as nobody else holds their pages. `beside`:
        pages of each group that must be free beside it.
        """
        needs = [a + b for a, b in zip(self.most_pages(most, chunk), beside or [0] * len(self.groups), strict=True)]
        for number, (shelf, need) in enumerate(zip(self._shelves, needs, strict=True)):
            spans = shelf.group.window.pages(cut, cut, self.page_size)
            names = [chain.name(tokens, page, cut, self.page_size) for span in spans for page in span]
            found = {shelf.index[name] for name in names}
            given = Counter(page for tables in spare for page in tables[number].values())
            more = {page for page, times in given.items() if shelf.holders[page] == times}
            if need - sum(page in shelf.holders for page in found - more) > shelf.free + len(more):
                return True
        return False

    def park(self, tables: Tables) -> SwappedPages | None:
        """Take the contents of a sequence's pages out and give the pages back; None where `swap` has no room."""
        held = zip(self.groups, tables, strict=True)
        nbytes = sum(group.page_bytes * len(table) for group, table in held)
        if self.parked + nbytes > self.swap:
            return None
        try:
            contents = tuple(self.memory.read(number, list(table.values())) for number, table in enumerate(tables))
        except (RuntimeError, MemoryError):  # no memory to park in after all
            return None
        parked = SwappedPages(tuple(tuple(table) for table in tables), contents, nbytes)
        self.parked += nbytes
        self.release(tables)
        return parked

    def unpark(self, tables: Tables, parked: SwappedPages) -> bool:
        """Put parked contents back into pages. False: too few are free, or the memory fails."""
        if any(len(pages) > shelf.free for pages, shelf in zip(parked.pages, self._shelves, strict=True)):
            return False
        try:
            for number, (shelf, table) in enumerate(zip(self._shelves, tables, strict=True)):
                table.update((page, shelf.take()) for page in parked.pages[number])
                self.memory.write(number, list(table.values()), parked.contents[number])
        except (RuntimeError, MemoryError):
            self.release(tables)
            return False
        except BaseException:
            self.release(tables)
            raise
        self.forget(parked)
        return True

    def forget(self, parked: SwappedPages) -> None:
        """SwappedPages contents are no longer needed."""
        self.parked -= parked.nbytes

    def covers(self, tables: Tables, computed: int) -> bool:
        """Whether the tables have every page that a row behind `computed` tokens reads of them."""
        pairs = zip(self.groups, tables, strict=True)
        return all(
            page in table
            for group, table in pairs
            for span in group.window.pages(computed, computed, self.page_size)
            for page in span
        )

    def owns(self, tables: Tables, computed: int) -> bool:
        """Whether a text has, for itself, all pages that are said to be ready behind `computed` tokens."""
        return all(
            shelf.owned(table, page)
            for shelf, table in zip(self._shelves, tables, strict=True)
            for span in shelf.group.window.pages(computed, table.ready, self.page_size)
            for page in span
            if page >= computed // self.page_size
        )

    def check(self, tables: Iterable[Tables]) -> None:
        """Prove that every page is free or held as the tables of all sequences say."""
        columns = list(tables)
        for number, shelf in enumerate(self._shelves):
            shelf.check([one[number] for one in columns])


def _empty(shelf: GroupPool, table: Table) -> None:
    while table:
        shelf.drop(table.popitem()[1])


def _runs(present: Sequence[bool]) -> list[int]:
    """How many of `present` are true side by side, up to and with each."""
    runs: list[int] = []
    for there in present:
        runs.append((runs[-1] + 1 if runs else 1) if there else 0)
    return runs
