"""A sequence's page table in one group of layers: which pool page holds which page of the sequence."""

from array import array
from collections.abc import Iterator, Mapping, MutableMapping
from itertools import repeat
from typing import TypeAlias

Pages: TypeAlias = "array[int]"  # C ints: page n of a text lies in page `pages[n]` of its group


class PageTable(MutableMapping[int, int]):
    """{page of the sequence: page of the pool}, in the order of the sequence.

    Page n of a sequence holds positions [n * page_size, (n + 1) * page_size). `pages` is the same as C ints, for
    readers by address: the pool page of page n at index n, ABSENT where there is none, nothing behind the last one.
    The array moves when it grows, so an address holds until the table changes.

    reserved: positions below it that are still to be computed have pages, which no other sequence reads and which are
    not cached. The pool sets it; any change of the table sets it back to 0.

        {0: 3, 2: 8}    pages = array('i', [3, -1, 8])
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

    def popitem(self) -> tuple[int, int]:
        """Remove the last page of the sequence."""
        if not self.pages:
            raise KeyError("the table is empty")
        last = len(self.pages) - 1
        return last, self.pop(last)

    def __repr__(self) -> str:
        return f"PageTable({dict(self)})"


PageTables = list[PageTable]  # of one sequence: one for each group of layers
