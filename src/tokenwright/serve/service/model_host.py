"""The model of a server: loaded in a thread, opened once, and checked while it generates."""

import asyncio
import ctypes
import gc
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tokenwright.engine import Failed, Request, SamplingParams, Token
from tokenwright.engine.loop import AsyncListener
from tokenwright.engine.port import Delivery, RequestHandle
from tokenwright.errors import EngineError, TokenwrightError
from tokenwright.serve.service.admission import Quota, retrieved
from tokenwright.serve.service.preprocess import Preprocessor
from tokenwright.serve.service.types import NotReady, without_folders
from tokenwright.trace.schema import Loading

if TYPE_CHECKING:
    from tokenwright.cluster.cluster_loop import ClusterLoop
    from tokenwright.llm.llm import LLM

COLLECT_S = 10.0
OVERDUE = 60  # rounds of COLLECT_S
HEAPS, M_ARENA_MAX = 2, -8  # M_ARENA_MAX is from malloc.h
_NEVER = 1_000_000_000  # a threshold that keeps Python from full collections

Load = Callable[[Callable[[int, int], None]], "LLM"]

log = logging.getLogger(__name__)


def share_heaps() -> None:
    """Let later threads share glibc's heaps; with one each, fragmentation grew by 24 MB in an hour."""
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(M_ARENA_MAX, HEAPS)


def give_back() -> None:
    """Return free memory of glibc's heaps to the system: 60 MB after bodies of 15 MB."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def uncollected(load: Load) -> Load:
    """Hide the loaded objects from the collector, which would stop everything for 0.2 s to visit 400,000."""

    def loaded(report: Callable[[int, int], None]) -> "LLM":
        llm = load(report)
        gc.collect()
        gc.freeze()
        return llm

    return loaded


async def collect_when_idle(idle: Callable[[], bool]) -> None:
    """Run full collections when idle or overdue, in place of Python's, which would come under load."""
    before, collected, rounds = gc.get_threshold(), 0, 0
    gc.set_threshold(*before[:2], _NEVER)
    try:
        while True:
            await asyncio.sleep(COLLECT_S)
            rounds += 1
            younger = gc.get_stats()[1]["collections"]
            if idle() or rounds >= OVERDUE:
                if younger != collected:
                    gc.collect()
                give_back()
                collected, rounds = gc.get_stats()[1]["collections"], 0
    finally:
        gc.set_threshold(*before)


class ModelHost:
    """Loads one LLM by load(report), in a thread."""

    def __init__(self, name: str, load: Load) -> None:
        self.name = name
        self.created = int(time.time())
        self.loading = Loading("loading", 0, 0, "")
        self.settled = threading.Event()
        self._failure: Exception | None = None
        self._closed = False
        self._load = load
        self._llm: LLM | None = None
        self._thread = threading.Thread(target=self._read, name="loading", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closed = True
        if self._llm is not None:
            self._llm.close()

    @property
    def failure(self) -> Exception | None:
        """The error that ended the load or the engine; it is final for this host."""
        if self._failure is None and self._llm is not None and not self._closed:
            try:
                self._llm.llm_engine.check()
            except EngineError as error:
                self._failure = error
        return self._failure

    @property
    def router(self) -> "ClusterLoop | None":
        """The router of the model's replicas, if it has any."""
        from tokenwright.cluster.cluster_llm import cluster_of

        cluster = None if self._llm is None else cluster_of(self._llm)
        return None if cluster is None else cluster.loop

    @property
    def llm(self) -> "LLM":
        """The model. Raises NotReady, with the reason if the load failed."""
        if self._llm is None:
            if self.loading.phase == "failed":
                raise NotReady(f"the model could not be read: {self.loading.message}")
            raise NotReady
        return self._llm

    def _read(self) -> None:
        def report(done: int, total: int) -> None:
            self.loading = Loading("loading", done, total, "")

        try:
            self._llm = self._load(report)
            self.loading = replace(self.loading, phase="ready")
        except TokenwrightError as error:
            self.loading, self._failure = (
                replace(self.loading, phase="failed", message=without_folders(str(error))),
                error,
            )
        except Exception as error:
            log.exception("the model could not be read")
            message = "an internal error; see the server's log"
            self.loading, self._failure = replace(self.loading, phase="failed", message=message), error
        finally:
            self.settled.set()


READY_S = 60.0  # how long a request waits for a model that is loading


@dataclass(frozen=True, slots=True)
class Opened:
    llm: "LLM"
    preparer: Preprocessor
    listener: AsyncListener


class Opening:
    """Opens the model once: `wait` for it, then use `opened`. prepare(): waits for the load."""

    def __init__(self, prepare: Callable[[], Coroutine[Any, Any, Opened]], waiting: Quota) -> None:
        self.opened: Opened | None = None
        self.waiting = waiting
        self._prepare = prepare
        self._task: asyncio.Task[None] | None = None

    async def wait(self, key: str) -> None:
        """Wait for the model. Raises NotReady if that takes long or fails."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._open())
            self._task.add_done_callback(retrieved)
        self.waiting.add(key)
        try:
            async with asyncio.timeout(READY_S):
                await asyncio.shield(self._task)
        except TimeoutError:
            raise NotReady from None
        finally:
            self.waiting.remove(key)

    async def _open(self) -> None:
        self.opened = await self._prepare()


PROBE_S = 20.0  # without a token for this long, an engine must prove itself by a probe
FRESH_S = 1.0  # a token this recent proves health
SOON_S = 0.2  # how long to wait for the probe if the last token is within PROBE_S


class EngineHealth:
    """Watches an engine's deliveries. submit: takes a request for it. token_at: the time of its last token."""

    def __init__(self, submit: Callable[[Request], Awaitable[RequestHandle]]) -> None:
        self.token_at = -PROBE_S
        self.probe_failed = False
        self._submit = submit
        self._probing: asyncio.Task[None] | None = None

    def add(self, deliveries: Sequence[Delivery]) -> None:
        if any(type(event) is Token for delivery in deliveries for event in delivery.events):
            self.token_at = time.monotonic()

    def add_probe(self, delivery: Delivery) -> None:
        self.probe_failed |= any(type(event) is Failed for event in delivery.events)

    async def prove(self) -> None:
        """Raises EngineError if the engine makes no token, by a probe if need be. A step may last PROBE_S."""
        silent_s = time.monotonic() - self.token_at
        if silent_s < FRESH_S:
            return
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._probe())
            self._probing.add_done_callback(retrieved)
        try:
            async with asyncio.timeout(SOON_S if silent_s < PROBE_S else None):
                await asyncio.shield(self._probing)
        except TimeoutError:
            return

    async def _probe(self) -> None:
        before, self.probe_failed = self.token_at, False
        handle = await self._submit(Request((0,), SamplingParams(temperature=0.0, max_tokens=1), share=False))
        try:
            async with asyncio.timeout(PROBE_S):
                while self.token_at <= before:
                    if self.probe_failed:
                        raise EngineError("the engine could not generate a token; see the server's log")
                    await asyncio.sleep(0.005)
        except TimeoutError:
            raise EngineError(f"the engine has generated no token for {PROBE_S:g} s") from None
        finally:
            handle.cancel()
