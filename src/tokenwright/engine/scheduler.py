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
"""

from collections import deque
from collections.abc import Sequence as ListLike

from tokenwright.engine.pages import PagePool
from tokenwright.engine.sequence import FinishReason, Request, Sequence, State
from tokenwright.engine.step import (
    Chunk,
    Event,
    Failed,
    Fault,
    Finished,
    Pick,
    Result,
    Score,
    Scored,
    Step,
    Token,
    Wants,
)

MOST_PREEMPTIONS = 4  # of one sequence; more would recompute the same text over and over


class Scheduler:
    """Owns the sequences and the page pool.

    token_budget: tokens computed in one step, over all sequences. max_sequences: as many are admitted to run at once,
    held ones aside.
    """

    def __init__(self, pool: PagePool, token_budget: int, max_sequences: int) -> None:
        assert token_budget > 0 and max_sequences > 0, "a step computes something"
        self.pool = pool
        self.token_budget = token_budget
        self.max_sequences = max_sequences
        self.sequences: dict[int, Sequence] = {}  # all that have not ended
        self.running: list[Sequence] = []  # oldest first
        self.waiting: deque[Sequence] = deque()

    def new(self, identity: int, request: Request, limit: int) -> Sequence:
        """A sequence that is not queued yet. `limit`: the most tokens it can hold."""
        pool, text = self.pool, list(request.prompt)
        return Sequence(identity, request, limit, text, pool.tables(), pool.chain(request.salt), cache=request.cache)

    def holds(self, sequence: Sequence) -> bool:
        """Whether the whole pool holds it, if it is alone."""
        return self.pool.holds([(sequence.slots, self.token_budget)])

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
        may_share = child.chain.root == parent.chain.root  # of one salt
        both_keep = parent.cache and child.cache and not child.scores
        if may_share and both_keep and parent.state is State.RUNNING and len(self._active()) < self.max_sequences:
            child.tables, child.chain = self.pool.fork(parent.tables), parent.chain.fork()
            child.computed = child.reused = parent.computed
            self._run(child)

    def schedule(self) -> Step:
        """Name the chunks of the next step, with pages reserved for them. Nothing else changes until commit."""
        chunks: list[Chunk] = []
        budget = self.token_budget
        for sequence in self._active():
            if not budget or sequence.state is not State.RUNNING:
                break  # it gave its pages to an older one, and so did all after it
            length = min(sequence.pending, budget)
            if not self._reserve(sequence, sequence.computed + length):
                return Step(tuple(chunks))  # it gave its own pages back: the pool is tight, admit nobody
            chunks.append(self._chunk(sequence, length))
            budget -= length
        while budget and self._admit(self._coming(chunks)):
            sequence = self.running[-1]
            length = min(sequence.pending, budget)
            if not self._reserve(sequence, sequence.computed + length):
                break
            chunks.append(self._chunk(sequence, length))
            budget -= length
        return Step(tuple(chunks))

    def commit(self, step: Step, results: ListLike[Result]) -> list[Event]:
        """Advance what was computed, append what was chosen, end what has ended; tell it in order."""
        faulty = {result.parent for result in results if isinstance(result, Fault)}
        for chunk in step.chunks:
            sequence = self.sequences[chunk.sequence]
            sequence.computed = chunk.stop
            sequence.forwarded += len(chunk.tokens)
            if sequence.shares and sequence.id not in faulty:  # nobody shall find what cannot be used
                self.pool.seal(sequence.tables, sequence.chain, sequence.tokens, chunk.start, chunk.stop)
            self.pool.trim(sequence.tables, chunk.stop)
        events: list[Event] = []
        for result in results:
            if result.parent in self.sequences:  # a fault may have ended it earlier in this very list
                self._apply(self.sequences[result.parent], result, events)
        for chunk in step.chunks:
            if chunk.sequence in self.sequences and self.sequences[chunk.sequence].pending == 0:
                self._exhaust(self.sequences[chunk.sequence], events)
        return events

    def fail(self, step: Step, error: Exception) -> list[Event]:
        """End every sequence of a step that could not be computed; the others go on."""
        events: list[Event] = []
        for chunk in step.chunks:
            if chunk.sequence in self.sequences:
                self._end(self.sequences[chunk.sequence], Failed(chunk.sequence, error), events)
        return events

    def hold(self, identity: int, at: int | None) -> None:
        """Hold a sequence once it has `at` tokens; None lets it go on to its end. Ended ones are left as they are."""
        if identity in self.sequences:
            self.sequences[identity].hold_at = at

    def use_cache(self, identity: int, cache: bool) -> None:
        """Let a sequence keep its K and V from now on, or forget them: now, and after each token."""
        if identity in self.sequences:
            sequence = self.sequences[identity]
            sequence.cache = cache
            if not cache:  # what it holds may be others' too, and is written to from now on
                self._drop(sequence)

    def abort(self, identity: int) -> list[Event]:
        """End a sequence in whatever state it is. Unknown or ended ones are left as they are."""
        events: list[Event] = []
        if identity in self.sequences:
            self._end(self.sequences[identity], Finished(identity, FinishReason.ABORTED), events)
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

    def _reserve(self, sequence: Sequence, stop: int) -> bool:
        """Make place for computing up to `stop`, at the cost of those held, then of the youngest.

        False: the youngest was itself.
        """
        while not self.pool.extend(sequence.tables, sequence.computed, stop, len(sequence.tokens)):
            victim = next(reversed(self._held()), self.running[-1])
            self.preempt(victim)
            if victim is sequence:
                return False
        return True

    def _active(self) -> list[Sequence]:
        """The running sequences that are not held, oldest first."""
        return [sequence for sequence in self.running if not sequence.held]

    def _held(self) -> list[Sequence]:
        return [sequence for sequence in self.running if sequence.held]

    def preempt(self, sequence: Sequence) -> None:
        """Put a running sequence off: its pages are free, and what they held is parked where there is room."""
        parked = self.pool.park(sequence.tables) if sequence.computed and sequence.cache else None  # may be interrupted
        self.running.remove(sequence)
        sequence.parked = parked
        if parked is None:
            self._drop(sequence)
        sequence.preemptions += 1
        sequence.state = State.WAITING
        self.waiting.appendleft(sequence)

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

    def _admit(self, coming: set[bytes]) -> bool:
        """Let the first in the queue run, if there is place for all it has and for a page to write on."""
        sequence = next((sequence for sequence in self.waiting if not sequence.held), None)
        if sequence is None or len(self._active()) >= self.max_sequences:
            return False
        cut, size = self._found(sequence), self.pool.page_size
        if cut is None:
            cut = 0
        elif cut // size < (len(sequence.tokens) - 1) // size and sequence.chain.names[cut // size] in coming:
            return False
        tokens = min(len(sequence.tokens) + size, sequence.slots)
        held = self._held()
        tables = [other.tables for other in held]
        if self.pool.lacking(sequence.chain, cut, tokens, self.token_budget, tables):
            return False
        fragile = sequence.preemptions >= MOST_PREEMPTIONS
        if fragile and not self._safe(sequence):
            return False
        while held and (fragile or self.pool.lacking(sequence.chain, cut, tokens, self.token_budget)):
            self.preempt(held.pop())  # a held one that went on could put off a fragile one
        self._start(sequence, cut)
        return True

    def _found(self, sequence: Sequence) -> int | None:
        """Tokens of a waiting sequence whose K and V lie in pages that others have left; None if it takes no such."""
        if sequence.parked is not None or not sequence.shares or sequence.scores:
            return None
        return self.pool.match(sequence.chain, sequence.tokens)

    def _start(self, sequence: Sequence, cut: int) -> None:
        """Give a waiting sequence what was found or parked of it, and let it run."""
        if sequence.parked is not None:
            if self.pool.unpark(sequence.tables, sequence.parked):
                sequence.parked = None
                sequence.reused += sequence.computed
            else:  # the memory has failed: it is computed again
                self._drop(sequence)
        else:
            self.pool.adopt(sequence.tables, sequence.chain, cut)
            sequence.computed = cut
            sequence.reused += cut
        self._run(sequence)

    def _run(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        self.running.append(sequence)
        sequence.state = State.RUNNING

    def _safe(self, sequence: Sequence) -> bool:
        """Whether it could never be put off: it and all that run, who are older, fit the pool at their longest."""
        return self.pool.holds([(other.slots, self.token_budget) for other in (*self._active(), sequence)])

    def _chunk(self, sequence: Sequence, length: int) -> Chunk:
        request, start = sequence.request, sequence.computed
        stop = start + length
        wants = Wants.ALL if sequence.scores else Wants.LAST if stop == len(sequence.tokens) else Wants.NONE
        return Chunk(
            sequence=sequence.id,
            request=request,
            start=start,
            tokens=tuple(sequence.tokens[start:stop]),
            tables=tuple(dict(table) for table in sequence.tables),
            limit=sequence.limit,
            wants=wants,
            following=tuple(sequence.tokens[start + 1 : stop + 1]),
        )

    def _apply(self, sequence: Sequence, result: Result, events: list[Event]) -> None:
        match result:
            case Fault(error=error):
                self._end(sequence, Failed(sequence.id, error), events)
            case Score(start=start, logprobs=logprobs):
                fresh = logprobs[max(0, sequence.scored + 1 - start) :]  # a preempted one is scored once
                if fresh:
                    events.append(Scored(sequence.id, sequence.scored + 1, fresh))
                    sequence.scored += len(fresh)
            case Pick(token=token, logprob=logprob):
                self._write(sequence, token, logprob, events)

    def _write(self, sequence: Sequence, token: int, logprob: float, events: list[Event]) -> None:
        sequence.tokens.append(token)
        events.append(Token(sequence.id, token, logprob))
        try:
            reason = sequence.request.guard.advance(token) or sequence.ended()
        except Exception as error:  # a guard is the client's: its fault must not reach the neighbours
            self._end(sequence, Failed(sequence.id, error), events)
            return
        if reason is not None:
            self._end(sequence, Finished(sequence.id, reason), events)
        elif not sequence.cache:  # the naive loop: forget, and compute everything again
            sequence.computed = 0
            self.pool.rewind(sequence.tables)

    def _exhaust(self, sequence: Sequence, events: list[Event]) -> None:
        """All is computed and nothing was to be chosen: the request only wanted its prompt scored."""
        reason = sequence.ended()
        assert reason is not None, "the sampler must answer every chunk that picks"
        self._end(sequence, Finished(sequence.id, reason), events)

    def _end(self, sequence: Sequence, event: Event, events: list[Event]) -> None:
        self._free(sequence)
        (self.running if sequence.state is State.RUNNING else self.waiting).remove(sequence)
        sequence.state = State.FINISHED
        del self.sequences[sequence.id]
        events.append(event)
