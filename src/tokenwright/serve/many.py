"""A server of several models, each with an app while it is loaded. `Switch` chooses one by the field `model`."""

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import HTTPConnection
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenwright.errors import RequestError
from tokenwright.serve import app as serving
from tokenwright.serve import model_list, store_routes
from tokenwright.serve.fleet import Fleet, LoadedApp, ManySource
from tokenwright.serve.http.api import LARGE, about, add_errors
from tokenwright.serve.http.exchange import unless_gone
from tokenwright.serve.http.openapi import add_schemas
from tokenwright.serve.ollama import routes as ollama
from tokenwright.serve.ollama.bodies import keep_alive
from tokenwright.serve.ollama.replies import loaded_line
from tokenwright.serve.openai.responses.stored import StoredResponses
from tokenwright.serve.service.metrics import Metrics
from tokenwright.serve.service.model_host import Load
from tokenwright.serve.service.residents import ResidentModel, Residents
from tokenwright.serve.service.service import ServiceLimits
from tokenwright.serve.transport.guard import Guard, Policy

_PROMPTED = ("/api/generate", "/api/chat")
_STORED = re.compile(r"/v1/(responses/(?!(?:input_tokens|compact)$)[^/]+(/cancel|/input_items)?|conversations(/.*)?)")
_ROOM = "/room/"  # of a class, whose pages poll


class Switch:
    def __init__(
        self,
        app: ASGIApp,
        own: Sequence[BaseRoute],
        fleet: Fleet,
        answer: Callable[[Request, Exception], Awaitable[Response]],
    ) -> None:
        self._front = app
        self._own = own
        self._fleet = fleet
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or any(route.matches(scope)[0] is not Match.NONE for route in self._own):
            await self._front(scope, receive, send)
        elif _needs_no_model(scope):
            await self._answer_without_opening(scope, receive, send)
        else:
            await self._forward(scope, receive, send)

    async def _answer_without_opening(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer page, status, class and stored responses by the first loaded model, which may leave meanwhile."""
        allowed = self._fleet.allowed(about(HTTPConnection(scope)).caller)
        loaded = next((one.loaded for one in allowed if isinstance(one.loaded, LoadedApp)), None)
        stored = _STORED.fullmatch(scope["path"]) is not None
        if loaded is None and (stored or scope.get("method") == "POST"):  # these need any app
            await self._forward(scope, receive, send)
        else:
            await (self._front if loaded is None else loaded.app)(scope, receive, send)

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        try:
            entry, raw, data = await self._read(request)
            if self._only_unloads(request, entry, data):
                await self._fleet.residents.unload(entry)
                reply = loaded_line(entry.name, 0.0, chat=scope["path"] == "/api/chat")
                await JSONResponse(reply)(scope, receive, send)
                return
            opened = await unless_gone(request, self._fleet.residents.acquire(entry))
        except Exception as error:
            await (await self._answer(request, error))(scope, receive, send)
            return
        assert isinstance(opened, LoadedApp), "this server opens no others"
        try:
            await opened.app(scope, _again(raw, receive), send)
        finally:
            self._fleet.residents.release(entry)

    async def _read(self, request: Request) -> tuple[ResidentModel, bytes, dict[str, Any]]:
        """The model that a request names, its raw body and its parsed body. Raises Missing."""
        raw = await request.body()
        data = await asyncio.to_thread(_object, raw) if len(raw) > LARGE else _object(raw)
        name = data.get("model") or (data.get("name") if request.url.path.startswith(ollama.API.prefixes) else None)
        return self._fleet.named(about(request).caller, name if isinstance(name, str) else None), raw, data

    def _only_unloads(self, request: Request, entry: ResidentModel, data: dict[str, Any]) -> bool:
        """Apply keep_alive, which restricted keys may not set. Returns whether the request only unloads its model."""
        path = request.scope["path"]
        seconds = keep_alive(data.get("keep_alive")) if path in ollama.API.prompts else None
        if seconds is None:
            return False
        unloads = seconds == 0 and path in _PROMPTED and not (data.get("prompt") or data.get("messages"))
        if not about(request).caller.models:
            entry.pinned, entry.keep_s = seconds == math.inf, seconds
        elif unloads:
            store_routes.check_unrestricted(request)
        else:
            about(request).ignored.append("keep_alive")
        return unloads


def _needs_no_model(scope: Scope) -> bool:
    """Whether a request needs no model to be opened. One about a stored response could wait for itself."""
    reads = scope["type"] == "websocket" or scope["method"] in ("GET", "HEAD", "OPTIONS")
    return reads or _STORED.fullmatch(scope["path"]) is not None or scope["path"].startswith(_ROOM)


def _object(raw: bytes) -> dict[str, Any]:
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def _again(raw: bytes, receive: Receive) -> Receive:
    """An ASGI `receive` that returns the body again, then the connection's further messages."""
    left: list[Message] = [{"type": "http.request", "body": raw, "more_body": False}]

    async def once_more() -> Message:
        return left.pop() if left else await receive()

    return once_more


def make_many_app(
    sources: Sequence[ManySource],
    make: Callable[[str], ManySource],
    limit: int,
    policy: Policy,
    page: Path | None,
    served: serving.Served | None = None,
) -> FastAPI:
    """make(name): the source of a pulled model. limit: bytes of all models in memory."""
    served = served or serving.Served()
    metrics = Metrics()
    limits = replace(served.limits or ServiceLimits(), keys=max(1, len(policy.keys)))

    stored = StoredResponses(served.stored_responses)  # shared, so that they outlive a model that leaves

    def open_(entry: ResidentModel, load: Load) -> LoadedApp:
        opened = LoadedApp(entry.name, entry.names, load, limits, metrics, page, stored, served.apis)
        opened.start()
        return opened

    residents = Residents((), limit, limits.queue)
    fleet = Fleet(residents, make, open_)
    residents.entries = [fleet.entry(source) for source in sources]
    if unknown := policy.keys.models - set(residents.names):
        raise RequestError(
            f"an API key names the model {min(unknown)}, which is not served: {', '.join(residents.names)}"
        )
    metrics.watch(lambda: [one.service for one in fleet.apps])

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if residents.entries:
            residents.preload(residents.entries[0])
        async with serving.living(served, lambda: not fleet.pending, fleet.stop, residents.close):
            yield

    app = serving.new_app(lifespan=lifespan, openapi_url=None)
    app.state.service = fleet
    answer = add_errors(app, serving.APIS, metrics.refused)
    if serving.lists_models(served.apis):
        model_list.add(app, fleet)
    store_routes.add(app, fleet, metrics, served.apis)
    add_schemas(app, served.apis)
    serving.add_fallbacks(app, served.apis)
    own = list(app.routes)
    serving.add_page(app, page, served.apis)
    app.add_middleware(serving.HeadRequests, routes=own)
    app.add_middleware(Switch, own=own, fleet=fleet, answer=answer)
    app.add_middleware(Guard, policy=policy, answer=serving.refusing(metrics), queued=serving.QUEUED, full=fleet.full)
    serving.add_access_log(app, served, metrics)
    return app
