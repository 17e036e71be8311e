"""The model of a server: loaded in a thread, opened once, and watched while it makes tokens."""

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
OVERDUE = 60  # turns of COLLECT_S
HEAPS, M_ARENA_MAX = 2, -8  # the second is malloc.h's
_NEVER = 1_000_000_000  # younger collections before Python collects in full by itself

Load = Callable[[Callable[[int, int], None]], "LLM"]

log = logging.getLogger(__name__)


def share_heaps() -> None:
    """Let later threads share glibc's heaps: with one each, holes grew by 24 MB in an hour of mixed load."""
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(M_ARENA_MAX, HEAPS)


def give_back() -> None:
    """Give back what glibc's heaps keep of their peak: 60 MB after bodies of 15 MB."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def uncollected(load: Load) -> Load:
    """`load`, then hide its objects from the collector: each visit of 400,000 objects stops all for 0.2 s and more."""

    def loaded(report: Callable[[int, int], None]) -> "LLM":
        llm = load(report)
        gc.collect()
        gc.freeze()
        return llm

    return loaded


async def collect_at_rest(resting: Callable[[], bool]) -> None:
    """Collect in full at rest or when overdue; Python would do so amid thousands of requests of 100 objects each."""
    before, collected, turns = gc.get_threshold(), 0, 0
    gc.set_threshold(*before[:2], _NEVER)
    try:
        while True:
            await asyncio.sleep(COLLECT_S)
            turns += 1
            younger = gc.get_stats()[1]["collections"]
            if resting() or turns >= OVERDUE:
                if younger != collected:
                    gc.collect()
                give_back()
                collected, turns = gc.get_stats()[1]["collections"], 0
    finally:
        gc.set_threshold(*before)


class ModelHost:
    """Loads one LLM by load(report) and keeps it."""

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
        """The error, final for this host, with which the model could not be read or its engine ended."""
        if self._failure is None and self._llm is not None and not self._closed:
            try:
                self._llm.llm_engine.check()
            except EngineError as error:
                self._failure = error
        return self._failure

    @property
    def router(self) -> "ClusterLoop | None":
        """The router of the model's replicas; None: it is in this process, or not loaded."""
        from tokenwright.cluster.cluster_llm import cluster_of

        cluster = None if self._llm is None else cluster_of(self._llm)
        return None if cluster is None else cluster.loop

    @property
    def llm(self) -> "LLM":
        """The model. Raises NotReady, with the reason if it could not be read."""
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
            message = "a fault of ours; the server's log says more"
            self.loading, self._failure = replace(self.loading, phase="failed", message=message), error
        finally:
            self.settled.set()


READY_S = 60.0  # a request waits this long for a model that is being read


@dataclass(frozen=True, slots=True)
class Opened:
    llm: "LLM"
    preparer: Preprocessor
    listener: AsyncListener


class Opening:
    """Opens the model once: `wait` for it, then read `opened`. prepare() waits for the model itself."""

    def __init__(self, prepare: Callable[[], Coroutine[Any, Any, Opened]], waiting: Quota) -> None:
        self.opened: Opened | None = None
        self.waiting = waiting
        self._prepare = prepare
        self._task: asyncio.Task[None] | None = None

    async def wait(self, key: str) -> None:
        """Wait, as a request of this key. Raises NotReady if that takes long or fails."""
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


PROBE_S = 20.0  # an engine without a token for this long has failed, unless it makes one now
FRESH_S = 1.0  # a token this recent proves health without a probe
SOON_S = 0.2  # an engine whose last token is older, but within PROBE_S, gets this long for its probe


class EngineHealth:
    """Watches the deliveries of an engine. submit: hands a request to it. token_at: when it last made a token."""

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
        """Prove that a token can be made, by a probe if need be; a long step may last PROBE_S. Raises EngineError."""
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
                        raise EngineError("the engine has failed to make a token; its log says why")
                    await asyncio.sleep(0.005)
        except TimeoutError:
            raise EngineError(f"the engine has made no token for {PROBE_S:g} s") from None
        finally:
            handle.cancel()
