"""A page table is a dictionary in the order of the text, and plain numbers for who reads it by its address."""

import ctypes
import gc
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.hand import build, request
from tests.engine.invariants import check_invariants
from tokenwright.engine import AttentionWindow, Group, Pick
from tokenwright.engine.layer_group import PageTable

PAGES = st.integers(0, 12)
TURNS = st.lists(st.tuples(st.sampled_from(["set", "set", "set", "pop", "popitem", "copy"]), PAGES, PAGES), max_size=40)


def by_address(table):
    """The numbers as native code finds them."""
    address, count = table.pages.buffer_info()
    return list((ctypes.c_int * count).from_address(address)) if count else []


@given(TURNS)
def test_it_is_a_dictionary(turns):
    table, right = PageTable(), {}
    for name, page, found in turns:
        match name:
            case "set":
                table[page] = right[page] = found
            case "pop":
                assert table.pop(page, None) == right.pop(page, None)
            case "popitem" if right:
                assert table.popitem() == (max(right), right.pop(max(right)))
            case "copy":
                other = table.copy()
                table[20] = 1  # which is none of the copy's business
                table = other
        assert table == right
        assert list(table.items()) == sorted(right.items())
        assert len(table) == len(right) and bool(table) is bool(right)
        assert all((page in table) is (page in right) for page in range(-2, 15))
        assert by_address(table) == [right.get(page, -1) for page in range(max(right, default=-1) + 1)]


def test_what_is_absent_is_an_error():
    table = PageTable()
    table[2] = 5
    for page in (-1, 0, 1, 3):
        with pytest.raises(KeyError):
            table[page]
        with pytest.raises(KeyError):
            del table[page]
    del table[2]
    with pytest.raises(KeyError):
        table.popitem()


def work(act):
    """The bytecodes that a call takes: what grows with a loop, whatever the machine."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 counts none where no frame asks before tracing begins
    gc.disable()  # finalizers of other tests' objects would be counted
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


@pytest.mark.parametrize("window", [AttentionWindow(), AttentionWindow(size=40, sinks=3), AttentionWindow(stop=20)])
def test_a_step_costs_the_same_however_long_the_text_is(window):
    """Within a page, scheduling and committing a token take as many bytecodes after 6 pages as after 600."""
    found = []
    for length in (96, 9600):
        engine, _ = build(Group(700, window), page_size=16, token_budget=10_000, context=10_000)
        scheduler = engine.scheduler
        sequence = engine.submit(request(*[5 + place % 90 for place in range(length)], most=50))
        while len(sequence.written) < 8:
            engine.scheduler.commit(
                step := engine.scheduler.schedule(), [Pick(c.sequence.id, (7,), (0.0,)) for c in step.chunks]
            )
        scheduler = engine.scheduler
        steps = []
        scheduling = work(lambda: steps.append(scheduler.schedule()))  # noqa: B023  (called at once)
        committing = work(lambda: scheduler.commit(steps[0], [Pick(sequence.id, (7,), (0.0,))]))  # noqa: B023
        found.append((scheduling, committing))
        check_invariants(scheduler)
    assert found[0] == found[1]
