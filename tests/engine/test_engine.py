"""The loop by hand, with a scripted model: counts, order, ends, and faults that stay where they happened."""

import random

import pytest

from tests.engine.hand import Planted, build, drain, request, sequence_of
from tests.engine.invariants import check_invariants
from tests.engine.scripted import ScriptedModel, main, scripted_engine
from tokenwright.engine import (
    AttentionWindow,
    Chunk,
    Failed,
    Finished,
    FinishReason,
    Group,
    LogitsNeeded,
    NoStopChecker,
    Pick,
    SamplingParams,
    State,
    Token,
)
from tokenwright.engine.scheduler import MAX_PREEMPTIONS
from tokenwright.errors import CapacityError, ContextError, RequestError


def up(text):
    return text[-1] + 1


def test_a_request_is_a_long_chunk_and_then_chunks_of_one():
    engine, _ = scripted_engine(up)
    sequence = engine.submit(request(1, 2, 3))
    chunks = []
    while engine.busy:
        chunks += [len(chunk.tokens) for chunk in engine.scheduler.schedule().chunks]
        engine.step()
    assert chunks == [3, 1, 1, 1]
    assert list(sequence.written) == [4, 5, 6, 7]
    assert sequence.state is State.FINISHED


@pytest.mark.parametrize(("n", "t"), [(8, 20), (1, 1), (5, 1), (1, 7)])
@pytest.mark.parametrize("budget", [1, 7, 64])
def test_counted_work_is_the_closed_formula(n, t, budget):
    for cache, formula in ((True, n + t - 1), (False, sum(range(n, n + t)))):
        engine, model = scripted_engine(up, token_budget=budget)
        sequence = engine.submit(request(*range(n), most=t, cache=cache))
        drain(engine)
        assert sequence.counts.forwarded == model.forwarded == formula


def test_a_long_prompt_is_cut_to_the_budget_and_others_go_on_beside_it():
    engine, _ = scripted_engine(up, token_budget=5)
    short, long = engine.submit(request(1)), engine.submit(request(*range(12)))
    engine.step()
    assert (short.computed, long.computed) == (1, 4)
    engine.step()
    assert (short.computed, long.computed) == (2, 8)


def test_a_pool_far_too_small_for_all_thrashes_nobody():
    """512 mixed requests over 1.2 times the pages of the longest: all end right, none is put off more than 4 times."""
    rng = random.Random(7)
    shapes = [(rng.randint(1, 100), rng.randint(1, 100)) for _ in range(512)]
    engine, model = build(16, page_size=16, token_budget=64, max_sequences=64, script=up, model=ScriptedModel)
    sequences = [engine.submit(request(*range(n), most=t, share=False)) for n, t in shapes]
    while engine.busy:
        engine.step()
    assert [len(sequence.tokens) for sequence in sequences] == [n + t for n, t in shapes]
    assert all(sequence.tokens == list(range(len(sequence.tokens))) for sequence in sequences)
    assert max(sequence.counts.preemptions for sequence in sequences) <= 4
    assert model.forwarded < 1.5 * sum(n + t - 1 for n, t in shapes), "most of the work is done once"


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_short_prompts_that_all_grow_at_once_put_nobody_off_more_than_four_times(page_size):
    """The worst case: everybody is admitted at once on a page or two, and then needs the others' pages."""
    engine, model = build(480 // page_size, page_size=page_size, max_sequences=64, script=up, model=ScriptedModel)
    model._read = lambda tables, row: [0]
    sequences = [engine.submit(request(1, 2, most=200 + i % 200, share=False)) for i in range(64)]
    while engine.busy:
        engine.step()
    assert [len(sequence.tokens) for sequence in sequences] == [202 + i % 200 for i in range(64)]
    assert max(sequence.counts.preemptions for sequence in sequences) == MAX_PREEMPTIONS


def test_what_cannot_be_served_is_refused_with_the_reason():
    engine, _ = scripted_engine(up, pages=3, page_size=4, context=32)
    with pytest.raises(RequestError, match="no tokens"):
        engine.submit(request())
    with pytest.raises(ContextError, match=r"33 tokens, 1 more than the model's context of 32; shorten it by 1 token$"):
        engine.submit(request(*range(33)))
    with pytest.raises(CapacityError, match="may come to 13 tokens in the KV cache, which need 4 pages, and it has 3"):
        engine.submit(request(1, most=13))
    engine.submit(request(1, most=12))  # the twelfth is written and never stored
    drain(engine)
    assert not engine.busy


def test_a_window_takes_as_many_pages_as_it_reads_back_and_each_group_must_have_its_own():
    engine, _ = build(8, Group(3, AttentionWindow(size=5)), token_budget=4)
    assert engine.submit(request(1, most=32)).max_computed == 32
    with pytest.raises(CapacityError, match=r"33 tokens in the KV cache, which need 9 \+ 3 pages, and it has 8 \+ 3;"):
        engine.submit(request(1, most=33))
    drain(engine)
    tight, _ = build(8, Group(2, AttentionWindow(size=5)), token_budget=4)
    with pytest.raises(CapacityError, match=r"need 8 \+ 3 pages, and it has 8 \+ 2;"):
        tight.submit(request(1, most=32))


def test_zero_tokens_end_at_once_without_work():
    engine, model = scripted_engine(up)
    sequence = engine.submit(request(1, 2, most=0))
    assert drain(engine) == [Finished(sequence.id, FinishReason.LENGTH)]
    assert model.forwarded == 0


def test_a_prompt_that_fills_the_context_ends_for_that_reason():
    engine, _ = scripted_engine(up, context=5)
    full, nearly = engine.submit(request(1, 2, 3, 4, 5)), engine.submit(request(1, 2, 3, 4))
    events = drain(engine)
    assert Finished(full.id, FinishReason.CONTEXT) in events
    assert [e for e in events if e.sequence == nearly.id] == [
        Token(nearly.id, 5, 0.0),
        Finished(nearly.id, FinishReason.CONTEXT),
    ]


class StopAt(NoStopChecker):
    def __init__(self, token):
        self.token = token

    def advance(self, token):
        if token == self.token:
            return FinishReason.EOS
        if token < 0:
            raise Planted
        return None


def test_the_guard_sees_the_very_first_token():
    engine, _ = scripted_engine(up)
    sequence = engine.submit(request(1, 2, most=9, stop_checker=StopAt(3)))
    assert drain(engine) == [Token(sequence.id, 3, 0.0), Finished(sequence.id, FinishReason.EOS)]


class Echo(NoStopChecker):
    """Ends at a token, and notes every one that it is given."""

    def __init__(self, end=None):
        self.end, self.heard = end, []

    def advance(self, token):
        self.heard.append(token)
        return FinishReason.EOS if token == self.end else None


def pick_of(sequence, *tokens):
    return Pick(sequence.id, tokens, (0.0,) * len(tokens), (0.0,) * len(tokens), ((),) * len(tokens))


@pytest.mark.parametrize(("end", "most", "written"), [(None, 9, 3), (8, 9, 2), (7, 9, 1), (None, 2, 2), (9, 3, 3)])
def test_a_pick_of_several_tokens_is_written_up_to_the_first_that_ends_the_text(end, most, written):
    engine, model = scripted_engine(up)
    checker = Echo(end)
    sequence = engine.submit(request(1, 2, 3, most=most, stop_checker=checker))
    step = engine.scheduler.schedule()
    model.forward(step)
    events = engine.scheduler.commit(step, [pick_of(sequence, 7, 8, 9)])
    tokens = [7, 8, 9][:written]
    assert list(sequence.written) == checker.heard == tokens
    assert [event.token for event in events if isinstance(event, Token)] == tokens
    if end is None and most == 9:
        assert sequence.pending == 3, "only the prompt was computed"
        drain(engine)
        assert list(sequence.written) == list(range(7, 16)), "the next step computes all of them"
    else:
        reason = FinishReason.LENGTH if end is None else FinishReason.EOS
        assert events[-1] == Finished(sequence.id, reason)
        assert engine.pool.available == engine.pool.pages


def test_a_guard_that_fails_fails_its_own_request_alone():
    engine, _ = scripted_engine(lambda text: -1 if text[0] == 1 else text[-1] + 1)
    bad, good = (
        engine.submit(request(1, stop_checker=StopAt(99))),
        engine.submit(request(7, most=2, stop_checker=StopAt(99))),
    )
    events = drain(engine)
    assert [type(event) for event in events if event.sequence == bad.id] == [Token, Failed]
    assert events[-1] == Finished(good.id, FinishReason.LENGTH)
    assert list(good.written) == [8, 9]


def test_an_interrupted_step_tells_later_what_it_had_to_tell_and_computes_anew():
    engine, model = scripted_engine(up)
    forward = model.forward
    nothing, something = engine.submit(request(1, most=0)), engine.submit(request(7, most=2))

    def interrupted(step):
        raise KeyboardInterrupt

    model.forward = interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    model.forward = forward
    events = drain(engine)
    assert events[0] == Finished(nothing.id, FinishReason.LENGTH)
    assert list(something.written) == [8, 9]


def test_a_paused_request_computes_nothing_and_goes_on_where_it_was():
    engine, model = scripted_engine(up)
    sequence = engine.submit(request(1, 2, 3))
    engine.pause(sequence.id)
    assert engine.step() == [] and model.forwarded == 0
    for written in (1, 2):
        engine.pause(sequence.id, 3 + written)
        drain_paused(engine)
        assert len(sequence.written) == written and sequence.paused
    engine.resume(sequence.id)
    drain(engine)
    assert list(sequence.written) == [4, 5, 6, 7]
    assert sequence.counts.forwarded == 3 + 4 - 1, "a pause costs nothing"


def drain_paused(engine):
    while engine.step():
        check_invariants(engine.scheduler)


def test_a_paused_request_keeps_its_pages_until_somebody_needs_them():
    engine, _ = scripted_engine(up, pages=4, page_size=4)
    paused = engine.submit(request(*range(8), most=8))
    engine.pause(paused.id, 9)
    drain_paused(engine)
    assert paused.pages == 2
    small = engine.submit(request(1, most=4))
    while small.state is not State.FINISHED:
        engine.step()
    assert paused.pages == 2, "there was room beside it"
    large = engine.submit(request(*range(50, 59), most=7))
    while large.state is not State.FINISHED:
        engine.step()
    assert (paused.pages, paused.counts.preemptions) == (0, 1), "the other came first"
    engine.resume(paused.id)
    drain(engine)
    assert list(paused.written) == list(range(8, 16))


def test_one_that_grows_takes_the_pages_of_a_paused_one_before_its_own():
    engine, _ = scripted_engine(up, pages=4, page_size=4)
    paused = engine.submit(request(*range(7), most=8))
    engine.pause(paused.id, 8)
    drain_paused(engine)
    growing = engine.submit(request(1, 2, most=11))
    while growing.state is not State.FINISHED:
        engine.step()
    assert (growing.counts.preemptions, paused.counts.preemptions) == (0, 1)
    engine.resume(paused.id)
    drain(engine)
    assert list(paused.written) == list(range(7, 15))


def test_an_engine_whose_requests_are_all_paused_is_not_busy():
    engine, _ = scripted_engine(up)
    sequence = engine.submit(request(1, 2))
    engine.pause(sequence.id)
    assert not engine.busy
    engine.resume(sequence.id)
    assert engine.busy
    drain(engine)


def test_a_paused_request_in_the_queue_is_passed_by():
    engine, _ = scripted_engine(up, pages=4, page_size=4)
    first = engine.submit(request(1, 2))
    engine.pause(first.id)
    second = engine.submit(request(5, 6))
    while second.state is not State.FINISHED:
        engine.step()
    assert first.state is State.WAITING
    engine.resume(first.id)
    drain(engine)
    assert list(first.written) == [3, 4, 5, 6]


def test_the_cache_is_switched_between_steps():
    engine, model = scripted_engine(up)
    sequence = engine.submit(request(1, 2, 3, most=6))
    lengths = []
    for cache in (True, True, False, False, True, True):
        if cache is not sequence.cache:
            engine.use_cache(sequence.id, cache)
        before = model.forwarded
        engine.step()
        lengths.append(model.forwarded - before)
    assert lengths == [3, 1, 5, 6, 7, 1], "off: all of it each time; on again: all of it once"
    assert list(sequence.written) == [4, 5, 6, 7, 8, 9]


def test_a_prompt_of_one_token_has_nothing_to_score():
    engine, _ = scripted_engine(up)
    sequence = engine.submit(request(1, most=0, prompt_logprobs_from=1))
    assert drain(engine) == [Finished(sequence.id, FinishReason.LENGTH)]


def test_a_chunk_knows_whether_a_token_is_to_be_chosen():
    def picks(start, stop, limit, logits_needed):
        return Chunk(sequence_of(1, 2, 3, limit=limit), start, stop, logits_needed).picks

    assert not picks(0, 2, 7, LogitsNeeded.NONE)
    assert not picks(0, 2, 7, LogitsNeeded.ALL)
    assert picks(2, 3, 7, LogitsNeeded.LAST)
    assert not picks(2, 3, 3, LogitsNeeded.ALL)


def test_one_stop_string_may_stand_alone():
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


def test_the_demonstration_runs(capsys):
    main()
    assert "Finished" in capsys.readouterr().out
