"""The service: takes requests of all APIs, admits them to the engine, and hands each its deltas.

    request ──► check ──► admission ──► prepare (threads) ──► engine thread ──► one callback per step ──► Generation

One event loop owns it. Whatever ends a request frees its place, and its pages after the step under way.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from tokenwright.engine import Failed, Finished, FinishReason, Request
from tokenwright.engine.loop import AsyncListener
from tokenwright.engine.port import Delivery, RequestHandle
from tokenwright.llm.asking import transcript
from tokenwright.llm.prompts.report import PROMPT_MEMORY, Cause
from tokenwright.serve.service import types
from tokenwright.serve.service.admission import Admission, AdmissionSlot, Quota
from tokenwright.serve.service.generation import Generation, timings_of_all
from tokenwright.serve.service.metrics import Metrics
from tokenwright.serve.service.model_host import EngineHealth, ModelHost, Opened, Opening
from tokenwright.serve.service.next_turns import NextTurns, Warm
from tokenwright.serve.service.preprocess import Preparation, Prepared, Preprocessor, check

T = TypeVar("T")
log = logging.getLogger(__name__)

AHEAD = 8  # sequences to prepare while the engine is full


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """The limits of the service. queue: requests that may wait. threads: that render, tokenise and compile.

    deadline_s: of a request that names none. reader_s: pause for a slow client. None: no limit.
    prompt_memory: bytes for answered prompts. retokenise: prompts do not reuse the ids of answers.
    warm: compute next turns ahead; auto: while the machine is free.
    """

    queue: int = 1024
    keys: int = 1
    threads: int = 2
    deadline_s: float | None = None
    reader_s: float | None = 300.0
    any_model: bool = False
    prompt_memory: int = PROMPT_MEMORY
    retokenise: bool = False
    warm: Warm = "off"


@dataclass(slots=True)
class _Running:
    """A request in the engine. releases: its session ends with the last of the session's requests."""

    generation: Generation
    place: AdmissionSlot
    opened: Opened
    releases: bool = False


class Service:
    """One model behind all APIs. names: by which clients may call the model; the first is its own."""

    def __init__(
        self, host: ModelHost, names: Sequence[str], limits: ServiceLimits | None = None, metrics: Metrics | None = None
    ) -> None:
        self.host = host
        self.metrics = metrics or Metrics()
        self.names = tuple(names)
        self.limits = limits or ServiceLimits()
        self.draining = False
        self.admission = Admission(1, self.limits.queue, self.limits.keys)
        self._running: dict[RequestHandle, _Running] = {}
        self.preparation = Preparation(self.limits.threads, self.limits.queue, self.limits.keys)
        # Places for the queue's requests, and for the one that would be in the engine.
        self._opening = Opening(self._open, Quota(1 + self.limits.queue, self.limits.keys))
        self._health = EngineHealth(self._probe)
        self._stopped = False
        self._next_turns = NextTurns(lambda: self._stopped or self.admission.used > 0, self.in_thread)

    @property
    def created(self) -> int:
        """The server's start, in seconds of Unix time: the model's age for clients."""
        return self.host.created

    @property
    def failure(self) -> Exception | None:
        return self.host.failure

    def listed(self, caller: types.Caller) -> list[types.ListedModel]:  # noqa: ARG002  (keys name models where there are several)
        context = self.host.llm.context if self.ready else None
        return [types.ListedModel(name, self.host.name, context) for name in self.names]

    @property
    def pending(self) -> int:
        return self.running + self.admission.waiting

    @property
    def ready(self) -> bool:
        return self.host.loading.phase == "ready" and not self.draining

    async def opened(self, key: str = "", *, taken: bool = False) -> Opened:
        """Wait until the model is loaded. Raises NotReady if that takes long or fails, and while draining; Busy."""
        if self.draining and not taken:
            raise types.NotReady(types.ENDING)
        opening = self._opening
        if opening.opened is None:
            if not taken and not opening.waiting.fits(key):
                raise self.admission.busy(opening.waiting.used)
            await opening.wait(key)
        assert opening.opened is not None, "it was waited for"
        return opening.opened

    async def _open(self) -> Opened:
        while not self.host.settled.is_set() and not self._stopped:
            await asyncio.sleep(0.01)
        if self._stopped:
            raise types.NotReady(types.ENDING)
        llm = self.host.llm
        engine = llm.llm_engine
        engine.prompts.most, engine.prompts.resumes = self.limits.prompt_memory, not self.limits.retokenise
        self.admission.places = engine.options.max_sequences + AHEAD
        listener = AsyncListener(asyncio.get_running_loop(), self._receive)
        return Opened(llm, await self.in_thread(lambda: Preprocessor(llm, self.limits.warm == "auto")), listener)

    async def in_thread(self, function: Callable[[], T]) -> T:
        return await self.preparation.in_thread(function)

    async def read(self, key: str, function: Callable[[], T]) -> T:
        return await self.preparation.read(key, function, self.limits.deadline_s)

    async def start(self, wanted: types.GenerationRequest) -> Generation:
        """Admit a request and hand it to the engine; whoever stops reading before the end must `cancel` it.

        Raises RequestError, ContextError or CapacityError for one that cannot be served, Busy where the queue is full,
        Late after its deadline, NotReady, and EngineError where the engine has ended.
        """
        asked = time.perf_counter() if wanted.since is None else wanted.since
        check(wanted)
        taken = wanted.since is not None
        deadline = self.limits.deadline_s if wanted.deadline_s is None else wanted.deadline_s
        try:
            async with asyncio.timeout(None if deadline is None else deadline - (time.perf_counter() - asked)):
                opened = await self.opened(wanted.caller.key, taken=taken)
                opened.preparer.check_prompt(wanted)
                key, weight = wanted.caller.key, _weight(wanted)
                place = await self.admission.enter(key, weight, wanted.priority, None, taken=taken)
        except TimeoutError:
            raise _late(deadline) from None
        try:
            if deadline is not None:
                left = deadline - (time.perf_counter() - asked)
                if left <= 0:
                    raise _late(deadline)
                wanted = replace(wanted, deadline_s=left)
            prepared = await self.preparation.prepared(opened.preparer, wanted)
            if self._stopped:
                raise types.NotReady(types.ENDING)
            return self._submit(opened, prepared, place, asked)
        except BaseException as error:
            place.leave()
            self._next_turns.ended(None)
            if isinstance(error, types.Late):
                raise _late(deadline) from None
            raise

    def full(self, key: str) -> types.Problem | None:
        """The problem of a full queue, where any request of this key would be refused; else None."""
        opening = self._opening
        if self.admission.full(key) or (opening.opened is None and not opening.waiting.fits(key)):
            return types.problem_of(self.admission.busy(opening.waiting.used))
        return None

    async def count(self, wanted: types.GenerationRequest) -> int:
        """The number of tokens of a request's prompt. Raises RequestError, NotReady, and as `read` does."""
        check(wanted)
        opened = await self.opened(wanted.caller.key)
        ids, _ = await self.read(wanted.caller.key, lambda: opened.preparer.prompt(wanted))
        return len(ids)

    def _submit(self, opened: Opened, prepared: Prepared, place: AdmissionSlot, asked: float) -> Generation:
        engine = opened.llm.llm_engine
        [handle] = engine.submit([prepared.request], opened.listener)
        text = transcript(engine, handle, prepared.origin)
        generation = Generation(handle, text, prepared, asked, self.limits.reader_s, lambda: engine.expert_counts)
        self._running[handle] = _Running(generation, place, opened)
        return generation

    def _receive(self, deliveries: list[Delivery]) -> None:
        self._health.add(deliveries)
        for delivery in deliveries:
            running = self._running.get(delivery.handle)
            if running is None:  # a probe of `healthy`
                self._health.add_probe(delivery)
                continue
            running.generation.feed(delivery)
            if delivery.ended:
                self._end(delivery, running)

    def _end(self, delivery: Delivery, running: _Running) -> None:
        del self._running[delivery.handle]
        running.place.leave()
        failed = any(isinstance(event, Failed) for event in delivery.events)
        gone = any(isinstance(e, Finished) and e.reason is FinishReason.ABORTED for e in delivery.events)
        outcome = "failed" if failed else "cancelled" if gone else "finished"
        counts = running.generation.counts()
        timings = timings_of_all([running.generation], [counts])
        self.metrics.ended(outcome, counts, timings)
        if (report := timings.cache) is not None and report.known and report.cause is not Cause.PLACE:
            log.warning("%s: %s", running.generation.identity, report)
        self._release(running)
        if self.limits.warm != "off":
            follow = partial(running.generation.follow, running.opened.preparer)
            self._next_turns.ended(follow if outcome == "finished" else None)

    def _release(self, ended: _Running) -> None:
        """End the pins of a session whose client has said so, once the last of its requests has ended."""
        asked = ended.generation.handle.sequence.request.retention
        if asked.session and (asked.last or ended.releases):
            asks = ((one.generation.handle.sequence.request.retention, one) for one in self._running.values())
            others = [one for its, one in asks if (its.owner, its.session) == (asked.owner, asked.session)]
            for one in others:
                one.releases = True
            if not others:
                ended.opened.llm.llm_engine.release(asked.owner, asked.session)

    @property
    def running(self) -> int:
        return len(self._running)

    def counts(self) -> list[types.TokenCounts]:
        return [one.generation.counts() for one in self._running.values()]

    async def healthy(self) -> None:
        self.host.llm.check()
        await self._health.prove()

    async def _probe(self, request: Request) -> RequestHandle:
        opened = await self.opened()
        [handle] = opened.llm.submit([request], opened.listener)
        return handle

    def stop(self) -> None:
        self.draining = self._stopped = True
        self.admission.close(types.NotReady(types.ENDING))
        self.preparation.stop()
        for handle in list(self._running):
            handle.cancel()

    def close(self) -> None:
        self.preparation.close()


def _late(deadline_s: float | None) -> types.Late:
    assert deadline_s is not None, "only a deadline makes a request late"
    return types.Late(f"the request waited for {deadline_s:g} s, which is its deadline")


def _weight(wanted: types.GenerationRequest) -> int:
    asked = (wanted.overrides.get(name) for name in ("n", "best_of", "beams"))
    return max((number for number in asked if isinstance(number, int)), default=1)
