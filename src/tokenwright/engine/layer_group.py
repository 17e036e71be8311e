"""A group of layers with one attention window and one KV format, which share pages; and their page tables."""

from array import array
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from itertools import repeat
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class AttentionWindow:
    """The positions that row i reads: itself, and every earlier position in [start, stop) that the window allows.

    A text may have K and V in two formats, each for its part [start, stop).

        sinks 2, window 4, row 9:      0 1 . . . . 6 7 8 9
    """

    size: int | None = None  # tokens that a row reads, itself included; None: all
    sinks: int = 0  # the first tokens, which every row reads (StreamingLLM, arXiv 2309.17453)
    start: int = 0
    stop: int | None = None

    @property
    def edge(self) -> int:
        """The highest position of queries on sinks."""
        return self.sinks + (self.size or 0) - 1

    def spans(self, row: int, end: int) -> list[range]:
        """The positions below `end` that some row from `row` on reads, in order: one range, or sinks and window."""
        end = end if self.stop is None else min(end, self.stop)
        near = self.start if self.size is None else max(self.start, row - self.size + 1)
        sinks = range(self.start, min(self.sinks, end, near))
        return [span for span in (sinks, range(near, end)) if len(span)]

    def tokens_read(self, row: int, end: int) -> int:
        return sum(map(len, self.spans(row, end)))

    def pages(self, row: int, end: int, page_size: int) -> list[range]:
        """The numbers of the text's pages that hold the positions of `spans`."""
        found: list[range] = []
        for span in self.spans(row, end):
            first, last = span.start // page_size, -(-span.stop // page_size)
            if found and first <= found[-1].stop:
                found[-1] = range(found[-1].start, last)
            else:
                found.append(range(first, last))
        return found

    def expired_pages(self, row: int, page_size: int) -> range:
        """The text's pages between sinks and window, which no row from `row` on reads."""
        assert self.size is not None, "without a window no page expires"
        end = row if self.stop is None else min(row, self.stop)
        sinks, near = min(self.sinks, end), max(self.start, row - self.size + 1)
        first = -(-sinks // page_size) if sinks > self.start else self.start // page_size
        return range(first, near // page_size if near < end else -(-end // page_size))

    def max_pages(self, tokens: int, chunk: int, page_size: int) -> int:
        """The most pages that a text of `tokens` uses at a time, computed at most `chunk` at once."""
        tokens = tokens if self.stop is None else min(tokens, self.stop)
        all_pages = max(0, -(-tokens // page_size) - self.start // page_size)
        if self.size is None:
            return all_pages
        near = self.size - 1 + chunk  # tokens, the first of which may lie anywhere in its page
        return min(all_pages, -(-min(self.sinks, tokens) // page_size) + (near + page_size - 2) // page_size + 1)

    def cached(self, page: int, page_size: int) -> bool:  # noqa: ARG002  (a StateWindow reads them)
        """Whether a full page is cached for other texts as soon as it is computed."""
        return True


@dataclass(frozen=True, slots=True)
class StateWindow(AttentionWindow):
    """The window of recurrent layers, which keep one state of a text, rewritten at each token, instead of K and V.

    Page n holds one state: the one after its last computed token. Row i reads the state after row i - 1, so `size` is
    2. A chunk writes the page of its last token, and each full page that holds the first token at or after a multiple
    of `every`; these pages stay in the prefix index.

        page size 4, every 8, rows 3 to 13:      reads page 0, writes pages 1, 2 (of tokens 4 to 11) and 3
    """

    size: int | None = 2
    every: int = 1

    def pages(self, row: int, end: int, page_size: int) -> list[range]:
        """The page of the state that `row` reads, and those that computing [row, end) writes."""
        found = {(row - 1) // page_size} if 0 < row <= end else set()
        if end > row:
            first = row // page_size * page_size // self.every + 1  # the first multiple in the page, or after it
            multiples = range(first * self.every, end // page_size * page_size + 1, self.every)
            found |= {(end - 1) // page_size, *((position - 1) // page_size for position in multiples)}
        return [range(page, page + 1) for page in sorted(found)]

    def expired_pages(self, row: int, page_size: int) -> range:
        return range(max(0, row - 1) // page_size)

    def max_pages(self, tokens: int, chunk: int, page_size: int) -> int:
        return min(-(-tokens // page_size), 2 + -(-chunk // max(self.every, page_size)))

    def cached(self, page: int, page_size: int) -> bool:
        return (page + 1) * page_size // self.every > page * page_size // self.every


@dataclass(frozen=True, slots=True)
class Group:
    pages: int
    window: AttentionWindow = AttentionWindow()
    page_bytes: int = 0  # of one page in all layers of the group


Pages: TypeAlias = "array[int]"  # C ints: page n of a text lies in page `pages[n]` of its group


class PageTable(MutableMapping[int, int]):
    """{page of the sequence: page of the pool}, in the order of the sequence.

    `pages` is the same as C ints, for kernels: ABSENT where a page is missing. The array may move when the table
    changes.

        {0: 3, 2: 8}    pages = array('i', [3, -1, 8])

    Positions still to be computed below `reserved` have pages that only this sequence uses and no hash finds. The pool
    sets it; any change of the table sets it back to 0.
    """

    ABSENT = -1
    __slots__ = ("_count", "pages", "reserved")

    def __init__(self, found: Mapping[int, int] | None = None) -> None:
        self.pages: Pages = array("i")
        self.reserved = 0
        self._count = 0
        if found is not None:
            self.update(found)

    def copy(self) -> "PageTable":
        other = PageTable()
        other.pages, other._count = self.pages[:], self._count
        return other

    def __getitem__(self, page: int) -> int:
        if 0 <= page < len(self.pages) and (found := self.pages[page]) >= 0:
            return found
        raise KeyError(page)

    def __contains__(self, page: object) -> bool:
        return isinstance(page, int) and 0 <= page < len(self.pages) and self.pages[page] >= 0

    def __setitem__(self, page: int, found: int) -> None:
        assert page >= 0 and found >= 0, "pages are counted from 0"
        pages, self.reserved = self.pages, 0
        if page >= len(pages):
            pages.extend(repeat(self.ABSENT, page + 1 - len(pages)))
        self._count += pages[page] < 0
        pages[page] = found

    def __delitem__(self, page: int) -> None:
        if page not in self:
            raise KeyError(page)
        self.reserved = 0
        self._count -= 1
        self.pages[page] = self.ABSENT
        while self.pages and self.pages[-1] < 0:
            self.pages.pop()

    def __iter__(self) -> Iterator[int]:
        return (page for page, found in enumerate(self.pages) if found >= 0)

    def __len__(self) -> int:
        return self._count

    def drain(self) -> list[int]:
        found = [page for page in reversed(self.pages) if page >= 0]
        self.pages, self.reserved, self._count = array("i"), 0, 0
        return found

    def popitem(self) -> tuple[int, int]:
        if not self.pages:
            raise KeyError("the table is empty")
        last = len(self.pages) - 1
        return last, self.pop(last)

    def __repr__(self) -> str:
        return f"PageTable({dict(self)})"


PageTables = list[PageTable]  # of one sequence: one for each group of layers
