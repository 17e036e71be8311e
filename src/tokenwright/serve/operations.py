"""/health (also /ping), /ready, /version and /metrics, for operators."""

from collections.abc import Awaitable, Callable
from typing import Any, NotRequired, TypedDict

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

import tokenwright
from tokenwright.errors import EngineError, RequestError
from tokenwright.serve.http.api import about
from tokenwright.serve.http.openapi import answers
from tokenwright.serve.service.metrics import CONTENT_TYPE, Metrics
from tokenwright.serve.service.service import Service
from tokenwright.serve.service.types import NotReady


class ModelState(TypedDict):
    """A model of a server of several. requests: now running. reason: why its last load failed."""

    name: str
    state: str
    requests: int
    bytes: int
    loaded_bytes: NotRequired[int]
    total_bytes: NotRequired[int]
    reason: NotRequired[str]


class Health(TypedDict):
    """The reply of /health. progress: the loaded share of the model. models: of a server of several."""

    status: str
    version: NotRequired[str]
    reason: NotRequired[str]
    progress: NotRequired[float]
    models: NotRequired[list[ModelState]]


class Version(TypedDict):
    version: str


class Ready(TypedDict):
    status: str


def _states(reply: type[Health | Ready]) -> dict[int | str, dict[str, Any]]:
    yes = answers(reply)
    return yes | {503: {"description": "It is not.", "content": yes[200]["content"]}}


async def health_of(service: Service) -> tuple[Health, int]:
    """Whether the engine generates or the model still loads. /ready says whether requests are accepted."""
    try:
        await service.healthy()
    except (EngineError, RequestError) as error:  # RequestError: it is closed
        return {"status": "failed", "reason": str(error)}, 503
    except NotReady as error:
        loading = service.host.loading
        health = Health(status=loading.phase, reason=str(error))
        if loading.phase != "loading":
            return health, 503
        return {**health, "progress": loading.done / loading.total if loading.total else 0.0}, 200
    return {"status": "ok", "version": tokenwright.__version__}, 200


def readiness_of(service: Service) -> tuple[Ready, int]:
    state = "draining" if service.draining else service.host.loading.phase
    return {"status": state}, 200 if service.ready else 503


def add(
    app: FastAPI,
    metrics: Metrics,
    health: Callable[[Request], Awaitable[tuple[Health, int]]],
    readiness: Callable[[], tuple[Ready, int]],
) -> None:

    @app.get("/version", responses=answers(Version), tags=["Operations"], response_model=None)
    async def version() -> JSONResponse:
        """The version of the program."""
        return JSONResponse({"version": tokenwright.__version__})

    @app.post("/ping", responses=_states(Health), tags=["Operations"], response_model=None)
    @app.get("/ping", responses=_states(Health), tags=["Operations"], response_model=None)
    @app.get("/v1/health", responses=_states(Health), tags=["Operations"], response_model=None)
    @app.get("/health", responses=_states(Health), tags=["Operations"], response_model=None)
    async def healthy(request: Request) -> JSONResponse:
        """Whether tokens can be generated; on a server of several models, also their states."""
        return JSONResponse(*await health(request))

    @app.get("/ready", responses=_states(Ready), tags=["Operations"], response_model=None)
    async def ready() -> JSONResponse:
        """Whether new requests are accepted."""
        return JSONResponse(*readiness())

    @app.get("/metrics", tags=["Operations"], response_class=PlainTextResponse)
    async def measured(request: Request) -> Response:
        """Prometheus metrics."""
        return Response(metrics.text(about(request).caller), media_type=CONTENT_TYPE)
