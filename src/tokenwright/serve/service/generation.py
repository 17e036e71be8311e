"""A running request in the event loop: turns the engine's deliveries into deltas."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tokenwright.checkpoints.files.pooling import Pooling
from tokenwright.engine import Finished, FinishReason, SamplingParams, Token
from tokenwright.engine.port import Delivery, RequestHandle
from tokenwright.llm.chat.answer_reader import AnswerReader
from tokenwright.llm.output_processor import OutputProcessor
from tokenwright.llm.outputs import Completion
from tokenwright.llm.prompts.report import CacheReport
from tokenwright.serve.service.preprocess import Prepared, Preprocessor
from tokenwright.serve.service.types import ENDING, HOUR_S, Delta, Finish, NotReady, Timings, TokenCounts, Unread

MOST_UNREAD = 256  # steps; with more unread, a request pauses until its reader catches up
BATCH = 64  # steps that a reader of whole texts is woken for

Deltas = dict[int, list[Delta]]


class GenerationClock:
    """Counts tokens, and keeps the times (time.perf_counter) of the request, its first token and its last."""

    def __init__(self, arrival: float) -> None:
        self.arrival = arrival
        self.written = 0
        self.times: list[float] = []  # of the first and the last token
        self.ended: float | None = None

    def add(self, delivery: Delivery) -> None:
        written = self.written
        for event in delivery.events:
            if type(event) is Token:
                self.written += 1
        if self.written > written:
            self.times[1:] = (delivery.time,)
        if delivery.ended:
            self.ended = delivery.time


class ReaderPause:
    """Pauses a request whose reader is slow, and cancels it after `seconds` of pauses in all; None: no limit."""

    def __init__(self, handle: RequestHandle, seconds: float | None) -> None:
        self.on = False
        self.given_up = False
        self._handle = handle
        self._left_s = seconds
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        self.on = True
        self._handle.pause()
        if self._left_s is not None:
            self._timer = asyncio.get_running_loop().call_later(self._left_s, self._give_up)

    def end(self) -> None:
        self.on = False
        self._handle.resume()
        if self._left_s is not None:
            self._left_s = self.stop()

    def stop(self) -> float:
        """Stop the timer; returns the seconds that were left."""
        timer, self._timer = self._timer, None
        if timer is None:
            return 0.0
        timer.cancel()
        return max(0.0, timer.when() - asyncio.get_running_loop().time())

    def _give_up(self) -> None:
        self.given_up = True
        self._handle.cancel()


class Generation:
    """One request in the engine. Iterate over it for the deltas of each step, or `await answers()` for whole texts."""

    def __init__(
        self,
        handle: RequestHandle,
        transcript: OutputProcessor,
        prepared: Prepared,
        arrival: float,
        reader_s: float | None = None,
        experts: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        before = dict(experts())  # counts of the expert pool; empty if all experts are in memory
        self.experts: Callable[[], dict[str, int] | None] = lambda: (
            {name: count - before[name] for name, count in experts().items()} if before else None
        )
        self.prepared = prepared
        self.handle = handle
        self._transcript = transcript
        self._clock = GenerationClock(arrival)
        self._deliveries: deque[Delivery] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.reader = AnswerReader(prepared.reader, keeps_tokens=prepared.request.params.logprobs is not None)
        self._finished: dict[int, Finish | Literal["abort"]] = {}
        self._pause = ReaderPause(handle, reader_s)
        self._cancelled = False
        self._whole = False  # read by `answers`, so woken less often

    def feed(self, delivery: Delivery) -> None:
        self._deliveries.append(delivery)
        self._clock.add(delivery)
        if self._waiter is not None and not self._waiter.done():
            if not self._whole or delivery.ended or len(self._deliveries) >= BATCH:
                self._waiter.set_result(None)
        elif len(self._deliveries) >= MOST_UNREAD and not self._pause.on:
            self._pause.begin()

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return self.prepared.request.prompt

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters, with defaults filled in and the seed drawn."""
        return self.prepared.request.params

    @property
    def arrival(self) -> float:
        return self._clock.arrival

    def cancel(self) -> None:
        """End the request; its pages are freed after the current step."""
        self._cancelled = True
        self._pause.stop()
        self.handle.cancel()

    @property
    def _aborted(self) -> bool:
        return any(text.reason is FinishReason.ABORTED for text in self._transcript.texts)

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> list[Delta]:
        """The deltas of the next steps. Raises EngineError, NotReady at shutdown, Unread after too long a pause."""
        while True:
            while not self._deliveries:
                if self._transcript.ended:
                    self._transcript.check()
                    if self._aborted and not self._cancelled:
                        if self._pause.given_up:
                            raise Unread
                        raise NotReady(ENDING)
                    raise StopAsyncIteration
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
            if deltas := self._read_deliveries():
                if self._cancelled and self._aborted:
                    raise StopAsyncIteration
                return deltas

    async def answers(self) -> list[Delta]:
        """Wait for the whole texts. Raises what iteration raises."""
        self._whole = True
        texts: dict[int, Delta] = {}
        async for deltas in self:
            for delta in deltas:
                texts.setdefault(delta.choice, Delta(delta.choice)).add(delta)
        return [texts[choice] for choice in sorted(texts)]

    def follow(self, preparer: Preprocessor) -> None:
        """Once it has ended, compute the beginning of the conversation's next prompt."""
        [text, *others] = self._transcript.texts
        if not others:
            preparer.warm_next_turn(self.prepared, text.pieces, text.reason, self.identity)

    def completion(self) -> Completion:
        return self._transcript.completion()

    def embedding(self, pooling: Pooling) -> NDArray[np.float32]:
        """The prompt's pooled hidden states [width], once an embedding request has ended."""
        return self._transcript.hidden.pooled(pooling)

    @property
    def prompt_logprobs(self) -> list[float]:
        """The log-probabilities of the prompt's tokens after the first, if `params` asks for them."""
        return self._transcript.prompt_logprobs

    @property
    def finishes(self) -> list[str]:
        """The finish reasons of the texts that have ended, by choice; "abort" for cancelled ones."""
        return [self._finished[choice] for choice in sorted(self._finished)]

    def counts(self) -> TokenCounts:
        drafted, accepted = self._transcript.drafts
        counts = self.handle.sequence.counts
        marks = zip(self.prepared.request.retention.marks, counts.pinned, strict=False)
        return TokenCounts(
            prompt=len(self.prompt_ids),
            completion=self._clock.written,
            cached=counts.prefix_hit,
            disk=min(counts.restored, counts.prefix_hit),
            reasoning=self.reader.reasoning_tokens,
            truncated=self.prepared.truncated,
            drafted=drafted,
            accepted=accepted,
            kept=max(0, self.handle.sequence.cacheable(len(self.prompt_ids)) - counts.prefix_hit),
            pinned=max(counts.pinned, default=0),
            pinned_hour=max((tokens for mark, tokens in marks if mark.ttl_s >= HOUR_S), default=0),
            unpinned=counts.pinned.count(0),
        )

    @property
    def logprobs(self) -> int:
        """The number of log-probabilities of the prompt and of all texts so far."""
        params, count = self.params, 0
        if params.logprobs is not None:
            count += self._clock.written * (1 + params.logprobs)
        if params.prompt_logprobs is not None:
            count += len(self.prompt_ids) * (1 + params.prompt_logprobs)
        return count

    @property
    def identity(self) -> str:
        return self._transcript.watch.name

    @property
    def cache(self) -> CacheReport | None:
        """The report on its prompt; None before its first step, or if nothing is cached."""
        return self._transcript.cache if self.handle.started is not None else None

    def timings(self) -> Timings:
        return timings_of_all([self])

    @property
    def moments(self) -> tuple[float, float, float]:
        """The times of its first step, first token and last token; of its end, or now, for what is missing."""
        clock, end = self._clock, self._clock.ended or time.perf_counter()
        first, last = (clock.times[0], clock.times[-1]) if clock.times else (end, end)
        return self.handle.started or end, first, last

    def _read_deliveries(self) -> list[Delta]:
        deltas: Deltas = {}
        while self._deliveries:
            delivery = self._deliveries.popleft()
            pieces = self._transcript.add(delivery)
            if not self.prepared.at_end:
                for piece in pieces:
                    self.reader.push(piece, _last(piece.choice, deltas))
            if delivery.ended or any(type(event) is Finished for event in delivery.events):
                self._finish_texts(deltas, delivery.ended)
        if self._pause.on:
            self._pause.end()
        every = (delta for choice in deltas.values() for delta in choice)
        return [one for one in every if one.text or one.finish or one.reasoning or one.tool_calls or one.tokens]

    def _finish_texts(self, deltas: Deltas, all_ended: bool) -> None:
        if self._transcript.error is not None:
            return
        if self.prepared.at_end:
            ended = self._read_best(deltas) if all_ended else []
        else:
            ended = [(text.choice, text.reason, text.stopped) for text in self._transcript.texts if text.reason]
        if all_ended and len(ended) < self.params.n:  # the request ended before any fork, so all texts are equal
            ended += [(choice, *ended[0][1:]) for choice in range(len(ended), self.params.n)]
        for choice, reason, stopped in ended:
            if choice not in self._finished:
                delta = _last(choice, deltas)
                self.reader.finish(delta, reason, stopped)
                self._finished[choice] = delta.finish or "abort"

    def _read_best(self, deltas: Deltas) -> list[tuple[int, FinishReason, str | int | None]]:
        ended = []
        for choice, best in enumerate(self._transcript.best):
            ended.append((choice, best.reason or FinishReason.ABORTED, best.stopped))
            for piece in best.pieces:
                self.reader.push(piece._replace(choice=choice), _last(choice, deltas))
        return ended


def timings_of_all(generations: Sequence[Generation], counts: Sequence[TokenCounts] = ()) -> Timings:
    """The times from the first arrival to the first step and first token of any request, and to the last token."""
    counts = counts or [one.counts() for one in generations]
    starts, firsts, lasts = zip(*(one.moments for one in generations), strict=True)
    started, first = min(starts), min(firsts)
    return Timings(
        queue_s=max(0.0, started - min(one.arrival for one in generations)),
        prefill_s=max(0.0, first - started),
        decode_s=max(lasts) - first,
        prompt_tokens=sum(one.prompt for one in counts),
        cached_tokens=sum(one.cached for one in counts),
        disk_tokens=sum(one.disk for one in counts),
        completion_tokens=sum(one.completion for one in counts),
        drafted_tokens=sum(one.drafted for one in counts),
        accepted_tokens=sum(one.accepted for one in counts),
        preemptions=sum(one.handle.sequence.counts.preemptions for one in generations),
        moves=sum(one.handle.moves for one in generations),
        cache=generations[0].cache,
        experts=generations[0].experts(),
    )


def _last(choice: int, deltas: Deltas) -> Delta:
    """The choice's delta to extend, a new one after tool calls because a delta's text precedes its calls."""
    listed = deltas.setdefault(choice, [])
    if not listed or listed[-1].tool_calls:
        listed.append(Delta(choice))
    return listed[-1]
