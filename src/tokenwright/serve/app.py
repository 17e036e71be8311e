"""The server as one ASGI app: the APIs, the explorer's routes and page, health and metrics, behind one policy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import Scope

import tokenwright
from tokenwright.serve import anthropic, explore, ollama, openai, openai_embeddings, operations, responses, texts
from tokenwright.serve.api import Api, add_errors, add_schemas, api_of
from tokenwright.serve.contract import Problem
from tokenwright.serve.explorer import Explorer, Gone
from tokenwright.serve.guard import App, Guard, Policy
from tokenwright.serve.log import AccessLog
from tokenwright.serve.metrics import Metrics
from tokenwright.serve.service import Limits, Service

APIS: tuple[Api, ...] = (anthropic.API, ollama.API, openai.API, explore.API)  # the last answers for all paths of no API


@dataclass(frozen=True, slots=True)
class Served:
    """How a model is served. names: of the model, for clients; by default its own. timings: in every reply."""

    names: Sequence[str] = ()
    limits: Limits | None = None
    timings: bool = False


class Page(StaticFiles):
    """The explorer's page, at all paths that no route has. Other methods of a route's path are refused as such."""

    def __init__(self, folder: Path, app: FastAPI) -> None:
        super().__init__(directory=folder, html=True)
        self._app = app

    async def get_response(self, path: str, scope: Scope) -> Response:
        others = [route for route in self._app.routes if route.matches(scope)[0] is Match.PARTIAL]
        if others:
            methods = sorted({method for route in others for method in getattr(route, "methods", ())})
            allowed = ", ".join(methods)
            message = f"{scope['path']} answers {allowed}, not {scope['method']}"
            raise HTTPException(405, message, headers={"Allow": allowed})
        if path != "." and scope["method"] not in ("GET", "HEAD"):
            raise HTTPException(404, f"there is no {scope['path']} here; /openapi.json lists what there is")
        return await super().get_response(path, scope)


def make_app(
    explorer: Explorer, hosts: Iterable[str] | Policy, page: Path | None, served: Served | None = None
) -> FastAPI:
    """The app. hosts: its "name:port" hosts ("127.0.0.1:8000"), or a whole policy; page: the folder of the page.

    `app.state.service` is its service.
    """
    served = served or Served()
    policy = hosts if isinstance(hosts, Policy) else Policy.of(hosts)
    metrics = Metrics()
    service = Service(explorer.host, served.names or (explorer.name,), served.limits, metrics)
    metrics.watch(service)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        explorer.start()
        yield
        service.stop()
        await asyncio.to_thread(explorer.close)
        service.close()

    app = FastAPI(
        title="Tokenwright", version=tokenwright.__version__, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    app.state.service = service
    add_errors(app, APIS, (Gone,), metrics.refused)
    operations.add(app, service, metrics)
    openai.add(app, service)
    openai_embeddings.add(app, service)
    for other in (responses, anthropic, ollama):
        other.add(app, service)
    texts.add(app, service, explorer)
    explore.add(app, explorer)
    add_schemas(app)
    if page is not None:
        app.mount("/", Page(page, app))

    def refused(path: str, problem: Problem, request_id: str) -> App:
        metrics.refused(problem)
        body: dict[str, Any] = api_of(APIS, path).error(problem, request_id)
        return JSONResponse(body, problem.status, problem.headers)

    app.add_middleware(Guard, policy=policy, answer=refused)
    app.add_middleware(AccessLog, timings=served.timings)  # the outermost: it gives the request its id
    return app
