"""Pictures that a tower computes in slices between steps: random schedules against the definition, and faults."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from tests.engine import test_branches as branches
from tests.engine.hand import FULL, Planted, Watched, build, drain, heard, naive, request, running
from tests.engine.invariants import check_invariants
from tokenwright.engine import Failed, Finished, Group, Token
from tokenwright.engine.layer_group import StateWindow
from tokenwright.engine.pictures import PictureSpan, Pixels
from tokenwright.engine.warming import WarmRules


class Tower:
    """A PictureSource that counts slices. most: pictures that it keeps. broken: digests whose last slice fails."""

    def __init__(self, slices, most=1000, broken=()):
        self.slices, self.most, self.broken = slices, most, broken
        self.kept, self.work, self.log, self.computed = {}, None, [], Counter()

    def ready(self, pixels):
        if found := pixels.digest in self.kept:
            self.kept[pixels.digest] = self.kept.pop(pixels.digest)
        return found

    def compute(self, pixels):
        if self.work is None or self.work[0] != pixels.digest:
            self.work = [pixels.digest, 0]
        self.work[1] += 1
        self.log.append(pixels.digest)
        if self.work[1] < self.slices[pixels.digest]:
            return False
        self.work = None
        if pixels.digest in self.broken:
            raise Planted
        self.kept[pixels.digest] = None
        self.computed[pixels.digest] += 1
        while len(self.kept) > self.most:
            del self.kept[next(iter(self.kept))]
        return True

    def stop(self, wanted):
        if self.work is not None and self.work[0] not in wanted:
            self.work = None


class Sighted(Watched):
    """Holds every chunk against the tower: what a row is computed from is there."""

    tower = None

    def forward(self, step):
        for chunk in step.chunks:
            for one in chunk.request.pictures:
                if one.start < chunk.stop and one.stop > chunk.start:
                    assert one.pixels.digest in self.tower.kept, "a row was computed without its picture"
                    assert not one.bidirectional or chunk.stop >= one.stop, "a picture was cut"
        return super().forward(step)


def seeing(tower, *groups, **options):
    engine, model = build(*groups, model=Sighted, **options)
    engine.scheduler.pictures.source = model.tower = tower
    engine.clock = lambda: 0.0  # one slice between two steps
    return engine


def pixels(name):
    return Pixels(b"", 1, 1, 1, name.encode())


def asked(*parts, most=4, whole=False):
    """A request whose prompt has tokens (numbers) and pictures (names, with their rows)."""
    tokens, spans = [], []
    for part in parts:
        if isinstance(part, int):
            tokens.append(part)
        else:
            name, rows = part
            spans.append(PictureSpan(len(tokens), len(tokens) + rows, pixels(name), bidirectional=whole))
            tokens += [50] * rows
    return request(*tokens, most=most, pictures=tuple(spans))


def test_a_text_goes_on_while_a_picture_is_computed():
    tower = Tower({b"a": 20})
    engine = seeing(tower, 40)
    text = engine.submit(request(1, 2, 3, most=60))
    heard(engine.step())
    picture = engine.submit(asked(4, ("a", 6), 5))
    for slices in range(1, 21):
        events = heard(engine.step())
        assert [type(one) for one in events if one.sequence == text.id] == [Token]
        assert len(tower.log) == slices and not picture.computed
    assert engine.scheduler.waiting and running(engine) == [text]  # the picture's text has had neither slot nor pages
    drain(engine)
    assert picture.tokens == naive(picture.request) and text.tokens == naive(text.request)


def test_a_tower_takes_as_much_time_as_the_step():
    tower = Tower({b"a": 9})
    engine = seeing(tower, 40)
    now = iter(range(100))  # each look at the clock is a second later, so a step takes one
    engine.clock = lambda: 0.1 * next(now)
    engine.submit(request(1, 2, most=60))
    engine.submit(asked(("a", 6), 5))
    heard(engine.step())
    assert len(tower.log) == 1
    engine.clock = iter([0.0, 1.0, 1.0, 1.1, 1.2, 1.3, 1.4]).__next__  # a step of a second, slices of a tenth
    heard(engine.step())
    assert len(tower.log) == 1 + 3  # at most a quarter of a second


def test_long_prompts_that_fill_each_step_hold_up_no_picture():
    tower = Tower({b"a": 20})
    engine = seeing(tower, 200, token_budget=16, max_sequences=4)
    engine.submit(request(*range(160), most=1, share=False))
    picture, steps = engine.submit(asked(4, ("a", 6), 5)), 0
    while not picture.computed:
        while len(engine.scheduler.waiting) < 3:
            engine.submit(request(*range(160), most=1, share=False))
        heard(engine.step())
        steps += 1
    assert steps < 40 and len(tower.log) == 20


def test_one_picture_of_two_texts_is_computed_once():
    tower = Tower({b"a": 5, b"b": 2})
    engine = seeing(tower, 40)
    both = [engine.submit(asked(at, ("a", 6), 5, ("b", 3), 1)) for at in range(2)]
    drain(engine)
    assert tower.computed == {b"a": 1, b"b": 1} and len(tower.log) == 7
    assert all(one.tokens == naive(one.request) for one in both)


def test_a_cached_prefix_needs_no_picture():
    tower = Tower({b"a": 5, b"b": 5}, most=1)
    engine = seeing(tower, 40)
    for parts in ((1, ("a", 7), 5), (2, ("b", 7), 5), (1, ("a", 7), 6)):
        engine.submit(asked(*parts))
        drain(engine)
    assert tower.computed == {b"a": 1, b"b": 1}


def test_beams_wait_for_one_that_awaits_a_picture():
    """Put off, two beams are computed again; then the picture is evicted that the last page of the third has."""
    engine = branches.build([FULL], 60, 4, 64, 8)
    tower = engine.scheduler.pictures.source = Tower({b"a": 3})
    engine.clock = lambda: 0.0
    text = asked(1, 2, 3, ("a", 6), 5)
    asks = replace(branches.beams(prompt=text.prompt), pictures=text.pictures)
    first = engine.submit(asks)
    while len(first.group.sequences) < 3:
        heard(engine.step())
    engine.scheduler.preempt(first.group)
    tower.kept.clear()
    *others, last = first.group.sequences
    while any(beam.pending > 1 for beam in others):
        heard(engine.step())
    assert not last.computed
    tower.kept.clear()
    drain(engine)
    assert asks.search.found == branches.Search(3, 5).run(text.prompt)


def test_work_on_a_cancelled_picture_ends():
    tower = Tower({b"a": 50, b"b": 3})
    engine = seeing(tower, 40)
    one, other = engine.submit(asked(("a", 6), 5)), engine.submit(asked(("b", 6), 5))
    for _ in range(10):
        heard(engine.step())
    assert tower.log == 10 * [b"a"]
    engine.abort(one.id)
    assert tower.work is None
    drain(engine)
    assert tower.log[10:] == 3 * [b"b"] and other.tokens == naive(other.request)


def test_an_error_of_the_tower_ends_those_that_need_the_picture():
    tower = Tower({b"a": 3, b"b": 3}, broken={b"a"})
    engine = seeing(tower, 60)
    lost = [engine.submit(asked(1, ("b", 4), ("a", 6), 5)), engine.submit(asked(("a", 6), 5))]
    kept = [engine.submit(asked(("b", 4), 5, most=9)), engine.submit(request(1, 2, 3, most=9))]
    events = drain(engine)
    assert {one.sequence for one in events if isinstance(one, Failed)} == {one.id for one in lost}
    assert all(one.tokens == naive(one.request) for one in kept)


def test_a_warm_up_computes_its_picture_in_slices():
    tower = Tower({b"a": 8})
    engine = seeing(tower, 40)
    engine.warm(asked(1, 2, ("a", 6), 5, most=0), WarmRules())
    heard(engine.step())  # the text before it
    for slices in range(1, 9):
        heard(engine.step())
        assert len(tower.log) == slices
    while engine.due:
        heard(engine.step())
    sequence = engine.submit(asked(1, 2, ("a", 6), 5))
    drain(engine)
    assert sequence.counts.reused >= 8 and len(tower.log) == 8


def warmed(engine, *parts, **options):
    engine.warm(asked(*parts, 0, most=0, **options), WarmRules())
    for _ in range(100):
        if engine.due:
            heard(engine.step())
            check_invariants(engine.scheduler)
    sequence = engine.submit(asked(*parts, 8, **options))
    drain(engine)
    assert sequence.counts.prefix_hit == len(sequence.request.prompt) - 1, "the warm-up has ended early"
    assert sequence.tokens == naive(sequence.request)


@pytest.mark.parametrize("rows", [12, 45])
def test_a_warm_up_cuts_no_picture_whose_rows_read_each_other(rows):
    engine = seeing(Tower({b"a": 2, b"b": 2}), 80, token_budget=64)
    warmed(engine, *range(25), ("a", rows), 5, ("b", rows), 6, whole=True)


@pytest.mark.parametrize("groups", [(60,), (Group(60), Group(12, StateWindow(every=1000)))])
def test_a_warm_up_needs_one_picture_at_a_time(groups):
    engine = seeing(Tower({b"a": 2, b"b": 2, b"c": 2}, most=1), *groups, token_budget=64)
    warmed(engine, ("a", 6), 5, ("b", 6), ("c", 6), 6)


def test_pages_come_while_a_warm_up_awaits_its_picture():
    engine = seeing(Tower({b"a": 3}), 40)
    parts = (("a", 6), 5)
    asks = asked(*parts, most=0)
    engine.warm(asks, WarmRules())
    heard(engine.step())
    tokens, prefixes = list(asks.prompt[:4]), engine.prefixes
    prefixes.insert_pages(prefixes.hashes(b"", asks.pictures), tokens, [[0]], [[tokens]])  # as a cache file does
    warmed(engine, *parts)
    assert engine.pool.available == engine.pool.pages


def test_a_warm_up_computes_no_cancelled_picture():
    tower = Tower({b"a": 20, b"b": 3})
    engine = seeing(tower, 40)
    sequence = engine.submit(asked(("a", 6), 5))
    heard(engine.step())
    engine.warm(asked(1, 2, ("b", 6), 5, most=0), WarmRules())
    engine.abort(sequence.id)
    while engine.due:
        heard(engine.step())
    assert tower.log == [b"a", *3 * [b"b"]]


def drawn(draw, names, whole):
    parts = [
        (draw.choice(names), draw.randint(1, 6)) if draw.random() < 0.6 else draw.randint(0, 3)
        for _ in range(draw.randint(1, 4))
    ]
    return asked(*parts, draw.randint(0, 3), most=draw.randint(1, 6), whole=whole)


@pytest.mark.parametrize("seed", range(80))
def test_random_schedules(seed):
    """Pressure, few slots, small budgets, cancelled and failing pictures: every text is as by the definition."""
    draw = Random(seed)
    names = "abcdef"[: draw.randint(1, 6)]
    broken = {one.encode() for one in names if draw.random() < 0.1}
    tower = Tower({one.encode(): draw.randint(1, 6) for one in names}, draw.choice((1, 2, 1000)), broken)
    whole = draw.random() < 0.4
    engine = seeing(
        tower,
        draw.randint(16, 40),
        page_size=draw.choice((1, 2, 4)),
        token_budget=draw.choice((7, 9, 16, 64)),
        max_sequences=draw.randint(1, 4),
    )
    sequences, ended, cancelled = [], {}, set()

    def step():
        slices = len(tower.log)
        for event in heard(engine.step()):
            if isinstance(event, Failed | Finished):
                ended[event.sequence] = event
        assert len(tower.log) - slices <= 1
        check_invariants(engine.scheduler)

    for _ in range(draw.randint(3, 12)):
        made = drawn(draw, names, whole)
        if engine.pool.fits([engine.pool.max_pages(len(made.prompt) + 6, 64)]):
            sequences.append(engine.submit(made))
        for _ in range(draw.randint(0, 6)):
            if engine.busy:
                step()
        if sequences and draw.random() < 0.2:
            gone = draw.choice(sequences)
            engine.abort(gone.id)
            cancelled.add(gone.id)
    steps = 0
    while engine.busy:
        step()
        steps += 1
        assert steps < 3000, "the engine turns and nothing ends"
    assert tower.work is None
    for one in (one for one in sequences if one.id not in cancelled):
        bad = [span for span in one.request.pictures if span.pixels.digest in broken]
        if isinstance(ended[one.id], Failed):
            assert bad
        else:
            assert not bad and one.tokens == naive(one.request)
    if tower.most == 1000:
        assert all(count == 1 for count in tower.computed.values())
