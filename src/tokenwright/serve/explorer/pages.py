"""The page's view of the page pool, and batches: a few prompts that run beside the shown run on the same engine.

A batch is plain requests, which share cached prefixes. They write as many tokens as the page asks for and are paused
then, so that their pages can be looked at. A batch that nobody asks about for `LEASE_S` seconds ends.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import FastAPI, Request, Response
from pydantic import Field

from tokenwright.engine import Engine, SamplingParams
from tokenwright.engine import Request as EngineRequest
from tokenwright.engine.port import Delivery, RequestHandle
from tokenwright.errors import CapacityError
from tokenwright.explorer.messages.pages import BatchCard, PoolCard
from tokenwright.serve.explorer.explorer import HIDDEN, Explorer, RunGone, Strict
from tokenwright.serve.explorer.player import new_identity
from tokenwright.serve.http.api import about, reads
from tokenwright.serve.http.fields import many

if TYPE_CHECKING:  # NumPy is loaded with the model, not with the server
    from tokenwright.explorer.views.pool import Known
    from tokenwright.llm.llm import LLM
    from tokenwright.llm.output_processor import OutputProcessor

LEASE_S = 30.0
MOST_BATCHES = 4
MOST_WRITTEN = 256  # tokens of one text

Prompt = Annotated[str, Field(min_length=1, max_length=4000)]
Tokens = Annotated[int, Field(ge=1, le=MOST_WRITTEN)]


class NewBatch(Strict):
    """POST /batches: prompts, each of which may write `max_tokens`."""

    prompts: Annotated[list[Prompt], many(6, 1)]
    max_tokens: Tokens = 64


class Write(Strict):
    """POST /batches/ID/write: each text goes on for `tokens` tokens."""

    tokens: Tokens = 1


@dataclass(slots=True, eq=False)
class PromptBatch:
    """Requests that were started together, and the listener for their news."""

    prompts: list[str]
    handles: Sequence[RequestHandle] = ()
    transcripts: dict[RequestHandle, OutputProcessor] = field(default_factory=dict)
    news: deque[Delivery] = field(default_factory=deque)
    lock: threading.Lock = field(default_factory=threading.Lock)
    timer: threading.Timer | None = None

    def deliver(self, deliveries: list[Delivery]) -> None:
        self.news.extend(deliveries)

    def known(self) -> list[Known]:
        """Its sequences, with what they have written so far."""
        from tokenwright.explorer.views.pool import Known  # with NumPy

        with self.lock:
            while self.news:
                delivery = self.news.popleft()
                self.transcripts[delivery.handle].add(delivery)
            texts = ["".join(piece.text for piece in its.texts[0].pieces) for its in self.transcripts.values()]
        found = enumerate(zip(self.handles, self.prompts, texts, strict=True))
        return [Known(handle.sequence, "batch", place, prompt, text) for place, (handle, prompt, text) in found]

    def write(self, tokens: int) -> None:
        """Let each text go on for a number of tokens."""
        for handle in self.handles:
            handle.let_write(tokens)

    def end(self) -> None:
        """End what still runs."""
        for handle in self.handles:
            handle.cancel()


class Batches:
    """The batches of a server, by ids that clients cannot guess."""

    def __init__(self, lease_s: float = LEASE_S) -> None:
        self.lease_s = lease_s
        self._batches: dict[str, PromptBatch] = {}
        self._lock = threading.Lock()

    def begin(self, llm: LLM, wanted: NewBatch, salt: str) -> BatchCard:
        """Start a batch; its texts write nothing yet.

        Raises RequestError for an invalid prompt, CapacityError without room for it beside what runs.
        """
        params = SamplingParams(temperature=0.0, max_tokens=wanted.max_tokens)
        requests = [llm.prepare(prompt, params, salt=salt) for prompt in wanted.prompts]
        batch, identity = PromptBatch(list(wanted.prompts)), new_identity()
        with self._lock:
            if len(self._batches) >= MOST_BATCHES:
                raise CapacityError(f"{MOST_BATCHES} batches are open; end one, or try again in {self.lease_s:.0f} s")
            llm.inspect(lambda engine: _check_room(engine, requests))
            batch.handles = llm.submit(requests, batch, paused=True)
            batch.transcripts = {handle: llm.transcript(handle) for handle in batch.handles}
            self._batches[identity] = batch
            self._renew(identity, batch)
        return BatchCard(identity, len(requests), self.lease_s)

    def get(self, identity: str) -> PromptBatch:
        """A batch, whose lease begins again. Raises Gone."""
        with self._lock:
            if (batch := self._batches.get(identity)) is None:
                raise RunGone
            self._renew(identity, batch)
        return batch

    def _renew(self, identity: str, batch: PromptBatch) -> None:
        if batch.timer is not None:
            batch.timer.cancel()
        batch.timer = threading.Timer(self.lease_s, self.remove, (identity,))
        batch.timer.daemon = True
        batch.timer.start()

    def remove(self, identity: str) -> bool:
        """End a batch and free its pages; returns whether it existed."""
        with self._lock:
            if (batch := self._batches.pop(identity, None)) is None:
                return False
            if batch.timer is not None:
                batch.timer.cancel()
        batch.end()
        return True

    def close(self) -> None:
        """End all batches."""
        for identity in list(self._batches):
            self.remove(identity)


def _check_room(engine: Engine[Any], requests: Sequence[EngineRequest]) -> None:
    """Raises CapacityError if the pool cannot hold the requests beside all others at their maximum lengths."""
    scheduler = engine.scheduler
    everyone = [*scheduler.sequences.values(), *map(engine.accept, requests)]
    if not scheduler.pool.fits([scheduler.max_pages(sequence) for sequence in everyone]):
        raise CapacityError("the page pool has no room for these prompts beside what runs; lower max_tokens")


def _pool(explorer: Explorer, batches: Batches, run: str | None, batch: str | None) -> PoolCard:
    from tokenwright.cache import group_layers  # with NumPy
    from tokenwright.explorer.views.pool import Known, snapshot

    known: list[Known] = []
    if run is not None:
        player = explorer.player(run)
        player.renew()
        known.append(Known(player.run.sequence, "run", prompt=player.card.prompt))
    if batch is not None:
        known += batches.get(batch).known()
    llm = explorer.llm
    layers = group_layers(llm.specs)
    return llm.inspect(lambda engine: snapshot(engine, layers, known))


def add(app: FastAPI, explorer: Explorer) -> None:
    """Add the routes of the panel Pages."""
    batches = Batches()
    explorer.closing.append(batches.close)

    @app.get("/pages", **HIDDEN)
    def pages(run: str | None = None, batch: str | None = None) -> PoolCard:
        return _pool(explorer, batches, run, batch)

    @app.post("/batches", **HIDDEN, status_code=201)
    def begin(body: Annotated[NewBatch, reads(NewBatch)], request: Request) -> BatchCard:
        return batches.begin(explorer.llm, body, about(request).caller.salt)

    @app.post("/batches/{identity}/write", **HIDDEN, status_code=204)
    def write(identity: str, body: Annotated[Write, reads(Write)]) -> Response:
        batches.get(identity).write(body.tokens)
        return Response(status_code=204)

    @app.delete("/batches/{identity}", **HIDDEN, status_code=204)
    def end(identity: str) -> Response:
        if not batches.remove(identity):
            raise RunGone
        return Response(status_code=204)
