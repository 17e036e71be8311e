"""What a row reads, against the definition asked of every position."""

from itertools import pairwise

from hypothesis import assume, example, given
from hypothesis import strategies as st

from tests.engine.hand import is_read, is_read_from
from tokenwright.engine import AttentionWindow
from tokenwright.engine.layer_group import StateWindow

LONGEST = 40
attention_windows = st.builds(
    AttentionWindow,
    size=st.none() | st.integers(1, 20),
    sinks=st.integers(0, 10),
    start=st.integers(0, 20),
    stop=st.none() | st.integers(1, LONGEST),
)
places = st.integers(0, LONGEST)


def positions(window, row, end):
    """Those below `end` that a row from `row` on reads."""
    return [place for place in range(end) if is_read_from(window, place, row)]


@given(attention_windows, places, places)
def test_the_nearest_row_stands_for_all_that_follow(window, place, row):
    """What the other tests rest on: a position that some later row reads is read by the nearest one as well."""
    assert is_read_from(window, place, row) is any(is_read(window, place, later) for later in range(row, 3 * LONGEST))


@given(attention_windows, places, places)
def test_spans_are_the_positions_that_are_read_in_order(window, row, end):
    spans = window.spans(row, end)
    assert [place for span in spans for place in span] == positions(window, row, end)
    assert window.tokens_read(row, end) == len(positions(window, row, end))
    assert all(len(span) for span in spans) and len(spans) <= 2


@given(attention_windows, places)
def test_one_row_reads_what_the_definition_says(window, row):
    read = [place for span in window.spans(row, row + 1) for place in span]
    assert read == [place for place in range(row + 1) if is_read(window, place, row)]


@given(attention_windows, places, places, st.integers(1, 9))
def test_pages_are_those_the_positions_lie_in_each_once(window, row, end, size):
    pages = window.pages(row, end, size)
    flat = [page for span in pages for page in span]
    assert flat == sorted({place // size for place in positions(window, row, end)})
    assert all(one.stop < other.start for one, other in pairwise(pages)), "side by side is one span"


@given(attention_windows.filter(lambda window: window.size is not None), places, st.integers(1, 9))
def test_behind_are_the_pages_of_earlier_rows_that_no_later_row_reads(window, row, size):
    """Of those that some row of the text up to `row` has read or written."""
    used = {place // size for place in range(row) if is_read(window, place, place)}
    read = {place // size for place in positions(window, row, row)}
    assert used & set(window.expired_pages(row, size)) == used - read


def taken(window, tokens, chunk, size):
    """The most pages that some chunk of a text reads and writes, tried one by one."""
    return max(
        len({place // size for place in positions(window, row, min(row + length, tokens))})
        for row in range(tokens)
        for length in range(1, chunk + 1)
    )


@given(attention_windows, st.integers(1, LONGEST), st.integers(1, 12), st.integers(1, 9))
@example(AttentionWindow(size=5, sinks=3), 40, 2, 4)
def test_no_chunk_takes_more_pages_than_the_most(window, tokens, chunk, size):
    assert taken(window, tokens, chunk, size) <= window.max_pages(tokens, chunk, size)


@given(st.none() | st.integers(1, 9), st.integers(0, 4), st.integers(1, 6), st.integers(1, 5), st.integers(1, LONGEST))
def test_the_most_is_really_taken(near, sinks, chunk, size, tokens):
    """Where it matters, the bound is no guess: some chunk of a long text takes as many. Shorter ones take all."""
    window = AttentionWindow(near, sinks)
    far = -(-sinks // size) * size + (near or 0) + chunk + 2 * size  # the window is away from the sinks
    assume(near is None or tokens <= max(1, near - 1) or tokens >= far)
    assert taken(window, tokens, chunk, size) == window.max_pages(tokens, chunk, size)


@given(attention_windows, st.integers(1, LONGEST), st.integers(1, 12), st.integers(1, 9))
def test_longer_texts_and_longer_chunks_never_take_less(window, tokens, chunk, size):
    most = window.max_pages(tokens, chunk, size)
    assert most <= window.max_pages(tokens + 1, chunk, size)
    assert most <= window.max_pages(tokens, chunk + 1, size)


def test_the_picture_in_the_docstring():
    assert AttentionWindow(size=4, sinks=2).spans(9, 10) == [range(2), range(6, 10)]


def holds_a_multiple(every, page, size):
    """Whether the end of some page is the first at or behind a multiple of `every`."""
    return any(page * size < count <= (page + 1) * size for count in range(every, (page + 1) * size + 1, every))


@given(st.integers(1, 20), places, places, st.integers(1, 9))
@example(8, 3, 14, 4)
def test_a_chunk_reads_one_state_and_writes_those_that_are_kept_and_the_last(every, row, end, size):
    assume(row <= end)
    window = StateWindow(every=every)
    wanted = {(row - 1) // size} if row else set()
    if row < end:
        full = range(row // size, end // size)
        wanted |= {(end - 1) // size, *(page for page in full if holds_a_multiple(every, page, size))}
    assert [page for span in window.pages(row, end, size) for page in span] == sorted(wanted)
    assert len(wanted) <= window.max_pages(end, end - row, size)
    assert all(window.cached(page, size) is holds_a_multiple(every, page, size) for page in range(end // size))


@given(st.integers(1, 20), places, st.integers(1, 9))
def test_of_states_all_but_the_last_expire(every, row, size):
    assert set(StateWindow(every=every).expired_pages(row, size)) == set(range(max(0, row - 1) // size))
