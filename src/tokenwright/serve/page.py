"""The page: its files, its errors, and its API, whose routes are imported only if it is served."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from tokenwright.errors import CapacityError, ContextError
from tokenwright.serve.http.api import Api
from tokenwright.serve.service.service import Service
from tokenwright.serve.service.types import NotReady, Problem

PAGES = {"chat": "chat.html"}


class Page(StaticFiles):
    """The pages of explorer and chat, at all paths without a route. Other methods of a route's path are refused."""

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


def problem(error: Exception) -> Problem | None:
    """The page's problem for an error; None: the common one."""
    match error:
        case ContextError():
            return Problem(400, "invalid", str(error), code="context_overflow")
        case CapacityError():
            return Problem(503, "unavailable", str(error), code="capacity")
        case NotReady():
            return Problem(503, "unavailable", str(error), code="loading", retry_after_s=1)
        case _:
            return None


def error_body(problem: Problem, request_id: str) -> dict[str, Any]:  # noqa: ARG001  (other APIs repeat the id)
    kind = problem.code or _KINDS.get(problem.kind, problem.kind)
    return {"error": {"kind": kind, "message": problem.message}}


_KINDS = {"invalid": "bad_request", "size": "bad_request", "missing": "bad_request"}


def add(app: FastAPI, service: Service) -> Callable[[], object]:
    from tokenwright.serve.explorer import routes  # a server without it loads nothing of it

    return routes.add(app, service)


API = Api((), error_body, problem=problem, name="explorer", add=add)
