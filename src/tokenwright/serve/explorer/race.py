"""POST /race: one text with the KV cache and without it, side by side, as server-sent events.

The first event is a RaceCard, then there is one RaceStep for each step, and a RaceEnd. One race runs at a time; it ends
with the client's connection, and its budget bounds it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

from fastapi import FastAPI, Response
from pydantic import Field

from tokenwright.errors import EngineError
from tokenwright.explorer.messages.race import RaceCard, RaceEnd, RaceStep
from tokenwright.serve.explorer.explorer import HIDDEN, Explorer, Strict
from tokenwright.serve.http.api import reads
from tokenwright.serve.http.fields import Text
from tokenwright.serve.http.sse import Streamed
from tokenwright.serve.service.types import Busy

if TYPE_CHECKING:  # NumPy is loaded with the model, not with the server
    from tokenwright.explorer.views.lanes import Race

log = logging.getLogger(__name__)


class NewRace(Strict):
    """POST /race. every: the uncached lane computes one step in `every`; budget_s: seconds for the whole race."""

    prompt: Text
    max_tokens: Annotated[int, Field(ge=1, le=4096)] = 64
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: Annotated[int, Field(ge=0, lt=2**53)] | None = None
    ignore_eos: bool = False
    every: Annotated[int, Field(ge=1, le=256)] = 1
    budget_s: Annotated[float, Field(gt=0, le=120)] = 20.0


def add(app: FastAPI, explorer: Explorer) -> None:
    """Add the route."""
    track = threading.Lock()

    @app.post("/race", **HIDDEN)
    async def race(body: Annotated[NewRace, reads(NewRace)]) -> Response:
        if not track.acquire(blocking=False):
            raise Busy("a race is under way on this server, and a second one would slow both; try again in a while")
        try:
            raced = await asyncio.to_thread(_prepared, explorer, body)
        except BaseException:
            track.release()
            raise
        return Streamed(_lines(raced, body), lambda: track.release() if raced.end() else None)


class _Prepared:
    """A race that has its room in the KV memory, and gives it back at the end."""

    def __init__(self, explorer: Explorer, race: Race, room: ExitStack) -> None:
        self.explorer = explorer
        self.race = race
        self._room = room
        self._ended = False

    def end(self) -> bool:
        """Close the race; a second call does nothing, and returns False."""
        ended, self._ended = self._ended, True
        if not ended:
            self.race.close()
            self._room.close()
        return not ended


def _prepared(explorer: Explorer, body: NewRace) -> _Prepared:
    """Raises what `Explorer.begin` raises."""
    from tokenwright.explorer.views.lanes import Race

    names = ("temperature", "top_k", "top_p", "min_p", "max_tokens", "ignore_eos")
    params = explorer.llm.sampling(**{name: getattr(body, name) for name in names})
    seed = body.seed if body.seed is not None else secrets.randbits(32)
    params = replace(params, seed=None if params.greedy else seed)
    race = Race(explorer.llm, body.prompt, params, every=body.every, budget_s=body.budget_s)
    room = ExitStack()
    try:
        room.enter_context(explorer.runs.guests([race.run, race.run]))  # the uncached lane needs as much again
    except BaseException:
        race.close()
        raise
    return _Prepared(explorer, race, room)


def messages(explorer: Explorer, wanted: NewRace) -> Iterator[RaceCard | RaceStep | RaceEnd]:
    """All messages of a race that no page watches. Raises what the route raises, and EngineError."""
    prepared = _prepared(explorer, wanted)
    try:
        yield _card(prepared, wanted)
        context = len(prepared.race.run.start.prompt)
        for step in prepared.race:
            context = step.context
            yield step
        yield RaceEnd(prepared.race.reason or "failed", context, "")
    finally:
        prepared.end()


def _card(prepared: _Prepared, body: NewRace) -> RaceCard:
    llm = prepared.explorer.llm
    return RaceCard(
        prompt=body.prompt,
        prompt_tokens=len(prepared.race.run.start.prompt),
        max_tokens=body.max_tokens,
        every=body.every,
        budget_s=body.budget_s,
        dtype=llm.dtype,
        weights=str(llm.weights),
        kernels=llm.kernels,
        device=llm.device,
        layers=llm.config.layers,
    )


async def _lines(prepared: _Prepared, body: NewRace) -> AsyncIterator[bytes]:
    race = prepared.race
    yield _event(_card(prepared, body))
    context, reason, message = len(race.run.start.prompt), "failed", ""
    try:
        steps = iter(race)
        while (step := await asyncio.to_thread(_next, steps)) is not None:
            context = step.context
            yield _event(step)
        reason = race.reason or "failed"
    except EngineError:
        log.exception("a race failed")
        message = "the engine failed on this race; the server's log says more"
    yield _event(RaceEnd(reason, context, message))


def _next(steps: Iterator[RaceStep]) -> RaceStep | None:
    return next(steps, None)


def _event(message: RaceCard | RaceStep | RaceEnd) -> bytes:
    return f"data: {json.dumps(asdict(message))}\n\n".encode()
