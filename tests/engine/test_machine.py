"""A state machine over the page pool and the scheduler, with the naive loop as its oracle.

Requests of every kind come, share, fork, run, fail and go away in any order, over pools that are always too small. The
scripted model's next token depends on all of the text that is in reach, which it reads back through the page tables,
and the watched one compares what every row could read in every group: one wrong page, one token computed twice or left
out, and it shows.
"""

from collections import Counter
from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.engine.hand import Guesses, ScriptedTier, Watched, heard, kept_pages, mixed, naive, running, seen
from tests.engine.invariants import check_invariants
from tests.profiles import examples
from tokenwright.engine import (
    AttentionWindow,
    Engine,
    Event,
    Failed,
    Finished,
    FinishReason,
    Group,
    PagePool,
    PrefixIndex,
    PromptLogprobs,
    Request,
    SamplingParams,
    Scheduler,
    Sequence,
    State,
    Step,
    Token,
)
from tokenwright.engine.layer_group import StateWindow
from tokenwright.engine.pins import Mark, Pins, Retention
from tokenwright.engine.scheduler import MAX_PREEMPTIONS
from tokenwright.engine.warming import CHUNK, WarmRules
from tokenwright.errors import CapacityError, ContextError

CONTEXT = 40
SALTS = (b"", b"salt")
COMMON = [[(step * place) % 5 for place in range(CONTEXT + 2)] for step in (1, 2)]  # texts that others begin like

windows = st.builds(AttentionWindow, size=st.integers(1, 9))
with_sinks = st.builds(AttentionWindow, size=st.integers(1, 9), sinks=st.integers(1, 6))
one_reach = st.one_of(st.just(AttentionWindow()), windows, with_sinks)


def two_parts(first, window):
    """One text whose beginning is kept in one way and the rest in another."""
    return [AttentionWindow(stop=first), AttentionWindow(window.size, window.sinks, start=first)]


attention_windows = st.one_of(
    st.tuples(one_reach),
    st.tuples(st.just(AttentionWindow()), st.one_of(windows, with_sinks)),
    st.builds(two_parts, st.integers(1, 20), one_reach),
    st.tuples(one_reach, one_reach, one_reach),
).flatmap(st.permutations)
states = st.builds(lambda every: [StateWindow(every=every)], st.sampled_from([1, 4, 6, 9, 15]))
with_states = st.builds(lambda others, last: [*others, *last], attention_windows, st.one_of(st.just([]), states))

prompts = st.one_of(
    st.builds(
        lambda text, cut, tail: text[:cut] + tail,
        st.sampled_from(COMMON),
        st.integers(0, 24),
        st.lists(st.integers(0, 2), min_size=1, max_size=6),
    ),
    st.builds(lambda text, cut: text[:cut], st.sampled_from(COMMON), st.integers(1, 24)),
    st.builds(lambda text, cut: text[:cut], st.sampled_from(COMMON), st.integers(10, 24)),
    st.lists(st.integers(0, 96), min_size=1, max_size=CONTEXT + 2),
)


def rarely(value, once_in=6):
    return st.integers(1, once_in).map(lambda chance: value if chance == once_in else not value)


def retained(prompt, asked, salt):
    """What a request asks of the cache: marks at some places of its prompt, owned by its salt."""
    places, ttl_s, explicit = asked
    marks = tuple(Mark(at, ttl_s) for at in sorted(places) if at <= len(prompt))
    return Retention(marks, salt.decode(), str(len(marks)), explicit)


def requests(prompts, salts):
    return st.builds(
        lambda prompt, most, asked, **options: Request(
            tuple(prompt),
            SamplingParams(max_tokens=most),
            retention=retained(prompt, asked, options["salt"]),
            **options,
        ),
        prompts,
        st.integers(0, 12),
        st.tuples(st.sets(st.integers(1, 30), max_size=3), st.integers(1, 5), rarely(True, 8)),
        cache=rarely(False, 12),
        prompt_logprobs_from=st.sampled_from([None, None, None, None, None, 1, 2, 5]),
        share=rarely(False),
        salt=st.sampled_from(salts),
    )


ACTIONS = ["warm", "warm", "wait", "release", "abort", "step_that_fails", "row_that_fails", "interrupt"]
TOYS = [
    "fork",
    "fork",
    "fork",
    "fork",
    "pause",
    "pause",
    "pause_all",
    "pause_all",
    "resume_all",
    "use_cache",
    "preempt",
]


class RecordedIndex(PrefixIndex):
    """Remembers which text every hash was made of."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.texts: dict[bytes, tuple[bytes, tuple[int, ...]]] = {}

    def cache_pages(self, tables, hashes, tokens, start, stop):
        super().cache_pages(tables, hashes, tokens, start, stop)
        size = self.pool.page_size
        for page, page_hash in enumerate(hashes.extend(tokens)[: stop // size], 1):
            text = (hashes.root, tuple(tokens[: page * size]))
            assert self.texts.setdefault(page_hash, text) == text, "a hash for two texts"

    def cache_tail(self, tables, hashes, tokens, stop):
        super().cache_tail(tables, hashes, tokens, stop)
        if stop:  # a full page's state may be cached here first: of a fork whose parent shares nothing
            text = (hashes.root, tuple(tokens[:stop]))
            tail = hashes.hash(tokens, (stop - 1) // self.pool.page_size, stop)
            assert self.texts.setdefault(tail, text) == text, "a hash for two texts"

    def check_contents(self, slots):
        """Cached pages hold the text of their hash, where any row behind the page reads it."""
        size = self.pool.page_size
        for pool, memory in zip(self.pool.group_pools, slots, strict=True):
            for page_hash, page in pool.index.items():
                _, text = self.texts[page_hash]
                if isinstance(pool.group.window, StateWindow):
                    assert memory[page * size] == text
                    continue
                for position in range((len(text) - 1) // size * size, len(text)):
                    if self.is_kept(pool.group.window, position):
                        assert memory[page * size + position % size] == text[position]

    @staticmethod
    def is_kept(window, position):
        """A window of one token reads back nothing: its pages may be given up half-way, and nobody misses them."""
        near = window.size is None or window.size > 1 or position < window.sinks
        return near and position >= window.start and (window.stop is None or position < window.stop)


class Machine(RuleBasedStateMachine):
    @initialize(
        attention_windows=with_states,
        room=st.integers(20, CONTEXT - 1),
        more=st.lists(st.integers(0, 3), min_size=4, max_size=4),
        texts=st.sampled_from([2, 1, 3, 5]),
        page_size=st.sampled_from([2, 1, 3, 4, 5, 7]),
        budget=st.sampled_from([16, 64, 30, 8, 16, 40, 1]),
        sequences=st.integers(2, 6),
        pinned=st.sampled_from([0.5, 0.1, 0.9, 1.0]),
        calm=st.booleans(),
        drafts=st.sampled_from([None, 1, 2, 3]),
        tier=st.sampled_from([None, 1, 2, 3]),
    )
    def build(self, attention_windows, room, more, texts, page_size, budget, sequences, **others):
        """Every group has the pages for so many texts of `room` tokens, and a few more."""
        calm, drafts, tier, pinned = (others[name] for name in ("calm", "drafts", "tier", "pinned"))
        least = [max(1, window.max_pages(room, budget, page_size)) for window in attention_windows]
        groups = [
            Group(texts * pages + extra, window, page_bytes=1)
            for pages, extra, window in zip(least, more, attention_windows, strict=False)
        ]
        self.model = Watched(mixed, groups, page_size)
        self.pool = PagePool(groups, page_size, self.model)
        self.prefixes = RecordedIndex(self.pool)
        self.tier = self.prefixes.tier = None if tier is None else ScriptedTier(tier)
        proposer = None if drafts is None else Guesses(attention_windows[0], drafts)
        self.now = 0.0
        self.pins = Pins(self.prefixes, pinned, lambda: self.now)
        self.scheduler = Scheduler(self.pool, budget, sequences, self.prefixes, proposer, self.pins)
        self.engine = Engine(self.model, self.model, self.scheduler, CONTEXT)
        self.calm = calm  # nobody pauses, switches, forks or preempts
        self.requests: dict[int, Request] = {}
        self.live: dict[int, Sequence] = {}
        self.texts: dict[int, list[int]] = {}
        self.scores: dict[int, dict[int, float]] = {}
        self.terminal: dict[int, Event] = {}
        self.reserved = False
        self.toyed: set[int] = set()  # paused, switched, forked or preempted by hand at some time
        self.family: set[int] = set()  # forks and their parents
        self.computed: dict[bytes, set[tuple[int, ...]]] = {salt: set() for salt in SALTS}  # by those who share
        self.warmed: list[int] = []  # tokens of each chunk that warm-ups have computed
        self.free = False  # the machine, for warm-ups that heed it
        self.ages: list[tuple[Sequence, list[int]]] = []  # of the texts that warm-ups go on from
        self.again: Counter[int] = Counter()  # tokens to be computed once more, because a state went back

    @rule(
        arrivals=st.lists(st.tuples(requests(prompts, [b"", *SALTS]), st.integers(1, 3)), max_size=2),
        action=st.sampled_from([None, *ACTIONS, *TOYS]),
        steps=st.integers(0, 5),
        data=st.data(),
    )
    def turn(self, arrivals, action, steps, data):
        """Some arrive, something happens, and some steps: one rule, for Hypothesis leaves rules out of an example."""
        for request in (request for request, times in arrivals for _ in range(times)):
            self.accepted(request, lambda request=request: self.engine.submit(request))
        if action is not None and not (self.calm and action in TOYS):
            getattr(self, action)(data)
        self.books_balance()
        while steps and self.engine.busy:
            self.step()
            self.books_balance()
            steps -= 1
        while steps and self.engine.due and not self.engine.busy:
            self.warm_step()
            steps -= 1

    def warm(self, data):
        """Some text is to be computed ahead, such as one that goes on from one that was written."""
        known = data.draw(st.sampled_from([*self.texts.values(), *COMMON]))
        text = [*known[: data.draw(st.integers(0, CONTEXT - 2))], *data.draw(st.lists(st.integers(0, 3), max_size=9))]
        salt, heeds = data.draw(st.sampled_from(SALTS)), data.draw(rarely(True, 8))
        request = Request((*text, 0), SamplingParams(max_tokens=0), salt=salt)
        rules = WarmRules(known, lambda: self.free or not heeds, lambda found, tokens: self.warmed.append(tokens))
        try:
            self.engine.warm(request, rules)
        except (ContextError, CapacityError):
            return

    def warm_step(self):
        """A chunk of a warm-up takes no page that was used after the text that it goes on from, and tells no client."""
        warming, pools = self.scheduler.warming, self.pool.group_pools
        before = [dict(pool.cached) for pool in pools]
        indexed = [dict(pool.hashes) for pool in pools]
        told, steps = len(self.warmed), len(self.model.steps)
        assert self.engine.step() == []
        for chunk in (chunk for step in self.model.steps[steps:] for chunk in step.chunks):
            text = chunk.sequence.tokens[: chunk.stop]
            self.computed[chunk.request.salt].update(tuple(text[:end]) for end in range(1, len(text) + 1))
            assert self.warmed[told:] == [chunk.stop - chunk.start] and chunk.stop - chunk.start <= CHUNK
            first = next((one for one in self.ages if one[0] is chunk.sequence), None)
            if first is None:  # its first chunk
                queued = next((one for one in warming.queue if one.sequence is chunk.sequence), None)
                self.ages += [(queued.sequence, queued.ages)] if queued is not None else []
                first = self.ages[-1] if queued is not None else None
            if first is not None:
                for pool, cached, hashes, age in zip(pools, before, indexed, first[1], strict=True):
                    gone = {page for page, known in hashes.items() if pool.hashes.get(page) != known}
                    assert all(cached.get(page, age) < age for page in gone & cached.keys()), "it is younger"
        self.books_balance()

    def wait(self, data):
        """Some pins may end."""
        self.now += data.draw(st.integers(1, 4))

    def release(self, data):
        """The pins of a session end."""
        owner, session = data.draw(st.sampled_from(SALTS)).decode(), str(data.draw(st.integers(0, 3)))
        self.pins.release(owner, session)
        assert not [pin for pin in self.pins if pin.owner == owner and session in pin.sessions]

    def fork(self, data):
        """Fork some at any place of their text; half of the forks end before their first step."""
        for closes in data.draw(st.lists(st.booleans(), min_size=1, max_size=4)):
            child = self.fork_one(data) if self.scheduler.sequences else None
            if child is not None and closes:
                self.books_balance()
                self.close(child.id)

    def fork_one(self, data):
        run = [one.id for one in running(self.engine)]  # these have pages for it
        parent = data.draw(st.sampled_from(3 * sorted(run) + sorted(self.scheduler.sequences)))
        salts = 3 * [self.requests[parent].salt] + [*SALTS]
        shared = data.draw(st.integers(0, len(self.texts[parent])))
        text = self.texts[parent]
        if shared < len(text):  # from an earlier place, with another token
            text = [*text[:shared], data.draw(st.integers(0, 3))]
        request = replace(data.draw(requests(st.just(text), salts)), parent=self.live[parent], shared=shared)
        child = self.accepted(request, lambda: self.engine.submit(request))
        if child is not None:
            self.toyed |= {parent, child.id}
            self.family |= {parent, child.id}
        return child

    def accepted(self, request, submit):
        try:
            sequence = submit()
        except ContextError:
            assert len(request.prompt) > CONTEXT
            return None
        except CapacityError:
            slots = max(len(request.prompt), request.limit(CONTEXT) - 1)
            most = self.pool.max_pages(slots, self.scheduler.token_budget)
            assert any(pages > group.pages for pages, group in zip(most, self.pool.groups, strict=True))
            return None
        self.requests[sequence.id] = request
        self.live[sequence.id] = sequence
        self.texts[sequence.id] = list(request.prompt)
        self.scores[sequence.id] = {}
        return sequence

    def step(self):
        oldest = next((sequence for sequence in running(self.engine) if not sequence.paused), None)
        before = None if oldest is None else (oldest.counts.forwarded, len(oldest.tokens))
        reused = {identity: one.counts.reused for identity, one in self.live.items()}
        steps, looked = len(self.model.steps), self.looked
        events = self.engine.step()
        assert events or len(self.model.steps) > steps or self.looked > looked, "who is busy gets on"
        self.check_reused(reused)
        self.go_back(self.model.steps[steps:])
        self.hear(events)
        self.remember(self.model.steps[steps:])
        if oldest is not None and oldest.id in self.live:  # it has not ended
            assert (oldest.counts.forwarded, len(oldest.tokens)) > before, "the oldest always advances"

    def check_reused(self, before):
        """What was not computed was found where a text of the same salt has left it."""
        for identity, reused in before.items():
            sequence, request = self.live[identity], self.requests[identity]
            if more := sequence.counts.reused - reused:
                assert sequence.cache and request.share
                ends = [min((page + 1) * self.pool.page_size, more) for page in self.needed(more)]
                texts = {tuple(sequence.tokens[:end]) for end in ends}
                assert texts <= self.computed[request.salt], "found, but nobody computed it"

    def needed(self, cut):
        """Pages that rows from `cut` on read of what is before it: none, if all windows are of one token."""
        return set().union(*(kept_pages(group.window, cut, self.pool.page_size) for group in self.pool.groups))

    def go_back(self, steps):
        """A state goes back no further than to where the chunk began, and only where a draft was rejected."""
        for chunk in (chunk for step in steps for chunk in step.chunks if chunk.drafts):
            sequence = chunk.sequence
            if sequence.id not in self.model.faulty:
                known = min(chunk.stop, len(sequence.tokens) - 1)
                assert chunk.start <= sequence.computed <= known
                assert sequence.computed == known or (self.pool.states and known < chunk.stop)
                self.again[sequence.id] += known - sequence.computed

    def remember(self, steps):
        """What this step has computed, and left for others."""
        size = self.pool.page_size
        for chunk in (chunk for step in steps for chunk in step.chunks if chunk.sequence.id not in self.model.faulty):
            if chunk.sequence.cache and chunk.request.share:
                text = tuple(self.texts[chunk.sequence.id])
                stop = min(chunk.stop, len(text) - 1) if chunk.drafts else chunk.stop
                ends = [*range(size, stop + 1, size), *(one.at for one in chunk.request.retention.marks)]
                self.computed[chunk.request.salt].update(text[:end] for end in ends if end <= stop)

    def step_that_fails(self, data):
        expected = {chunk.sequence.id for chunk in self.peek().chunks}
        self.model.breaks = True
        events = self.engine.step()
        self.model.breaks = False
        failed = {event.sequence for event in events if isinstance(event, Failed)}
        assert failed == expected, "the step's sequences fail, and no others"
        self.hear(events)

    def row_that_fails(self, data):
        """What the model computes for one sequence of the step is rubbish, and it says so."""
        chunks = self.peek().chunks
        if chunks:
            bad = data.draw(st.sampled_from([chunk.sequence.id for chunk in chunks]))
            self.model.faulty = {bad}
            self.step()
            self.model.faulty = set()
            assert isinstance(self.terminal[bad], Failed)

    def interrupt(self, data):
        """Pages are reserved for a step that never comes."""
        self.peek()
        self.reserved = True

    def peek(self) -> Step:
        """What the next step will compute. Scheduling again without a commit names the same sequences, or more.

        More after the tier was asked, or a group was preempted: the next call may admit others.
        """
        self.scheduler.warming.give_up()
        reused = {identity: one.counts.reused for identity, one in self.live.items()}
        looked, step = self.looked, self.scheduler.schedule()
        self.check_reused(reused)
        while self.looked > looked:
            looked, step = self.looked, self.scheduler.schedule()
        while (more := self.scheduler.schedule()) != step:
            assert {one.sequence.id for one in step.chunks} < {one.sequence.id for one in more.chunks}
            step = more
        return step

    @property
    def looked(self):
        """How often the tier was asked."""
        return 0 if self.tier is None else self.tier.looked

    def abort(self, data):
        if self.live:
            self.close(data.draw(st.sampled_from(sorted(self.live))))

    def close(self, identity):
        ends_anyway = identity not in self.scheduler.sequences
        events = self.engine.abort(identity)
        assert events == ([] if ends_anyway else [Finished(identity, FinishReason.ABORTED)])
        self.hear(events)

    def pause(self, data):
        if self.live:
            identity = self.toy_with(data)
            more = data.draw(st.none() | st.integers(-2, 3))
            if more is None:
                self.engine.resume(identity)
            else:
                self.engine.pause(identity, len(self.texts[identity]) + more)

    def toy_with(self, data):
        """One of those that live."""
        identity = data.draw(st.sampled_from(sorted(self.live)))
        self.toyed.add(identity)
        return identity

    def pause_all(self, data):
        for identity in self.live:
            self.toyed.add(identity)
            self.engine.pause(identity)

    def resume_all(self, data):
        for identity in self.live:
            self.engine.resume(identity)

    def use_cache(self, data):
        if self.live:
            self.engine.use_cache(self.toy_with(data), data.draw(st.booleans()))

    def preempt(self, data):
        if self.scheduler.running:
            sequence = data.draw(st.sampled_from(running(self.engine)))
            self.toyed.add(sequence.id)
            self.scheduler.preempt(sequence.group)

    def unknown(self):
        assert self.engine.abort(10_000) == []
        self.engine.pause(10_000)
        self.engine.use_cache(10_000, False)

    def hear(self, events: list[Event]) -> None:
        for event in heard(events):
            identity = event.sequence
            assert identity in self.live, "nothing is told of a request after its end"
            match event:
                case Token(token=token):
                    at = self.live[identity].group.pause_at
                    assert at is None or len(self.texts[identity]) < at, "a paused sequence writes nothing"
                    text = self.texts[identity]
                    assert token == mixed(seen(self.window, text)), "the text is the naive loop's"
                    text.append(token)
                case PromptLogprobs(start=start, logprobs=values):
                    for place, value in enumerate(values, start):
                        assert place not in self.scores[identity], "each token is scored once"
                        self.scores[identity][place] = value
                case Finished() | Failed():
                    self.terminal[identity] = event
                    sequence = self.live[identity]
                    if isinstance(event, Finished) and sequence.shares:  # its tail is left as well
                        self.computed[sequence.request.salt].add(tuple(sequence.tokens[: sequence.computed]))
                    self.end(identity)

    @property
    def window(self):
        """Of the group that the script reads."""
        return self.pool.groups[0].window

    def end(self, identity: int) -> None:
        event, request = self.terminal[identity], self.requests[identity]
        sequence = self.live.pop(identity)
        assert sequence.pages == 0
        if isinstance(event, Finished) and event.reason is not FinishReason.ABORTED:
            text = self.texts[identity]
            assert text == naive(request, self.window, CONTEXT)
            written = len(text) - len(request.prompt)
            assert event.reason is (
                FinishReason.LENGTH if written == request.params.max_tokens else FinishReason.CONTEXT
            )
            if request.prompt_logprobs_from is not None:
                right = self.right_scores(request.prompt).items()
                assert self.scores[identity] == {at: score for at, score in right if at >= request.prompt_logprobs_from}
            if not sequence.counts.preemptions and identity not in self.toyed and written:
                self.check_counts(sequence)

    def check_counts(self, sequence):
        n, t = len(sequence.request.prompt), len(sequence.tokens)
        if sequence.request.cache:
            rejected = sequence.counts.drafted - sequence.counts.accepted
            assert sequence.counts.forwarded + sequence.counts.reused == t - 1 + rejected + self.again[sequence.id], (
                "each token but the last is computed once or found"
            )
        else:
            assert (sequence.counts.forwarded, sequence.counts.reused) == (sum(range(n, t)), 0)

    def right_scores(self, prompt):
        guesses = [mixed(seen(self.window, prompt[:end])) for end in range(1, len(prompt))]
        return {end: 0.0 if guess == prompt[end] else -1.0 for end, guess in enumerate(guesses, 1)}

    @invariant()
    def books_balance(self):
        if not hasattr(self, "scheduler"):
            return
        check_invariants(self.scheduler)
        self.prefixes.check_contents(self.model.slots)
        self.check_tables()
        self.check_order()
        for identity, sequence in self.scheduler.sequences.items():
            assert sequence.tokens == self.texts[identity]
            assert sequence.counts.preemptions <= MAX_PREEMPTIONS or identity in self.toyed
            assert (
                not sequence.counts.reused
                or sequence.counts.preemptions
                or identity in self.family
                or sequence.request.share
            )

    def check_tables(self):
        """Who holds which page: what a row reads, no more than a window needs, and only of texts it may share."""
        holders: dict[tuple[int, int], set[int]] = {}
        for sequence in self.scheduler.sequences.values():
            root = self.prefixes.hashes(sequence.request.salt).root
            for number, pool in enumerate(self.pool.group_pools):
                table = sequence.tables[number]
                self.check_table(sequence, pool.group.window, table)
                kept = self.scheduler.kv.saved_states.get(sequence.id, self.pool.tables())[number]
                for place, page in (*table.items(), *kept.items()):
                    holders.setdefault((number, page), set()).add(sequence.id)
                    if page in pool.hashes:
                        end = (place + 1) * self.pool.page_size
                        if pool.hashes[page] in pool.tail_of:  # a mark was just passed within the page
                            end = min(end, sequence.computed)
                        mine, (origin, text) = tuple(sequence.tokens[:end]), self.prefixes.texts[pool.hashes[page]]
                        if sequence.id in self.family:  # another text filled the page, or a fork ended within it
                            known = min(sequence.computed, len(text))
                            mine, text = mine[:known], text[:known]
                        assert (origin, text) == (root, mine)
                        assert sequence.shares or sequence.id in self.family, "it shares nothing"
        for several in holders.values():
            assert len({self.requests[identity].salt for identity in several}) == 1, "salts keep apart"
            lonely = [one for one in several if not self.requests[one].share and one not in self.family]
            assert not lonely or len(several) == 1, "it shares nothing"
        pinned = {(n, page) for pin in self.pins for n, table in enumerate(pin.tables) for page in table.values()}
        for pin in self.pins:
            assert pin.until > self.now - 5, "those whose time is over end after a step"
            root = self.prefixes.hashes(pin.owner.encode()).root
            texts = [self.prefixes.texts[pool.hashes[page]] for (n, page), pool in self.pinned_pages(pin)]
            # None behind a window of one token, which reads nothing back.
            assert all(origin == root and len(text) <= pin.tokens for origin, text in texts)
        warm = {(n, p) for one in self.scheduler.warming for n, table in enumerate(one.tables) for p in table.values()}
        assert self.pool.available == self.pool.pages - len(holders.keys() | pinned | warm)

    def pinned_pages(self, pin):
        """The pages of a pin by group, each with its group's pool."""
        for number, (pool, table) in enumerate(zip(self.pool.group_pools, pin.tables, strict=True)):
            kept = kept_pages(pool.group.window, pin.tokens, self.pool.page_size)
            assert table.keys() == kept, "what a row behind it reads"
            yield from (((number, page), pool) for page in table.values())

    def check_table(self, sequence, window, table):
        size = self.pool.page_size
        assert len(table) <= window.max_pages(sequence.max_computed, self.scheduler.token_budget, size)
        if sequence.state is State.WAITING:
            assert not table
            return
        kept = kept_pages(window, sequence.computed, size)
        assert kept <= table.keys(), "all that is read"
        if window.size is None or self.reserved:
            ahead = Guesses.MOST if self.reserved and self.scheduler.proposer else 0
            kept = kept_pages(window, sequence.computed, size, len(sequence.tokens) + ahead)
        assert table.keys() <= kept, "and no more"

    def check_order(self):
        """First come, first served; one that was preempted while paused queues where it was."""
        if self.toyed:
            return
        waiting = [group.first.id for group in self.scheduler.waiting]
        ahead = [sequence.id for sequence in running(self.engine)]
        assert ahead + waiting == sorted(ahead + waiting)
        assert len(ahead) <= self.scheduler.max_sequences

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        self.unknown()
        self.resume_all(None)
        while self.engine.busy:
            self.step()
            self.books_balance()
        self.free = True
        while self.engine.due:
            self.warm_step()
        assert not self.scheduler.warming.queue
        self.now += 10
        self.scheduler.expire()
        assert not len(self.pins) and self.terminal.keys() == self.requests.keys(), "every request and pin ended"
        assert self.pool.available == self.pool.pages
        self.ask_twice()

    def ask_twice(self):
        """With nobody beside it, a prompt that was just computed is found, up to the page of its last token.

        Behind the last state that is kept it may go on so far that other pages take the place of what is read there.
        """
        size, budget = self.pool.page_size, self.scheduler.token_budget
        n = max((n for n in range(1, CONTEXT) if self.pool.fits([self.pool.max_pages(n, budget)])), default=0)
        if n:
            request = Request(tuple(range(100, 100 + n)), SamplingParams(max_tokens=1))
            pages = range((n - 1) // size, 0, -1)
            kept = (page for page in pages if all(one.window.cached(page - 1, size) for one in self.pool.groups))
            whole = next(kept, 0) * size
            first, second = self.ask(request), self.ask(request)
            assert first == (0 if self.needed(whole) else whole)
            assert second == whole or (second < whole and not self.stays(whole, n))

    def stays(self, cut, end):
        """Whether there are pages for what is read at a cut, beside the pages of the steps from it to an end.

        Pages of an attention window are cached as the text goes by, newer than what was read at the cut.
        """
        size, budget, steps = self.pool.page_size, self.scheduler.token_budget, range(cut, end)
        for window, pages in ((one.window, one.pages) for one in self.pool.groups):
            seen = kept_pages(window, cut, size)
            for kept in (kept_pages(window, at, size, min(at + budget, end)) for at in steps if seen):
                if len(seen | kept) > pages:
                    return False
                seen |= set() if isinstance(window, StateWindow) else kept
        return True

    def ask(self, request):
        """How much of a request is found."""
        sequence = self.accepted(request, lambda: self.engine.submit(request))
        while self.engine.busy:
            self.step()
        return sequence.counts.reused


Machine.TestCase.settings = examples(600, stateful_step_count=20)
TestMachine = Machine.TestCase
