"""The service: takes requests of all APIs, admits them to the engine, and returns their deltas.

    request ──► check ──► admission ──► prepare (threads) ──► engine thread ──► one callback per step ──► Generation

One event loop owns it. However a request ends, its slot is freed at once, and its pages after the current step.
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
from tokenwright.engine.pins import Retention
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

AHEAD = 8  # sequences that are prepared while the engine is full


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    queue: int = 1024  # requests that may wait
    keys: int = 1  # API keys that share the queue
    threads: int = 2  # that render, tokenise and compile
    deadline_s: float | None = None  # for requests that set none; None: no limit
    reader_s: float | None = 300.0  # in which a slow client may pause its request; None: no limit
    any_model: bool = False  # answer to any model name
    prompt_memory: int = PROMPT_MEMORY  # bytes for answered prompts
    retokenise: bool = False  # prompts do not reuse the token ids of earlier answers
    warm: Warm = "off"  # compute next turns ahead


@dataclass(slots=True)
class _Running:
    generation: Generation
    slot: AdmissionSlot
    opened: Opened
    releases: bool = False  # its client has ended the session

    @property
    def retention(self) -> Retention:
        return self.generation.handle.sequence.request.retention


class Service:
    """Serves one model to all APIs. names: the names that clients may use, the model's own first."""

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
        self._opening = Opening(self._open, Quota(1 + self.limits.queue, self.limits.keys))
        self._health = EngineHealth(self._probe)
        self._stopped = False
        self._next_turns = NextTurns(lambda: self._stopped or self.admission.used > 0, self.in_thread)

    @property
    def created(self) -> int:
        """The server's start in Unix time, which clients read as the model's age."""
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

    async def opened(self, key: str = "", *, unlimited: bool = False) -> Opened:
        """Wait for the model. Raises NotReady if it fails, takes long or drains; Busy unless `unlimited`."""
        if self.draining and not unlimited:
            raise types.NotReady(types.ENDING)
        opening = self._opening
        if opening.opened is None:
            if not unlimited and not opening.waiting.fits(key):
                raise self.admission.busy(opening.waiting.used)
            await opening.wait(key)
        assert opening.opened is not None, "wait() returns once it is loaded"
        return opening.opened

    async def _open(self) -> Opened:
        while not self.host.settled.is_set() and not self._stopped:
            await asyncio.sleep(0.01)
        if self._stopped:
            raise types.NotReady(types.ENDING)
        llm = self.host.llm
        engine = llm.llm_engine
        engine.prompts.most, engine.prompts.resumes = self.limits.prompt_memory, not self.limits.retokenise
        self.admission.capacity = engine.options.max_sequences + AHEAD
        listener = AsyncListener(asyncio.get_running_loop(), self._receive)
        return Opened(llm, await self.in_thread(lambda: Preprocessor(llm, self.limits.warm == "auto")), listener)

    async def in_thread(self, function: Callable[[], T]) -> T:
        return await self.preparation.in_thread(function)

    async def read(self, key: str, function: Callable[[], T]) -> T:
        return await self.preparation.read(key, function, self.limits.deadline_s)

    async def start(self, wanted: types.GenerationRequest) -> Generation:
        """Admit a request to the engine. A caller that stops reading before the end must `cancel` it.

        Raises RequestError, ContextError or CapacityError if it cannot be served, Busy if the queue is full,
        Late after its deadline, NotReady, and EngineError if the engine has ended.
        """
        arrival = time.perf_counter() if wanted.arrival is None else wanted.arrival
        check(wanted)
        unlimited, key = wanted.arrival is not None, wanted.caller.key
        deadline = types.Deadline(self.limits.deadline_s if wanted.deadline_s is None else wanted.deadline_s, arrival)
        async with deadline.limit():
            opened = await self.opened(key, unlimited=unlimited)
            opened.preparer.check_prompt(wanted)
            slot = await self.admission.enter(key, _weight(wanted), wanted.priority, unlimited=unlimited)
        try:
            if deadline.seconds is not None:
                wanted = replace(wanted, deadline_s=deadline.left_s())
            prepared = await self.preparation.prepared(opened.preparer, wanted)
            if self._stopped:
                raise types.NotReady(types.ENDING)
            return self._submit(opened, prepared, slot, arrival)
        except BaseException as error:
            slot.leave()
            self._next_turns.ended(None)
            if isinstance(error, types.Late):
                raise deadline.late() from None  # a wait for the grammar knows only what was left of it
            raise

    def full(self, key: str) -> types.Problem | None:
        """The reply to a request of this key if the queue is full, else None."""
        opening = self._opening
        if self.admission.full(key) or (opening.opened is None and not opening.waiting.fits(key)):
            return types.problem_of(self.admission.busy(opening.waiting.used))
        return None

    async def count(self, wanted: types.GenerationRequest) -> int:
        """Count a prompt's tokens. Raises RequestError, NotReady, Busy, Late."""
        check(wanted)
        opened = await self.opened(wanted.caller.key)
        prompt = await self.read(wanted.caller.key, lambda: opened.preparer.prompt(wanted))
        return len(prompt.ids)

    def _submit(self, opened: Opened, prepared: Prepared, slot: AdmissionSlot, arrival: float) -> Generation:
        engine = opened.llm.llm_engine
        [handle] = engine.submit([prepared.request], opened.listener)
        text = transcript(engine, handle, prepared.origin)
        generation = Generation(handle, text, prepared, arrival, self.limits.reader_s, lambda: engine.expert_counts)
        self._running[handle] = _Running(generation, slot, opened)
        return generation

    def _receive(self, deliveries: list[Delivery]) -> None:
        self._health.add(deliveries)
        for delivery in deliveries:
            running = self._running.get(delivery.handle)
            if running is None:  # a probe that `healthy` submitted
                self._health.add_probe(delivery)
                continue
            running.generation.feed(delivery)
            if delivery.ended:
                self._end(delivery, running)

    def _end(self, delivery: Delivery, running: _Running) -> None:
        del self._running[delivery.handle]
        running.slot.leave()
        failed = any(isinstance(event, Failed) for event in delivery.events)
        aborted = any(isinstance(e, Finished) and e.reason is FinishReason.ABORTED for e in delivery.events)
        outcome = "failed" if failed else "cancelled" if aborted else "finished"
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
        """End the pins of a session that its client has ended, after the last of its requests."""
        retention = ended.retention
        if retention.session and (retention.last or ended.releases):
            session = retention.owner, retention.session
            others = [r for r in self._running.values() if (r.retention.owner, r.retention.session) == session]
            for other in others:
                other.releases = True
            if not others:
                ended.opened.llm.llm_engine.release(*session)

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


def _weight(wanted: types.GenerationRequest) -> int:
    sequences = (wanted.overrides.get(name) for name in ("n", "best_of", "beams"))
    return max((number for number in sequences if isinstance(number, int)), default=1)
