"""The routes of a server of several models that belong to no model: health, metrics and Ollama's model store."""

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar, TypedDict

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

import tokenwright
from tokenwright.errors import CheckpointError, RequestError, TokenwrightError
from tokenwright.serve import operations
from tokenwright.serve.fleet import Fleet, LoadedApp
from tokenwright.serve.http.api import Api, RefusedRequest, about, body_of, wrong_field
from tokenwright.serve.http.fields import MOST_NAME, Body, GivenName, Name, Refused
from tokenwright.serve.http.openapi import answers, takes
from tokenwright.serve.http.reply_text import dumps, when
from tokenwright.serve.ollama import replies
from tokenwright.serve.ollama import routes as ollama
from tokenwright.serve.ollama.replies import entry
from tokenwright.serve.ollama.routes import NDJSON, VERSION
from tokenwright.serve.openai import routes as openai
from tokenwright.serve.openai.replies import ReleasedSession
from tokenwright.serve.service.metrics import Metrics
from tokenwright.serve.service.residents import ResidentModel, find
from tokenwright.serve.service.types import Problem
from tokenwright.trace.schema import Loading

MOST_COPIES = 100

log = logging.getLogger(__name__)


class Pull(Body):
    """POST /api/pull. name: what older clients call the model."""

    refused: ClassVar = {"insecure": Refused("the hub is asked over TLS alone", (False,))}

    model: GivenName = None
    name: GivenName = None
    stream: bool = True


class Delete(Body):
    """DELETE /api/delete. name: what older clients call the model."""

    model: GivenName = None
    name: GivenName = None


class OllamaStatus(TypedDict):
    status: str


class Copy(Body):
    """POST /api/copy: a further name for a model, as long as the server runs."""

    source: Name
    destination: Name


def add(app: FastAPI, fleet: Fleet, metrics: Metrics, apis: Sequence[Api]) -> None:
    _add_states(app, fleet, metrics)
    if openai.API in apis:
        _add_sessions(app, fleet)
    if ollama.API in apis:
        _add_lists(app, fleet)
        _add_store(app, fleet)


def _add_states(app: FastAPI, fleet: Fleet, metrics: Metrics) -> None:
    async def health(request: Request) -> tuple[operations.Health, int]:
        models = [_state(one) for one in fleet.allowed(about(request).caller)]
        for opened in fleet.apps:
            if opened.service.ready:
                found, status = await operations.health_of(opened.service)
                stays = any(one.loaded is opened and one.state == "ready" for one in fleet.residents.entries)
                if status != 200 and stays:  # else it has left
                    return {**found, "models": models}, status
        return {"status": "ok", "version": tokenwright.__version__, "models": models}, 200

    def readiness() -> tuple[operations.Ready, int]:
        return ({"status": "draining"}, 503) if fleet.draining else ({"status": "ready"}, 200)

    operations.add(app, metrics, health, readiness)

    @app.get("/status", include_in_schema=False)
    async def status(request: Request) -> Loading:
        """The first model's progress for the page, which loads it; following a link here does not."""
        first = fleet.named(about(request).caller, None)
        if request.headers.get("sec-fetch-mode") != "navigate":
            fleet.residents.preload(first)
        done, total = (0, 0) if first.loaded is None else first.loaded.progress
        failed = first.state == "absent" and first.failure
        phase = "failed" if failed else "ready" if first.state == "ready" else "loading"
        return Loading(phase, done, total, first.failure)  # type: ignore[arg-type]  # one of its phases


def _state(one: ResidentModel) -> operations.ModelState:
    found = operations.ModelState(name=one.name, state=one.state, requests=one.users, bytes=one.nbytes)
    if one.state == "loading":
        found["loaded_bytes"], found["total_bytes"] = (0, 0) if one.loaded is None else one.loaded.progress
    if one.failure:
        found["reason"] = one.failure
    return found


def _add_lists(app: FastAPI, fleet: Fleet) -> None:
    @app.get("/api/version", responses=answers(replies.OllamaVersion), tags=["Ollama"])
    async def version() -> JSONResponse:
        return JSONResponse(replies.OllamaVersion(version=VERSION))

    @app.get("/api/ps", responses=answers(replies.OllamaRunning), tags=["Ollama"])
    async def running(request: Request) -> JSONResponse:
        allowed, there = fleet.allowed(about(request).caller), fleet.apps
        found: list[replies.OllamaLoaded] = []
        for one in allowed:
            opened = next((app for app in there if app is one.loaded and app.service.ready), None)
            if opened is not None:
                expiry = replies.NEVER if one.keep_s > 1e9 else when(time.time() + one.keep_s)
                found.append({**replies.loaded(one.name, opened.host.llm), "expires_at": expiry})
        return JSONResponse(replies.OllamaRunning(models=found))

    @app.get("/api/tags", responses=answers(replies.OllamaTags), tags=["Ollama"])
    async def tags(request: Request) -> JSONResponse:
        allowed = fleet.allowed(about(request).caller)
        return JSONResponse(
            replies.OllamaTags(models=[_tag(fleet, one, name) for one in allowed for name in one.names])
        )


def _tag(fleet: Fleet, one: ResidentModel, name: str) -> replies.OllamaEntry:
    """A model in Ollama's list; of one that is not loaded, what is known without reading it."""
    opened = next((app for app in fleet.apps if app is one.loaded and app.service.ready), None)
    if opened is not None:
        return entry(name, opened.host.llm, fleet.created)
    unread = replies.OllamaDetails(
        parent_model="", format="safetensors", family="", families=[], parameter_size="", quantization_level=""
    )
    return {
        "name": name,
        "model": name,
        "modified_at": when(fleet.created),
        "size": one.nbytes,
        "digest": hashlib.sha256(one.name.encode()).hexdigest(),
        "details": unread,
    }


def _add_store(app: FastAPI, fleet: Fleet) -> None:
    @app.post(
        "/api/pull",
        openapi_extra=takes(Pull),
        responses=answers(OllamaStatus, stream=NDJSON),
        tags=["Ollama"],
        response_model=None,
    )
    async def pull(request: Request) -> Response:
        """Download a model from the hub and serve it."""
        body = await body_of(request, Pull, any_type=True)
        name = _name(body)
        check_unrestricted(request)
        if body.stream:
            return StreamingResponse(_pulling(fleet, name), media_type=NDJSON)
        await _fetched(fleet, name)
        return JSONResponse({"status": "success"})

    @app.delete("/api/delete", openapi_extra=takes(Delete), tags=["Ollama"], response_model=None)
    async def delete(request: Request) -> Response:
        """Remove a model from memory and disk, or one of its further names."""
        name = _name(await body_of(request, Delete, any_type=True))
        check_unrestricted(request)
        entry = find(name, fleet.residents.entries)
        if name in entry.names[1:]:
            entry.names.remove(name)
            return Response(status_code=200)
        from tokenwright.checkpoints import local_models as store

        _, remove = await asyncio.to_thread(store.removal, entry.name)
        fleet.residents.entries.remove(entry)
        await fleet.residents.unload(entry)
        await asyncio.to_thread(remove)
        return Response(status_code=200)

    @app.post("/api/copy", openapi_extra=takes(Copy), tags=["Ollama"], response_model=None)
    async def copy(request: Request) -> Response:
        """Give a model a further name."""
        body = await body_of(request, Copy, any_type=True)
        check_unrestricted(request)
        entry, taken = find(body.source, fleet.residents.entries), fleet.residents.names
        if body.destination in taken:
            raise RequestError(f"destination: the name {body.destination} is taken", "destination")
        if len(taken) - len(fleet.residents.entries) >= MOST_COPIES:
            why = f"destination: there are {MOST_COPIES} further names already; delete one of them"
            raise RequestError(why, "destination")
        entry.names.append(body.destination)
        for opened in fleet.apps:
            if opened is entry.loaded:
                opened.service.names = tuple(entry.names)
        return Response(status_code=200)


def _add_sessions(app: FastAPI, fleet: Fleet) -> None:
    @app.delete("/v1/cache/sessions/{session:path}", responses=answers(ReleasedSession), tags=["OpenAI"])
    async def release(request: Request, session: str) -> JSONResponse:
        """End the pins of a session of this key in all models that it may use."""
        caller = about(request).caller
        for one in fleet.allowed(caller):
            if isinstance(one.loaded, LoadedApp) and one.loaded.service.ready:
                one.loaded.host.llm.llm_engine.release(caller.salt, session[:MOST_NAME])
        return JSONResponse(ReleasedSession(id=session, object="cache.session.released"))


def _name(body: Pull | Delete) -> str:
    if (body.model is None) == (body.name is None):
        raise RequestError("model: give the model's name, once")
    return body.model or body.name or ""


def check_unrestricted(request: Request) -> None:
    """Raises RefusedRequest for a key that is restricted to some models."""
    if about(request).caller.models:
        raise RefusedRequest(
            Problem(403, "forbidden", "this API key is restricted to some models, and may not change them")
        )


async def _fetched(fleet: Fleet, name: str) -> None:
    from tokenwright.checkpoints import local_models as store

    try:
        await asyncio.to_thread(store.fetch, name)
    except CheckpointError as error:
        raise wrong_field("model", str(error)) from None
    fleet.add(name)


async def _pulling(fleet: Fleet, name: str) -> AsyncIterator[bytes]:
    yield _line({"status": "pulling manifest"})
    try:
        await _fetched(fleet, name)
    except TokenwrightError as error:
        yield _line({"error": str(error)})
    except Exception:
        log.exception("pulling %s failed", name)
        yield _line({"error": "the server has failed on this request; its log says more"})
    else:
        yield _line({"status": "success"})


def _line(value: dict[str, Any]) -> bytes:
    return f"{dumps(value)}\n".encode()
