"""A sequence's page table in one group: which page of the pool holds which page of the text."""

from array import array
from collections.abc import Iterator, Mapping, MutableMapping
from itertools import repeat
from typing import TypeAlias

Pages: TypeAlias = "array[int]"  # C ints: page n of a text lies in page `pages[n]` of its group


class Table(MutableMapping[int, int]):
    """{page of the text: page of the group}, in the order of the text.

    `pages` is the same for who reads it by its address: C ints, page n of the text at n, ABSENT where there is none,
    and nothing behind the last one. It moves when it grows, so an address holds until the table changes.

    `ready`: what is still to be computed before this position has its pages, and they are nobody else's. The pool says
    so, and any change takes it back.

        {0: 3, 2: 8}    pages = array('i', [3, -1, 8])
    """

    ABSENT = -1
    __slots__ = ("_held", "pages", "ready")

    def __init__(self, found: Mapping[int, int] | None = None) -> None:
        self.pages: Pages = array("i")
        self.ready = 0
        self._held = 0
        if found is not None:
            self.update(found)

    def copy(self) -> "Table":
        other = Table()
        other.pages, other._held = self.pages[:], self._held
        return other

    def __getitem__(self, page: int) -> int:
        if 0 <= page < len(self.pages) and (found := self.pages[page]) >= 0:
            return found
        raise KeyError(page)

    def __contains__(self, page: object) -> bool:
        return isinstance(page, int) and 0 <= page < len(self.pages) and self.pages[page] >= 0

    def __setitem__(self, page: int, found: int) -> None:
        assert page >= 0 and found >= 0, "pages are counted from 0"
        pages, self.ready = self.pages, 0
        if page >= len(pages):
            pages.extend(repeat(self.ABSENT, page + 1 - len(pages)))
        self._held += pages[page] < 0
        pages[page] = found

    def __delitem__(self, page: int) -> None:
        if page not in self:
            raise KeyError(page)
        self.ready = 0
        self._held -= 1
        self.pages[page] = self.ABSENT
        while self.pages and self.pages[-1] < 0:
            self.pages.pop()

    def __iter__(self) -> Iterator[int]:
        return (page for page, found in enumerate(self.pages) if found >= 0)

    def __len__(self) -> int:
        return self._held

    def popitem(self) -> tuple[int, int]:
        """Take the last page of the text out."""
        if not self.pages:
            raise KeyError("the table is empty")
        last = len(self.pages) - 1
        return last, self.pop(last)

    def __repr__(self) -> str:
        return f"Table({dict(self)})"
