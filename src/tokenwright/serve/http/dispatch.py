"""Ways around FastAPI's router: for requests that wait, for HEAD, and for OpenAI's paths without their version."""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence

from fastapi import FastAPI, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from tokenwright.serve.http.api import Api


class Direct:
    """Calls the handlers of requests that wait, without FastAPI's layers, each of which keeps objects for them.

    The routes stay in the app for its OpenAPI document and for other methods.
    """

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
    """Takes OpenAI's paths without /v1, as llama.cpp's server does, and with a slash too many: clients write both."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = {**scope, "path": _meant(scope["path"])}
        await self._app(scope, receive, send)


def _meant(path: str) -> str:
    """The path of a route. Of a model's name, which may have slashes too, nothing is changed."""
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
    """Answers HEAD as GET where a route has GET; the server below leaves out the body. FastAPI's routes refuse it."""

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self._routes = [route for route in routes if isinstance(route, APIRoute) and "GET" in (route.methods or ())]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("method") == "HEAD":
            asked = {**scope, "method": "GET"}
            if any(route.matches(asked)[0] is Match.FULL for route in self._routes):
                scope = asked
        await self._app(scope, receive, send)


def handlers_of(app: FastAPI, apis: Sequence[Api]) -> dict[str, Callable[[Request], Awaitable[Response]]]:
    """The handlers of the paths whose requests wait. Each takes only the request."""
    queued = frozenset().union(*(one.queued for one in apis))
    routes = [route for route in app.routes if isinstance(route, APIRoute) and route.path in queued]
    assert sorted(route.path for route in routes) == sorted(queued), "each path that waits has one handler"
    return {route.path: route.endpoint for route in routes}
