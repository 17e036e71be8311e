"""Pins: prefixes outlive a flood for their time, in their share of the pages, and at no running text's cost."""

import pytest

from tests.engine.hand import FULL, build, drain, naive, request, run
from tokenwright.engine import Group
from tokenwright.engine.layer_group import StateWindow
from tokenwright.engine.pins import MOST_SESSIONS, Mark, Pins, Retention

SHARED = tuple(range(1, 33))  # eight pages


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def engine_of(*groups, share=0.5, **options):
    """An engine, its pins and their clock."""
    engine, _ = build(*groups, **options)
    clock = Clock()
    pins = engine.scheduler.kv.pins = Pins(engine.prefixes, share, clock)
    return engine, pins, clock


def marked(*places, ttl=100.0, owner="", session="", explicit=False):
    return Retention(tuple(Mark(at, ttl) for at in places), owner, session, explicit)


def asked(prompt, *places, most=2, salt=b"", **options):
    return request(*prompt, most=most, salt=salt, retention=marked(*places, owner=salt.decode(), **options))


def flood(engine, count=12):
    """Other prompts, in all more than the pool holds; each is computed as it must be."""
    for first in range(count):
        (one,) = run(engine, request(*range(100 + first, 126 + first), most=3))
        assert one.tokens == naive(one.request)


def hit(engine, prompt, **options):
    return run(engine, request(*prompt, 97, most=1, **options))[0].counts.prefix_hit


def test_a_pinned_prefix_survives_a_flood_for_its_time_and_leaves_after_it():
    engine, pins, clock = engine_of(30)
    (first,) = run(engine, asked([*SHARED, 3, 4, 5], 32))
    assert first.counts.pinned == [32] and pins.pages() == [8]
    flood(engine)
    clock.now = 99
    assert hit(engine, SHARED) == 32, "and its use renews it"
    clock.now = 198
    flood(engine)
    assert hit(engine, SHARED) == 32
    clock.now = 299
    flood(engine)
    assert hit(engine, SHARED) == 0 and not len(pins) and engine.pool.available == 30
    run(engine, request(*SHARED, 3))
    flood(engine)
    assert hit(engine, SHARED) == 0, "nothing is pinned unasked"


@pytest.mark.parametrize("at", [12, 13, 15])
def test_a_state_is_kept_at_exactly_the_mark(at):
    engine, pins, _ = engine_of(Group(30, FULL), Group(12, StateWindow(every=1000)))
    (first,) = run(engine, asked([*SHARED, 3, 4], at, most=6))
    assert first.counts.pinned == [at] and first.tokens == naive(first.request)
    flood(engine)
    assert hit(engine, SHARED[:at]) == at
    pins.release("", "")
    assert engine.pool.available == engine.pool.pages
    flood(engine)
    assert hit(engine, SHARED[:at]) == 0


def test_pins_keep_within_their_share_and_the_oldest_yields():
    engine, pins, _ = engine_of(40, share=0.5)  # twenty pages
    texts = [[*range(first, first + 32)] for first in (1, 101, 201)]
    assert [run(engine, asked([*text, 5], 32))[0].counts.pinned for text in texts] == [[32]] * 3
    assert len(pins) == 2 and pins.pages() == [16]
    assert run(engine, asked([*range(300, 385)], 32, 84))[0].counts.pinned == [32, 0], "more than all pins may have"
    flood(engine)
    assert [hit(engine, text) for text in texts] == [0, 0, 32]


def test_a_client_with_more_pins_yields_to_one_with_fewer():
    engine, pins, _ = engine_of(40)
    for first in (1, 101):
        run(engine, asked([*range(first, first + 32), 5], 32, salt=b"a"))
    assert run(engine, asked([*range(1, 33), 5], 32, salt=b"b"))[0].counts.pinned == [32]
    assert [pins.pages(owner) for owner in ("a", "b")] == [[8], [8]]
    for first in (201, 301):
        assert run(engine, asked([*range(first, first + 32), 5], 32, salt=b"a"))[0].counts.pinned == [32]
    assert [pins.pages(owner) for owner in ("a", "b")] == [[8], [8]], "its own oldest one yields, not another's"
    flood(engine)
    assert hit(engine, range(1, 33), salt=b"b") == 32


def test_a_running_text_is_not_preempted_for_the_pins_of_others():
    engine, pins, _ = engine_of(20)
    run(engine, asked([*SHARED, 5], 32, salt=b"a"))
    texts = [engine.submit(request(*range(first, first + 9), most=30, salt=b"b")) for first in (1, 50)]
    drain(engine)
    assert [one.tokens for one in texts] == [naive(one.request) for one in texts]
    assert [one.counts.preemptions for one in texts] == [0, 0] and not len(pins)


def test_the_last_text_takes_all_pins_and_a_client_keeps_its_own_before_it():
    engine, pins, _ = engine_of(20)
    run(engine, asked([*SHARED, 5], 32))
    (big,) = run(engine, request(*range(100, 170), most=5))
    assert big.tokens == naive(big.request) and not len(pins), "whatever the pool can hold is served"
    run(engine, asked([*SHARED, 5], 32))
    texts = [engine.submit(request(*range(first, first + 9), most=24)) for first in (40, 60)]
    drain(engine)
    assert sum(one.counts.preemptions for one in texts) > 0 and len(pins) == 1
    assert [one.tokens for one in texts] == [naive(one.request) for one in texts]


def test_explicit_caches_nothing_behind_the_last_mark():
    engine, pins, _ = engine_of(60)
    run(engine, asked([*SHARED, 3], 14, explicit=True, most=8))
    assert hit(engine, SHARED) == 12
    run(engine, asked([*range(40, 80)], explicit=True))
    assert hit(engine, range(40, 80)) == 0 and pins.pages() == [3]


def test_a_session_is_released_for_its_owner_only():
    engine, pins, _ = engine_of(60)
    run(engine, asked([*SHARED, 3], 8, 32, salt=b"a", session="one"), asked([*SHARED, 3], 32, salt=b"b", session="one"))
    run(engine, asked([*range(50, 70)], 16, salt=b"a", session="two"))
    assert pins.release("a", "one") == 2 and pins.release("a", "one") == 0
    assert [pins.pages(owner) for owner in ("a", "b")] == [[4], [8]]


def test_a_prefix_of_two_sessions_stays_for_the_other():
    engine, pins, _ = engine_of(60)
    for session in ("one", "two", "one"):
        run(engine, asked([*SHARED, 3], 32, session=session))
    [pin] = pins
    assert pins.release("", "one") == 1 and list(pins) == [pin] and pin.session == "two"
    assert pins.release("", "two") == 1 and not len(pins) and engine.pool.available == 60
    for number in range(MOST_SESSIONS + 9):
        run(engine, asked([*SHARED, 3], 32, session=str(number)))
    assert len(next(iter(pins)).sessions) == MOST_SESSIONS


def test_what_shares_nothing_pins_nothing():
    engine, pins, _ = engine_of(60)
    for options in ({"share": False}, {"cache": False}):
        (one,) = run(engine, request(*SHARED, retention=marked(16), **options))
        assert one.counts.pinned == [0] and not len(pins) and one.tokens == naive(one.request)
