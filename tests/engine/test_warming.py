"""Warm-ups: a following prompt finds what was computed ahead; any request comes first; no younger page makes way."""

import pytest

from tests.engine.hand import FULL, build, naive, request, run
from tests.engine.invariants import check_invariants
from tokenwright.engine import Group
from tokenwright.engine.layer_group import StateWindow
from tokenwright.engine.warming import CHUNK, MOST_QUEUED, WarmRules

TEXT = tuple(range(1, 91))  # twenty-two pages and two tokens
KINDS = ((Group(60, FULL),), (Group(60, FULL), Group(12, StateWindow(every=1000))))


def warm(engine, text, after=(), **rules):
    """Ask for a text ahead; returns the tokens of its chunks, as the client is told."""
    told = []
    engine.warm(request(*text, 0, most=0), WarmRules(after, computed=lambda found, n: told.append((found, n)), **rules))
    return told


@pytest.mark.parametrize("groups", KINDS)
def test_a_following_prompt_finds_exactly_what_was_warmed(groups):
    engine, _ = build(*groups)
    told = warm(engine, TEXT)
    assert not engine.busy and engine.due
    while engine.due:
        assert engine.step() == []
    chunk = min(CHUNK, engine.scheduler.token_budget)
    assert {n for _, n in told[:-1]} == {chunk} and sum(n for _, n in told) == len(TEXT)
    assert engine.pool.available == engine.pool.pages
    (one,) = run(engine, request(*TEXT, 7, 8, most=3))
    assert one.counts.prefix_hit == len(TEXT) and one.tokens == naive(one.request)
    check_invariants(engine.scheduler)


@pytest.mark.parametrize("groups", KINDS)
def test_any_request_comes_first_and_nothing_is_computed_twice(groups):
    engine, model = build(*groups)
    told = warm(engine, TEXT)
    engine.step()
    steps, held = len(model.steps), engine.pool.available
    assert held < engine.pool.pages
    other = engine.submit(request(200, 201, most=2))
    engine.step()
    assert [chunk.sequence for step in model.steps[steps:] for chunk in step.chunks] == [other]
    assert not any(one.pages for one in engine.scheduler.warming), "its pages were left at once"
    while engine.busy:
        engine.step()
    while engine.due:
        engine.step()
    assert sum(n for _, n in told) == len(TEXT) and engine.pool.available == engine.pool.pages
    (one,) = run(engine, request(*TEXT, 7, most=1))
    assert one.counts.prefix_hit == len(TEXT)


def test_no_page_that_was_used_later_makes_way():
    older, own, younger = (list(range(start, start + 40)) for start in (100, 200, 300))
    engine, _ = build(32)
    for text in (older, own, younger):  # ten pages each
        run(engine, request(*text, most=1))
    told = warm(engine, [*own[:20], *TEXT], after=own)
    while engine.due:
        engine.step()
    assert 0 < sum(n for _, n in told) < len(TEXT), "it stops where only younger pages are left"
    hits = [run(engine, request(*text, 7, most=1))[0].counts.prefix_hit for text in (younger, older)]
    assert hits[0] == 40 and hits[1] < 40


def test_it_waits_while_the_machine_is_busy_and_the_oldest_leave():
    engine, _ = build(60)
    free = False
    told = [warm(engine, [number, *TEXT], allowed=lambda: free) for number in range(MOST_QUEUED + 2)]
    assert not engine.due and engine.step() == [] and not any(told)
    assert len(engine.scheduler.warming.queue) == MOST_QUEUED
    free = True
    while engine.due:
        engine.step()
    assert [bool(one) for one in told[:3]] == [False, False, True]


def test_a_failing_model_ends_the_warm_up_and_nothing_else():
    engine, model = build(60)
    told = warm(engine, TEXT)
    model.breaks = True
    engine.step()
    model.breaks = False
    assert not engine.due and told == [] and engine.pool.available == engine.pool.pages
    (one,) = run(engine, request(1, 2, 3))
    assert one.tokens == naive(one.request)
