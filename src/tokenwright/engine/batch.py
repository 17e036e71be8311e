"""A step as flat data: all that a backend sees of it, in plain arrays, without torch. It can be pickled.

    batch  = flatten(step.chunks)
    logits = backend(batch)

A chunk is four numbers in `chunks`. Its page tables are the sequences' own arrays, not copies of them: a step over long
texts copies nothing, and the batch is to be used before the step is committed. A batch that was pickled has copies.

    chunks         0  1  77  500   1  3  0  64         two chunks: row, rows, start, limit
    tokens         5   7 8 9                           [T]
    tables         [3 -1 8] [4 1 0]   [2] [6]          of the first chunk for each group, of the second for each group
    logits_rows    0   3                               [W]
    output_rows    range(0, 1)   range(1, 2)
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from tokenwright.engine.page_table import Pages, Table
from tokenwright.engine.step import ALL, LAST, LogitsNeeded


@dataclass(slots=True)
class Batch:
    """T tokens of C chunks, for a store with G groups of layers.

    tokens: [T] ids, 64 bits, the rows of all chunks one after another.
    chunks: [C][4], 64 bits: the chunk's first row, its rows, the position of the first, and the most tokens that its
        sequence may come to, which some rotations depend on.
    tables: [C * G]; of each chunk, for each group, the pages of the store that hold the pages of the text: 32 bits,
        page n of the text at n, `Table.ABSENT` where there is none.
    logits_rows: [W] rows of the step whose logits are needed, 64 bits.
    output_rows: [C]; the rows of the logits [W, vocabulary] that belong to each chunk.
    """

    tokens: "array[int]"
    chunks: "array[int]"
    tables: list[Pages]
    logits_rows: "array[int]"
    output_rows: tuple[range, ...]

    def each_chunk(self) -> Iterator[tuple[int, int, int, int]]:
        """Of each chunk its first row, its rows, its first position and its limit."""
        numbers = iter(self.chunks)
        return zip(numbers, numbers, numbers, numbers, strict=True)


class ChunkLike(Protocol):
    """What is read of a chunk."""

    @property
    def start(self) -> int: ...
    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def tables(self) -> Sequence[Table]: ...
    @property
    def limit(self) -> int: ...
    @property
    def logits_needed(self) -> LogitsNeeded: ...


def flatten(chunks: Iterable[ChunkLike]) -> Batch:
    """The batch of a step's chunks, in their order."""
    tokens: list[int] = []
    numbers: list[int] = []
    tables: list[Pages] = []
    logits_rows: list[int] = []
    output_rows: list[range] = []
    row = 0
    for chunk in chunks:
        tokens += chunk.tokens
        stop, first, needed = len(tokens), len(logits_rows), chunk.logits_needed
        numbers += (row, stop - row, chunk.start, chunk.limit)
        tables += [table.pages for table in chunk.tables]
        if needed is LAST:
            logits_rows.append(stop - 1)
        elif needed is ALL:
            logits_rows += range(row, stop)
        output_rows.append(range(first, len(logits_rows)))
        row = stop
    return Batch(array("q", tokens), array("q", numbers), tables, array("q", logits_rows), tuple(output_rows))


def one_chunk(tokens: Sequence[int], start: int, tables: Sequence[Table], limit: int) -> Batch:
    """The batch of `tokens` from position `start` on, of one sequence, with the logits of all rows."""
    rows = range(len(tokens))
    pages = [table.pages for table in tables]
    return Batch(array("q", tokens), array("q", (0, len(rows), start, limit)), pages, array("q", rows), (rows,))
