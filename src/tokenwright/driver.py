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
from types import TracebackType
from typing import Any, Self

from tokenwright.completion import Completion, Piece, Usage
from tokenwright.decode import TextGuard
from tokenwright.engine import Engine, Event, Failed, Finished, FinishReason, Request, Scored, Sequence, State, Token
from tokenwright.errors import EngineError


class Job:
    """A request as its client sees it. Written by whichever thread turns the engine, read by its client.

    `pieces` are published before `ended` turns true: a client that reads `ended` first misses none.
    """

    def __init__(self, sequence: Sequence, guard: TextGuard, submitted: float) -> None:
        self.sequence = sequence
        self.guard = guard
        self.submitted = submitted
        self.started: float | None = None  # when the step began that first computed something for it
        self.pieces: deque[Piece] = deque()  # published, not yet fetched
        self.written: list[Piece] = []  # all that were published
        self.scores: list[float] = []
        self.times: list[float] = []  # seconds from `submitted` to each token
        self.reason: FinishReason | None = None
        self.error: Exception | None = None
        self.ended = False

    def take(self, events: list[Event], now: float) -> None:
        """Note what one step tells of this job, then publish it."""
        fresh: list[Piece] = []
        for event in events:
            match event:
                case Token(token=token, logprob=logprob):
                    fresh.append(Piece(self.guard.take(), token, logprob))
                    self.times.append(now - self.submitted)
                case Scored(logprobs=logprobs):
                    self.scores += logprobs
                case Finished(reason=reason):
                    if fresh:  # what was held back belongs to the last token
                        fresh[-1] = Piece(fresh[-1].text + self.guard.finish(), fresh[-1].token_id, fresh[-1].logprob)
                    self.reason = FinishReason.STOP if self.guard.stopped else reason
                case Failed(error=error):
                    self.error = error
        self.written += fresh
        self.pieces += fresh
        self.ended = self.reason is not None or self.error is not None

    @property
    def torn(self) -> bool:
        """Whether the sequence is ahead of what was told of it, or computed without an answer."""
        sequence = self.sequence
        if (len(self.written), len(self.scores)) != (len(sequence.written), sequence.scored):
            return True
        return sequence.state is State.FINISHED or not sequence.pending


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
        self._aborts: deque[int] = deque()
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

    def submit(self, request: Request, guard: TextGuard, *, held: bool = False) -> Job:
        """Queue a request; `held` ones compute nothing until `allow`. Raises what `Engine.submit` raises."""
        submitted = self._clock()  # before it waits for a turn that is under way
        with self.between_turns() as engine:
            sequence = engine.submit(request)
            if held:
                engine.hold(sequence.id, 0)
            job = self._jobs[sequence.id] = Job(sequence, guard, submitted)
        return job

    def allow(self, job: Job, tokens: int | None) -> None:
        """Let a job write `tokens` more tokens and then hold it; None: let it go on to its end."""
        with self.between_turns() as engine:
            engine.hold(job.sequence.id, None if tokens is None else len(job.sequence.tokens) + tokens)

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
        """What has been written so far, and what it cost."""
        reason = job.reason if job.ended else None  # read before `written`: an end is told of the whole text
        sequence, request, written = job.sequence, job.sequence.request, tuple(job.written)
        return Completion(
            text="".join(piece.text for piece in written),
            token_ids=tuple(piece.token_id for piece in written),
            logprobs=tuple(piece.logprob for piece in written),
            finish_reason=reason,
            usage=Usage(
                prompt_tokens=len(request.prompt),
                completion_tokens=len(written),
                forward_tokens=sequence.forwarded,
                layer_tokens=sequence.forwarded * self.layers,
                reused_tokens=sequence.reused,
                kv_bytes=self.kv_bytes(sequence.computed) if sequence.cache else 0,
                preemptions=sequence.preemptions,
                seed=request.params.seed,
                queue_s=0.0 if job.started is None else job.started - job.submitted,
                token_s=tuple(job.times),
            ),
        )

    def abort(self, job: Job) -> None:
        """End a job in any state and free its pages. It never waits, so that a finaliser may call it.

        If another turn of the engine is under way, that turn's thread does it right after.
        """
        if not job.ended:
            self._aborts.append(job.sequence.id)
            self._sweep()

    def close(self) -> None:
        """End every job, after the turn that is under way."""
        with self.between_turns() as engine:
            for identity in list(self._jobs):
                self._route(engine.abort(identity))

    def _turn(self, job: Job) -> None:
        """Turn the engine once, or wait while another thread does, which may bring something for `job`."""
        seen, released = len(job.written), self._released
        if not self._lock.acquire(blocking=False):
            with self._release:
                self._release.wait_for(lambda: self._released != released)
            return
        try:
            if not job.ended and len(job.written) == seen:
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
        for identity, job in self._jobs.items():
            end = Finished(identity, FinishReason.ABORTED) if job is interrupted else Failed(identity, fault)
            job.take([end], self._clock())
        self._jobs.clear()

    def _route(self, events: list[Event]) -> None:
        now = self._clock()
        told: dict[int, list[Event]] = {}
        for event in events:
            told.setdefault(event.sequence, []).append(event)
        for identity, its_events in told.items():
            job = self._jobs[identity]
            job.take(its_events, now)
            if job.ended:
                del self._jobs[identity]

    def _sweep(self) -> None:
        """Carry out what is to be aborted, unless the lock is held: then its holder will, on release."""
        while self._aborts and self._lock.acquire(blocking=False):
            try:
                while self._aborts:
                    self._route(self.engine.abort(self._aborts.popleft()))
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
