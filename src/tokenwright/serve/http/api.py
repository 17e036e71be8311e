"""Shared by all APIs: reading a body, the caller, and errors in the format of the path's API."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.types import Scope

from tokenwright.checks import shown
from tokenwright.errors import TokenwrightError
from tokenwright.serve.http.complaints import complaint, complaint_of_parameters
from tokenwright.serve.http.fields import Body, Reading
from tokenwright.serve.service.generation import Generation, timings_of_all
from tokenwright.serve.service.types import NOBODY, Caller, Kind, Problem, ServerError, Timings, problem_of

if TYPE_CHECKING:
    from tokenwright.serve.service.service import Service

B = TypeVar("B", bound=BaseModel)
T = TypeVar("T")

MOST_VALUES = 2**21  # of a body: parsing many values holds the interpreter's lock
LARGE = 2**15  # bytes of a body; a thread parses larger ones

log = logging.getLogger(__name__)


@dataclass(slots=True)
class About:
    """The knowledge that middlewares have of a request."""

    request_id: str
    timed: bool = False  # the reply has timings
    caller: Caller = NOBODY
    model: str = ""
    large: bool = False  # a thread parses the body
    strict: bool = False  # unknown fields are refused
    ignored: list[str] = field(default_factory=list)  # fields and values that had no effect
    generations: list[Generation] = field(default_factory=list)
    hold: Callable[[int], object] = int  # counts bytes of stored texts that the body names; raises RefusedRequest

    @property
    def timings(self) -> Timings | None:
        return timings_of_all(self.generations) if self.generations else None

    @property
    def finishes(self) -> list[str]:
        return [finish for one in self.generations for finish in one.finishes]


class Route(NamedTuple):
    """A route, by default POST if it has a body, else GET."""

    path: str
    handler: Callable[..., Awaitable[Response]]  # (exchange, body if any, **path parameters)
    replies: tuple[Any, ...]
    body: type[BaseModel] | None = None
    stream: str | None = None  # the media type of a streamed reply
    method: str = ""
    prompt: str = ""  # the body's field with the prompt, if the request waits for the engine
    tag: str = ""  # by default the API's


@dataclass(frozen=True, slots=True)
class Api:
    prefixes: tuple[str, ...]  # of its paths
    error: Callable[[Problem, str], Mapping[str, Any]]  # (problem, request id) -> the body, of the type `errors`
    routes: tuple[Route, ...] = ()
    name: str = field(kw_only=True)  # for `serve --apis`
    tag: str = ""  # of its routes in the OpenAPI document
    any_type: bool = False  # bodies of any Content-Type are read
    # Adds other routes; returns a function that closes them, or None.
    add: "Callable[[FastAPI, Service], Callable[[], object] | None]" = lambda *_: None
    problem: Callable[[Exception], Problem | None] = lambda _: None  # its own one for an error; None: the common one
    errors: Any = None
    header: str = ""  # marks its clients' requests on paths of other APIs that begin with `shared`
    shared: tuple[str, ...] = ()

    @property
    def prompts(self) -> dict[str, str]:
        """The field of the prompt, by the paths of POST requests that wait for the engine."""
        return {one.path: one.prompt for one in self.routes if one.prompt}


STATUSES = {
    400: "The request cannot be served.", 401: "The key is missing or wrong.", 403: "Another host or origin.",
    404: "There is no such model, or nothing of the kind.", 408: "The body has not come in time.",
    413: "The body is too large.", 415: "The body is not JSON.", 429: "Too many requests wait.",
    431: "The headers are too large.", 500: "The engine failed.",
    503: "The model is loading, or the server is shutting down.",
}  # fmt: skip


class RefusedRequest(ServerError):
    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def wrong_field(param: str, message: str) -> RefusedRequest:
    return RefusedRequest(Problem(400, "invalid", message, param))


def missing_field(param: str) -> RefusedRequest:
    return wrong_field(param, f"{param}: this field is required")


class ClientGone(Exception):
    """The client has gone."""


def about(request: HTTPConnection) -> About:
    found = request.scope.get("tokenwright")
    return found if isinstance(found, About) else About("")


async def body_of(request: Request, model: type[B], *, any_type: bool = False) -> B:
    """Parse the body as a `model`. Raises RefusedRequest that names the field at fault."""
    known = about(request)
    return await read_body(request, known, lambda raw: parsed_body(raw, model, known), any_type=any_type)


async def read_body(request: Request, known: About, parse: Callable[[bytes], T], *, any_type: bool = False) -> T:
    """Read the body and `parse` it, in a thread if it is large. any_type: accept any Content-Type."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not any_type and kind != "application/json" and not kind.endswith("+json"):
        raise RefusedRequest(
            Problem(415, "invalid", "the body must be JSON; send the header Content-Type: application/json")
        )
    raw = b"".join([part async for part in request.stream()])  # `request.body` would keep it while the request waits
    known.large = len(raw) > LARGE
    return await asyncio.to_thread(parse, raw) if known.large else parse(raw)


def parsed_json(raw: bytes) -> Any:
    """Raises RefusedRequest for a body that is not JSON."""
    if len(raw) > MOST_VALUES and sum(map(raw.count, (b",", b"[", b"{"))) > MOST_VALUES:
        raise RefusedRequest(Problem(413, "invalid", f"the body has more than {MOST_VALUES:,} values; leave some out"))
    try:
        return json.loads(raw, parse_constant=_refuse_constant, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise RefusedRequest(Problem(400, "invalid", f"the body is not JSON: {reason}")) from None


def parsed_body(raw: bytes, model: type[B], about: About) -> B:
    data = parsed_json(raw)
    reading = Reading(model, about.strict) if issubclass(model, Body) else None
    try:
        found = model.model_validate(data, context=reading)
    except ValidationError as error:
        wrong = complaint(error, data, {} if reading is None else reading.renamed)
        raise RefusedRequest(Problem(400, "invalid", wrong.message, wrong.param)) from None
    except RecursionError:
        raise RefusedRequest(Problem(400, "invalid", "the body is nested too deeply")) from None
    about.ignored += [] if reading is None else reading.ignored
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises ValueError for a repeated key, or one with a lone surrogate."""
    found = dict(pairs)
    for name in found:
        if not name.isascii() and any("\ud800" <= character <= "\udfff" for character in name):
            raise ValueError("the name of a field has half of a surrogate pair, which is no character; remove it")
    if len(found) < len(pairs):
        last = {name: at for at, (name, _) in enumerate(pairs)}
        twice = next(name for at, (name, _) in enumerate(pairs) if last[name] != at)
        raise ValueError(f"an object has the key {shown(twice)} twice")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def close_reason(text: str) -> str:
    return text.encode()[:123].decode(errors="ignore")


def add_errors(
    app: FastAPI, apis: Sequence[Api], refused: Callable[[Problem], object] = lambda _: None
) -> Callable[[Request, Exception], Awaitable[Response]]:
    """Answer errors in the format of the path's API. refused: is told each problem. Returns the handler."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        known, api = about(request), api_of(apis, request.scope)
        if isinstance(error, ClientGone):
            return JSONResponse({}, 499)
        problem = api.problem(error) or problem_from(error)
        if problem.param == "messages":
            problem = replace(problem, param=api.prompts.get(request.scope["path"], "messages"))
        refused(problem)
        if problem.kind == "engine":
            log.error("request %s failed", known.request_id, exc_info=error)
        return JSONResponse(api.error(problem, known.request_id), problem.status, problem.headers)

    for kind in (TokenwrightError, RequestValidationError, HTTPException, ClientGone, Exception):
        app.add_exception_handler(kind, answer)
    return answer


def apis_of(apis: Sequence[Api], path: str) -> list[Api]:
    """The API of a path (the first whose prefix it has, else the last), then those that share the path."""
    owner = next((one for one in apis if path.startswith(one.prefixes)), apis[-1])
    shared = () if path in owner.prompts else apis
    return [owner, *(one for one in shared if path.startswith(one.shared) and one is not owner)]


def api_of(apis: Sequence[Api], scope: Scope) -> Api:
    """The API of a request, chosen by header if several share the path."""
    owner, *others = apis_of(apis, scope["path"])
    names = {name for name, _ in scope["headers"]}
    return next((one for one in others if one.header.encode() in names), owner)


_HTTP: dict[int, Kind] = {404: "missing", 405: "invalid", 413: "size"}


def problem_from(error: Exception) -> Problem:
    match error:
        case RefusedRequest():
            return error.problem
        case RequestValidationError():
            found = complaint_of_parameters(error.errors())
            return Problem(400, "invalid", found.message, found.param)
        case HTTPException():
            kind, allow = _HTTP.get(error.status_code, "invalid"), (error.headers or {}).get("Allow")
            return Problem(error.status_code, kind, str(error.detail), allow=allow)
        case _:
            return problem_of(error)
