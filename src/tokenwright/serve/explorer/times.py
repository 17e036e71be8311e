"""GET /runs/ID/times: how long a finished run takes with the KV cache, and without it."""

from __future__ import annotations

import threading
from collections.abc import Generator

from fastapi import FastAPI, Request

from tokenwright.errors import RequestError
from tokenwright.explorer.messages.times import RunTimes
from tokenwright.serve.explorer.explorer import HIDDEN, Explorer
from tokenwright.serve.explorer.inside import in_parts
from tokenwright.serve.http.api import unless_gone

POLL_S = 0.1


def add(app: FastAPI, explorer: Explorer) -> None:
    """Add the route."""
    busy = threading.Lock()  # one measurement after the other: two would slow each other

    def alone(identity: str) -> Generator[RunTimes | None, None, None]:
        from tokenwright.explorer.views.run_times import run_times  # with NumPy

        player = explorer.player(identity)
        player.renew()
        run = player.run
        if not run.ended or run.summary is None or run.summary.written < 2:
            raise RequestError("the times of a run are measured after its end, and for at least two tokens")
        while not busy.acquire(timeout=POLL_S):
            yield None  # the client may have gone
        try:
            with explorer.runs.guests([run]):
                yield from run_times(explorer.llm, run)
        finally:
            busy.release()

    @app.get("/runs/{identity}/times", **HIDDEN)
    async def times(identity: str, request: Request) -> RunTimes:
        return await unless_gone(request, in_parts(alone(identity)))
