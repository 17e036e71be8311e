"""One engine shared by many threads: whoever waits for a token does the work for all.

There is no thread of its own. A waiting client takes the lock, turns the engine once, and hands every event to the
job it belongs to; so requests from several threads are batched, and nothing runs when nobody waits. Who finds the lock
taken waits for the end of that turn, not for the lock: what it brought is fetched while the next turn is under way.

A job may be held: its viewer lets it write so many tokens, and then it waits. Who wants to look at the engine's memory
does so between two turns (`between_turns`).
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, cast

from tokenwright.completion import Completion, Piece, TreeToken, Usage
from tokenwright.decode import BeamSearch, TextStopChecker
from tokenwright.engine import (
    Dropped,
    Engine,
    Event,
    Failed,
    Finished,
    FinishReason,
    Forked,
    PromptLogprobsAdded,
    Request,
    Sequence,
    State,
    Token,
    TopLogprob,
)
from tokenwright.errors import EngineError

ENDS = (Finished, Failed, Dropped)  # the last event of a sequence is one of these


class Branch:
    """A sequence of the engine on behalf of a job. `told`: how many of its tokens the job has heard of."""

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.told = 0
        self.ended = False

    @property
    def torn(self) -> bool:
        """Whether the sequence is ahead of what was told of it, or computed without an answer."""
        sequence = self.sequence
        return self.told != len(sequence.written) or sequence.state is State.FINISHED or not sequence.pending


class Text:
    """One text as its client sees it: of a request for several, one of them."""

    def __init__(self, branch: Branch, stop_checker: TextStopChecker, choice: int) -> None:
        self.branch = branch
        self.stop_checker = stop_checker
        self.choice = choice
        self.written: list[Piece] = []  # all that were published
        self.rest = ""  # what was held back when it ended without another token
        self.times: list[float] = []  # seconds from the job's submission to each token
        self.score: float | None = None
        self.reason: FinishReason | None = None
        self.error: Exception | None = None

    def take(self, events: list[Event], since: float) -> list[Piece]:
        """Note what one step tells of this text; its fresh pieces."""
        fresh: list[Piece] = []
        for event in events:
            match event:
                case Token(token=token, logprob=logprob, sampler_logprob=drawn, top=top):
                    fresh.append(Piece(self.stop_checker.take(), token, logprob, drawn, top, self.choice))
                    self.times.append(since)
                    self.branch.told += 1
                case Finished(reason=reason):
                    whole = self.branch.told == len(self.branch.sequence.written)  # a commit may have broken off
                    self.rest = self.stop_checker.finish() if whole else ""
                    if fresh:  # what was held back belongs to the last token
                        fresh[-1] = fresh[-1]._replace(text=fresh[-1].text + self.rest)
                        self.rest = ""
                    self.reason = FinishReason.STOP if isinstance(self.stop_checker.stopped, str) else reason
                case Failed(error=error):
                    self.error = error
        self.written += fresh
        return [*fresh, Piece(self.rest, None, 0.0, choice=self.choice)] if self.rest else fresh

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.written) + self.rest


class Job:
    """A request as its client sees it. Written by whichever thread turns the engine, read by its client.

    `pieces` are published before `ended` turns true: a client that reads `ended` first misses none. A search has no
    pieces, and no texts before its end.
    """

    def __init__(self, sequence: Sequence, submitted: float) -> None:
        self.search: BeamSearch | None = sequence.request.search
        stop_checker = self.search.stop_checker if self.search is not None else sequence.stop_checker
        self.submitted = submitted
        self.started: float | None = None  # when the step began that first computed something for it
        self.branches = {sequence.id: Branch(sequence)}
        self.texts = {sequence.id: Text(self.branches[sequence.id], cast("TextStopChecker", stop_checker), 0)}
        self.pieces: deque[Piece] = deque()  # published, not yet fetched
        self.scores: list[float] = []
        self.tops: list[tuple[TopLogprob, ...]] = []  # the likeliest tokens at each prompt token that was scored
        self.steps: list[float] = []  # of a search: seconds from `submitted` to each step that picked
        self.ended = False

    @property
    def first(self) -> Text:
        return next(iter(self.texts.values()))

    @property
    def sequence(self) -> Sequence:
        return self.first.branch.sequence

    @property
    def reason(self) -> FinishReason | None:
        return self.first.reason

    @property
    def error(self) -> Exception | None:
        return next((text.error for text in self.texts.values() if text.error is not None), None)

    @property
    def written(self) -> int:
        """Tokens that were published."""
        return sum(len(text.written) for text in self.texts.values())

    def fork(self, event: Forked) -> None:
        """Follow one sequence more, before what else the same step tells."""
        sequence = event.branch
        branch = self.branches[sequence.id] = Branch(sequence)
        branch.told = self.branches[event.parent].told
        if self.search is None:
            self.texts[sequence.id] = Text(branch, cast("TextStopChecker", sequence.stop_checker), sequence.choices[0])

    def score(self, event: PromptLogprobsAdded) -> None:
        self.scores += event.logprobs
        self.tops += event.tops

    def take(self, told: dict[int, list[Event]], now: float) -> None:
        """Note what else one step tells of this job's sequences, by their ids, then publish it in their order."""
        fresh: list[Piece] = []
        since, ends = now - self.submitted, not told  # nothing: it was interrupted at its end
        for identity, events in told.items():
            if self.search is None:
                fresh += self.texts[identity].take(events, since)
            else:
                self._hear(self.branches[identity], events)
            if isinstance(events[-1], ENDS):
                self.branches[identity].ended = ends = True
        if self.search is not None and told:
            self.steps.append(since)
        self.pieces += fresh
        if ends and all(branch.ended for branch in self.branches.values()):
            if self.search is not None and self.error is None:
                self._harvest(self.search)
            self.ended = True

    def _hear(self, branch: Branch, events: list[Event]) -> None:
        """What a beam tells: nothing that its client sees, unless it fails."""
        for event in events:
            match event:
                case Token():
                    branch.told += 1
                case Finished(reason=reason):
                    self.first.reason = reason
                case Failed(error=error):
                    self.first.error = error

    def _harvest(self, search: BeamSearch) -> None:
        """The texts of a search that is over, each read once more by a guard of its own."""
        found = search.best(search.params.n)
        if not found or self.first.reason is FinishReason.ABORTED:
            return
        root = self.first.branch
        self.texts.clear()
        for place, hypothesis in enumerate(found):
            stop_checker = cast("TextStopChecker", search.stop_checker.fork())
            text = self.texts[place] = Text(root, stop_checker, place)
            for node in hypothesis.node.path():
                stop_checker.advance(node.token)
                text.written.append(
                    Piece(stop_checker.take(), node.token, node.logprob, node.sampler_logprob, node.top, place)
                )
            last = text.written[-1]
            text.written[-1] = last._replace(text=last.text + stop_checker.finish())
            text.times = self.steps[: len(text.written)]
            text.score, text.reason = hypothesis.score, hypothesis.reason
            if isinstance(stop_checker.stopped, str):
                text.reason = FinishReason.STOP

    @property
    def torn(self) -> bool:
        """Whether some sequence is ahead of what was told of it, or computed without an answer."""
        if len(self.scores) != self.sequence.logprobs_reported:
            return True
        return any(branch.torn for branch in self.branches.values() if not branch.ended)


class Driver:
    """Thread-safe access to an engine."""

    def __init__(
        self,
        engine: Engine[Any],
        layers: int,
        kv_bytes: Callable[[int], int],
        clock: Callable[[], float] = time.perf_counter,
        end_step: Callable[[float, float], object] | None = None,
    ) -> None:
        self.engine = engine
        self.layers = layers  # of the model, for the usage
        self.kv_bytes = kv_bytes  # bytes that the KV cache keeps of a text of so many tokens
        self._clock = clock
        self._end_step = end_step  # told when each step began and ended, before anybody hears what it brought
        self._lock = threading.Lock()
        self._jobs: dict[int, Job] = {}
        self._aborts: deque[Job] = deque()
        self._released = 0  # times the lock was given back
        self._release = threading.Condition()

    @contextmanager
    def between_turns(self) -> Iterator[Engine[Any]]:
        """The engine, while nobody turns it."""
        try:
            with self._lock:
                yield self.engine
        finally:
            self._tell()
            self._sweep()

    def submit(self, request: Request, *, held: bool = False) -> Job:
        """Queue a request; `held` ones compute nothing until `allow`. Raises what `Engine.submit` raises.

        Its guard must be a TextStopChecker, or a BeamSearch, which is then its search as well.
        """
        submitted = self._clock()  # before it waits for a turn that is under way
        with self.between_turns() as engine:
            sequence = engine.submit(request)
            if held:
                engine.pause(sequence.id)
            job = self._jobs[sequence.id] = Job(sequence, submitted)
        return job

    def allow(self, job: Job, tokens: int | None) -> None:
        """Let a job write `tokens` more tokens and then hold it; None: let it go on to its end."""
        with self.between_turns() as engine:
            if tokens is None:
                engine.resume(job.sequence.id)
            else:
                engine.pause(job.sequence.id, len(job.sequence.tokens) + tokens)

    def use_cache(self, job: Job, cache: bool) -> None:
        """Switch a job's KV cache on or off, from its next step on."""
        with self.between_turns() as engine:
            engine.use_cache(job.sequence.id, cache)

    def fetch(self, job: Job) -> Piece | None:
        """The job's next piece, turning the engine as long as there is none; None once it has ended.

        A job that is held has no next piece: `allow` it one first.

        Raises EngineError if it failed.
        """
        while True:
            ended = job.ended  # read before `pieces`: what was published before the end is not missed
            if job.pieces:
                return job.pieces.popleft()
            if ended and job.error is not None:
                raise EngineError(str(job.error) or type(job.error).__name__) from job.error
            if ended:
                return None
            self._turn(job)

    def finish(self, job: Job) -> None:
        """Turn the engine until the job has ended, well or not."""
        while not job.ended:
            self._turn(job)

    def completion(self, job: Job) -> Completion:
        """What has been written so far, and what it cost; of several texts the best or the first, with the others."""
        ended = job.ended  # read before what was written: an end is told of the whole text
        request = job.sequence.request
        texts = list(job.texts.values())
        if request.params.best_of is not None:
            texts = sorted(texts, key=lambda text: -_mean(text))[: request.params.n]
        told = [self._told(job, text, ended) for text in texts]
        if ended and job.search is None:  # a request that ended before its texts parted has one that stands for all
            told += told[:1] * (request.params.n - len(told))
        first, *others = told
        first = replace(first, others=tuple(others))
        if job.search is not None and ended:
            places = {node: place for place, node in enumerate(job.search.nodes())}
            tree = tuple(
                TreeToken(places.get(node.parent), node.token, node.logprob, node.score, node.reason)  # type: ignore[arg-type]
                for node in places
            )
            best = job.search.best(request.params.n)
            first = replace(first, tree=tree, ends=tuple(places[found.node] for found in best))
        return first

    def _told(self, job: Job, text: Text, ended: bool) -> Completion:
        sequence, written = text.branch.sequence, tuple(text.written)
        request = sequence.request
        branches = [text.branch] if job.search is None else list(job.branches.values())
        forwarded = sum(branch.sequence.forwarded for branch in branches)
        held = len(request.prompt) + len(written) - 1 if job.search is not None else sequence.computed
        return Completion(
            text=text.text,
            token_ids=tuple(piece.token_id for piece in written if piece.token_id is not None),
            logprobs=tuple(piece.logprob for piece in written),
            finish_reason=text.reason if ended else None,
            usage=Usage(
                prompt_tokens=len(request.prompt),
                completion_tokens=len(written),
                forward_tokens=forwarded,
                layer_tokens=forwarded * self.layers,
                reused_tokens=sequence.reused,
                kv_bytes=self.kv_bytes(held) if sequence.cache else 0,
                preemptions=sequence.preemptions,
                seed=request.params.seed,
                queue_s=0.0 if job.started is None else job.started - job.submitted,
                token_s=tuple(text.times),
            ),
            sampler_logprobs=tuple(piece.sampler_logprob for piece in written),
            top_logprobs=tuple(piece.top for piece in written) if request.params.logprobs is not None else (),
            stopped=text.stop_checker.stopped if ended else None,
            score=text.score,
            prompt_logprobs=tuple(job.scores),
            prompt_top_logprobs=tuple(job.tops),
        )

    def abort(self, job: Job) -> None:
        """End a job in any state and free its pages. It never waits, so that a finaliser may call it.

        If another turn of the engine is under way, that turn's thread does it right after.
        """
        if not job.ended:
            self._aborts.append(job)
            self._sweep()

    def close(self) -> None:
        """End every job, after the turn that is under way."""
        with self.between_turns() as engine:
            for identity in list(self._jobs):
                self._route(engine.abort(identity))  # a beam's team ends with it

    def _turn(self, job: Job) -> None:
        """Turn the engine once, or wait while another thread does, which may bring something for `job`."""
        seen, released = job.written, self._released
        if not self._lock.acquire(blocking=False):
            with self._release:
                self._release.wait_for(lambda: self._released != released)
            return
        try:
            if not job.ended and job.written == seen:
                self._step(job)
        finally:
            self._lock.release()
            self._tell()
            self._sweep()

    def _tell(self) -> None:
        """Wake who waits for the lock to be given back: it has been."""
        with self._release:
            self._released += 1
            self._release.notify_all()

    def _step(self, job: Job) -> None:
        began = self._clock()
        try:
            events = self.engine.step()
            for other in self._jobs.values():
                if other.started is None and other.sequence.forwarded:
                    other.started = began
            if self._end_step is not None:
                self._end_step(began, self._clock())
            self._route(events)
        except BaseException as error:  # Ctrl-C, which mostly meets the model's forward and leaves all as it was
            if any(other.torn for other in self._jobs.values()):
                self._give_up(job, error)
            raise

    def _give_up(self, interrupted: Job, error: BaseException) -> None:
        """End everything: a commit broke off, and what the engine holds is neither before the step nor after."""
        self.engine.reset()
        fault = EngineError(f"the engine was interrupted in the middle of a step ({type(error).__name__})")
        for job in dict.fromkeys(self._jobs.values()):
            live = [identity for identity, branch in job.branches.items() if not branch.ended]
            aborted = job is interrupted
            ends = {one: Finished(one, FinishReason.ABORTED) if aborted else Failed(one, fault) for one in live}
            job.take({one: [end] for one, end in ends.items()}, self._clock())
        self._jobs.clear()

    def _route(self, events: list[Event]) -> None:
        now = self._clock()
        told: dict[Job, dict[int, list[Event]]] = {}
        for event in events:
            match event:
                case Forked(sequence=child, parent=parent):
                    self._jobs[child] = self._jobs[parent]
                    self._jobs[child].fork(event)
                case PromptLogprobsAdded(sequence=identity):
                    self._jobs[identity].score(event)
                case _:
                    identity = event.sequence
                    told.setdefault(self._jobs[identity], {}).setdefault(identity, []).append(event)
        for job, its in told.items():
            job.take(its, now)
            for identity in its:
                if job.branches[identity].ended:
                    del self._jobs[identity]

    def _sweep(self) -> None:
        """Carry out what is to be aborted, unless the lock is held: then its holder will, on release."""
        while self._aborts and self._lock.acquire(blocking=False):
            try:
                while self._aborts:
                    for identity in list(self._aborts.popleft().branches):
                        self._route(self.engine.abort(identity))  # one that has ended is left as it is
            finally:
                self._lock.release()
                self._tell()


class Stream:
    """The pieces of one text as they are written. Dropping or closing it early frees its pages.

    `completion` is what has been written so far; it is final once the iteration has ended.
    """

    def __init__(self, driver: Driver, job: Job) -> None:
        self._driver = driver
        self._job = job

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        piece = self._driver.fetch(self._job)
        if piece is None:
            raise StopIteration
        return piece

    @property
    def completion(self) -> Completion:
        return self._driver.completion(self._job)

    def close(self) -> None:
        """End the text here. Pieces that were written already can still be fetched."""
        self._driver.abort(self._job)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def _mean(text: Text) -> float:
    """The mean log-probability of a text's tokens, by which the best of several is found."""
    return sum(piece.logprob for piece in text.written) / max(1, len(text.written))
