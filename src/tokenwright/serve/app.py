"""The server as one ASGI app: the APIs, the explorer's routes and page, health and metrics, behind one policy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import Scope

import tokenwright
from tokenwright.serve import model_list, operations
from tokenwright.serve.anthropic import routes as anthropic
from tokenwright.serve.explorer import routes as explore
from tokenwright.serve.explorer.explorer import Explorer, RunGone
from tokenwright.serve.http.api import Api, add_errors, api_of
from tokenwright.serve.http.dispatch import Direct, HeadRequests, ShortPaths, handlers_of
from tokenwright.serve.http.openapi import add_schemas
from tokenwright.serve.llama_cpp import routes as llama_cpp
from tokenwright.serve.ollama import routes as ollama
from tokenwright.serve.openai import embeddings, rerank
from tokenwright.serve.openai import routes as openai
from tokenwright.serve.openai.responses import routes as responses
from tokenwright.serve.openai.responses.stored import MOST_BYTES, StoredResponses
from tokenwright.serve.service.metrics import Metrics
from tokenwright.serve.service.model_host import collect_at_rest
from tokenwright.serve.service.service import Service, ServiceLimits
from tokenwright.serve.service.types import Problem
from tokenwright.serve.transport.access_log import AccessLog
from tokenwright.serve.transport.guard import App, Guard, Policy
from tokenwright.serve.transport.telemetry import Spans

APIS: tuple[Api, ...] = (
    anthropic.API,
    ollama.API,
    llama_cpp.API,
    openai.API,
    explore.API,
)  # the last answers for all paths of no API
QUEUED = frozenset[str]().union(*(api.queued for api in APIS))  # paths whose requests wait


@dataclass(frozen=True, slots=True)
class Served:
    """How a model is served. names: of the model, for clients; by default its own. timings: in every reply.

    strict_fields: requests with unknown fields are refused. stored_responses: bytes of OpenAI's that are kept.
    adapters: the names of those that the model is opened with; each is served as a model of its own.
    spans: makes OpenTelemetry's spans of the requests. `alone`: the process serves this model to its end and does
    nothing else, so the server decides when garbage is collected.
    """

    names: Sequence[str] = ()
    limits: ServiceLimits | None = None
    timings: bool = False
    spans: Spans | None = None
    alone: bool = False
    strict_fields: bool = False
    stored_responses: int = MOST_BYTES
    adapters: Sequence[str] = ()


def names_of(served: Served, name: str) -> tuple[str, ...]:
    """The names for clients of a model and its adapters. name: the model's own."""
    return (*(served.names or (name,)), *served.adapters)


def limits_of(served: Served, policy: Policy) -> ServiceLimits:
    """The limits of a server's only model."""
    limits = served.limits or ServiceLimits()
    return replace(limits, keys=max(1, len(policy.keys)), any_model=not served.adapters)


@asynccontextmanager
async def living(
    served: Served,
    resting: Callable[[], bool],
    stop: Callable[[], object],
    close: Callable[[], object],
    *beside: Coroutine[Any, Any, None],
) -> AsyncIterator[None]:
    """The tasks beside a server, and its end. resting: whether few requests are there. close: is called in a thread."""
    collecting = [collect_at_rest(resting)] if served.alone else []
    tasks = [asyncio.create_task(one) for one in (*beside, *collecting)]
    yield
    for task in tasks:
        task.cancel()
    stop()
    await asyncio.to_thread(close)
    if served.spans is not None:
        await asyncio.to_thread(served.spans.close)


PAGES = {"chat": "chat.html"}  # pages by the paths that people type


class Page(StaticFiles):
    """The explorer's page and the chat's, at all paths that no route has.

    Other methods of a route's path are refused as such.
    """

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
        try:
            if path == "." or scope["method"] in ("GET", "HEAD"):
                return await super().get_response(PAGES.get(path, path), scope)
        except HTTPException as error:
            if error.status_code != 404:
                raise
        raise HTTPException(404, f"there is no {scope['path'][:200]} here; /openapi.json lists what there is")


def make_app(
    explorer: Explorer, hosts: Iterable[str] | Policy, page: Path | None, served: Served | None = None
) -> FastAPI:
    """The app. hosts: its "name:port" hosts ("127.0.0.1:8000"), or a whole policy; page: the folder of the page.

    `app.state.service` is its service.
    """
    served = served or Served()
    policy = hosts if isinstance(hosts, Policy) else Policy.of(hosts)
    metrics = Metrics()
    service = Service(explorer.host, names_of(served, explorer.name), limits_of(served, policy), metrics)
    metrics.watch(lambda: [service])

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        explorer.start()
        async with living(served, lambda: not service.admission.waiting, service.stop, explorer.close):
            yield
        service.close()

    app = new_app(lifespan=lifespan)
    add_routes(app, explorer, service, metrics, page, StoredResponses(served.stored_responses))
    app.add_middleware(Guard, policy=policy, answer=refusing(metrics), queued=QUEUED, full=service.full)
    add_access_log(app, served, metrics)
    return app


def add_access_log(app: FastAPI, served: Served, metrics: Metrics) -> None:
    """Add the outermost middlewares; the first gives each request its id."""
    app.add_middleware(ShortPaths)
    app.add_middleware(
        AccessLog,
        timings=served.timings,
        strict=served.strict_fields,
        spans=served.spans,
        ignored=metrics.ignored,
    )


def new_app(**options: Any) -> FastAPI:
    """An app without routes. `app.state.renew` is what SIGHUP does: nothing, unless it is set."""
    app = FastAPI(
        title="Tokenwright",
        version=tokenwright.__version__,
        docs_url=None,
        redoc_url=None,
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},  # `Spans` makes ours
        **options,
    )
    app.state.renew = None
    return app


def add_routes(
    app: FastAPI, explorer: Explorer, service: Service, metrics: Metrics, page: Path | None, stored: StoredResponses
) -> None:
    """Add all routes of one model, and what answers their errors."""
    app.state.service = service
    answer = add_errors(app, APIS, (RunGone,), metrics.refused)
    operations.add(app, metrics, lambda _: operations.health_of(service), lambda: operations.readiness_of(service))
    openai.add(app, service)
    model_list.add(app, service)
    embeddings.add(app, service)
    responses.add(app, service, stored)
    for other in (rerank, anthropic, ollama, llama_cpp):
        other.add(app, service)
    explore.add(app, explorer)
    add_schemas(app, APIS)
    if page is not None:
        app.mount("/", Page(page, app))

    app.add_middleware(HeadRequests, routes=app.routes)
    app.add_middleware(Direct, handlers=handlers_of(app, APIS), answer=answer)


def refusing(metrics: Metrics) -> Callable[[Scope, Problem, str], App]:
    """Makes the guard's answers: errors in the shape of the API whose path it is."""

    def refused(scope: Scope, problem: Problem, request_id: str) -> App:
        metrics.refused(problem)
        body = api_of(APIS, scope).error(problem, request_id)
        return JSONResponse(body, problem.status, problem.headers)

    return refused
