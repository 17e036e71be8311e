"""The model of a server: read in a thread of its own, so that the server answers at once."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from tokenwright.errors import EngineError, TokenwrightError
from tokenwright.serve.service.types import NotReady
from tokenwright.trace.schema import Loading

if TYPE_CHECKING:  # NumPy is loaded with the model, not with the server
    from tokenwright.llm.llm import LLM

COLLECT_S = 10.0
OVERDUE = 60  # turns of COLLECT_S
HEAPS, M_ARENA_MAX = 2, -8  # the second is of malloc.h
_NEVER = 1_000_000_000  # collections of younger objects until Python collects in full by itself

Load = Callable[[Callable[[int, int], None]], "LLM"]

log = logging.getLogger(__name__)


def share_heaps() -> None:
    """Let threads that start from now on share the heaps of glibc: each would have its own, and the holes of dozens
    grew by 24 MB in an hour of mixed load, while the bytes in use stayed the same.
    """
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(M_ARENA_MAX, HEAPS)


def uncollected(load: Load) -> Load:
    """`load`, after which the garbage collector skips all that is there: modules and a model that stay.

    To visit their 400,000 objects takes 0.2 s and more, again and again, in which neither a request nor a step goes on.
    For a process that has one model to its end; `collect_at_rest` belongs to it.
    """

    def loaded(report: Callable[[int, int], None]) -> LLM:
        llm = load(report)
        gc.collect()
        gc.freeze()
        return llm

    return loaded


async def collect_at_rest(resting: Callable[[], bool]) -> None:
    """Collect garbage in full only where few requests are there, or where it is overdue; runs until it is cancelled.

    Python would do so while thousands of requests wait: each has 100 objects, and all are visited in one pause.
    """
    before, collected, turns = gc.get_threshold(), 0, 0
    gc.set_threshold(*before[:2], _NEVER)
    try:
        while True:
            await asyncio.sleep(COLLECT_S)
            turns += 1
            younger = gc.get_stats()[1]["collections"]
            if younger != collected and (resting() or turns >= OVERDUE):
                gc.collect()
                collected, turns = gc.get_stats()[1]["collections"], 0
    finally:
        gc.set_threshold(*before)


class ModelHost:
    """Loads one LLM and keeps it. name: what the model is called. load(report): opens it."""

    def __init__(self, name: str, load: Load) -> None:
        self.name = name
        self.created = int(time.time())
        self.loading = Loading("loading", 0, 0, "")
        self.settled = threading.Event()  # the model is ready, or cannot be read
        self._failure: Exception | None = None
        self._closed = False
        self._load = load
        self._llm: LLM | None = None
        self._thread = threading.Thread(target=self._read, name="loading", daemon=True)

    def start(self) -> None:
        """Start to load the model."""
        self._thread.start()

    def close(self) -> None:
        """Free the memory. Does not wait for a model that is still loading."""
        self._closed = True
        if self._llm is not None:
            self._llm.close()

    @property
    def failure(self) -> Exception | None:
        """Why the model cannot be read, or why its engine takes no request any more: nothing mends it but a new one."""
        if self._failure is None and self._llm is not None and not self._closed:
            try:
                self._llm.check()
            except EngineError as error:
                self._failure = error
        return self._failure

    @property
    def llm(self) -> LLM:
        """The model. Raises NotReady before it is loaded, and with the reason where it could not be."""
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
            self.loading, self._failure = replace(self.loading, phase="failed", message=str(error)), error
        except Exception as error:
            log.exception("the model could not be read")
            message = "a fault of ours; the server's log says more"
            self.loading, self._failure = replace(self.loading, phase="failed", message=message), error
        finally:
            self.settled.set()
