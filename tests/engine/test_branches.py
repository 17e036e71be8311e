"""Forks by picks, on a scripted model: n texts, and beams that advance together. The oracle is recursion over texts.

Which ways a text goes on is a function of the text alone, so the set of texts that a request comes to is known without
an engine: whatever pages, budgets, neighbours and preemptions it meets, it must come to these.
"""

from dataclasses import dataclass, field
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.hand import Planted, running, seen
from tests.engine.invariants import check_invariants
from tests.engine.scripted import ScriptedModel
from tests.profiles import examples
from tokenwright.engine import (
    AttentionWindow,
    Dropped,
    Engine,
    Failed,
    Finish,
    Finished,
    FinishReason,
    Forked,
    Group,
    LogitsNeeded,
    NoStopChecker,
    PagePool,
    Pick,
    PromptLogprobs,
    Request,
    SamplingParams,
    Scheduler,
    State,
    Step,
    Token,
)
from tokenwright.engine.layer_group import StateWindow
from tokenwright.errors import CapacityError


def number(*parts: object) -> int:
    return int.from_bytes(sha256(repr(parts).encode()).digest()[:4], "little")


def choice_of(text, choice):
    """The token of one of n texts."""
    return number("choice", tuple(text), choice) % 50


@dataclass(eq=False)
class Search:
    """A beam search without probabilities: the beams' texts, ranked by a hash, go on in hashed ways."""

    width: int
    length: int
    beams: dict[int, list[int]] = field(default_factory=dict)  # by choice
    found: list[list[int]] = field(default_factory=list)

    def next(self, texts):
        """The texts after one more token each, with the place of their parents; some parents have no child."""
        ways = [(number("rank", text, k), place, k) for place, text in enumerate(texts) for k in range(3)]
        return [(place, number("token", texts[place], k) % 50) for _, place, k in sorted(ways)[: self.width]]

    def run(self, prompt):
        """By the definition alone: the texts at the end."""
        texts = [list(prompt)]
        for _ in range(self.length):
            texts = [[*texts[place], token] for place, token in self.next(texts)]
        return texts

    def pick(self, rows):
        texts = [list(chunk.sequence.tokens) for chunk, _ in rows]
        places = {chunk.sequence.choices[0]: place for place, (chunk, _) in enumerate(rows)}
        if self.beams:
            assert {choice: texts[place] for choice, place in places.items()} == self.beams, "beams stay in lockstep"
        order = [texts[places[choice]] for choice in sorted(places)]
        by_choice = [rows[places[choice]][0].sequence.id for choice in sorted(places)]
        if len(order[0]) == self.end:
            self.found = order
            return [Finish(chunk.sequence.id, FinishReason.EOS) for chunk, _ in rows]
        ways = self.next(order)
        self.beams = {slot: [*order[place], token] for slot, (place, token) in enumerate(ways)}
        return [Pick(by_choice[place], (token,), (0.0,), choice=slot) for slot, (place, token) in enumerate(ways)]

    end = 0


class Branching(ScriptedModel):
    """Picks for every choice, and hands the chunks of a search to it; reads every row's text back, as its base does."""

    budget = 0

    def pick(self, output, step):
        assert step.size <= self.budget, "a step computes more than it may"
        results, searches = [], {}
        for chunk, rows in zip(step.chunks, output.rows, strict=True):
            if chunk.logits_needed is LogitsNeeded.ALL:
                results.append(PromptLogprobs(chunk.sequence.id, chunk.start + 1, (0.0,) * len(chunk.following)))
            if chunk.picks:
                read = output.logits[rows[-1]]
                assert read == seen(self.groups[0].window, list(chunk.sequence.tokens)), "the pages hold the text"
                search = chunk.request.search
                if search is not None:
                    searches.setdefault(id(search), (search, []))[1].append((chunk, read))
                else:
                    results += [
                        Pick(chunk.sequence.id, (choice_of(chunk.sequence.tokens, choice),), (0.0,), choice=choice)
                        for choice in chunk.sequence.choices
                    ]
        for search, rows in searches.values():
            assert len(rows) == max(1, len(search.beams)), "all beams are there"
            results += search.pick(rows)
        return results


def build(attention_windows, pages, page_size, budget, sequences) -> Engine:
    groups = [Group(pages, window, page_bytes=1) for window in attention_windows]
    model = Branching(lambda text: 0, groups, page_size)
    model.budget = budget
    pool = PagePool(groups, page_size, model)
    return Engine(model, model, Scheduler(pool, budget, sequences), 60)


def texts_of(prompt, choices, most):
    """The n texts, by the definition alone."""
    found = []
    for choice in range(choices):
        text = list(prompt)
        for _ in range(most):
            text.append(choice_of(text, choice))
        found.append(text)
    return found


def drain(engine, mischief=(), most=1000):
    """All events, with every invariant proven after each step. `mischief`: what happens before each of the first."""
    events = []
    for turn in range(3000):
        if not engine.busy:
            return events
        if turn < len(mischief):
            disturb(engine, *mischief[turn])
        events += engine.step()
        check_invariants(engine.scheduler)
        assert len(running(engine)) <= most, "more run than may"
    raise AssertionError("it does not end")


def disturb(engine, what, which):
    """Preempt one that runs, let it drop its pages, or schedule a step that never comes."""
    running = [one for group in engine.scheduler.running for one in group.sequences if one.cache]
    if what == "peek":
        engine.scheduler.schedule()
    elif running and what == "preempt":
        engine.scheduler.preempt(running[which % len(running)].group)
    elif running and what == "forget":
        for cache in False, True:
            engine.use_cache(running[which % len(running)].id, cache)


def written(events, prompts):
    """The text of each sequence, told by events alone: a fork begins as its parent is at that moment."""
    texts = {identity: list(prompt) for identity, prompt in prompts.items()}
    ended = {}
    for event in events:
        assert event.sequence not in ended, "nothing is told after the end"
        match event:
            case Forked(sequence=child, parent=parent, branch=branch):
                texts[child] = list(texts[parent])
                assert branch.id == child
            case Token(sequence=one, token=token):
                texts[one].append(token)
            case Finished() | Failed() | Dropped():
                ended[event.sequence] = event
    assert texts.keys() == ended.keys(), "every sequence ends"
    return texts, ended


requests = st.lists(
    st.tuples(
        st.sampled_from(["choices", "beams", "plain"]),
        st.lists(st.integers(0, 3), min_size=1, max_size=12),
        st.integers(1, 5),  # choices, or width
        st.integers(1, 8),  # tokens
        st.booleans(),  # with the cache
        st.booleans(),  # sharing
    ),
    min_size=1,
    max_size=4,
)


@examples(250)
@given(
    requests,
    st.sampled_from(
        [
            (AttentionWindow(),),
            (AttentionWindow(size=4),),
            (AttentionWindow(size=5, sinks=2), AttentionWindow()),
            (AttentionWindow(), AttentionWindow(size=3)),
            (AttentionWindow(stop=4), AttentionWindow(start=4)),
        ]
    ),
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([5, 6, 9, 16, 64]),
    st.sampled_from([2, 3, 5, 6, 12]),
    st.sampled_from([0, 1, 8]),
    st.lists(st.tuples(st.sampled_from(["peek", "preempt", "preempt", "forget", ""]), st.integers(0, 5)), max_size=20),
)
def test_whatever_the_engine_meets_the_texts_are_those_of_the_definition(
    asked, attention_windows, page_size, budget, sequences, spare, mischief
):
    asked = [
        (kind, prompt, min(width, sequences) if kind == "beams" else width, *rest)
        for kind, prompt, width, *rest in asked
    ]

    def pages_for(kind, prompt, width, most, share):
        engine = build(attention_windows, 1000, page_size, budget, sequences)
        request = Request(tuple(prompt), SamplingParams(max_tokens=most + 1), width=width, share=share)
        return max(engine.scheduler.max_pages(engine.scheduler.new(request, request.limit(60))))

    needs = [
        pages_for(kind, prompt, width if kind == "beams" else 1, most, share and cache)
        for kind, prompt, width, most, cache, share in asked
    ]
    engine = build(attention_windows, max(needs) + spare, page_size, budget, sequences)
    searches, prompts, expected = {}, {}, {}
    for kind, prompt, width, most, cache, share in asked:
        if kind == "beams":
            search = Search(width, most)
            search.end = len(prompt) + most
            params = SamplingParams(max_tokens=most + 1)
            request = Request(tuple(prompt), params, cache=cache, share=share and cache, width=width, search=search)
        else:
            search = None
            params = SamplingParams(max_tokens=most, n=width if kind == "choices" else 1, seed=1)
            request = Request(tuple(prompt), params, cache=cache, share=share)
        sequence = engine.submit(request)
        prompts[sequence.id] = prompt
        if search is not None:
            searches[sequence.id] = search
        else:
            expected[sequence.id] = texts_of(prompt, width if kind == "choices" else 1, most)
    events = drain(engine, mischief, sequences)
    texts, ended = written(events, prompts)
    parents = {event.sequence: event.parent for event in events if isinstance(event, Forked)}
    of_root = {}
    for identity, text in texts.items():
        root = identity
        while root in parents:
            root = parents[root]
        of_root.setdefault(root, []).append(text)
    for root, wanted in expected.items():
        assert sorted(of_root[root]) == sorted(wanted)
    for root, search in searches.items():
        assert search.found == search.run(prompts[root])
    assert engine.pool.available == engine.pool.pages
    assert all(isinstance(event, Finished | Dropped) for event in ended.values())


def beams(width=3, most=5, prompt=(1, 2, 3), **options):
    search = Search(width, most)
    search.end = len(prompt) + most
    return Request(tuple(prompt), SamplingParams(max_tokens=most + 1), width=width, search=search, **options)


def test_a_prompt_is_computed_once_for_all_its_texts_and_its_pages_are_shared():
    engine = build([AttentionWindow()], 64, 4, 64, 16)
    sequence = engine.submit(Request(tuple(range(20)), SamplingParams(max_tokens=4, n=6, seed=1)))
    events = engine.step()
    forks = [event.branch for event in events if isinstance(event, Forked)]
    assert [one.choices for one in (sequence, *forks)] == [(choice,) for choice in range(6)]
    assert running(engine) == [sequence, *forks]
    assert {tuple(one.tables[0].items()) for one in forks} == {tuple(sequence.tables[0].items())}
    drain(engine)
    assert engine.runner.forwarded == 20 + 6 * 3
    assert [one.counts.forwarded + one.counts.reused for one in (sequence, *forks)] == [23] * 6


def family(engine, sequence):
    """The events of a first step that forks, and all sequences after it."""
    events = engine.step()
    return events, [sequence, *(event.branch for event in events if isinstance(event, Forked))]


def test_what_was_asked_of_a_prompt_holds_for_all_its_texts():
    """Its hold, its cache, and that its scores were told."""
    for sequences in 2, 8:
        engine = build([AttentionWindow()], 64, 4, 64, sequences)
        request = Request(tuple(range(9)), SamplingParams(max_tokens=6, n=4, seed=1), prompt_logprobs_from=1)
        sequence = engine.submit(request)
        engine.pause(sequence.id, 12)
        engine.use_cache(sequence.id, False)
        events, branches = family(engine, sequence)
        for _ in range(20):
            events += engine.step()
            check_invariants(engine.scheduler)
        assert [len(one.tokens) for one in branches] == [12] * 4
        assert [one.cache for one in branches] == [False] * 4
        assert not engine.busy
        for one in branches:
            engine.resume(one.id)
        events += drain(engine)
        assert [event.start for event in events if isinstance(event, PromptLogprobs)] == [1]
        texts, _ = written(
            [event for event in events if not isinstance(event, PromptLogprobs)], {sequence.id: range(9)}
        )
        assert sorted(texts.values()) == sorted(texts_of(range(9), 4, 6))


def test_every_text_has_a_guard_of_its_own():
    class Listening(NoStopChecker):
        def __init__(self, heard=()):
            self.heard = list(heard)

        def advance(self, token):
            self.heard.append(token)

        def fork(self):
            return Listening(self.heard)

    engine = build([AttentionWindow()], 64, 4, 64, 3)
    sequence = engine.submit(Request((1, 2), SamplingParams(max_tokens=5, n=4, seed=1), stop_checker=Listening()))
    _, branches = family(engine, sequence)
    drain(engine)
    assert [one.stop_checker.heard for one in branches] == [one.tokens[2:] for one in branches]


@pytest.mark.parametrize("steps", [2, 3, 5])
@pytest.mark.parametrize("forgotten", [False, True])
def test_beams_that_were_put_off_compute_once_what_they_have_in_common(steps, forgotten):
    """`forgotten`: their pages were used up by another text meanwhile."""
    engine = build([AttentionWindow()], 12, 4, 64, 3)
    sequence = engine.submit(beams(prompt=range(20), most=8))
    for _ in range(steps):
        engine.step()
    group, before = list(sequence.group.sequences), engine.runner.forwarded
    if forgotten:
        for one in group:
            engine.pause(one.id)
        engine.scheduler.preempt(sequence.group)
        engine.submit(Request(tuple(range(50, 90)), SamplingParams(max_tokens=1)))
        drain(engine)
        before += 40
        for one in group:
            engine.resume(one.id)
    else:
        engine.scheduler.preempt(sequence.group)
    length = len(sequence.tokens)
    for _ in range(9):
        if len(sequence.tokens) == length:
            engine.step()
            check_invariants(engine.scheduler)
    assert len(sequence.tokens) == length + 1
    common = 20 if forgotten else 0
    assert engine.runner.forwarded - before <= common + len(group) * (length - 20)
    drain(engine)
    assert sequence.request.search.found == sequence.request.search.run(range(20))


def test_beams_that_share_nothing_catch_up_side_by_side():
    """The naive loop takes a step for each token, with beams as without."""
    engine = build([AttentionWindow()], 64, 4, 64, 8)
    engine.submit(beams(most=5, cache=False, share=False))
    steps = 0
    while engine.busy:
        engine.step()
        steps += 1
    assert steps == 5 + 1


@pytest.mark.parametrize("steps", range(7))
def test_an_abort_of_one_beam_ends_the_group_in_every_state(steps):
    engine = build([AttentionWindow()], 64, 4, 5, 8)
    sequence = engine.submit(beams(prompt=range(12)))
    other = engine.submit(Request((7,), SamplingParams(max_tokens=2)))
    events = [event for _ in range(steps) for event in engine.step()]
    live = list(sequence.group.sequences)
    ends = engine.abort(live[-1].id) if live else []
    assert [event.reason for event in ends] == [FinishReason.ABORTED] * len(live)
    check_invariants(engine.scheduler)
    rest = drain(engine)
    assert any(event == Finished(other.id, FinishReason.LENGTH) for event in [*events, *rest])
    assert engine.pool.available == engine.pool.pages


def test_a_fault_in_one_beam_fails_the_group_alone():
    engine = build([AttentionWindow()], 64, 4, 64, 8)
    pick = engine.sampler.pick

    def with_fault(output, step):
        results = pick(output, step)
        group = [one for one in results if isinstance(one, Pick) and one.sequence != other.id]
        if len(group) > 1:
            return [Failed(group[-1].sequence, Planted()), *[one for one in results if one.sequence == other.id]]
        return results

    engine.sampler.pick = with_fault
    sequence, other = engine.submit(beams()), engine.submit(Request((7,), SamplingParams(max_tokens=4)))
    events = drain(engine)
    _, ended = written(events, {sequence.id: (), other.id: ()})
    assert {type(event) for identity, event in ended.items() if identity != other.id} == {Failed}
    assert ended[other.id] == Finished(other.id, FinishReason.LENGTH)


def test_beams_that_could_never_advance_in_one_step_are_refused():
    for budget, sequences in (4, 16), (16, 4):
        with pytest.raises(CapacityError, match="5 beams advance in one step, and this engine computes 4"):
            build([AttentionWindow()], 64, 4, budget, sequences).submit(beams(width=5))


def test_a_group_that_could_never_fit_is_refused_and_one_that_fits_by_sharing_is_not():
    prompt = range(16)
    with pytest.raises(CapacityError, match="pages"):
        build([AttentionWindow()], 10, 4, 64, 8).submit(beams(width=4, prompt=prompt, share=False))
    engine = build([AttentionWindow()], 4 + 4 * 2, 4, 64, 8)
    engine.submit(beams(width=4, prompt=prompt))
    drain(engine)


@pytest.mark.parametrize("told", ["once", "always"])
@pytest.mark.parametrize("how", ["told", "raised"])
def test_a_guard_that_beams_have_in_common_ends_them_all(told, how):
    class Common(NoStopChecker):
        over = False

        def finished(self):
            if not self.over:
                return None
            self.over = told == "always"
            if how == "raised":
                raise Planted
            return FinishReason.TIME

    engine, stop_checker = build([AttentionWindow()], 64, 4, 64, 8), Common()
    sequence = engine.submit(beams(stop_checker=stop_checker))
    engine.step()
    group = list(sequence.group.sequences)
    stop_checker.over = True
    events = engine.scheduler.expire()
    kinds = {"told": Finished, "raised": Failed}
    assert [(event.sequence, type(event)) for event in events] == [(one.id, kinds[how]) for one in group]
    assert not engine.busy
    assert engine.pool.available == engine.pool.pages


@pytest.mark.parametrize("pages", range(9, 17))
def test_beams_beside_states_end_in_any_pool_that_takes_them(pages):
    """Put off, they find no state behind the prompt, so each computes it again, in pages of its own."""
    engine = build([AttentionWindow(), StateWindow(every=1000)], pages, 1, 64, 4)
    try:
        first = engine.submit(search := beams(width=2, prompt=range(5), most=3))
    except CapacityError:
        return
    while len(first.group.sequences) < 2:
        engine.step()
    engine.scheduler.preempt(first.group)
    drain(engine)
    assert search.search.found == Search(2, 3).run(range(5))


def test_a_step_that_fails_with_one_beam_ends_the_group():
    engine = build([AttentionWindow()], 64, 4, 64, 8)
    sequence = engine.submit(beams())
    engine.step()
    group, step = list(sequence.group.sequences), engine.scheduler.schedule()
    engine.runner.forward = lambda _: (_ for _ in ()).throw(Planted())
    events = engine._compute(Step(step.chunks[1:2]))
    assert [(event.sequence, type(event)) for event in events] == [(one.id, Failed) for one in group]
    assert not engine.busy


@pytest.mark.parametrize(("share", "pages"), [(True, 9), (False, 17)])
def test_beams_that_were_put_off_wait_until_there_is_room_for_all_of_them(share, pages):
    """`pages` are free: more than one of them takes, and less than they all do."""
    engine = build([AttentionWindow()], 32, 4, 64, 8)
    sequence = engine.submit(beams(width=4, prompt=range(16), most=6, share=share))
    for _ in range(3):
        engine.step()
    sequence = next(iter(engine.scheduler.sequences.values()))  # one that nobody dropped
    engine.scheduler.preempt(sequence.group)
    others = engine.pool.tables()
    assert engine.pool.reserve(others, 0, 4 * (32 - pages), 4 * (32 - pages))
    for _ in range(3):
        engine.step()
    assert sequence.state is State.WAITING and sequence.counts.preemptions == 1
    engine.pool.release(others)
    drain(engine)
    assert sequence.counts.preemptions == 1


def test_what_beams_have_in_common_is_counted_in_the_part_of_the_text_that_a_group_keeps():
    """The second group keeps nothing of the prompt, so nothing in it is common."""
    attention_windows, request = (
        [AttentionWindow(stop=4), AttentionWindow(start=4)],
        beams(width=4, prompt=range(4), most=8),
    )
    with pytest.raises(CapacityError, match="pages"):
        build(attention_windows, 7, 4, 64, 8).submit(request)
    engine = build(attention_windows, 8, 4, 64, 8)
    engine.submit(request)
    drain(engine)


class Timed(NoStopChecker):
    def __init__(self):
        self.reason = None

    def finished(self):
        return self.reason


@pytest.mark.parametrize("state", ["waiting", "paused", "running"])
def test_a_guard_may_end_a_sequence_without_a_token(state):
    engine = build([AttentionWindow()], 64, 4, 64, 1)
    stop_checker = Timed()
    first = engine.submit(
        Request(
            (1,), SamplingParams(max_tokens=3), stop_checker=NoStopChecker() if state == "waiting" else stop_checker
        )
    )
    late = first
    if state == "waiting":
        late = engine.submit(Request((2,), SamplingParams(max_tokens=3), stop_checker=stop_checker))
    if state == "paused":
        engine.pause(first.id)
    stop_checker.reason = FinishReason.TIME
    events = engine.step()
    assert Finished(late.id, FinishReason.TIME) in events
    assert late.state is State.FINISHED


def test_a_guard_that_fails_when_it_is_asked_fails_its_own_request_alone():
    class Broken(NoStopChecker):
        def finished(self):
            raise Planted

    engine = build([AttentionWindow()], 64, 4, 64, 4)
    bad = engine.submit(Request((1,), SamplingParams(max_tokens=3), stop_checker=Broken()))
    good = engine.submit(Request((2,), SamplingParams(max_tokens=3)))
    events = drain(engine)
    assert [type(event) for event in events if event.sequence == bad.id] == [Token, Failed]
    assert Finished(good.id, FinishReason.LENGTH) in events


@pytest.mark.parametrize("beams", [1, 3])
def test_a_guard_that_cannot_be_copied_fails_its_own_request_alone(beams):
    class Single(NoStopChecker):
        copies = 0

        def fork(self):
            self.copies += 1
            if self.copies == 2:
                raise Planted
            return self

    params = SamplingParams(max_tokens=4, n=3, seed=1)
    search = Search(3, 4) if beams > 1 else None
    engine = build([AttentionWindow()], 64, 4, 64, 8)
    bad = engine.submit(Request((1, 2), params, stop_checker=Single(), width=beams, search=search))
    good = engine.submit(Request((2,), SamplingParams(max_tokens=3)))
    events = drain(engine)
    assert [type(event) for event in events if event.sequence != good.id] == [Failed]
    assert Finished(good.id, FinishReason.LENGTH) in events and bad.state is State.FINISHED
    assert not engine.scheduler.sequences and engine.pool.available == engine.pool.pages


def test_a_group_is_paused_and_loses_its_cache_as_a_whole():
    engine = build([AttentionWindow()], 64, 4, 64, 8)
    sequence = engine.submit(beams())
    engine.step()
    group = list(sequence.group.sequences)
    assert len(group) == 3
    engine.pause(group[1].id)
    assert not engine.busy
    engine.resume(group[2].id)
    engine.use_cache(group[2].id, False)
    assert not any(one.pages or one.computed for one in group)
    check_invariants(engine.scheduler)
    drain(engine)
    assert sequence.request.search.found == sequence.request.search.run((1, 2, 3))
