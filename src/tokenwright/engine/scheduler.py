"""The scheduler: which tokens of which sequences to compute now, and what follows from what was computed.

There is no prefill and no decode here. Every running sequence, the oldest first, is given as much of its pending
tokens as the step's token budget still allows: a prompt is a long chunk, decode is a chunk of one. What is left of
the budget admits waiting sequences, first come first served. When pages run out, the youngest running sequence
gives its pages back and will be recomputed, or finds what they held where it was parked (its tokens are kept): so the
oldest always advances, and since no request is admitted that the whole pool could not hold, every request ends. A
sequence that was put off `MOST_PREEMPTIONS` times is admitted again only when nothing can put it off once more.

A sequence that is admitted starts behind what another text has left of the same beginning. If what it lacks next is
being computed in this very step, it waits for that.

A held sequence (its viewer has paused it) computes nothing and keeps its pages, until somebody else needs them:
held ones are put off before all others.

Several picks with one parent fork it: the branches go on from the same pages, and who writes to one first copies it.
The beams of a search are a team: they are admitted and put off together, and take their last token in the same step,
so that the sampler sees all of them at once. One that nothing is picked from ends.
"""

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as ListLike
from itertools import count

from tokenwright.engine.page_pool import PagePool
from tokenwright.engine.request import FinishReason, Request, Sequence, State
from tokenwright.engine.step import (
    ALL,
    LAST,
    NONE,
    Chunk,
    Dropped,
    Event,
    Failed,
    Fault,
    Finish,
    Finished,
    Forked,
    Pick,
    PromptLogprobs,
    PromptLogprobsAdded,
    Result,
    Step,
    Token,
    finished,
)

RUNNING = State.RUNNING
MOST_PREEMPTIONS = 4  # of one sequence; more would recompute the same text over and over


class Scheduler:
    """Owns the sequences and the page pool.

    token_budget: tokens computed in one step, over all sequences. max_sequences: as many are admitted to run at once,
    held ones aside.
    """

    def __init__(self, pool: PagePool, token_budget: int, max_sequences: int, ids: Iterator[int] | None = None) -> None:
        assert token_budget > 0 and max_sequences > 0, "a step computes something"
        self.pool = pool
        self.ids = ids or count()  # of sequences
        self.token_budget = token_budget
        self.max_sequences = max_sequences
        self.sequences: dict[int, Sequence] = {}  # all that have not ended
        self.running: list[Sequence] = []  # oldest first
        self.waiting: deque[Sequence] = deque()

    def new(self, request: Request, limit: int) -> Sequence:
        """A sequence that is not queued yet. `limit`: the most tokens it can hold."""
        pool, identity = self.pool, next(self.ids)
        return Sequence(
            id=identity,
            root=identity,
            request=request,
            limit=limit,
            tokens=list(request.prompt),
            tables=pool.tables(),
            chain=pool.chain(request.salt),
            stop_checker=request.stop_checker,
            choices=tuple(range(request.params.choices)),
            cache=request.cache,
        )

    def most_pages(self, sequence: Sequence) -> list[int]:
        """The most pages of each group that a sequence's team takes: its beams have their prompt's in common."""
        own = self.pool.most_pages(sequence.slots, self.token_budget)
        same = self.pool.whole_pages(len(sequence.request.prompt) if sequence.shares else 0)
        width = sequence.request.width
        return [width * pages - (width - 1) * common for pages, common in zip(own, same, strict=True)]

    def holds(self, sequence: Sequence) -> bool:
        """Whether the whole pool holds it, if it is alone."""
        return self.pool.holds([self.most_pages(sequence)])

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence, which must fit the pool when alone."""
        assert self.holds(sequence), "the engine refuses what can never fit"
        self.sequences[sequence.id] = sequence
        self.waiting.append(sequence)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Add `child`, whose prompt is the text of `parent`, on the parent's pages, as the youngest that runs.

        Where the parent has none, or as many run as may, it is queued like any other.
        """
        assert child.tokens == parent.tokens, "a fork goes on where its parent is"
        self.add(child)
        may_share = child.chain.root == parent.chain.root and not child.scores  # of one salt
        both_keep = parent.cache and child.cache and parent.state is RUNNING
        if may_share and both_keep and self._seats(child) <= self.max_sequences:
            self._share(parent, child)
            self._run(child)

    def _branch(self, parent: Sequence, choice: int, after: Sequence, events: list[Event]) -> Sequence:
        """One more way on from a sequence that has caught up: it runs `after`, or is queued where no seat is left."""
        child = Sequence(
            id=next(self.ids),
            root=parent.root,
            request=parent.request,
            limit=parent.limit,
            tokens=list(parent.tokens),
            tables=self.pool.tables(),
            chain=parent.chain.fork(),
            stop_checker=parent.stop_checker.fork(),
            choices=(choice,),
            cache=parent.cache,
            hold_at=parent.hold_at,
            scored=parent.scored,
        )
        self.sequences[child.id] = child
        events.append(Forked(child.id, parent.id, child))
        if parent.request.width > 1:
            child.team = parent.team
            child.team.insert(child.team.index(after) + 1, child)
        elif self._seats(child) > self.max_sequences:
            self.waiting.append(child)
            return child
        self._share(parent, child)
        self.running.insert(self.running.index(after) + 1, child)
        child.state = RUNNING
        return child

    def _share(self, parent: Sequence, child: Sequence) -> None:
        """Put a child on its parent's pages, if both keep theirs."""
        if parent.cache and child.cache:
            child.tables, child.chain = self.pool.fork(parent.tables), parent.chain.fork()
            child.computed = child.reused = parent.computed

    def schedule(self) -> Step:
        """Name the chunks of the next step, with pages reserved for them. No text changes until commit.

        Who is admitted, put off or catches up with its team does so here: a second call may name more than the first.
        """
        chunks: list[Chunk] = []
        budget = self.token_budget
        together: set[int] = set()  # teams that take their last tokens in this step
        for sequence in self._active():
            if not budget or sequence.state is not RUNNING:
                break  # it gave its pages to an older one, and so did all after it
            length = self._length(sequence, budget, together)
            if not length:
                continue
            if not self._reserve(sequence, sequence.computed + length):
                return Step(self._left(chunks))  # it gave its own pages back: the pool is tight, admit nobody
            chunks.append(self._chunk(sequence, length))
            budget -= length
        while budget and self.waiting and (admitted := self._admit(self._coming(chunks))):
            for sequence in admitted:
                length = self._length(sequence, budget, together)
                if length and not self._reserve(sequence, sequence.computed + length):
                    return Step(self._left(chunks))
                if length:
                    chunks.append(self._chunk(sequence, length))
                    budget -= length
        return Step(tuple(chunks))

    def _length(self, sequence: Sequence, budget: int, together: set[int]) -> int:
        """How many tokens of a sequence to compute now. Beams catch up one after another, but for their last token."""
        team = sequence.team
        if len(team) == 1:
            return min(sequence.pending, budget)
        fresh = [mate for mate in team if mate.shares and not mate.computed]
        if sequence is team[0] and not fresh and sum(mate.pending for mate in team) <= budget:
            together.add(sequence.root)
        if sequence.root in together:
            return sequence.pending
        if sequence in fresh:  # what it shares with those before it is found, once they have it
            if any(mate.pending > 1 for mate in team[: team.index(sequence)]):
                return 0
            if not sequence.pages:  # else a step that broke off has given it some
                self._adopt(sequence, self._found(sequence) or 0)
        return min(sequence.pending - 1, budget)

    def _left(self, chunks: list[Chunk]) -> tuple[Chunk, ...]:
        """The chunks of those that still run: a beam may have put its own team off."""
        return tuple(chunk for chunk in chunks if self.sequences[chunk.sequence].state is RUNNING)

    def commit(self, step: Step, results: ListLike[Result]) -> list[Event]:
        """Advance what was computed, append what was chosen, end what has ended; tell it in order."""
        faulty = {result.parent for result in results if isinstance(result, Fault)}
        for chunk in step.chunks:
            sequence, stop = self.sequences[chunk.sequence], chunk.stop
            sequence.computed = stop
            sequence.forwarded += len(chunk.tokens)
            if sequence.shares and sequence.id not in faulty:  # nobody shall find what cannot be used
                self.pool.seal(sequence.tables, sequence.chain, sequence.tokens, chunk.start, stop)
            self.pool.trim(sequence.tables, stop)
        events: list[Event] = []
        told: dict[int, list[Result]] = {}
        for result in results:
            told.setdefault(result.parent, []).append(result)
        for parent, its in told.items():
            if parent in self.sequences:  # a fault of its team may have ended it
                self._apply(self.sequences[parent], its, events)
        for chunk in step.chunks:
            left = self.sequences.get(chunk.sequence)
            if left is not None and left.computed == len(left.tokens):
                self._exhaust(left, events)
        return events

    def expire(self) -> list[Event]:
        """End every sequence whose guard says that it shall not go on; who waits or is held as well."""
        events: list[Event] = []
        for sequence in list(self.sequences.values()):
            if sequence.id in self.sequences:  # its team may have ended
                try:
                    reason = sequence.stop_checker.finished()
                except Exception as error:  # a guard is the client's: its fault must not reach the neighbours
                    self._end_team(sequence, error, events)
                    continue
                if reason is not None:
                    self._end_team(sequence, reason, events)
        return events

    def fail(self, step: Step, error: Exception) -> list[Event]:
        """End every sequence of a step that could not be computed; the others go on."""
        events: list[Event] = []
        for chunk in step.chunks:
            if chunk.sequence in self.sequences:
                self._end_team(self.sequences[chunk.sequence], error, events)
        return events

    def hold(self, identity: int, at: int | None) -> None:
        """Hold a sequence, with its team, once it has `at` tokens; None lets it go on to its end.

        Ended ones are left as they are.
        """
        for mate in self.sequences[identity].team if identity in self.sequences else ():
            mate.hold_at = at

    def use_cache(self, identity: int, cache: bool) -> None:
        """Let a sequence and its team keep their K and V from now on, or forget them: now, and after each token."""
        for mate in self.sequences[identity].team if identity in self.sequences else ():
            mate.cache = cache
            if not cache:  # what it holds may be others' too, and is written to from now on
                self._drop(mate)

    def abort(self, identity: int) -> list[Event]:
        """End a sequence in whatever state it is, with its team. Unknown or ended ones are left as they are."""
        events: list[Event] = []
        if identity in self.sequences:
            self._end_team(self.sequences[identity], FinishReason.ABORTED, events)
        return events

    def check(self) -> None:
        """Prove the invariants: for tests, and at idle."""
        self.pool.check([sequence.tables for sequence in self.sequences.values()])
        parked = sum(sequence.parked.nbytes for sequence in self.sequences.values() if sequence.parked)
        assert parked == self.pool.parked, "what is parked is somebody's"
        assert len(self.running) + len(self.waiting) == len(self.sequences), "a sequence is in two places or in none"
        for sequence in self.waiting:
            assert not sequence.pages, "who waits holds nothing"
            assert bool(sequence.computed) == (sequence.parked is not None), "who waits has computed what is parked"
        for sequence in self.running:
            assert sequence.computed <= len(sequence.tokens) <= sequence.limit, "nothing is computed or kept too much"
            assert self.pool.covers(sequence.tables, sequence.computed), "what is computed and read has a place"
            assert self.pool.owns(sequence.tables, sequence.computed), "what is written to is nobody else's"
            at = self.running.index(sequence.team[0])
            assert self.running[at : at + len(sequence.team)] == sequence.team, "a team runs side by side"

    def _reserve(self, sequence: Sequence, stop: int) -> bool:
        """Make place for computing up to `stop`, at the cost of those held, then of the youngest.

        False: the youngest was itself, or of its team.
        """
        while not self.pool.extend(sequence.tables, sequence.computed, stop, len(sequence.tokens)):
            victim = next(reversed(self._held()), self.running[-1])
            self.preempt(victim)
            if sequence.state is not RUNNING:
                return False
        return True

    def _active(self) -> list[Sequence]:
        """The running sequences that are not held, oldest first."""
        return [sequence for sequence in self.running if not sequence.held]

    def _held(self) -> list[Sequence]:
        return [sequence for sequence in self.running if sequence.held]

    def preempt(self, sequence: Sequence) -> None:
        """Put a running sequence off with its team: its pages are free, and what they held is parked if there is room.

        Teams are not parked: what their beams have in common would come back for each of them.
        """
        for mate in reversed(sequence.team):
            alone = len(mate.team) == 1
            parked = self.pool.park(mate.tables) if mate.computed and mate.cache and alone else None  # may break off
            self.running.remove(mate)
            mate.parked = parked
            if parked is None:
                self._drop(mate)
            mate.preemptions += 1
            mate.state = State.WAITING
            self.waiting.appendleft(mate)

    def _drop(self, sequence: Sequence) -> None:
        """Give back all that is kept of a sequence but its tokens: it is to be computed again."""
        self._free(sequence)
        sequence.computed = 0

    def _free(self, sequence: Sequence) -> None:
        self.pool.release(sequence.tables)
        if sequence.parked is not None:
            self.pool.forget(sequence.parked)
            sequence.parked = None

    def _coming(self, chunks: list[Chunk]) -> set[bytes]:
        """The names of the pages that these chunks fill."""
        size, found = self.pool.page_size, set()
        for chunk in chunks:
            sequence = self.sequences[chunk.sequence]
            if sequence.shares and chunk.stop // size > chunk.start // size:
                names = sequence.chain.upto(sequence.tokens, size)
                found.update(names[chunk.start // size : chunk.stop // size])
        return found

    def _seats(self, more: Sequence | None = None) -> int:
        """How many run at once, as teams come to their full width; with one more."""
        teams = {sequence.root: sequence.request.width for sequence in self._active() if sequence.request.width > 1}
        alone = sum(sequence.request.width == 1 for sequence in self._active())
        return alone + sum(teams.values()) + (more.request.width if more is not None else 0)

    def _admit(self, coming: set[bytes]) -> list[Sequence]:
        """Let the first in the queue run, with its team, if there is place for all it has and a page to write on."""
        sequence = next((sequence for sequence in self.waiting if not sequence.held), None)
        if sequence is None or self._seats(sequence) > self.max_sequences:
            return []
        cut, size = self._found(sequence), self.pool.page_size
        if cut is None:
            cut = 0
        elif cut // size < self._spared(sequence) // size and sequence.chain.names[cut // size] in coming:
            return []
        tokens = min(len(sequence.tokens) + size, sequence.slots)
        mates = self._mates(sequence, tokens)
        held = self._held()
        tables = [other.tables for other in held]
        text = sequence.chain, sequence.tokens, cut, tokens, self.token_budget
        if self.pool.lacking(*text, tables, mates):
            return []
        fragile = sequence.preemptions >= MOST_PREEMPTIONS
        if fragile and not self._safe(sequence):
            return []
        while held and (fragile or self.pool.lacking(*text, (), mates)):
            self.preempt(held.pop())  # a held one that went on could put off a fragile one
            held = self._held()
        for mate in sequence.team:
            self._start(mate, cut if mate is sequence else 0)
        return sequence.team

    def _mates(self, sequence: Sequence, tokens: int) -> list[int]:
        """Pages of each group that the rest of its team takes, beside what all have in common."""
        own = self.pool.most_pages(tokens, self.token_budget)
        same = self.pool.whole_pages(len(sequence.request.prompt) if sequence.shares else 0)
        return [(len(sequence.team) - 1) * (pages - common) for pages, common in zip(own, same, strict=True)]

    def _spared(self, sequence: Sequence) -> int:
        """The most tokens that a sequence need not compute: the last one's row is needed, and those that are scored."""
        last = len(sequence.tokens) - 1
        return min(last, sequence.score_at - 1) if sequence.scores else last

    def _found(self, sequence: Sequence) -> int | None:
        """Tokens of a waiting sequence whose K and V lie in pages that others have left; None if it takes no such."""
        if sequence.parked is not None or not sequence.shares:
            return None
        return self.pool.match(sequence.chain, sequence.tokens, self._spared(sequence))

    def _adopt(self, sequence: Sequence, cut: int) -> None:
        """Put a sequence that has nothing on the pages that were found."""
        self.pool.adopt(sequence.tables, sequence.chain, sequence.tokens, cut)
        sequence.computed = cut
        sequence.reused += cut

    def _start(self, sequence: Sequence, cut: int) -> None:
        """Give a waiting sequence what was found or parked of it, and let it run."""
        if sequence.parked is None:
            self._adopt(sequence, cut)
        elif self.pool.unpark(sequence.tables, sequence.parked):
            sequence.parked = None
            sequence.reused += sequence.computed
        else:  # the memory has failed: it is computed again
            self._drop(sequence)
        self._run(sequence)

    def _run(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        self.running.append(sequence)
        sequence.state = RUNNING

    def _safe(self, sequence: Sequence) -> bool:
        """Whether it could never be put off: it and all that run, who are older, fit the pool at their longest."""
        first = [other for other in self._active() if other is other.team[0]]
        return self.pool.holds([self.most_pages(other) for other in (*first, sequence)])

    def _chunk(self, sequence: Sequence, length: int) -> Chunk:
        text, start = sequence.tokens, sequence.computed
        stop = start + length
        logits_needed = LAST if stop == len(text) else NONE
        if sequence.scores and stop >= sequence.score_at:
            logits_needed = ALL
        return Chunk(  # by place: names would take nearly three times as long
            sequence.id,
            sequence.request,
            start,
            tuple(text[start:stop]),
            sequence.tables,
            sequence.limit,
            logits_needed,
            tuple(text[start + 1 : stop + 1]),
            sequence.choices,
            text,
            sequence.stop_checker,
        )

    def _apply(self, sequence: Sequence, results: list[Result], events: list[Event]) -> None:
        """Carry out what was answered of one sequence: scores before picks, and a fault instead of both."""
        picks: list[Pick] = []
        for result in results:
            match result:
                case Pick():  # nearly always
                    picks.append(result)
                case Fault(error=error):
                    self._end_team(sequence, error, events)
                    return
                case Finish(reason=reason):
                    self._end(sequence, finished(sequence, reason), events)
                    return
                case PromptLogprobs():
                    self._score(sequence, result, events)
        branches, last = [sequence], sequence
        for pick in picks[1:]:
            branches.append(self._branch(sequence, pick.choice, last, events))
            last = branches[-1] if branches[-1].state is RUNNING else last
        for branch, pick in zip(branches, picks, strict=bool(picks)):
            branch.choices = (pick.choice,)
            self._write(branch, pick, events)

    def _score(self, sequence: Sequence, score: PromptLogprobs, events: list[Event]) -> None:
        at = sequence.score_at
        known = max(0, at - score.start)  # a preempted one is scored once
        fresh = score.logprobs[known:]
        if fresh:
            events.append(PromptLogprobsAdded(sequence.id, at, fresh, score.tops[known:]))
            sequence.scored += len(fresh)

    def _write(self, sequence: Sequence, pick: Pick, events: list[Event]) -> None:
        checker = sequence.stop_checker
        sequence.tokens.append(pick.token)
        token = Token(sequence.id, pick.token, pick.logprob, pick.sampler_logprob, pick.top)
        events.append(token)
        try:
            reason = checker.advance(pick.token) or sequence.ended()
            token.text = checker.take_text()
        except Exception as error:  # a stop checker is the client's: its fault must not reach the neighbours
            self._end_team(sequence, error, events)
            return
        if reason is not None:
            self._end(sequence, finished(sequence, reason), events)
        elif not sequence.cache:  # the naive loop: forget, and compute everything again
            sequence.computed = 0
            self.pool.rewind(sequence.tables)

    def _exhaust(self, sequence: Sequence, events: list[Event]) -> None:
        """All is computed and nothing was picked: a beam that is left behind, or a prompt that was only scored."""
        reason = sequence.ended()
        if reason is None and sequence.request.width > 1:
            self._end(sequence, Dropped(sequence.id), events)
            return
        assert reason is not None, "the sampler must answer every chunk that picks"
        self._end(sequence, finished(sequence, reason), events)

    def _end_team(self, sequence: Sequence, why: FinishReason | Exception, events: list[Event]) -> None:
        for mate in list(sequence.team):
            event = Failed(mate.id, why) if isinstance(why, Exception) else finished(mate, why)
            self._end(mate, event, events)

    def _end(self, sequence: Sequence, event: Event, events: list[Event]) -> None:
        if sequence.shares and sequence.pages and isinstance(event, Finished):
            self.pool.seal_tail(sequence.tables, sequence.chain, sequence.tokens, sequence.computed)
        self._free(sequence)
        (self.running if sequence.state is RUNNING else self.waiting).remove(sequence)
        sequence.state = State.FINISHED
        sequence.team.remove(sequence)
        del self.sequences[sequence.id]
        events.append(event)
