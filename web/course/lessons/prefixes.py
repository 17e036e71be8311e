"""Hashes of pages in a chain, and sharing of equal prefixes."""

from collections.abc import Iterator
from typing import Any

from ..cell import expect
from ..one_file import original
from ..steps import run, small

TITLE = "Prefix hashes"
TEXT = """
Many texts begin alike: a system prompt, a conversation with one more message. K and V of a token depend on the tokens
up to it and on nothing else, so such texts have the same first pages, and one copy of them is enough. A full page
gets a hash, by which others find it, also when its own text has ended.

Write both sides: the hash of each full page, and the page table of the longest prefix that the pool knows. Ask
yourself what a page's K and V depend on: two pages with the same four tokens are not always the same.
"""
PARTS = ("Sequence.page_hashes", "Pool.attach")
START = '''\
def page_hashes(self, count, page_size):
    """The hashes of the first `count` pages; self.hashes has the earlier ones."""
    for start in range(len(self.hashes) * page_size, count * page_size, page_size):
        tokens = pack(f"<{page_size}I", *self.tokens[start : start + page_size])
        # Is this all that the page's K and V depend on?
        self.hashes.append(sha256(tokens).digest())
    return self.hashes[:count]

def attach(self, hashes):
    """A page table of the longest prefix whose pages have these hashes."""
    pages = []
    # self.page_of has the page of a hash. Stop at the first hash that it lacks.
    # Then for each page: self.refcounts counts one table more, and the page
    # is not in self.available any more, where it could be written to anew.
    return pages
'''


def check(file: Any) -> Iterator[None]:
    check_hashes(file)
    check_attach(file)
    yield
    mine, right = (shared(one) for one in (file, original()))
    yield
    expect(mine[0] == right[0], "Texts that share pages get other tokens than texts that do not.")
    expect(mine[1] > 0, "A text that begins as an earlier one reused no token.")
    expect(mine[1] == right[1], f"{mine[1]} tokens were reused, and it should be {right[1]}.")
    print(f"four texts with the same first 12 tokens: {mine[1]} of their tokens were found in the pool, not computed")


def hashes(file: Any, tokens: list[int], count: int) -> list[bytes]:
    sequence = file.Sequence(tokens, file.Sampling(), 0)
    sequence.page_hashes(1, 4)  # the others are computed later
    return list(sequence.page_hashes(count, 4))


def check_hashes(file: Any) -> None:
    same, first, second = [7, 8, 9, 3], [1, 2, 3, 4], [5, 2, 3, 4]
    one, other = hashes(file, first + same + same, 3), hashes(file, second + same + same, 3)
    expect(len(one) == 3, f"page_hashes(3, …) must return three hashes, and returns {len(one)}.")
    expect(one == hashes(file, first + same + same, 3), "Equal tokens have different hashes, so nobody finds the page.")
    why = "Pages with equal tokens behind different prefixes have the same hash, and their K and V differ"
    expect(one[1] != other[1], f"{why}: look at what goes into sha256. The hash before covers all that is before.")
    expect(one[2] != other[2], f"{why}: the hash must cover every page before it, not only the tokens of one.")
    expect(one[1] != one[2], f"{why}, also within one text.")
    expect(one[0] != other[0], "Different first pages have the same hash.")


def check_attach(file: Any) -> None:
    pool, keys = file.Pool(6, 4), [b"a", b"b", b"c"]
    table = [pool.allocate() for _ in keys]
    for page, key in zip(table, keys, strict=True):
        pool.cache(page, key)
    pages = [*table]
    pool.release(table)  # they are cached now: available, with a hash
    found = pool.attach(iter([b"a", b"b", b"x", b"c"]))
    expect(isinstance(found, list), "attach must return a list of pages, a page table.")
    expect(
        found != [pages[0], pages[1], pages[2]],
        "attach went on after a hash that the pool does not have: K and V behind a gap are of another text.",
    )
    expect(
        found == pages[:2],
        f"For the hashes a, b, x, c, where the pool has a, b and c, the table is {pages[:2]}, not {found}.",
    )
    for page in found:
        expect(
            page not in pool.available,
            f"Page {page} is in a table and still available: the next allocate writes over it.",
        )
        expect(pool.refcounts[page] == 1, f"Page {page} is in one table, and its count is {pool.refcounts[page]}.")
    again = pool.attach(iter(keys))
    expect(again == pages, "A page that is in use can be shared as well: attach must find it.")
    expect(
        pool.refcounts[pages[0]] == 2, f"Page {pages[0]} is in two tables, and its count is {pool.refcounts[pages[0]]}."
    )
    pool.check([found, again])


def shared(file: Any) -> tuple[list[list[int]], int]:
    """The tokens of four texts that begin alike, and how many tokens of them were reused."""
    engine = file.Engine(small(file), pages=24, page_size=4, token_budget=64)
    texts, prefix = [], [3, 9, 1, 12, 30, 2, 8, 8, 17, 5, 21, 6]
    for last in (4, 11, 25, 4):
        texts.append(engine.add([*prefix, last], file.Sampling(max_tokens=5)))
        run(engine)
        engine.scheduler.check()
    return [text.tokens for text in texts], engine.scheduler.reused
