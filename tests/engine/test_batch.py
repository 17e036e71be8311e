"""A batch says what its step says, copies no page table, and survives pickling."""

import pickle
from collections.abc import Sequence
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.chunks import BareChunk
from tokenwright.engine import Batch, LogitsNeeded, flatten, one_chunk
from tokenwright.engine.page_table import PageTable

PAGES = st.dictionaries(st.integers(0, 40), st.integers(0, 2**31 - 1), max_size=8)


@st.composite
def steps(draw: st.DrawFn) -> list[BareChunk]:
    groups = draw(st.integers(1, 3))
    chunk = st.builds(
        BareChunk,
        tokens=st.lists(st.integers(0, 2**40), min_size=1, max_size=6).map(tuple),
        start=st.integers(0, 2**40),
        tables=st.lists(PAGES.map(PageTable), min_size=groups, max_size=groups),
        limit=st.integers(1, 2**40),
        logits_needed=st.sampled_from(LogitsNeeded),
    )
    return draw(st.lists(chunk, min_size=1, max_size=5))


def wanted(chunk: BareChunk) -> list[int]:
    """The rows of a chunk whose logits are needed, counted in the chunk."""
    rows = list(range(len(chunk.tokens)))
    return {LogitsNeeded.NONE: [], LogitsNeeded.LAST: rows[-1:], LogitsNeeded.ALL: rows}[chunk.logits_needed]


@given(chunks=steps())
def test_a_batch_describes_its_step(chunks: Sequence[BareChunk]) -> None:
    batch = flatten(chunks)
    edges = [0, *accumulate(len(chunk.tokens) for chunk in chunks)]
    assert list(batch.tokens) == [token for chunk in chunks for token in chunk.tokens]
    assert list(batch.each_chunk()) == [
        (first, stop - first, chunk.start, chunk.limit)
        for chunk, (first, stop) in zip(chunks, pairwise(edges), strict=True)
    ]
    assert list(batch.logits_rows) == [
        first + row for chunk, first in zip(chunks, edges, strict=False) for row in wanted(chunk)
    ]
    for chunk, first, rows in zip(chunks, edges, batch.output_rows, strict=False):
        assert [batch.logits_rows[row] - first for row in rows] == wanted(chunk)
    assert [row for rows in batch.output_rows for row in rows] == list(range(len(batch.logits_rows)))
    assert len(batch.output_rows) == len(chunks)


@given(chunks=steps())
def test_page_tables_are_the_sequences_own(chunks: Sequence[BareChunk]) -> None:
    """In their order, and not copied: a step over long texts must not take longer."""
    tables = [table for chunk in chunks for table in chunk.tables]
    for pages, table in zip(flatten(chunks).tables, tables, strict=True):
        assert pages is table.pages
        assert {page: found for page, found in enumerate(pages) if found != PageTable.ABSENT} == dict(table)


@given(chunks=steps())
def test_a_pickled_batch_is_the_same_with_tables_of_its_own(chunks: Sequence[BareChunk]) -> None:
    batch = flatten(chunks)
    sent = pickle.dumps(batch)
    copy = pickle.loads(sent)
    assert copy == batch
    assert [one.typecode for one in (copy.tokens, copy.chunks, copy.logits_rows, *copy.tables)] == [
        *"qqq",
        *"i" * len(copy.tables),
    ]
    for chunk in chunks:
        for table in chunk.tables:
            table[41] = 5
    assert batch != copy == pickle.loads(sent)


@given(chunks=steps())
def test_one_chunk_alone_is_a_step_of_one_chunk(chunks: Sequence[BareChunk]) -> None:
    first = chunks[0]
    whole = BareChunk(first.tokens, first.start, first.tables, first.limit)
    assert one_chunk(first.tokens, first.start, first.tables, first.limit) == flatten([whole])


def test_numbers_that_are_no_whole_chunks_are_refused() -> None:
    batch = one_chunk([1, 2], 0, [PageTable({0: 0})], 9)
    batch.chunks.pop()
    with pytest.raises(ValueError, match="zip"):
        list(batch.each_chunk())


def test_nothing_computed_is_an_empty_batch() -> None:
    empty = flatten([])
    assert (list(empty.tokens), list(empty.each_chunk()), empty.tables, empty.output_rows) == ([], [], [], ())
    assert isinstance(empty, Batch)
