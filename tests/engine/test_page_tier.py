"""The page tier: pages that outlive the pool are read back, and the texts are those of the naive loop."""

import random

import pytest

from tests.engine.hand import ScriptedTier, Watched, build, drain, heard, naive, request, run
from tokenwright.engine import AttentionWindow, Group

FULL = AttentionWindow()
WINDOW = AttentionWindow(size=6)
WITH_SINKS = AttentionWindow(size=6, sinks=3)
GROUPS = {
    "full": [FULL],
    "window": [WINDOW],
    "sinks": [WITH_SINKS],
    "both": [FULL, WITH_SINKS],
    "two parts": [AttentionWindow(stop=7), AttentionWindow(start=7)],
}


def groups(kind, pages=40):
    return [Group(pages, window, page_bytes=1) for window in GROUPS[kind]]


def text(length, first=0):
    return [(first + 7 * place + place * place // 5) % 89 for place in range(length)]


@pytest.mark.parametrize("kind", GROUPS)
def test_another_engine_reads_what_one_has_written(kind):
    tier = ScriptedTier(0, lossless=True)
    run(build(*groups(kind), tier=tier)[0], request(*text(41), most=3))
    engine, model = build(*groups(kind), tier=tier)
    (again,) = run(engine, request(*text(41), most=3))
    assert (again.counts.restored, again.counts.reused, again.counts.prefix_hit) == (40, 40, 40)
    assert again.counts.forwarded == 41 + 3 - 1 - 40
    assert again.tokens == naive(again.request, GROUPS[kind][0])
    assert model.moved > 0, "through the memory"


def test_pages_in_memory_are_not_read():
    tier = ScriptedTier(0, lossless=True)
    engine, _ = build(40, tier=tier)
    run(engine, request(*text(41), most=3))
    (again,) = run(engine, request(*text(41), most=3))
    assert (again.counts.restored, again.counts.reused, tier.looked) == (0, 40, 0)


def test_other_salts_and_secrets_find_nothing():
    tier = ScriptedTier(0, lossless=True)
    run(build(40, tier=tier)[0], request(*text(41), most=3, salt=b"one"))
    for other in (request(*text(41), most=3, salt=b"two"), request(*text(41), most=3), request(*text(41), share=False)):
        assert run(build(40, tier=tier)[0], other)[0].counts.restored == 0
    engine, _ = build(40, tier=tier)
    engine.prefixes.secret = b"another"
    assert run(engine, request(*text(41), most=3, salt=b"one"))[0].counts.restored == 0


def test_others_go_on_while_pages_are_read():
    """One page a step is read for the second text; the first writes a token in each of them."""
    tier = ScriptedTier(0, lossless=True)
    run(build(60, tier=tier)[0], request(*text(41), most=1))

    class OnePage(ScriptedTier):
        def read(self, group, hashes, memory, pages):
            return super().read(group, hashes[:1], memory, pages)

    slow = OnePage(0, lossless=True)
    slow.pages = tier.pages
    engine, _ = build(60, tier=slow)
    busy = engine.submit(request(*text(9, 3), most=30))
    heard(engine.step())
    late = engine.submit(request(*text(41), most=1))
    for step in range(1, 10):
        before = len(busy.tokens)
        heard(engine.step())
        assert (late.counts.restored, late.computed, len(busy.tokens)) == (4 * step, 0, before + 1)
    drain(engine)
    assert late.counts.restored == late.counts.prefix_hit == 40
    assert [one.tokens for one in (busy, late)] == [naive(one.request) for one in (busy, late)]


def test_what_is_not_worth_reading_is_computed():
    tier = ScriptedTier(0, lossless=True)
    run(build(40, tier=tier)[0], request(*text(41), most=3))
    asked = []
    tier.worth_reading = lambda tokens, nbytes: asked.append((tokens, nbytes))
    (again,) = run(build(40, tier=tier)[0], request(*text(41), most=3))
    assert asked == [(40, 10)], "40 tokens in ten pages of a byte"
    assert (again.counts.restored, again.counts.forwarded) == (0, 43)


@pytest.mark.parametrize("lost", [0, 4, 9])
def test_the_text_is_computed_from_the_first_page_that_is_lost(lost):
    tier = ScriptedTier(0, lossless=True)
    run(build(40, tier=tier)[0], request(*text(41), most=3))
    engine, _ = build(40, tier=tier)
    hashes = engine.prefixes.hashes()
    gone = 0, hashes.extend(text(41))[lost]

    real = tier.read

    def read(group, found, memory, pages):
        if gone in [(group, one) for one in found]:
            tier.pages.pop(gone, None)
        return real(group, found, memory, pages)

    tier.read = read
    (again,) = run(engine, request(*text(41), most=3))
    assert (again.counts.restored, again.counts.reused) == (4 * lost, 4 * lost)
    assert again.tokens == naive(again.request)
    assert gone in tier.pages, "it was computed, so it is written again"


def test_pages_that_the_tier_has_lost_are_written_again_when_a_text_uses_them():
    tier = ScriptedTier(0, lossless=True)
    engine, _ = build(40, tier=tier)
    run(engine, request(*text(41), most=1))
    tier.pages.clear()
    run(engine, request(*text(41), most=1))
    assert len(tier.pages) == 10


def test_the_last_use_of_a_text_is_told_in_its_order():
    tier = ScriptedTier(0, lossless=True)
    engine, _ = build(40, tier=tier)
    run(engine, request(*text(41), most=1))
    hashes = engine.prefixes.hashes()
    assert tier.touched == [(0, hashes.extend(text(41)))]


def test_what_memory_still_has_of_a_prefix_is_not_evicted_for_its_other_pages():
    """The first text's last pages were evicted; its first ones are those that were used longest ago."""
    tier = ScriptedTier(0, lossless=True)
    engine, _ = build(12, tier=tier)
    run(engine, request(*text(41), most=3))
    run(engine, request(*text(21, 5), most=3))
    (again,) = run(engine, request(*text(41), most=3))
    assert again.counts.reused == 40 > again.counts.restored > 0
    assert again.tokens == naive(again.request)


def test_a_memory_that_fails_does_not_end_the_engine():
    tier = ScriptedTier(0, lossless=True)
    run(build(40, tier=tier)[0], request(*text(41), most=3))

    class Failing(Watched):
        def write(self, group, pages, contents):
            raise MemoryError

    engine, _ = build(40, tier=tier, model=Failing)
    (again,) = run(engine, request(*text(41), most=3))
    assert (again.counts.restored, again.tokens) == (0, naive(again.request))


@pytest.mark.parametrize("seed", range(60))
def test_random_schedules_over_a_lossy_tier_give_the_naive_texts(seed):
    """Texts with common beginnings, pools that are too small, and engines that come and go over one tier."""
    draw = random.Random(seed)
    kind = draw.choice(list(GROUPS))
    tier, restored = ScriptedTier(seed), 0
    for _ in range(4):
        engine, _ = build(*groups(kind, draw.randint(14, 40)), tier=tier, token_budget=12)
        for _ in range(4):
            asked = [
                request(*text(draw.randint(1, 30), draw.randint(0, 1)), draw.randint(0, 2), most=draw.randint(1, 8))
                for _ in range(draw.randint(1, 4))
            ]
            sequences = run(engine, *asked)
            assert [one.tokens for one in sequences] == [naive(one, GROUPS[kind][0]) for one in asked]
            restored += sum(one.counts.restored for one in sequences)
    assert restored > 0
