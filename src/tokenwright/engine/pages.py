"""The page pool: which pages of the KV memory are free and which sequence holds which.

A page is a fixed number of token slots, in every layer. The pool hands out page numbers; it holds no tensor. A
sequence's page table is a plain list that only the pool changes:

    table  [ 3, 0, 7 ]        position p lives in page table[p // page_size], slot p % page_size
    free   [ 9, 8, 6, 5, ...] a stack: the page freed last is used first, while it is warm
"""

from collections.abc import Iterable


class PagePool:
    """`pages` pages of `page_size` token slots each."""

    def __init__(self, pages: int, page_size: int) -> None:
        assert pages > 0 and page_size > 0, "a pool has pages, and a page has slots"
        self.pages = pages
        self.page_size = page_size
        self._free = list(range(pages - 1, -1, -1))

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def needed(self, tokens: int) -> int:
        """Pages that `tokens` tokens fill, the last one perhaps in part."""
        return -(-tokens // self.page_size)

    def extend(self, table: list[int], tokens: int) -> bool:
        """Grow `table` until it covers `tokens` tokens; all or nothing. False: too few pages are free."""
        missing = self.needed(tokens) - len(table)
        if missing > len(self._free):
            return False
        table += [self._free.pop() for _ in range(missing)]
        return True

    def release(self, table: list[int]) -> None:
        """Take all pages of `table` back and empty it."""
        while table:
            self._free.append(table.pop())

    def check(self, tables: Iterable[list[int]]) -> None:
        """Prove that every page is either free or in exactly one of `tables`."""
        seen = sorted([*self._free, *(page for table in tables for page in table)])
        assert seen == list(range(self.pages)), f"pages lost, invented or held twice: {seen} of {self.pages}"
