"""Page tables, and reference counts."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..cell import expect
from ..one_file import original
from ..steps import small, steps

TITLE = "Pages"
TEXT = """
Texts grow, and nobody knows how long they get. A piece of memory of the greatest length for each one would be mostly
empty. So the cache is divided into pages of a few tokens, as the memory of an operating system is. A text has a page
table: a list of page numbers, in any order, that grows by a page when the last one is full.

The first function translates. Token 9 of a text, with pages of 4 tokens, is in the third page of its table, at place
1 of that page. The second one gives pages back. Several texts may have a page in their tables (the next lesson shows
why), so each page has a count of its tables.
"""
PARTS = ("Sequence.slots", "Pool.release")
START = '''\
def slots(self, stop, page_size):
    """The places in the cache of the text's first `stop` tokens.

    Page p has the places from p * page_size on. The page table is self.pages.
    """
    return np.arange(stop)  # right only if the page table is 0, 1, 2, ...

def release(self, pages):
    """Empty a page table. A page is available again when no other table has it."""
    while pages:
        page = pages.pop()
        # self.refcounts[page] is the number of tables with this page: one less now.
        # A page that others have is not available. One that none has has no count.
        self.available[page] = None
        # Such a page is taken first, unless it has a hash (lesson 4).
        self.available.move_to_end(page, last=page in self.hash_of)
'''


def check(file: Any) -> Iterator[None]:
    check_slots(file)
    yield
    check_release(file)
    yield
    (mine, right), last = (engine(one) for one in (file, original())), list[str]()
    for _, _ in zip(steps(mine), steps(right), strict=False):
        mine.scheduler.check()
        texts = [[one.tokens for one in each.scheduler.running] for each in (mine, right)]
        expect(texts[0] == texts[1], "Each function is right, and two texts in pages get other tokens than they must.")
        if len(texts[0]) == 2:
            last = [f"a text of {len(one.tokens)} tokens: pages {one.pages}" for one in mine.scheduler.running]
    print(*last, sep="\n")


def engine(file: Any) -> Any:
    made = file.Engine(small(file), pages=12, page_size=4, token_budget=8)
    for prompt in ([7, 3, 11, 2, 9], [4, 20, 6]):
        made.add(prompt, file.Sampling(max_tokens=9))
    return made


def check_slots(file: Any) -> None:
    for pages, size, stop in (([4, 2, 5], 4, 9), ([1, 0], 4, 8), ([3, 6, 0, 2], 2, 7)):
        sequence = file.Sequence([1] * stop, file.Sampling(), 0, pages=pages)
        right = [pages[n // size] * size + n % size for n in range(stop)]
        found = sequence.slots(stop, size)
        expect(found is not None, "slots returns nothing.")
        mine = [int(place) for place in np.asarray(found).ravel()]
        shown = (
            f"With the page table {pages}, {size} tokens a page, the first {stop} tokens are at {right}; yours: {mine}."
        )
        expect(mine != [*range(stop)], f"These are the places of pages 0, 1, 2, …: look them up in self.pages. {shown}")
        expect(len(mine) <= stop, f"There are {len(mine)} places for {stop} tokens: the last page is not full. {shown}")
        unscaled = [pages[n // size] + n % size for n in range(stop)]
        expect(mine != unscaled, f"Page p has the places from p * page_size on, not from p on. {shown}")
        expect(mine == right, shown)


def check_release(file: Any) -> None:
    pool = file.Pool(4, 2)
    one = [pool.allocate(), pool.allocate()]
    other = [one[0], pool.allocate()]  # shares its first page
    pool.refcounts[one[0]] += 1
    shared, own = one
    pool.release(one)
    expect(not one, "The released page table still has pages: take them out of the list.")
    expect(own in pool.available, f"Page {own} was in one table only, and is not available after its release.")
    expect(own not in pool.refcounts, f"Page {own} is in no table and has an entry in refcounts: delete it at 0.")
    lost = f"Page {shared} is available while another table has it, so others write over it. Look at refcounts."
    expect(shared not in pool.available, lost)
    expect(pool.refcounts[shared] == 1, f"Page {shared} is in one table, and its count is {pool.refcounts[shared]}.")
    pool.release(other)
    expect(len(pool.available) == 4 and not pool.refcounts, "After all releases a page is lost: look at counts of 0.")
