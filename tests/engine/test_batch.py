"""A batch says what its step says, copies no page table, and survives pickling."""

import pickle
from dataclasses import replace
from itertools import accumulate, compress, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.hand import sequence_of
from tokenwright.engine import Batch, Chunk, LogitsNeeded, Step, flatten, one_chunk
from tokenwright.engine.layer_group import PageTable

PAGES = st.dictionaries(st.integers(0, 40), st.integers(0, 2**31 - 1), max_size=8)


@st.composite
def chunks_of(draw: st.DrawFn, groups: int) -> Chunk:
    """Some of a sequence's tokens."""
    tokens = draw(st.lists(st.integers(0, 2**40), min_size=1, max_size=9))
    tables = draw(st.lists(PAGES.map(PageTable), min_size=groups, max_size=groups))
    start = draw(st.integers(0, len(tokens) - 1))
    stop = draw(st.integers(start + 1, len(tokens)))
    sequence = sequence_of(*tokens, limit=draw(st.integers(1, 2**40)), tables=tables)
    return Chunk(sequence, start, stop, draw(st.sampled_from(LogitsNeeded)))


def steps() -> st.SearchStrategy[Step]:
    chunks = st.integers(1, 3).flatmap(lambda groups: st.lists(chunks_of(groups), min_size=1, max_size=5))
    return chunks.map(tuple).map(Step)


def wanted(chunk: Chunk, hidden: bool = False) -> list[int]:
    """The rows of a chunk whose logits, or hidden states, are needed, counted in the chunk."""
    rows = list(range(len(chunk.tokens)))
    if hidden or chunk.logits_needed is LogitsNeeded.HIDDEN:
        return rows if hidden and chunk.logits_needed is LogitsNeeded.HIDDEN else []
    return {LogitsNeeded.NONE: [], LogitsNeeded.LAST: rows[-1:], LogitsNeeded.ALL: rows}[chunk.logits_needed]


@given(step=steps())
def test_a_batch_describes_its_step(step: Step) -> None:
    batch, chunks = flatten(step), step.chunks
    edges = [0, *accumulate(len(chunk.tokens) for chunk in chunks)]
    assert list(batch.tokens) == [token for chunk in chunks for token in chunk.tokens]
    assert list(batch.each_chunk()) == [
        (first, stop - first, chunk.start, chunk.sequence.limit)
        for chunk, (first, stop) in zip(chunks, pairwise(edges), strict=True)
    ]
    for hidden, found in ((False, batch.logits_rows), (True, batch.hidden_rows)):
        assert list(found) == [
            first + row for chunk, first in zip(chunks, edges, strict=False) for row in wanted(chunk, hidden)
        ]
        of_these = [(chunk.logits_needed is LogitsNeeded.HIDDEN) is hidden for chunk in chunks]
        for chunk, first, rows in compress(zip(chunks, edges, batch.output_rows, strict=False), of_these):
            assert [found[row] - first for row in rows] == wanted(chunk, hidden)
        its = compress(batch.output_rows, of_these)
        assert [row for rows in its for row in rows] == list(range(len(found)))
    assert len(batch.output_rows) == len(chunks)


@given(step=steps())
def test_page_tables_are_the_sequences_own(step: Step) -> None:
    """In their order, and not copied: a step over long texts must not take longer."""
    tables = [table for chunk in step.chunks for table in chunk.sequence.tables]
    for pages, table in zip(flatten(step).tables, tables, strict=True):
        assert pages is table.pages
        assert {page: found for page, found in enumerate(pages) if found != PageTable.ABSENT} == dict(table)


@given(step=steps())
def test_a_pickled_batch_is_the_same_with_tables_of_its_own(step: Step) -> None:
    batch = flatten(step)
    sent = pickle.dumps(batch)
    copy = pickle.loads(sent)
    assert copy == batch
    assert [one.typecode for one in (copy.tokens, copy.chunks, copy.logits_rows, *copy.tables)] == [
        *"qqq",
        *"i" * len(copy.tables),
    ]
    for chunk in step.chunks:
        for table in chunk.sequence.tables:
            table[41] = 5
    assert batch != copy == pickle.loads(sent)


@given(step=steps())
def test_one_chunk_alone_is_a_step_of_one_chunk(step: Step) -> None:
    chunk = replace(step.chunks[0], logits_needed=LogitsNeeded.ALL)
    assert one_chunk(chunk.tokens, chunk.start, chunk.sequence.tables, chunk.sequence.limit) == flatten(Step((chunk,)))


def test_numbers_that_are_no_whole_chunks_are_refused() -> None:
    batch = one_chunk([1, 2], 0, [PageTable({0: 0})], 9)
    batch.chunks.pop()
    with pytest.raises(ValueError, match="zip"):
        list(batch.each_chunk())


def test_nothing_computed_is_an_empty_batch() -> None:
    empty = flatten(Step(()))
    assert (list(empty.tokens), list(empty.each_chunk()), empty.tables, empty.output_rows) == ([], [], [], ())
    assert isinstance(empty, Batch)
