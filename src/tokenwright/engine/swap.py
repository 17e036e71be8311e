"""Swapping: the contents of a preempted sequence's pages leave the KV memory, and return when it goes on."""

from dataclasses import dataclass
from typing import Any

from tokenwright.engine.layer_group import PageTables
from tokenwright.engine.page_pool import PagePool


@dataclass(frozen=True, slots=True)
class SwappedPages:
    """The contents of a sequence's pages, outside the pool. `pages[g]`: its pages in group g; `contents[g]`: theirs."""

    pages: tuple[tuple[int, ...], ...]
    contents: tuple[Any, ...]
    nbytes: int


class SwapSpace:
    """Memory for swapped pages: `used` of at most `capacity` bytes. A capacity of 0 swaps nothing."""

    def __init__(self, pool: PagePool, capacity: int = 0) -> None:
        self.pool = pool
        self.capacity = capacity
        self.used = 0

    def swap_out(self, tables: PageTables) -> SwappedPages | None:
        """Move the contents of a sequence's pages out and release the pages; None if there is no room for them."""
        pool = self.pool
        nbytes = sum(group.page_bytes * len(table) for group, table in zip(pool.groups, tables, strict=True))
        if self.used + nbytes > self.capacity:
            return None
        try:
            contents = tuple(pool.memory.read(number, list(table.values())) for number, table in enumerate(tables))
        except (RuntimeError, MemoryError):  # the machine has less memory than the capacity promised
            return None
        swapped = SwappedPages(tuple(tuple(table) for table in tables), contents, nbytes)
        self.used += nbytes
        pool.release(tables)
        return swapped

    def swap_in(self, tables: PageTables, swapped: SwappedPages) -> bool:
        """Move swapped contents back into pages. False: too few are available, or the memory fails."""
        pool = self.pool
        if any(len(pages) > one.available for pages, one in zip(swapped.pages, pool.group_pools, strict=True)):
            return False
        try:
            for number, (one, table) in enumerate(zip(pool.group_pools, tables, strict=True)):
                table.update((page, one.allocate()) for page in swapped.pages[number])
                pool.memory.write(number, list(table.values()), swapped.contents[number])
        except (RuntimeError, MemoryError):
            pool.release(tables)
            return False
        except BaseException:
            pool.release(tables)
            raise
        self.discard(swapped)
        return True

    def discard(self, swapped: SwappedPages) -> None:
        self.used -= swapped.nbytes
