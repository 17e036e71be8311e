"""The explorer's server: serves the page, and the engine's runs to the page.

Every answer is a message of `trace/schema.py`. A run's frames go over a WebSocket (viewer.py).
"""

from __future__ import annotations

import base64
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import FastAPI, Response, WebSocket
from fastapi.responses import JSONResponse

from tokenwright.errors import CapacityError, ContextError
from tokenwright.serve.explorer import (
    beams,
    branches,
    calculator,
    chat,
    export,
    inside,
    lab,
    learn,
    pages,
    race,
    sampler,
    times,
)
from tokenwright.serve.explorer.explorer import HIDDEN, Explorer, NewRun, RunGone
from tokenwright.serve.explorer.viewer import Viewer
from tokenwright.serve.http.api import Api, reads
from tokenwright.serve.service.types import NotReady, Problem
from tokenwright.trace.frame_codec import as_json
from tokenwright.trace.rooms import ReplicasCard
from tokenwright.trace.schema import HeadMasses, Loading, ModelCard, RunCard, RunState


def problem(error: Exception) -> Problem | None:
    """The problem of an error as the page knows it; None: the server's own answer will do."""
    match error:
        case ContextError():
            return Problem(400, "invalid", str(error), code="context_overflow")
        case CapacityError():
            return Problem(503, "unavailable", str(error), code="capacity")
        case NotReady():
            return Problem(503, "unavailable", str(error), code="loading", retry_after_s=1)
        case RunGone():
            why = "there is no such run, or no longer; begin a new one"
            return Problem(404, "missing", why, code="gone")
        case _:
            return None


def error_body(problem: Problem, request_id: str) -> dict[str, Any]:  # noqa: ARG001  (other APIs repeat the id)
    """An error as the page reads it."""
    kind = problem.code or _KINDS.get(problem.kind, problem.kind)
    return {"error": {"kind": kind, "message": problem.message}}


_KINDS = {"invalid": "bad_request", "size": "bad_request", "missing": "bad_request"}
API = Api((), error_body, problem)


def add(app: FastAPI, explorer: Explorer) -> None:
    """Add the routes of the page."""
    _add_model(app, explorer)
    _add_runs(app, explorer)
    race.add(app, explorer)
    branches.add(app, explorer)
    sampler.add(app, explorer)
    chat.add(app, explorer)
    export.add(app, explorer)
    times.add(app, explorer)
    for panel in (beams, calculator, inside, lab, pages):
        panel.add(app, explorer)
    explorer.closing.append(learn.add(app, explorer).close)


def _add_model(app: FastAPI, explorer: Explorer) -> None:
    @app.get("/status", **HIDDEN)
    def status() -> Loading:
        return explorer.loading

    @app.get("/model", **HIDDEN)
    def model() -> ModelCard:
        return explorer.model()

    @app.get("/replicas", **HIDDEN)
    def replicas() -> ReplicasCard:
        return explorer.replicas()


def _add_runs(app: FastAPI, explorer: Explorer) -> None:
    @app.post("/runs", **HIDDEN, status_code=201)
    def begin(body: Annotated[NewRun, reads(NewRun)]) -> RunCard:
        return explorer.begin(body)

    @app.get("/runs/{identity}", **HIDDEN)
    def state(identity: str) -> RunState:
        return explorer.player(identity).state()

    @app.delete("/runs/{identity}", **HIDDEN, status_code=204)
    def end(identity: str) -> Response:
        if not explorer.runs.remove(identity):
            raise RunGone
        return Response(status_code=204)

    @app.get("/runs/{identity}/steps/{step}", **HIDDEN)
    def one_step(identity: str, step: int) -> JSONResponse:
        return JSONResponse(as_json(explorer.player(identity).run.frame(step)))

    @app.get("/runs/{identity}/attention", **HIDDEN)
    def attention(identity: str, step: int, layer: int, head: int, reference: bool = False) -> dict[str, Any]:
        player = explorer.player(identity)
        player.renew()
        run, row = player.run, player.run.attention(step, layer, head)
        answer = asdict(row) | {"codes": base64.b64encode(row.codes).decode()}
        return answer | ({"weights": run.reference(step, layer, head)} if reference else {})

    @app.get("/runs/{identity}/heads", **HIDDEN)
    def heads(identity: str, step: int) -> HeadMasses:
        player = explorer.player(identity)
        player.renew()
        return player.run.heads(step)

    @app.websocket("/runs/{identity}/stream")
    async def stream(socket: WebSocket, identity: str, since_step: int = 0) -> None:
        await socket.accept()
        player = explorer.runs.get(identity)
        if player is None:
            await socket.close(4404, "there is no such run, or no longer")
            return
        await Viewer(explorer, player, socket, since_step).serve()
