"""The scheduler chooses the tokens to compute in each step, and commits the results.

There is no prefill and no decode here. Every running sequence, the oldest first, gets as much of its pending tokens as
the step's token budget still allows: a prompt is a long chunk, decode is a chunk of one. The rest of the budget admits
waiting sequences, first come first served. When pages run out, paused sequences are preempted, then the youngest: its
pages are freed, and recomputed later. So the oldest always advances, and since no request is admitted
that the whole pool could not hold, every request ends.

A sequence stops before a picture whose embeddings the tower has not computed. The first such picture of a step is
`pictures.first`, which the engine lets the tower compute.

An admitted sequence starts after the cached pages of its prefix. If a chunk of this step computes the next page of that
prefix, the sequence waits for it. Several picks with one parent fork it: the branches share pages, copied on write.
`Sampler.pick` decides which drafts a pick accepts, and `_write` rolls the sequence back to them.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as ListLike
from itertools import count

from tokenwright.engine import step as steps
from tokenwright.engine.kv_manager import KVManager
from tokenwright.engine.page_pool import PagePool
from tokenwright.engine.pictures import AwaitedPictures, PictureSource, common, uncut
from tokenwright.engine.pins import NEVER, Pins
from tokenwright.engine.prefix_index import PrefixIndex
from tokenwright.engine.request import FinishReason, Request, Sequence, SequenceGroup, State, group_for, pages_of
from tokenwright.engine.warming import Warming

RUNNING = State.RUNNING  # a global name, which is faster than an attribute of an enumeration

MAX_PREEMPTIONS = 4  # of one sequence; then it is admitted only if nothing can preempt it again


class Scheduler:
    """Owns the sequences that have not ended and their pages; `running` has the oldest group first.

    A step computes at most `token_budget` tokens; at most `max_sequences` run at once, without paused ones.
    """

    def __init__(
        self,
        pool: PagePool,
        token_budget: int,
        max_sequences: int,
        prefixes: PrefixIndex | None = None,
        proposer: steps.Proposer | None = None,
        pins: Pins | None = None,
        pictures: PictureSource | None = None,
    ) -> None:
        assert token_budget > 0 and max_sequences > 0, "a step computes something"
        self.pool = pool
        self.kv = KVManager(pool, prefixes, pins)
        self.proposer = proposer
        self.pictures = AwaitedPictures(pictures)
        self.sequences: dict[int, Sequence] = {}
        self.running: list[SequenceGroup] = []
        self.waiting: deque[SequenceGroup] = deque()
        self.ids = count()
        self.token_budget = token_budget
        self.max_sequences = max_sequences
        self.warming = Warming(self.kv, token_budget)

    def new(self, request: Request, limit: int) -> Sequence:
        assert not (request.hidden and request.params.max_tokens), "no token follows hidden states"
        sequence = Sequence(
            id=next(self.ids),
            request=request,
            tokens=list(request.prompt),
            tables=self.pool.tables(),
            prefix_hashes=self.kv.prefixes.hashes(request.salt, request.pictures),
            stop_checker=request.stop_checker,
            choices=tuple(range(request.choice, request.choice + request.params.choices)),
            group=group_for(request, limit),
        )
        sequence.counts.sampler_logprob = request.continued_logprob
        sequence.group.add(sequence)
        return sequence

    def max_pages(self, sequence: Sequence) -> list[int]:
        return pages_of(self.pool, sequence, sequence.request.width, sequence.max_computed, self.token_budget)

    def fits(self, sequence: Sequence) -> bool:
        return self.pool.fits([self.max_pages(sequence)])

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence, which must fit the empty pool."""
        assert self.fits(sequence), "the engine refuses what can never fit"
        self.sequences[sequence.id] = sequence
        self.waiting.append(sequence.group)

    def fork(self, parent: Sequence, child: Sequence, shared: int) -> None:
        """Run `child` as the youngest, on the parent's pages of the first `shared` tokens; or queue it."""
        assert child.tokens[:shared] == parent.tokens[:shared], "a fork goes on from its parent's text"
        self.add(child)
        may_share = child.prefix_hashes.root == parent.prefix_hashes.root and not child.needs_rows  # roots: same salt
        may_share = may_share and common(child.request.pictures, parent.request.pictures, shared)
        running = self.sequences.get(parent.id) is parent and parent.state is RUNNING
        may_run = running and self._slots(child.group) <= self.max_sequences
        if may_share and may_run and self.kv.share(parent, child, shared):
            self._run(child.group)

    def schedule(self) -> steps.Step:
        """Choose the chunks of the next step and reserve pages for them. No text changes until commit.

        It admits and preempts groups at once: called again without a commit (a test), it may choose more chunks.
        """
        if self.kv.saved_states:  # of a step that failed
            self.kv.release_saved_states()
        step, proposer = self._without_drafts(), self.proposer
        budget = self.token_budget - step.size
        return step if proposer is None else steps.with_drafts(step, proposer, self.kv.reserve_drafts, budget)

    def _without_drafts(self) -> steps.Step:
        chunks: list[steps.Chunk] = []
        budget, self.pictures.first = self.token_budget, None
        for group in self._groups(chunks):
            if len(group.sequences) == 1:  # no search
                single = group.sequences[0]
                length = min(len(single.tokens) - single.computed, budget)
                if self.pool.windowed and (mark := single.mark) is not None and mark.at > single.computed:
                    length = min(length, mark.at - single.computed)  # the pages before a mark can be cached only there
                plan: Iterable[tuple[Sequence, int]] = ((single, length),)
            else:
                plan = group.plan(budget, self.kv.attach_cached, self._all_ready)
            for sequence, length in plan:
                if sequence.request.pictures:  # a mark, or a beam's last token, may cut a bidirectional picture: retry
                    most = min(sequence.pending, budget)
                    length = self._ready_length(sequence, length) or self._ready_length(sequence, most)
                    if not length:  # its next picture is awaited, or the rest of the budget is too small for it
                        continue
                if not self._reserve(sequence, sequence.computed + length):
                    # `_reserve` has preempted the sequence's own group: the pool is tight, so admit no other.
                    return steps.Step(tuple(chunk for chunk in chunks if chunk.sequence.state is RUNNING))
                chunks.append(steps.chunk_of(sequence, length))
                budget -= length
            if not budget:
                break
        if not budget and self.waiting:
            self._first_ready()  # a full step admits none, but the tower is to compute the queue's first picture
        return steps.Step(tuple(chunks))

    def _ready_length(self, sequence: Sequence, length: int) -> int:
        """How many of a sequence's next `length` tokens a chunk may have: their pictures are ready, none is cut."""
        spans, start = sequence.request.pictures, sequence.computed
        return uncut(spans, start, self.pictures.ready_stop(spans, start, start + length)) - start

    def _all_ready(self, sequence: Sequence) -> bool:
        return not sequence.request.pictures or self._ready_length(sequence, sequence.pending) == sequence.pending

    def _groups(self, chunks: list[steps.Chunk]) -> Iterator[SequenceGroup]:
        for group in self._active():
            if group.sequences[0].state is not RUNNING:
                break  # an older group has preempted it, and with it all younger ones
            yield group
        while self.waiting and (admitted := self._admit(chunks)):
            yield admitted

    def _active(self) -> list[SequenceGroup]:
        return [group for group in self.running if group.pause_at is None or not group.paused]

    def _reserve(self, sequence: Sequence, stop: int) -> bool:
        """Reserve pages for computing up to `stop`; preempt paused groups for them, then the youngest.

        Before a running group is preempted, pins of other clients end; before the last group, or one that was preempted
        often, the sequence's own client's too. False: the sequence's own group was the youngest, and is preempted.
        """
        while not self.pool.reserve(sequence.tables, sequence.computed, stop, len(sequence.tokens)):
            victim = next((group for group in reversed(self.running) if group.paused), self.running[-1])
            protected = len(self.running) == 1 or victim.first.counts.preemptions >= MAX_PREEMPTIONS
            spared = None if protected else sequence.request.retention.owner
            unpinned = (protected or not victim.paused) and self.kv.pins.end_oldest(spared)
            if not unpinned:
                self.preempt(victim)
            if sequence.state is not RUNNING:
                return False
        return True

    def commit(self, step: steps.Step, results: ListLike[steps.Result]) -> list[steps.Event]:
        """Advance the sequences of a step, append their picks and end those that are done. Returns the events."""
        faulty = {result.sequence for result in results if isinstance(result, steps.Failed)}
        size = self.pool.page_size
        for chunk in step.chunks:
            sequence, start, stop = chunk.sequence, chunk.start, chunk.stop
            sequence.computed = stop
            sequence.counts.forwarded += stop - start
            if stop > len(sequence.tokens):  # it has drafts: `_write` counts those that the pick accepted
                continue
            if sequence.id not in faulty:
                if start // size != stop // size:  # the chunk has filled a page
                    self.kv.cache_pages(sequence, start, stop)
                if sequence.request.retention.marks:
                    self.kv.pass_marks(sequence)
            if self.pool.windowed:
                self.pool.trim(sequence.tables, stop)
        events: list[steps.Event] = []
        answers: dict[int, list[steps.Result]] = {}
        for result in results:
            answers.setdefault(result.sequence, []).append(result)
        for parent, answer in answers.items():
            if parent in self.sequences:  # a fault in its group may have ended it
                self._apply(self.sequences[parent], answer, events)
        for chunk in step.chunks:
            sequence = chunk.sequence
            if sequence.computed == len(sequence.tokens) and sequence.state is RUNNING:
                self._end_without_pick(sequence, events)
        return events

    def _apply(self, sequence: Sequence, results: list[steps.Result], events: list[steps.Event]) -> None:
        """Carry out the results of one sequence: prompt logprobs before picks, or a fault instead of both."""
        if len(results) == 1 and isinstance(pick := results[0], steps.Pick):  # the common case, kept short
            sequence.choices = (pick.choice,)
            self._write(sequence, pick, events)
            return
        picks: list[steps.Pick] = []
        for result in results:
            match result:
                case steps.Pick():
                    picks.append(result)
                case steps.Failed(error=error):
                    events += self.end_group(sequence.group, error)
                    return
                case steps.Finish(reason=reason):
                    self.end(sequence, steps.finished(sequence, reason), events)
                    return
                case steps.PromptLogprobs() | steps.HiddenStates():
                    events += steps.reported(sequence, result)
        try:
            forks = [sequence.fork(next(self.ids), self.pool.tables(), pick.choice) for pick in picks[1:]]
        except Exception as error:  # of a stop checker, as in `_write`
            events += self.end_group(sequence.group, error)
            return
        branches, last = [sequence, *forks], sequence
        for fork in forks:
            self._branch(sequence, fork, last, events)
            last = fork if fork.state is RUNNING else last
        for branch, pick in zip(branches, picks, strict=bool(picks)):
            branch.choices = (pick.choice,)
            self._write(branch, pick, events)

    def _branch(self, parent: Sequence, child: Sequence, after: Sequence, events: list[steps.Event]) -> None:
        self.sequences[child.id] = child
        events.append(steps.Forked(child.id, parent.id, child))
        group = child.group
        group.add(child, after if group is parent.group else None)
        if group is not parent.group:
            if self._slots(group) > self.max_sequences:
                self.waiting.append(group)
                return
            self.running.insert(self.running.index(after.group) + 1, group)
        self.kv.share(parent, child, len(parent.tokens))
        child.state = RUNNING

    def _write(self, sequence: Sequence, pick: steps.Pick, events: list[steps.Event]) -> None:
        """Append the tokens of a pick, up to the first that ends the sequence; undo the rows of rejected drafts."""
        checker, reason, known = sequence.stop_checker, None, len(sequence.tokens)
        try:
            for n in range(len(pick.tokens)):  # most often one, for which zip takes twice as long
                token = pick.tokens[n]
                sequence.tokens.append(token)
                sequence.counts.sampler_logprob += pick.sampler_logprobs[n]
                event = steps.Token(sequence.id, token, pick.logprobs[n], pick.sampler_logprobs[n], pick.tops[n])
                events.append(event)
                reason = checker.advance(token)
                if not reason and len(sequence.tokens) >= sequence.group.limit:
                    reason = sequence.exhausted()
                event.text = checker.take_text()
                if reason is not None:
                    break
        except Exception as error:  # of this request's stop checker: others must not fail with it
            events += self.end_group(sequence.group, error)
            return
        if sequence.computed > known:  # accepted drafts stay computed, except the last token written
            self.kv.roll_back(sequence, known)
        if reason is not None:
            self.end(sequence, steps.finished(sequence, reason), events)
        elif not sequence.group.cache:  # the naive loop
            sequence.computed = 0
            self.pool.rewind(sequence.tables)

    def _slots(self, added: SequenceGroup) -> int:
        """How many sequences run at most with one group more: the sum of all widths."""
        return sum(group.width for group in self._active()) + added.width

    def _admit(self, chunks: list[steps.Chunk]) -> SequenceGroup | None:
        """Let the first group in the queue run if there are pages for its tokens and one more, taken from paused groups
        and, if nothing runs, from pins. None: it waits for a later step.
        """
        group = self._first_ready()
        if group is None or self._slots(group) > self.max_sequences:
            return None
        sequence = group.first
        if self.kv.prefix_grows(chunks, sequence, cached := self.kv.cached_prefix(sequence)):
            return None
        tokens = min(len(sequence.tokens) + self.pool.page_size, sequence.max_computed)
        needs = pages_of(self.pool, sequence, len(group.sequences), tokens, self.token_budget)
        text = sequence.prefix_hashes, sequence.tokens, cached, needs
        paused = [other for other in self.running if other.paused]
        preemptible = [one.tables for other in paused for one in other.sequences]
        while not self.kv.prefixes.can_admit(*text, preemptible):
            if self._active() or not self.kv.pins.end_oldest(None):
                return None
        protected = sequence.counts.preemptions >= MAX_PREEMPTIONS
        if protected and not self.pool.fits([self.max_pages(one.first) for one in (*self._active(), group)]):
            return None  # a running group, which is older, could preempt it once more
        while paused and (protected or not self.kv.prefixes.can_admit(*text)):
            self.preempt(paused.pop())  # resumed, it could preempt a protected group
        if (restored := self.kv.restore(sequence, cached)) is None:
            return None  # the page tier reads on in the next step
        self.kv.attach(sequence, restored)
        self._run(group)
        return group

    def _first_ready(self) -> SequenceGroup | None:
        """The first group in the queue whose next tokens await no picture; sets `pictures.first` on the way.

        A group that awaits its first picture takes neither a slot nor pages. Those after it in the queue may run before
        it only if all their pictures are ready, so the tower computes pictures in the queue's order.
        """
        passed = False
        for group in self.waiting:
            first, spans = group.first, group.first.request.pictures
            if group.paused:
                continue
            if not spans:
                return group
            start, length = 0 if passed else self.kv.loadable_prefix(first), len(first.tokens)
            stop = self.pictures.ready_stop(spans, start, length)
            if stop == length or (not passed and any(one.start < stop and one.stop > start for one in spans)):
                return group
            passed = True
        return None

    def _run(self, group: SequenceGroup) -> None:
        self.waiting.remove(group)
        self.running.append(group)
        for sequence in group.sequences:
            sequence.state = RUNNING

    def preempt(self, group: SequenceGroup) -> None:
        """Free the pages of a running group and put it first in the queue."""
        self.running.remove(group)
        for sequence in group.sequences[::-1]:
            self.kv.drop(sequence)
            sequence.counts.preemptions += 1
            sequence.state = State.WAITING
        self.waiting.appendleft(group)

    def _end_without_pick(self, sequence: Sequence, events: list[steps.Event]) -> None:
        """End a sequence that is computed and has no pick: a rejected beam, or a prompt that asked for logprobs."""
        reason = sequence.exhausted()
        assert reason is not None or sequence.group.width > 1, "the sampler must answer every chunk that picks"
        self.end(sequence, steps.Dropped(sequence.id) if reason is None else steps.finished(sequence, reason), events)

    def expire(self) -> list[steps.Event]:
        if self.kv.pins.next_end < NEVER:
            self.kv.pins.expire()
        events: list[steps.Event] = []
        for sequence in list(self.sequences.values()):
            if sequence.id in self.sequences:  # else its group has ended in this loop
                try:
                    why: FinishReason | Exception | None = sequence.stop_checker.finished()
                except Exception as error:  # of this request's stop checker: others must not fail with it
                    why = error
                if why is not None:
                    events += self.end_group(sequence.group, why)
        return events

    def end_group(self, group: SequenceGroup, why: FinishReason | Exception) -> list[steps.Event]:
        events: list[steps.Event] = []
        for sequence in list(group.sequences):
            event = steps.Failed(sequence.id, why) if isinstance(why, Exception) else steps.finished(sequence, why)
            self.end(sequence, event, events)
        return events

    def end(self, sequence: Sequence, event: steps.Event, events: list[steps.Event]) -> None:
        if isinstance(event, steps.Finished):
            self.kv.cache_tail(sequence)
        self.kv.free(sequence)
        if self.proposer is not None:
            self.proposer.end(sequence)
        group = sequence.group
        group.sequences.remove(sequence)
        if not group.sequences:
            (self.running if sequence.state is RUNNING else self.waiting).remove(group)
        sequence.state = State.FINISHED
        del self.sequences[sequence.id]
        if sequence.request.pictures:
            self.pictures.stop_unless(other.request.pictures for other in self.sequences.values())
        events.append(event)
