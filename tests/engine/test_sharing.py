"""Pages that several texts hold: found by what they hold, forked, and copied before they are written to.

Each test says in counts what sharing is for. That the texts stay right is found by the watched model, which compares
what every row reads with what was to be there, and by the naive loop.
"""

import random

import pytest

from tests.engine.hand import Planted, build, drain, heard, naive, request, run
from tests.engine.invariants import check_invariants
from tests.profiles import share
from tokenwright.engine import AttentionWindow, Failed, FinishReason, Group, State, Token
from tokenwright.engine.scheduler import MAX_PREEMPTIONS
from tokenwright.errors import CapacityError, ContextError

WINDOW = AttentionWindow(size=6)
WITH_SINKS = AttentionWindow(size=6, sinks=3)


def group(pages, window=AttentionWindow()):  # noqa: B008  (it is frozen)
    return Group(pages, window, page_bytes=1)


def used(engine):
    return engine.pool.pages - engine.pool.available


def text(length, first=0):
    """Tokens no two of which are side by side twice soon."""
    return [(first + 7 * place + place * place // 5) % 89 for place in range(length)]


@pytest.mark.parametrize("budget", [512, 4096])
def test_a_common_beginning_is_computed_and_kept_once(budget):
    engine, _ = build(500, page_size=16, token_budget=budget, max_sequences=64)
    requests = [request(*text(512), 100 + i, *text(9, i), most=6) for i in range(64)]
    sequences = [engine.submit(one) for one in requests]
    most = 0
    while engine.busy:
        heard(engine.step())
        check_invariants(engine.scheduler)
        most = max(most, used(engine))
    assert most == 512 // 16 + 64, "the beginning once, and a page of its own for each"
    assert sum(sequence.counts.forwarded for sequence in sequences) == 512 + 64 * (10 + 6 - 1)
    assert [sequence.counts.reused for sequence in sequences] == [0] + 63 * [512]
    alone, _ = build(500, page_size=16, token_budget=budget, max_sequences=64)
    unshared = run(alone, *[request(*one.prompt, most=6, share=False) for one in requests])
    assert [one.tokens for one in sequences] == [one.tokens for one in unshared] == [naive(one) for one in requests]
    assert sum(sequence.counts.forwarded for sequence in unshared) == 64 * (512 + 10 + 6 - 1)
    (late,) = run(engine, request(*text(512), 99, most=6))
    assert (late.counts.reused, late.counts.forwarded) == (512, 6), "what all have left is still there"


def test_the_written_text_is_found_like_the_prompt():
    """A conversation goes on: what was asked and answered before is there."""
    engine, _ = build(30)
    (first,) = run(engine, request(*text(6), most=11))
    (second,) = run(engine, request(*first.tokens, 1, 2, most=3))
    assert (len(first.tokens), second.counts.reused) == (17, 16)


@pytest.mark.parametrize("window", [AttentionWindow(), WINDOW, WITH_SINKS], ids=["full", "window", "sinks"])
def test_one_that_was_put_off_finds_its_pages_again(window):
    engine, model = build(group(20, window))
    sequence = engine.submit(request(*text(9), most=12))
    for _ in range(6):
        heard(engine.step())
    assert sequence.computed == 14
    engine.scheduler.preempt(sequence.group)
    check_invariants(engine.scheduler)
    assert (sequence.computed, sequence.pages) == (0, 0)
    drain(engine)
    assert (sequence.counts.reused, sequence.counts.forwarded) == (12, 20 + 2), "all but the page that was not full"
    assert sequence.tokens == naive(sequence.request, window)
    assert model.moved == 0


@pytest.mark.parametrize("computed", range(1, 10))
def test_a_page_is_left_once_it_is_full(computed):
    engine, _ = build(20, token_budget=computed)
    sequence = engine.submit(request(*text(11)))
    heard(engine.step())
    engine.scheduler.preempt(sequence.group)
    assert engine.pool.cached == computed // 4
    drain(engine)
    assert (sequence.counts.reused, sequence.tokens) == (computed // 4 * 4, naive(sequence.request))


def test_who_does_not_share_neither_takes_nor_leaves():
    engine, _ = build(40)
    (alone,) = run(engine, request(*text(12), 5, share=False))
    assert engine.pool.cached == 0
    (first,) = run(engine, request(*text(12), 5))
    (after,) = run(engine, request(*text(12), 5, share=False))
    assert [one.counts.reused for one in (alone, first, after)] == [0, 0, 0]


def test_the_naive_loop_neither_takes_nor_leaves():
    engine, model = build(40, group(20, WINDOW))
    (first,) = run(engine, request(*text(12), most=3, cache=False))
    assert engine.pool.cached == 0
    run(engine, request(*text(12), most=3))
    before = model.forwarded
    (again,) = run(engine, request(*text(12), most=3, cache=False))
    assert first.tokens == again.tokens == naive(again.request)
    assert (again.counts.reused, model.forwarded - before) == (0, 12 + 13 + 14)


def test_a_prompt_to_be_scored_is_computed_whole_and_left_to_others():
    engine, _ = build(40)
    run(engine, request(*text(12), 5, most=1))
    (scored,) = run(engine, request(*text(16), 5, most=1, prompt_logprobs_from=1))
    assert (scored.counts.reused, scored.counts.forwarded) == (0, 17)
    assert run(engine, request(*text(16), 6, most=1))[0].counts.reused == 16
    engine.submit(request(*text(17), most=3, prompt_logprobs_from=1))
    assert len([event for event in drain(engine) if isinstance(event, Token)]) == 3


def test_who_lacks_nothing_of_what_is_being_computed_does_not_wait():
    engine, _ = build(40, token_budget=4096)
    engine.submit(request(*text(33)))
    other, short = engine.submit(request(*text(33, 1))), engine.submit(request(*text(4)))
    heard(engine.step())
    assert (other.computed, short.computed) == (33, 4), "another text, and one whose only page has its last token"


@pytest.mark.parametrize("whole", [True, False], ids=["step", "row"])
def test_what_failed_is_not_waited_for_and_not_found(whole):
    engine, model = build(40, token_budget=4096)
    one, two, three = [engine.submit(request(*text(33), most=4)) for _ in range(3)]
    model.breaks, model.faulty = whole, set() if whole else {one.id}
    (event,) = engine.step()
    assert isinstance(event, Failed) and event.sequence == one.id
    assert engine.pool.cached == 0, "it leaves nothing"
    model.breaks, model.faulty = False, set()
    drain(engine)
    assert [(two.counts.reused, two.counts.forwarded), (three.counts.reused, three.counts.forwarded)] == [
        (0, 36),
        (32, 4),
    ]
    assert two.tokens == three.tokens == naive(two.request)


@pytest.mark.parametrize("whole", [True, False], ids=["step", "row"])
def test_a_fault_leaves_what_was_computed_before_it(whole):
    engine, model = build(40, token_budget=8)
    broken = engine.submit(request(*text(33), most=4))
    heard(engine.step()), heard(engine.step())
    model.breaks, model.faulty = whole, set() if whole else {broken.id}
    (event,) = engine.step()
    assert isinstance(event.error, Planted)
    model.breaks, model.faulty = False, set()
    (again,) = run(engine, request(*text(33), most=4))
    assert (again.counts.reused, again.tokens) == (16, naive(again.request))


def fork_after(steps, *groups, **options):
    """An engine, its model, and a parent of 9 tokens that has made some steps."""
    engine, model = build(*(groups or (20,)), **options)
    parent = engine.submit(request(*text(9), most=12))
    for _ in range(steps):
        heard(engine.step())
    return engine, model, parent


def child_of(engine, parent, **options):
    return engine.submit(request(*parent.tokens, parent=parent, shared=len(parent.tokens), **options))


@pytest.mark.parametrize("steps", range(1, 7))
def test_a_fork_goes_on_where_its_parent_is_and_copies_one_page_a_group(steps):
    groups = [group(20), group(20, WINDOW), group(20, WITH_SINKS)]
    engine, model, parent = fork_after(steps, *groups, script=lambda text: (text[-1] * 5 + len(text)) % 89)
    computed, held = parent.computed, used(engine)
    child = child_of(engine, parent, most=9)
    check_invariants(engine.scheduler)
    assert (child.state, child.computed, used(engine)) == (State.RUNNING, computed, held), "a fork costs no page"
    assert model.copies == []
    drain(engine)
    partial = computed % 4 != 0
    assert sorted(number for number, _, _ in model.copies) == ([0, 1, 2] if partial else []), "one is left to itself"
    assert child.counts.forwarded + child.counts.reused == len(child.tokens) - 1 and child.counts.reused == computed
    assert parent.counts.forwarded == len(parent.tokens) - 1
    assert child.tokens[: len(parent.tokens)] == parent.tokens[: len(child.tokens)], "the script is the same"


class Diverging:
    """A script that writes otherwise each time it is asked."""

    def __init__(self):
        self.random = random.Random(3)

    def __call__(self, text):
        return self.random.randrange(89)


@pytest.mark.parametrize("window", [AttentionWindow(), WINDOW, WITH_SINKS], ids=["full", "window", "sinks"])
def test_parent_and_children_part_and_each_reads_its_own_text(window):
    """The watched model compares every row; here the texts are all different."""
    engine, _, parent = fork_after(3, group(60, window), group(60), script=Diverging())
    children = [child_of(engine, parent, most=12) for _ in range(3)]
    heard(engine.step())
    children.append(child_of(engine, children[0], most=9))
    drain(engine)
    texts = {tuple(sequence.tokens) for sequence in (parent, *children)}
    assert len(texts) == 5
    assert children[3].tokens[:13] == children[0].tokens[:13]
    assert engine.pool.available == engine.pool.pages


@pytest.mark.parametrize(
    "options",
    [{"cache": False}, {"prompt_logprobs_from": 1}, {"salt": b"another"}],
    ids=["naive", "scored", "salted"],
)
def test_a_fork_that_may_not_have_the_pages_is_queued(options):
    engine, _, parent = fork_after(3)
    child = child_of(engine, parent, most=2, **options)
    assert (child.state, child.pages) == (State.WAITING, 0)
    drain(engine)
    assert child.counts.reused == 0
    assert [parent.tokens, child.tokens] == [naive(parent.request), naive(child.request)]


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("shared", range(1, 20))
def test_an_earlier_fork_goes_on_with_its_own_token_on_the_same_pages(shared, ended):
    engine, model, parent = fork_after(10, group(40))
    if ended:
        engine.abort(parent.id)
    table = dict(parent.tables[0])
    own = (*parent.tokens[:shared], 88)
    child = engine.submit(request(*own, most=6, parent=parent, shared=shared))
    if not ended:
        assert child.state is State.RUNNING
        assert child.computed == child.counts.reused == min(shared, parent.computed)
        pages = -(-child.computed // 4)
        assert dict(child.tables[0]) == {page: table[page] for page in range(pages)}
        assert engine.pool.shared(child.tables) == engine.pool.shared(parent.tables) == [pages]
    heard(engine.step())
    check_invariants(engine.scheduler)
    if not ended:
        assert engine.pool.shared(child.tables) == [child.counts.reused // 4], "the page that is not full was copied"
        full = range(shared // 4)
        assert [parent.tables[0][page] for page in full] == [table[page] for page in full], "the parent stays there"
    drain(engine)
    assert child.tokens == naive(child.request) and child.tokens[: len(own)] == list(own)
    assert ended or parent.tokens == naive(parent.request)
    assert child.counts.forwarded + child.counts.reused == len(child.tokens) - 1
    most = min(shared, 18)  # the text's last token is never computed
    assert child.counts.reused in ({most - most % 4, most} if ended else {most})
    assert len(model.copies) <= 1


@pytest.mark.parametrize("ends", ["fork first", "parent first"])
@pytest.mark.parametrize("shared", range(1, 20))
def test_an_earlier_fork_that_never_stepped_leaves_its_parents_page_its_hash(shared, ends):
    """Whoever goes on from these pages later reads the parent's text there, and no other that was put into them."""
    engine, _, parent = fork_after(10)
    child = engine.submit(request(*parent.tokens[:shared], 88, most=6, parent=parent, shared=shared))
    assert child.state is State.RUNNING and child.computed == min(shared, 18)
    hashes = dict(engine.pool.group_pools[0].hashes)
    for gone in (child, parent) if ends == "fork first" else (parent, child):
        engine.abort(gone.id)
        check_invariants(engine.scheduler)
        assert hashes.items() <= engine.pool.group_pools[0].hashes.items()
    run(engine, request(*text(70, 50), most=1))  # takes nearly all pages
    for prefix in range(1, 20):
        (again,) = run(engine, request(*parent.tokens[:prefix], most=3))
        assert again.tokens == naive(again.request)


def test_a_fork_from_before_the_window_is_computed_again():
    """The parent has released the pages that the child's window reads."""
    engine, _, parent = fork_after(10, group(40, WINDOW), group(40))
    late, early = parent.computed - 1, parent.computed - 8
    states = []
    for shared in (late, early):
        child = engine.submit(request(*parent.tokens[:shared], 88, most=6, parent=parent, shared=shared))
        states.append((child.state, child.computed))
    assert states == [(State.RUNNING, late), (State.WAITING, 0)]
    drain(engine)


def test_a_fork_takes_no_pages_from_the_pool_of_another_engine():
    engine, _, parent = fork_after(10, group(40))
    other, _ = build(group(40))
    child = other.submit(request(*parent.tokens[:12], 88, most=6, parent=parent, shared=12))
    assert (child.state, child.pages) == (State.WAITING, 0)
    for each in (other, engine):
        drain(each)
        check_invariants(each.scheduler)
    assert child.tokens == naive(child.request) and parent.tokens == naive(parent.request)


def test_no_more_forks_run_than_may():
    engine, _, parent = fork_after(1, max_sequences=2)
    children = [child_of(engine, parent, most=2) for _ in range(3)]
    assert [child.state for child in children] == [State.RUNNING, State.WAITING, State.WAITING]
    drain(engine)


def test_a_fork_that_writes_nothing_ends_at_once():
    engine, _, parent = fork_after(1, context=30)
    none = child_of(engine, parent, most=0)
    ended = [event for event in drain(engine) if event.sequence == none.id]
    assert [event.reason for event in ended] == [FinishReason.LENGTH]


def test_a_fork_is_refused_like_any_request():
    engine, _ = build(4, context=40)
    parent = engine.submit(request(*text(9), most=7))
    heard(engine.step())
    with pytest.raises(CapacityError):
        child_of(engine, parent, most=20)
    parent.tokens += text(40)  # as no request could
    with pytest.raises(ContextError):
        child_of(engine, parent)


def test_pages_that_several_paused_texts_share_are_given_up_for_one_that_waits():
    """None of the paused ones alone would free them; together they do, and nobody waits for ever."""
    engine, _ = build(5)
    paused = [engine.submit(request(*range(13), most=3)) for _ in range(2)]
    for sequence in paused:
        engine.pause(sequence.id, 14)
    while engine.step():
        pass
    assert engine.pool.available == 0 and [sequence.pages for sequence in paused] == [4, 4]
    other = engine.submit(request(*range(50, 60), most=3))
    for _ in range(10):
        heard(engine.step())
        check_invariants(engine.scheduler)
    assert other.state is State.FINISHED
    for sequence in paused:
        engine.resume(sequence.id)
    drain(engine)
    assert [sequence.tokens for sequence in paused] == [naive(sequence.request) for sequence in paused]


def test_a_paused_text_is_not_put_off_for_one_that_needs_its_pages_and_more():
    """What is found in a paused text's pages is no page to be had besides."""
    engine, _ = build(5)
    paused = engine.submit(request(*text(12), most=6))
    engine.pause(paused.id, 13)
    while engine.step():
        pass
    running = engine.submit(request(70, 71, 72, most=6))
    for _ in range(3):
        heard(engine.step())
    assert engine.pool.available == 0
    late = engine.submit(request(*text(12), 90, 91, most=3))
    heard(engine.step())
    assert (late.counts.preemptions, paused.counts.preemptions) == (0, 0)
    while late.state is not State.FINISHED:
        heard(engine.step())
    assert (running.state, late.counts.reused) == (State.FINISHED, 12)


SHAPES = {
    "full": [AttentionWindow()],
    "window": [AttentionWindow(size=20)],
    "sinks": [AttentionWindow(size=20, sinks=5)],
    "hybrid": [AttentionWindow(), AttentionWindow(size=20)],
    "parts": [AttentionWindow(stop=24), AttentionWindow(size=20, sinks=30, start=24)],
}


@pytest.mark.parametrize("common", [True, False], ids=["common", "own"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_pool_hardly_larger_than_the_longest_text_serves_all(shape, common):
    rng = random.Random(11)
    budget, size, longest = 48, 8, 80
    attention_windows = SHAPES[shape]
    pages = [int(1.2 * window.max_pages(longest, budget, size)) for window in attention_windows]
    groups = [group(count, window) for count, window in zip(pages, attention_windows, strict=True)]
    engine, _ = build(*groups, page_size=size, token_budget=budget, max_sequences=16)
    beginnings = [text(30, 1), text(30, 2)]
    requests = []
    for i in range(share(256)):
        begin = rng.choice(beginnings)[: rng.randint(0, 30)] if common else []
        prompt = [*begin, *text(rng.randint(1, 40 - len(begin)), i)]
        requests.append(request(*prompt, most=rng.randint(1, longest - len(prompt))))
    sequences = [engine.submit(one) for one in requests]
    firsts = {}
    while engine.busy:
        for event in heard(engine.step()):
            firsts.setdefault(event.sequence, event)
    check_invariants(engine.scheduler)
    assert [one.tokens for one in sequences] == [naive(one, attention_windows[0]) for one in requests]
    assert list(firsts) == sorted(firsts), "first tokens come in the order of arrival"
    assert max(one.counts.preemptions for one in sequences) <= MAX_PREEMPTIONS
    assert engine.pool.available == engine.pool.pages
    undisturbed = [one for one in sequences if not one.counts.preemptions]
    assert all(one.counts.forwarded + one.counts.reused == len(one.tokens) - 1 for one in undisturbed)
    assert not common or sum(one.counts.reused for one in undisturbed) > 0
