"""Chunks with draft tokens: who gets some, what is kept, and what is given back. The texts stay the naive loop's."""

import pytest

from tests.engine.hand import FULL, Guesses, build, drain, heard, kept_pages, mixed, naive, request, run, seen
from tests.engine.invariants import check_invariants
from tests.engine.scripted import ScriptedModel
from tokenwright.engine import AttentionWindow, Chunk, FinishReason, Group, LogitsNeeded, NoStopChecker, Token
from tokenwright.engine.layer_group import StateWindow
from tokenwright.engine.step import most_drafts


class Right(Guesses):
    """Every draft holds; the step it was asked in, and how many there could be, are kept."""

    def __init__(self, window=FULL, count=4):
        super().__init__(window, 0)
        self.count = count
        self.asked = []
        self.ended = []

    def _drafts(self, sequence, most):
        self.asked.append((sequence.id, len(sequence.tokens), most))
        text = list(sequence.tokens)
        while len(text) < len(sequence.tokens) + min(most, self.count):
            text.append(self.script(seen(self.window, text)))
        return text[len(sequence.tokens) :]

    def end(self, sequence):
        self.ended.append(sequence.id)


class Wrong(Right):
    """No draft holds."""

    def _drafts(self, sequence, most):
        return [(token + 1) % 97 for token in super()._drafts(sequence, most)]


def steps_of(engine):
    """The events of each step to the end."""
    steps = []
    while engine.busy:
        steps.append(heard(engine.step()))
        check_invariants(engine.scheduler)
    return steps


@pytest.mark.parametrize("window", [FULL, AttentionWindow(size=5, sinks=2)], ids=["full", "window"])
def test_drafts_that_hold_make_steps_of_several_tokens(window):
    engine, _ = build(Group(40, window), proposer=Right(window))
    one = request(*range(5), most=21)
    sequence = engine.submit(one)
    written = [sum(isinstance(event, Token) for event in events) for events in steps_of(engine)]
    assert written == [1, 5, 5, 5, 5], "the prompt's own row, then four drafts and the token behind them"
    assert sequence.tokens == naive(one, window)
    assert (sequence.counts.drafted, sequence.counts.accepted) == (16, 16)
    assert sequence.counts.forwarded == len(sequence.tokens) - 1


def test_drafts_that_fail_leave_nothing_behind():
    engine, _ = build(40, page_size=2, proposer=Wrong())
    one = request(*range(5), most=8)
    sequence = engine.submit(one)
    while engine.busy:
        heard(engine.step())
        check_invariants(engine.scheduler)
        if engine.scheduler.sequences:
            assert len(sequence.tables[0]) == -(-sequence.computed // 2), "the pages of drafts are given back"
    assert sequence.tokens == naive(one)
    assert sequence.counts.accepted == 0
    assert sequence.counts.drafted == sum(min(4, left - 1) for left in range(7, 0, -1))
    assert sequence.counts.forwarded == len(sequence.tokens) - 1 + sequence.counts.drafted


def test_drafts_that_fail_give_pages_back_where_a_text_is_kept_in_two_parts():
    windows = [AttentionWindow(stop=8), AttentionWindow(start=8)]
    engine, _ = build(*(Group(40, window) for window in windows), page_size=3, proposer=Wrong(windows[0]))
    sequence = engine.submit(request(*range(4), most=9))
    while engine.busy:
        heard(engine.step())
        check_invariants(engine.scheduler)
        if engine.scheduler.sequences:
            for window, table in zip(windows, sequence.tables, strict=True):
                assert set(table) <= kept_pages(window, sequence.computed, 3)


class Half(Right):
    """Two drafts hold, and two do not."""

    def _drafts(self, sequence, most):
        right = super()._drafts(sequence, most)
        return [*right[:2], *((token + 1) % 97 for token in right[2:])]


@pytest.mark.parametrize(("page_size", "written", "again"), [(1, [1, *[3] * 6], 0), (64, [1, *[3, 1] * 4, 3], 4 * 3)])
def test_a_state_goes_back_to_the_end_of_a_page_or_to_where_the_chunk_began(page_size, written, again):
    """From there what holds is computed once more, with the next token and without drafts."""
    engine, _ = build(100, Group(30, StateWindow(), page_bytes=1), page_size=page_size, proposer=Half())
    one = request(*range(5), most=sum(written))
    sequence = engine.submit(one)
    steps = steps_of(engine)
    assert [sum(isinstance(event, Token) for event in events) for events in steps] == written
    assert sequence.tokens == naive(one)
    counts = sequence.counts
    assert counts.forwarded == len(sequence.tokens) - 1 + counts.drafted - counts.accepted + again
    assert engine.pool.available == engine.pool.pages


def test_no_state_of_a_text_is_taken_for_a_draft():
    """With one page, the text's own, there are no drafts; and it is written to the end."""
    engine, _ = build(40, Group(1, StateWindow(), page_bytes=1), page_size=64, proposer=Right())
    [sequence] = run(engine, one := request(*range(5), most=9))
    assert sequence.tokens == naive(one) and sequence.counts.drafted == 0


def test_accepted_tokens_are_cached_for_others_and_rejected_ones_are_not():
    engine, _ = build(40, page_size=2, proposer=Right())
    (first,) = run(engine, request(*range(5), most=11))
    (again,) = run(engine, request(*first.tokens, most=1))
    assert again.counts.reused == len(first.tokens) - 1
    engine.scheduler.proposer = Wrong()
    (other,) = run(engine, request(7, *range(5), most=4))
    (again,) = run(engine, request(*other.tokens, most=1))
    assert again.counts.reused == len(other.tokens) - 1


def test_a_text_gets_no_drafts_beyond_its_limit_or_the_place_where_it_is_paused():
    engine, _ = build(40, proposer=Right(count=9))
    one = request(*range(5), most=7)
    sequence = engine.submit(one)
    engine.pause(sequence.id, 8)
    steps_of(engine)
    assert len(sequence.tokens) == 8, "it is paused where it was to be"
    engine.resume(sequence.id)
    steps_of(engine)
    assert sequence.tokens == naive(one)
    proposer = engine.scheduler.proposer
    assert [most for _, _, most in proposer.asked] == [1, 3]
    assert proposer.ended == [sequence.id]


@pytest.mark.parametrize(
    "options", [{"cache": False}, {"speculate": False}, {"prompt_logprobs_from": 1, "most": 1}], ids=str
)
def test_these_are_never_asked_about(options):
    engine, _ = build(40, proposer=Right())
    (sequence,) = run(engine, request(*range(5), **options))
    assert engine.scheduler.proposer.asked == []
    assert sequence.counts.drafted == 0


def test_a_prompt_gets_no_drafts_before_its_last_token_alone_is_left():
    engine, _ = build(40, token_budget=4, proposer=Right())
    (sequence,) = run(engine, request(*range(10), most=6))
    assert engine.scheduler.proposer.asked[0] == (sequence.id, 11, 3), "the token of the prompt's last row came first"


def test_drafts_fill_what_the_budget_leaves():
    engine, _ = build(80, token_budget=8, proposer=Right(count=9))
    first, second = (engine.submit(request(*range(n), most=20)) for n in (3, 4))
    steps = [engine.scheduler.schedule()]
    while engine.busy:
        heard(engine.step())
        steps.append(engine.scheduler.schedule())
    assert max(step.size for step in steps) == 8
    assert {len(step.chunks) for step in steps} == {0, 1, 2}, "a draft takes no other text's turn"
    assert [first.tokens, second.tokens] == [naive(first.request), naive(second.request)]


def test_nobody_is_preempted_for_a_draft():
    """The pool holds both texts without drafts to the last page."""
    engine, _ = build(6, page_size=4, proposer=Wrong(count=6))
    texts = run(engine, *[request(*range(n), most=12 - n) for n in (4, 5)])
    assert [one.counts.preemptions for one in texts] == [0, 0]
    assert any(one.counts.drafted for one in texts)


class Twice(NoStopChecker):
    """Ends a text at its second token, wherever it is in a step."""

    def __init__(self):
        self.heard = []

    def advance(self, token):
        self.heard.append(token)
        return FinishReason.STOP_ID if len(self.heard) == 2 else None


def test_a_text_ends_in_the_middle_of_its_drafts():
    engine, _ = build(40, proposer=Right())
    checker = Twice()
    one = request(*range(5), most=20, stop_checker=checker)
    sequence = engine.submit(one)
    events = drain(engine)
    assert sequence.tokens == naive(one)[:7] and len(checker.heard) == 2, "nothing is written behind its end"
    assert events[-1].reason is FinishReason.STOP_ID
    assert sequence.computed == 6
    assert engine.pool.available == engine.pool.pages


def test_a_beam_or_several_texts_to_come_get_none():
    engine, _ = build(40, proposer=Right())
    sequence = engine.submit(request(*range(5), most=9))
    engine.step()
    chunk = Chunk(sequence, 5, 6, LogitsNeeded.LAST)
    assert most_drafts(chunk) == 7
    sequence.choices = (0, 1)
    assert most_drafts(chunk) == 0
    sequence.choices, sequence.group.width = (0,), 2
    assert most_drafts(chunk) == 0


class Sticky(ScriptedModel):
    """A planted fault: what a rejected draft has left stays there."""

    def forward(self, step):
        kept = {}
        for chunk in step.chunks:
            for slots, table in zip(self.slots, chunk.sequence.tables, strict=True):
                for position in range(chunk.start, chunk.stop):
                    at = self._slot(table, position)
                    if slots[at] is not None:
                        kept[id(slots), at] = slots[at]
        output = super().forward(step)
        for slots in self.slots:
            for at in range(len(slots)):
                slots[at] = kept.get((id(slots), at), slots[at])
        return output


def test_what_a_rejected_draft_leaves_would_be_seen():
    engine, _ = build(40, proposer=Wrong(), model=Sticky, script=mixed)
    engine_without, _ = build(40, model=Sticky, script=mixed)
    one = request(*range(5), most=8)
    assert run(engine_without, one)[0].tokens == naive(one)
    wrong = engine.submit(one)
    steps_of(engine)
    assert wrong.tokens != naive(one)
