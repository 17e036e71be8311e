"""The server as one ASGI app: APIs, explorer, page, health and metrics."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

import tokenwright
from tokenwright.errors import RequestError
from tokenwright.serve import model_list, operations
from tokenwright.serve.anthropic import routes as anthropic
from tokenwright.serve.http import openapi
from tokenwright.serve.http.api import Api, add_errors, api_of
from tokenwright.serve.llama_cpp import routes as llama_cpp
from tokenwright.serve.ollama import routes as ollama
from tokenwright.serve.openai import routes as openai
from tokenwright.serve.openai.responses.stored import MOST_BYTES, StoredResponses
from tokenwright.serve.page import API as PAGE
from tokenwright.serve.page import Page
from tokenwright.serve.service.metrics import Metrics
from tokenwright.serve.service.model_host import ModelHost, collect_when_idle
from tokenwright.serve.service.next_turns import Warm
from tokenwright.serve.service.service import Service, ServiceLimits
from tokenwright.serve.service.types import Problem
from tokenwright.serve.settings import Settings
from tokenwright.serve.transport.access_log import AccessLog
from tokenwright.serve.transport.guard import App, Guard, Policy, read_keys
from tokenwright.serve.transport.telemetry import TELEMETRY

APIS: tuple[Api, ...] = (
    anthropic.API,
    ollama.API,
    llama_cpp.API,
    openai.API,
    PAGE,
)  # the last also owns paths of no API
QUEUED = frozenset(path for api in APIS for path in api.prompts)


@dataclass(frozen=True, slots=True)
class Served:
    """How a model is served."""

    names: Sequence[str] = ()  # for clients; by default the model's own
    limits: ServiceLimits | None = None
    timings: bool = False
    alone: bool = False  # the process serves nothing else, so garbage is collected while the server is idle
    strict_fields: bool = False
    stored_responses: int = MOST_BYTES
    adapters: Sequence[str] = ()  # served under these names
    apis: Sequence[Api] = APIS


def apis_named(names: Sequence[str]) -> Sequence[Api]:
    """The named APIs, by default all. Raises RequestError for an unknown name."""
    known = {api.name: api for api in APIS}
    if unknown := next((name for name in names if name not in known), None):
        raise RequestError(f"apis: there is no API {unknown[:200]!r}; use {', '.join(known)}", "apis")
    return [api for api in APIS if api.name in names] or APIS


def names_of(served: Served, name: str) -> tuple[str, ...]:
    return (*(served.names or (name,)), *served.adapters)


def limits_of(served: Served, policy: Policy) -> ServiceLimits:
    limits = served.limits or ServiceLimits()
    return replace(limits, keys=max(1, len(policy.keys)), any_model=not served.adapters)


@asynccontextmanager
async def living(
    served: Served,
    idle: Callable[[], bool],
    stop: Callable[[], object],
    close: Callable[[], object],
    *background: Coroutine[Any, Any, None],
) -> AsyncIterator[None]:
    """Run the background tasks of a server, then end it. idle: whether few requests run. close: runs in a thread."""
    collecting = [collect_when_idle(idle)] if served.alone else []
    tasks = [asyncio.create_task(one) for one in (*background, *collecting)]
    yield
    for task in tasks:
        task.cancel()
    stop()
    await asyncio.to_thread(close)


def make_app(
    host: ModelHost, hosts: Iterable[str] | Policy, page: Path | None, served: Served | None = None
) -> FastAPI:
    """The app, with its service in `app.state.service`. hosts: its names, or a policy. page: a folder."""
    served = served or Served()
    policy = hosts if isinstance(hosts, Policy) else Policy.of(hosts)
    metrics = Metrics()
    service = Service(host, names_of(served, host.name), limits_of(served, policy), metrics)
    metrics.watch(lambda: [service])

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        host.start()
        async with living(served, lambda: not service.admission.waiting, service.stop, close):
            yield
        service.close()

    app = new_app(lifespan=lifespan)
    close = add_routes(app, service, metrics, page, StoredResponses(served.stored_responses), served.apis)
    app.add_middleware(Guard, policy=policy, answer=refusing(metrics), queued=QUEUED, full=service.full)
    add_access_log(app, served, metrics)
    return app


def add_access_log(app: FastAPI, served: Served, metrics: Metrics) -> None:
    app.add_middleware(ShortPaths)
    app.add_middleware(AccessLog, timings=served.timings, strict=served.strict_fields, ignored=metrics.ignored)


def new_app(**options: Any) -> FastAPI:
    """An app without routes. SIGHUP calls `app.state.renew`, if set."""
    app = FastAPI(
        title="Tokenwright",
        version=tokenwright.__version__,
        docs_url=None,
        redoc_url=None,
        telemetry=TELEMETRY,
        **options,
    )
    app.state.renew = None
    return app


def add_routes(
    app: FastAPI, service: Service, metrics: Metrics, page: Path | None, stored: StoredResponses, apis: Sequence[Api]
) -> Callable[[], None]:
    """Returns a function that frees the model."""
    app.state.service, app.state.stored = service, stored
    answer = add_errors(app, APIS, metrics.refused)
    operations.add(app, metrics, lambda _: operations.health_of(service), lambda: operations.readiness_of(service))
    if lists_models(apis):
        model_list.add(app, service)
    for api in apis:
        openapi.add_routes(app, service, api)
    closing = [close for api in apis if (close := api.add(app, service)) is not None]
    openapi.add_schemas(app, apis)
    add_fallbacks(app, apis)
    add_page(app, page, apis)
    app.add_middleware(HeadRequests, routes=app.routes)
    app.add_middleware(Direct, handlers=handlers_of(app, apis), answer=answer)

    def close_all() -> None:
        for close in (*closing, service.host.close):
            close()

    return close_all


def lists_models(apis: Sequence[Api]) -> bool:
    return any("/v1/models".startswith((*api.prefixes, *api.shared)) for api in apis if api is not PAGE)


def add_fallbacks(app: FastAPI, apis: Sequence[Api]) -> None:
    for api in (one for one in APIS if one not in apis):
        for prefix in api.prefixes:
            app.router.routes.append(Route(f"{prefix}{{rest:path}}", _Absent(api.name)))


def add_page(app: FastAPI, page: Path | None, apis: Sequence[Api]) -> None:
    """Add the page for paths without a route; without a page, the line by which Ollama's clients recognise a server."""
    if page is not None and PAGE in apis:
        app.mount("/", Page(page, app))
    elif ollama.API in apis:
        app.router.routes.append(Route("/", lambda _: PlainTextResponse("Tokenwright is running")))


@dataclass(frozen=True, slots=True)
class _Absent:
    name: str

    async def __call__(self, *_: object) -> None:
        raise HTTPException(404, f"this server does not serve {self.name}; start it with --apis {self.name}")


def refusing(metrics: Metrics) -> Callable[[Scope, Problem, str], App]:

    def refused(scope: Scope, problem: Problem, request_id: str) -> App:
        metrics.refused(problem)
        body = api_of(APIS, scope).error(problem, request_id)
        return JSONResponse(body, problem.status, problem.headers)

    return refused


def policy_of(settings: Settings) -> Policy:
    """Raises RequestError for keys that cannot be read."""
    keys = list(settings.api_key)
    if settings.api_key_file:
        keys += read_keys(Path(settings.api_key_file))
    return Policy.of(hosts_of(settings), keys, origins=frozenset(settings.cors_origin), body=settings.max_body)


def served_of(settings: Settings) -> Served:
    limits = ServiceLimits(
        queue=settings.max_queue,
        deadline_s=settings.request_timeout or None,
        reader_s=settings.reader_timeout or None,
        prompt_memory=settings.prompt_memory,
        retokenise=settings.retokenise,
        warm=cast("Warm", settings.warm),
    )
    return Served(
        (),
        limits,
        settings.timings,
        alone=True,
        strict_fields=settings.strict_fields,
        stored_responses=settings.stored_responses,
        apis=apis_named([name.strip() for one in settings.apis for name in one.split(",") if name.strip()]),
    )


def in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def hosts_of(settings: Settings) -> list[str] | None:
    """The names that the Host header may have; None: any, since a key is required."""
    if not (settings.local or settings.no_key or settings.allowed_host):
        return None
    names = ["127.0.0.1", "localhost", "[::1]", *settings.allowed_host]
    if not settings.local and not settings.everywhere:
        names.append(in_url(settings.host))
    return names


class Direct:
    """Calls the handlers of queued paths without FastAPI's layers, whose objects would stay in memory meanwhile."""

    def __init__(
        self,
        app: ASGIApp,
        handlers: Mapping[str, Callable[[Request], Awaitable[Response]]],
        answer: Callable[[Request, Exception], Awaitable[Response]],
    ) -> None:
        self._app = app
        self._handlers = handlers
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self._handlers.get(scope["path"]) if scope.get("method") == "POST" else None
        if handler is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive, send)
        try:
            response = await handler(request)
        except Exception as error:
            response = await self._answer(request, error)
        await response(scope, receive, send)


class ShortPaths:
    """Accepts OpenAI's paths without /v1, or with extra slashes."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = {**scope, "path": _normalised(scope["path"])}
        await self._app(scope, receive, send)


def _normalised(path: str) -> str:
    """A route's path. A model's name in it, which may have slashes, stays unchanged."""
    start = _START.match(path)
    assert start is not None, "a path begins with a slash"
    root, rest = start[1] or "", path[start.end() :]
    rest = rest if rest.startswith("models/") and rest != "models/" else rest.rstrip("/")
    if not root and _SHORT.fullmatch(f"/{rest}"):
        root = "v1"
    if not root:
        return path
    return f"/{root}/{rest}" if rest else f"/{root}"


_START = re.compile(r"/*(?:(v1|api)(?:/+|$))?")
_SHORT = re.compile(r"/(chat/completions(/input_tokens)?|completions|embeddings|(responses|models)(/.*)?)")


class HeadRequests:
    """Answers HEAD as GET, which FastAPI's routes refuse; uvicorn drops the body."""

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self._routes = [route for route in routes if isinstance(route, APIRoute) and "GET" in (route.methods or ())]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("method") == "HEAD":
            as_get = {**scope, "method": "GET"}
            if any(route.matches(as_get)[0] is Match.FULL for route in self._routes):
                scope = as_get
        await self._app(scope, receive, send)


def handlers_of(app: FastAPI, apis: Sequence[Api]) -> dict[str, Callable[[Request], Awaitable[Response]]]:
    """The handlers of queued paths; each takes only the request."""
    queued = frozenset(path for one in apis for path in one.prompts)
    routes = [route for route in app.routes if isinstance(route, APIRoute) and route.path in queued]
    assert sorted(route.path for route in routes) == sorted(queued), "each path that waits has one handler"
    return {route.path: route.endpoint for route in routes}
