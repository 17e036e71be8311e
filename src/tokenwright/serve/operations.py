"""/health (also /ping), /ready, /version and /metrics: for those who run the server."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel

import tokenwright
from tokenwright.errors import EngineError
from tokenwright.serve.http.api import answers
from tokenwright.serve.http.reply_schema import Health, Ready, Version
from tokenwright.serve.service.metrics import CONTENT_TYPE, Metrics
from tokenwright.serve.service.service import Service
from tokenwright.serve.service.types import NotReady


def _states(reply: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """The replies of a route: it is, or it is not."""
    yes = answers(reply)
    return yes | {503: {"description": "It is not.", "content": yes[200]["content"]}}


def add_version(app: FastAPI) -> None:
    """Add the route that says which version of the program this is."""

    @app.get("/version", responses=answers(Version), tags=["Operations"], response_model=None)
    async def version() -> JSONResponse:
        """The version of the program."""
        return JSONResponse({"version": tokenwright.__version__})


def add(app: FastAPI, service: Service, metrics: Metrics) -> None:
    """Add the routes."""

    add_version(app)

    @app.post("/ping", responses=_states(Health), tags=["Operations"], response_model=None)
    @app.get("/ping", responses=_states(Health), tags=["Operations"], response_model=None)
    @app.get("/v1/health", responses=_states(Health), tags=["Operations"], response_model=None)
    @app.get("/health", responses=_states(Health), tags=["Operations"], response_model=None)
    async def health() -> JSONResponse:
        """Whether the engine makes tokens: a busy one shows it by those it makes, an idle one makes one more.

        A server whose model is still being read is well, and says how far that is; /ready says whether it takes
        requests.
        """
        try:
            await service.healthy()
        except EngineError as error:
            return JSONResponse({"status": "failed", "reason": str(error)}, 503)
        except NotReady as error:
            loading = service.host.loading
            told = {"status": loading.phase, "reason": str(error)}
            if loading.phase != "loading":
                return JSONResponse(told, 503)
            return JSONResponse(told | {"progress": loading.done / loading.total if loading.total else 0.0})
        return JSONResponse({"status": "ok", "version": tokenwright.__version__})

    @app.get("/ready", responses=_states(Ready), tags=["Operations"], response_model=None)
    async def ready() -> JSONResponse:
        """Whether the model is loaded and new requests are taken."""
        state = "draining" if service.draining else service.host.loading.phase
        return JSONResponse({"status": state}, 200 if service.ready else 503)

    @app.get("/metrics", tags=["Operations"], response_class=PlainTextResponse)
    async def measured() -> Response:
        """Prometheus metrics."""
        return Response(metrics.text(), media_type=CONTENT_TYPE)
