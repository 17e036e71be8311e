"""Batches: a few prompts beside the shown run, for the panel of pages. Each ends `LEASE_S` after its last request."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tokenwright.engine import Engine, Request
from tokenwright.engine.port import Delivery, RequestHandle
from tokenwright.engine.request import Sequence as EngineSequence
from tokenwright.errors import CapacityError
from tokenwright.explorer.player import Drive, new_identity, undriven
from tokenwright.llm.llm import LLM
from tokenwright.llm.output_processor import OutputProcessor

LEASE_S = 30.0
MOST_BATCHES = 4
Whose = Literal["run", "batch", "other"]


@dataclass(frozen=True, slots=True)
class Known:
    """A sequence that the viewer may read."""

    sequence: EngineSequence
    whose: Whose
    place: int = 0
    prompt: str = ""
    text: str = ""


@dataclass(slots=True, eq=False)
class PromptBatch:
    prompts: list[str]
    until: float
    handles: Sequence[RequestHandle] = ()
    transcripts: dict[RequestHandle, OutputProcessor] = field(default_factory=dict)
    news: deque[Delivery] = field(default_factory=deque)
    lock: threading.Lock = field(default_factory=threading.Lock)
    wake: Callable[[], object] = field(default_factory=lambda: lambda: None)
    ended: bool = False

    def deliver(self, deliveries: list[Delivery]) -> None:
        self.news.extend(deliveries)

    def known(self) -> list[Known]:
        with self.lock:
            while self.news:
                delivery = self.news.popleft()
                self.transcripts[delivery.handle].add(delivery)
            texts = ["".join(piece.text for piece in one.texts[0].pieces) for one in self.transcripts.values()]
        found = enumerate(zip(self.handles, self.prompts, texts, strict=True))
        return [Known(handle.sequence, "batch", place, prompt, text) for place, (handle, prompt, text) in found]

    def write(self, tokens: int) -> None:
        for handle in self.handles:
            handle.let_write(tokens)

    def end(self) -> None:
        self.ended = True
        for handle in self.handles:
            handle.cancel()
        self.wake()

    def turn(self) -> float | None:
        if not self.ended and (rest := self.until - time.monotonic()) > 0:
            return rest
        self.end()
        return None


class Batches:
    def __init__(self, drive: Drive = undriven, lease_s: float = LEASE_S) -> None:
        self.lease_s = lease_s
        self._drive = drive
        self._batches: dict[str, PromptBatch] = {}
        self._lock = threading.Lock()

    def begin(self, llm: LLM, prompts: list[str], requests: Sequence[Request]) -> str:
        """Start a batch, which writes nothing yet; its id. Raises CapacityError without room for it."""
        batch, identity = PromptBatch(prompts, time.monotonic() + self.lease_s), new_identity()
        with self._lock:
            self._batches = {name: one for name, one in self._batches.items() if not one.ended}
            if len(self._batches) >= MOST_BATCHES:
                raise CapacityError(f"{MOST_BATCHES} batches are open; end one, or try again in {self.lease_s:.0f} s")
            llm.inspect(lambda engine: _check_room(engine, requests))
            batch.handles = llm.submit(requests, batch, paused=True)
            batch.transcripts = {handle: llm.transcript(handle) for handle in batch.handles}
            self._batches[identity] = batch
            batch.wake = self._drive(batch.turn, f"batch {identity}").wake
        return identity

    def get(self, identity: str) -> PromptBatch | None:
        """A batch; renews its lease."""
        batch = self._batches.get(identity)
        if batch is None or batch.ended:
            return None
        batch.until = time.monotonic() + self.lease_s
        return batch

    def remove(self, identity: str) -> bool:
        with self._lock:
            batch = self._batches.pop(identity, None)
        if batch is None or batch.ended:
            return False
        batch.end()
        return True

    def turn(self) -> float | None:
        """Give each batch a turn, where no driver does. Returns the least seconds until the next."""
        turns = [batch.turn() for batch in list(self._batches.values())]
        return min((rest for rest in turns if rest is not None), default=None)

    def close(self) -> None:
        for identity in list(self._batches):
            self.remove(identity)


def _check_room(engine: Engine, requests: Sequence[Request]) -> None:
    """Raises CapacityError if the pool cannot hold the requests beside all others."""
    scheduler = engine.scheduler
    everyone = [*scheduler.sequences.values(), *map(engine.accept, requests)]
    if not scheduler.pool.fits([scheduler.max_pages(sequence) for sequence in everyone]):
        raise CapacityError("the page pool has no room for these prompts beside what runs; lower max_tokens")
