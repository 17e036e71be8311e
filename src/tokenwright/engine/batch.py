"""A step as flat data in plain arrays: all that a backend sees of it. It can be pickled.

    chunks         0  1  77  500   1  3  0  64         two chunks: row, rows, start, limit
    tokens         5   7 8 9                           [T]
    tables         [3 -1 8] [4 1 0]   [2] [6]          of the first chunk for each group, of the second for each group
    logits_rows    0   3                               [W]
    hidden_rows                                        [N]
    output_rows    range(0, 1)   range(1, 2)

Page tables are the sequences' own arrays, not copies: use the batch before its step is committed.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenwright.engine.layer_group import Pages, PageTable
from tokenwright.engine.pictures import PictureSpan, Spans, axes, read_ends
from tokenwright.engine.step import ALL, HIDDEN, LAST, Step


@dataclass(slots=True)
class Batch:
    """T tokens of C chunks, for a store with G groups of layers. Arrays of ids and rows have 64 bits, tables 32."""

    tokens: "array[int]"  # [T] ids, the rows of all chunks one after another
    chunks: "array[int]"  # [C][4]: first row, rows, first position, and the most tokens that the sequence may come to
    tables: list[Pages]  # [C * G]: the store's page of each page of the text, `PageTable.ABSENT` for none
    logits_rows: "array[int]"  # [W]: rows whose logits are needed
    output_rows: tuple[range, ...]  # [C]: each chunk's rows of the logits, or of the hidden states
    hidden_rows: "array[int]" = field(default_factory=lambda: array("q"))  # [N]: rows whose hidden states are needed
    adapters: list[tuple[int, range]] = field(default_factory=list)  # the adapter's number, the chunk's rows
    before: Any = None  # [T, width] in fp32: the hidden state of the token before each row, for a model that reads it
    pictures: list[tuple[int, PictureSpan, range]] = field(default_factory=list)  # first row, span, its rows
    inserted: list[tuple[int, Any]] = field(default_factory=list)  # first row, embeddings [n, width] of the tower
    ends: list[tuple[int, "array[int]"]] = field(default_factory=list)  # a chunk with a bidirectional span: rows' ends
    axes: list[tuple[int, list["array[int]"]]] = field(default_factory=list)  # a chunk after a picture: positions

    def each_chunk(self) -> Iterator[tuple[int, int, int, int]]:
        numbers = iter(self.chunks)
        return zip(numbers, numbers, numbers, numbers, strict=True)

    def position(self, row: int) -> int:
        first, _, start, _ = self._chunk(row)[1]
        return start + row - first

    def tables_of(self, row: int) -> list[Pages]:
        groups = len(self.tables) // len(self.output_rows)
        index = self._chunk(row)[0]
        return self.tables[index * groups : (index + 1) * groups]

    def _chunk(self, row: int) -> tuple[int, tuple[int, int, int, int]]:
        return next((i, one) for i, one in enumerate(self.each_chunk()) if one[0] <= row < one[0] + one[1])

    def rows_of_adapters(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for adapter, rows in self.adapters:
            found.setdefault(adapter, []).extend(rows)
        return found


def flatten(step: Step) -> Batch:
    tokens: list[int] = []
    numbers: list[int] = []
    tables: list[Pages] = []
    logits_rows: list[int] = []
    hidden_rows: list[int] = []
    output_rows: list[range] = []
    adapters: list[tuple[int, range]] = []
    seeing: list[tuple[int, int]] = []  # index and first row of chunks whose prompts have pictures
    row = 0
    for chunk in step.chunks:
        sequence, start, stop, needed = chunk.sequence, chunk.start, chunk.stop, chunk.logits_needed
        rows = stop - start
        tokens += sequence.tokens[start:stop]
        if chunk.drafts:
            tokens += chunk.drafts
        numbers += (row, rows, start, sequence.group.limit)
        for table in sequence.tables:
            tables.append(table.pages)  # noqa: PERF401  (a comprehension is a call, for each chunk)
        if sequence.request.adapter:
            adapters.append((sequence.request.adapter, range(row, row + rows)))
        if sequence.request.pictures:
            seeing.append((len(output_rows), row))
        row += rows
        wanted = hidden_rows if needed is HIDDEN else logits_rows
        first = len(wanted)
        if needed is LAST:
            wanted.append(row - 1)
        elif needed is ALL or needed is HIDDEN:
            wanted += range(row - rows, row)
        output_rows.append(range(first, len(wanted)))
    each = (array("q", tokens), array("q", numbers), tables, array("q", logits_rows), tuple(output_rows))
    batch = Batch(*each, array("q", hidden_rows), adapters)
    for index, first in seeing:
        chunk = step.chunks[index]
        _add_pictures(batch, chunk.request.pictures, range(chunk.start, chunk.stop), index, first)
    return batch


def _add_pictures(batch: Batch, spans: Spans, positions: range, index: int = 0, row: int = 0) -> None:
    start, stop = positions.start, positions.stop
    for one in spans:
        first, last = max(one.start, start), min(one.stop, stop)
        if first < last:
            batch.pictures.append((row + first - start, one, range(first - one.start, last - one.start)))
    if (ends := read_ends(spans, start, stop)) is not None:
        batch.ends.append((index, array("q", ends)))
    if (found := axes(spans, start, stop)) is not None:
        batch.axes.append((index, [array("q", one) for one in found]))


def one_chunk(tokens: Sequence[int], start: int, tables: Sequence[PageTable], limit: int, spans: Spans = ()) -> Batch:
    """The batch of `tokens` from position `start` on, with the logits of all rows. spans: the text's pictures."""
    rows = range(len(tokens))
    pages = [table.pages for table in tables]
    batch = Batch(array("q", tokens), array("q", (0, len(rows), start, limit)), pages, array("q", rows), (rows,))
    _add_pictures(batch, spans, range(start, start + len(rows)))
    return batch
