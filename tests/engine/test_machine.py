"""A state machine over the page pool and the scheduler, with plain dictionaries as its oracle.

Requests of every kind come, run, fail and go away in any order, over pools that are always too small. The scripted
model's next token depends on the whole text, which it reads back through the page tables: one wrong page, one token
computed twice or left out, and the texts differ from the shadow's.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tokenwright.engine import (
    Engine,
    Event,
    Failed,
    Finished,
    FinishReason,
    PagePool,
    Request,
    SamplingParams,
    Scheduler,
    Scored,
    Sequence,
    Step,
    Token,
)
from tokenwright.engine.scheduler import MOST_PREEMPTIONS
from tokenwright.engine.scripted import ScriptedModel
from tokenwright.errors import CapacityError, ContextError

CONTEXT = 40


def script(text: list[int]) -> int:
    """A next token that every earlier token and its place have a say in."""
    return sum((place + 1) * token for place, token in enumerate(text)) % 97


def naive(request: Request) -> tuple[list[int], FinishReason]:
    """What a request must come to, by the definition alone."""
    text = list(request.prompt)
    while len(text) < CONTEXT and len(text) - len(request.prompt) < request.params.max_tokens:
        text.append(script(text))
    written = len(text) - len(request.prompt)
    return text, FinishReason.LENGTH if written == request.params.max_tokens else FinishReason.CONTEXT


class FailingModel(ScriptedModel):
    fails = False

    def forward(self, step):
        if self.fails:
            raise RuntimeError("planted")
        return super().forward(step)


class Machine(RuleBasedStateMachine):
    @initialize(
        pages=st.integers(3, 12),
        page_size=st.integers(1, 7),
        budget=st.integers(1, 30),
        sequences=st.integers(1, 5),
    )
    def build(self, pages, page_size, budget, sequences):
        self.model = FailingModel(script, pages, page_size)
        self.scheduler = Scheduler(PagePool(pages, page_size), budget, sequences)
        self.engine = Engine(self.model, self.model, self.scheduler, CONTEXT)
        self.requests: dict[int, Request] = {}
        self.live: dict[int, Sequence] = {}
        self.texts: dict[int, list[int]] = {}
        self.scores: dict[int, dict[int, float]] = {}
        self.terminal: dict[int, Event] = {}
        self.toyed: set[int] = set()  # held or switched at some time

    @rule(
        prompt=st.lists(st.integers(0, 96), min_size=1, max_size=CONTEXT + 2),
        most=st.integers(0, 20),
        cache=st.booleans(),
        scored=st.booleans(),
    )
    def submit(self, prompt, most, cache, scored):
        params = SamplingParams(max_tokens=most)
        request = Request(tuple(prompt), params, cache=cache, prompt_logprobs=scored)
        try:
            sequence = self.engine.submit(request)
        except ContextError as error:
            self.refused_for_length(prompt, str(error))
            return
        except CapacityError:
            pool = self.scheduler.pool
            assert max(len(prompt), min(len(prompt) + most, CONTEXT) - 1) > pool.pages * pool.page_size
            return
        self.requests[sequence.id] = request
        self.live[sequence.id] = sequence
        self.texts[sequence.id] = list(prompt)
        self.scores[sequence.id] = {}

    def refused_for_length(self, prompt, message):
        assert len(prompt) > CONTEXT
        assert f"{len(prompt) - CONTEXT} more than" in message

    @precondition(lambda self: self.engine.busy)
    @rule()
    def step(self):
        oldest = next((sequence for sequence in self.scheduler.running if not sequence.held), None)
        before = None if oldest is None else (oldest.forwarded, len(oldest.tokens))
        self.hear(self.engine.step())
        if oldest is not None and oldest.id in self.live:
            assert (oldest.forwarded, len(oldest.tokens)) > before, "the oldest always advances"

    @precondition(lambda self: self.scheduler.sequences)
    @rule()
    def step_that_fails(self):
        expected = {chunk.sequence for chunk in self.peek().chunks}
        self.model.fails = True
        events = self.engine.step()
        self.model.fails = False
        failed = {event.sequence for event in events if isinstance(event, Failed)}
        assert failed == expected, "the step's sequences fail, and no others"
        self.hear(events)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data):
        identity = data.draw(st.sampled_from(sorted(self.live)))
        ends_anyway = identity not in self.scheduler.sequences
        events = self.engine.abort(identity)
        assert events == ([] if ends_anyway else [Finished(identity, FinishReason.ABORTED)])
        self.hear(events)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), more=st.none() | st.integers(-2, 3))
    def hold(self, data, more):
        identity = data.draw(st.sampled_from(sorted(self.live)))
        self.toyed.add(identity)
        self.engine.hold(identity, None if more is None else len(self.texts[identity]) + more)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), cache=st.booleans())
    def use_cache(self, data, cache):
        identity = data.draw(st.sampled_from(sorted(self.live)))
        self.toyed.add(identity)
        self.engine.use_cache(identity, cache)

    @rule(identity=st.integers(10_000, 10_010))
    def unknown(self, identity):
        assert self.engine.abort(identity) == []
        self.engine.hold(identity, 0)
        self.engine.use_cache(identity, False)

    def peek(self) -> Step:
        """What the next step will compute. Scheduling twice without a commit names the same chunks."""
        return self.scheduler.schedule()

    def hear(self, events: list[Event]) -> None:
        for event in events:
            identity = event.sequence
            assert identity in self.live, "nothing is told of a request after its end"
            match event:
                case Token(token=token):
                    hold = self.live[identity].hold_at
                    assert hold is None or len(self.texts[identity]) < hold, "what is held writes nothing"
                    assert token == script(self.texts[identity]), "the text is the naive loop's"
                    self.texts[identity].append(token)
                case Scored(start=start, logprobs=values):
                    for place, value in enumerate(values, start):
                        assert place not in self.scores[identity], "each token is scored once"
                        self.scores[identity][place] = value
                case Finished() | Failed():
                    self.terminal[identity] = event
                    self.end(identity)

    def end(self, identity: int) -> None:
        event, request = self.terminal[identity], self.requests[identity]
        sequence = self.live.pop(identity)
        assert sequence.pages == []
        if isinstance(event, Finished) and event.reason is not FinishReason.ABORTED:
            text, reason = naive(request)
            assert (self.texts[identity], event.reason) == (text, reason)
            if request.prompt_logprobs:
                prompt = request.prompt
                right = {i: 0.0 if script(list(prompt[:i])) == prompt[i] else -1.0 for i in range(1, len(prompt))}
                assert self.scores[identity] == right
            if not sequence.preemptions and identity not in self.toyed and len(text) > len(request.prompt):
                n, t = len(request.prompt), len(text)
                assert sequence.forwarded == (t - 1 if request.cache else sum(range(n, t)))

    @invariant()
    def books_balance(self):
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check()
        owners: dict[int, int] = {}
        for identity, sequence in self.scheduler.sequences.items():
            for page in sequence.pages:
                assert page not in owners, "a page has one owner"
                owners[page] = identity
            assert sequence.tokens == self.texts[identity]
        assert self.scheduler.pool.free == self.scheduler.pool.pages - len(owners)
        waiting = [sequence.id for sequence in self.scheduler.waiting]
        if not self.toyed:  # who was held and put off queues again where it was, behind those that went on
            assert waiting == sorted(waiting), "first come, first served"
            if waiting and self.scheduler.running:
                assert max(sequence.id for sequence in self.scheduler.running) < waiting[0]
            assert len(self.scheduler.running) <= self.scheduler.max_sequences
        for identity, sequence in self.scheduler.sequences.items():
            assert sequence.preemptions <= MOST_PREEMPTIONS or identity in self.toyed

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for identity in self.live:
            self.engine.hold(identity, None)
        while self.engine.busy:
            self.step()
            self.books_balance()
        assert self.terminal.keys() == self.requests.keys(), "every request ended"
        assert self.scheduler.pool.free == self.scheduler.pool.pages


Machine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestMachine = Machine.TestCase


class PoolMachine(RuleBasedStateMachine):
    """The pool alone: tables that grow and go, against a dictionary from page to owner."""

    @initialize(pages=st.integers(1, 20), page_size=st.integers(1, 5))
    def build(self, pages, page_size):
        self.pool = PagePool(pages, page_size)
        self.tables: dict[int, list[int]] = {}
        self.owner: dict[int, int] = {}

    @rule(table=st.integers(0, 5), tokens=st.integers(0, 60))
    def extend(self, table, tokens):
        pages = self.tables.setdefault(table, [])
        before = list(pages)
        needed = -(-tokens // self.pool.page_size)
        fits = needed - len(before) <= self.pool.pages - len(self.owner)
        assert self.pool.extend(pages, tokens) is fits
        assert pages[: len(before)] == before, "what is held stays in place"
        assert len(pages) == (max(needed, len(before)) if fits else len(before))
        for page in pages[len(before) :]:
            assert page not in self.owner and 0 <= page < self.pool.pages
            self.owner[page] = table

    @rule(table=st.integers(0, 5))
    def release(self, table):
        pages = self.tables.get(table, [])
        self.pool.release(pages)
        assert pages == []
        self.owner = {page: owner for page, owner in self.owner.items() if owner != table}

    @invariant()
    def books_balance(self):
        if hasattr(self, "pool"):
            self.pool.check(self.tables.values())
            assert self.pool.free == self.pool.pages - len(self.owner)


PoolMachine.TestCase.settings = settings(max_examples=100, deadline=None)
TestPoolMachine = PoolMachine.TestCase
