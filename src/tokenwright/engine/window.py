"""Which positions a row reads, and so which must be kept: the geometry of windows and sinks, without a tensor.

A group is the layers whose K and V are kept alike. It has pages of its own: a window's are released as the text goes
on, and pages of different sizes never mix.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionWindow:
    """The positions that row i reads: itself, and every earlier position in [start, stop) that the window allows.

    size: tokens that a row reads, itself included; None for all. sinks: the first tokens, which every row reads
    (StreamingLLM, arXiv 2309.17453). [start, stop) is the part of a text whose K and V this is; a text may be kept in
    two formats, one after the other.

        sinks 2, window 4, row 9:      0 1 . . . . 6 7 8 9
    """

    size: int | None = None
    sinks: int = 0
    start: int = 0
    stop: int | None = None

    def spans(self, row: int, end: int) -> list[range]:
        """The positions below `end` that some row from `row` on reads, in order: one range, or sinks and window."""
        end = end if self.stop is None else min(end, self.stop)
        near = self.start if self.size is None else max(self.start, row - self.size + 1)
        sinks = range(self.start, min(self.sinks, end, near))
        return [span for span in (sinks, range(near, end)) if len(span)]

    def kept(self, row: int, end: int) -> int:
        """How many positions below `end` some row from `row` on reads."""
        return sum(map(len, self.spans(row, end)))

    def pages(self, row: int, end: int, page_size: int) -> list[range]:
        """The numbers of the text's pages that hold the positions of `spans`, in order and each once."""
        found: list[range] = []
        for span in self.spans(row, end):
            first, last = span.start // page_size, -(-span.stop // page_size)
            if found and first <= found[-1].stop:
                found[-1] = range(found[-1].start, last)
            else:
                found.append(range(first, last))
        return found

    def expired_pages(self, row: int, page_size: int) -> range:
        """The numbers of the text's pages that no row from `row` on reads any more, between sinks and window."""
        assert self.size is not None, "without a window no page expires"
        end = row if self.stop is None else min(row, self.stop)
        sinks, near = min(self.sinks, end), max(self.start, row - self.size + 1)
        first = -(-sinks // page_size) if sinks > self.start else self.start // page_size
        return range(first, near // page_size if near < end else -(-end // page_size))

    def max_pages(self, tokens: int, chunk: int, page_size: int) -> int:
        """The most pages that a text of `tokens` uses at a time, if at most `chunk` of them are computed at once."""
        tokens = tokens if self.stop is None else min(tokens, self.stop)
        all_pages = max(0, -(-tokens // page_size) - self.start // page_size)
        if self.size is None:
            return all_pages
        near = self.size - 1 + chunk  # tokens in a row, which may begin anywhere in a page
        return min(all_pages, -(-min(self.sinks, tokens) // page_size) + (near + page_size - 2) // page_size + 1)

    def cached(self, page: int, page_size: int) -> bool:  # noqa: ARG002  of a state's pages only some are
        """Whether a full page is cached for other texts as soon as it is computed."""
        return True


@dataclass(frozen=True, slots=True)
class StateWindow(AttentionWindow):
    """The pages of layers that keep one state of a text, rewritten at each token, instead of K and V.

    Page n of a text has room for one state: that behind the last computed token of the page. Row i reads the state
    behind row i - 1, so it has a window of two. A chunk writes the page of its last token, and those on its way that
    hold the first token at or behind a multiple of `every`, which stay in the prefix index; each needs to be full.

        page size 4, every 8, rows 3 to 13:      reads page 0, writes pages 1, 2 (of tokens 4 to 11) and 3
    """

    size: int | None = 2
    every: int = 1

    def pages(self, row: int, end: int, page_size: int) -> list[range]:
        """The page of the state that row `row` reads, and those that computing [row, end) writes."""
        found = {(row - 1) // page_size} if 0 < row <= end else set()
        if end > row:
            first = row // page_size * page_size // self.every + 1  # the first multiple in the page, or behind it
            whole = range(first * self.every, end // page_size * page_size + 1, self.every)
            found |= {(end - 1) // page_size, *((place - 1) // page_size for place in whole)}
        return [range(page, page + 1) for page in sorted(found)]

    def expired_pages(self, row: int, page_size: int) -> range:
        return range(max(0, row - 1) // page_size)

    def max_pages(self, tokens: int, chunk: int, page_size: int) -> int:
        return min(-(-tokens // page_size), 2 + -(-chunk // max(self.every, page_size)))

    def cached(self, page: int, page_size: int) -> bool:
        return (page + 1) * page_size // self.every > page * page_size // self.every


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that keep K and V in the same window and in pages of the same size, of which there are `pages`."""

    pages: int
    window: AttentionWindow = AttentionWindow()
    page_bytes: int = 0  # of one page in all layers of the group
