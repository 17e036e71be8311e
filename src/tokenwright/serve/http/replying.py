"""Code that the adapters beside OpenAI's chat share: one text asked for and read, whole or as it is written."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any

from fastapi import Request, Response

from tokenwright.errors import RequestError, TokenwrightError
from tokenwright.llm.chat.tools import read_begun, read_json
from tokenwright.sampling_params import Grammar
from tokenwright.serve.http.api import about, unless_gone
from tokenwright.serve.http.reply_text import LONG, Json, dumps, server_timing, timings_of, written
from tokenwright.serve.service.generation import Generation
from tokenwright.serve.service.service import Service
from tokenwright.serve.service.types import (
    Answer,
    Delta,
    GenerationRequest,
    NotReady,
    Problem,
    ToolCall,
    no_model,
    problem_of,
)

log = logging.getLogger(__name__)


def check_model(request: Request, service: Service, name: str, *, exact: bool = False) -> str:
    """The name of the model that a request asks for: the server's own, where it names none.

    A server of one model answers under any name, since agents write that of a company's model; the reply says so.
    Raises Missing for a model that this server does not have, where there are several, or an `exact` name is needed.
    """
    known, name = about(request), name or service.names[0]
    if name not in service.names and service.limits.any_model and not (exact or known.strict):
        known.ignored.append("model")
        name = service.names[0]
    known.model = name
    if name not in service.names:
        raise no_model(name, service.names)
    return name


def schema_grammar(schema: Mapping[str, Any], where: str, *, strict: bool = False) -> Grammar:
    """A grammar of JSON that follows a client's schema. where: the field that has it. Raises RequestError."""
    try:
        return Grammar("json_schema", json.dumps(schema), client=True, strict=where if strict else "")
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where} cannot be written as JSON: {error}") from None


async def started(request: Request, service: Service, wanted: GenerationRequest) -> Generation:
    """A generation that the caller reads. Raises what `Service.start` raises, and Gone."""
    return await unless_gone(request, about(request).started(service.start(wanted)))


async def answered(request: Request, service: Service, wanted: GenerationRequest) -> tuple[Generation, Answer]:
    """A whole text; the request is cancelled if its client goes away. Raises what `Service.start` raises, and Gone."""
    return await unless_gone(request, finished(request, service, wanted))


async def finished(request: Request, service: Service, wanted: GenerationRequest) -> tuple[Generation, Answer]:
    """A whole text, whether or not its client still waits. Raises what `Service.start` raises."""
    generation = await about(request).started(service.start(wanted))
    try:
        [answer] = await generation.answers()
    finally:
        generation.cancel()
    return generation, answer


async def events_of(
    request: Request,
    generation: Generation,
    take: Callable[[Delta], Iterable[bytes]],
    end: Callable[[Delta], Iterable[bytes]],
    failed: Callable[[Problem], bytes],
) -> AsyncIterator[bytes]:
    """The chunks of a streamed text, one for each step: `take` writes a delta, `end` the last one's end as well.

    A request that fails while it is written ends with what `failed` writes.
    """
    try:
        async for deltas in generation:
            for delta in deltas:
                chunk = b"".join(take(delta))
                if delta.finish is not None:
                    long = generation.logprobs > LONG
                    chunk += await asyncio.to_thread(_joined, end(delta)) if long else _joined(end(delta))
                if chunk:
                    yield chunk
    except TokenwrightError as error:
        if not isinstance(error, NotReady):  # the server ends, and has said so
            log.error("request %s failed while it was streamed", about(request).request_id, exc_info=error)
        yield failed(problem_of(error))


def _joined(chunks: Iterable[bytes]) -> bytes:
    return b"".join(chunks)


def arguments_of(call: ToolCall) -> Json:
    """The arguments of a call; where the text's end has cut it off, those that are whole."""
    try:
        found = read_json(call.arguments)
    except (ValueError, RecursionError):
        found = read_begun(call.arguments)
    return found if isinstance(found, dict) else {}


def said(request: Request, generation: Generation) -> Json:
    """The fields of a reply beyond its API: where the time went, if the server is set or asked to say so."""
    return {"timings": timings_of(generation.timings())} if about(request).timed else {}


async def whole(request: Request, reply: Callable[[], Json], generation: Generation) -> Response:
    """A reply that is not streamed."""
    headers = {"server-timing": server_timing(generation.timings())} if about(request).timed else {}
    body = await written(lambda: reply() | said(request, generation), generation.logprobs)
    return Response(body, media_type="application/json", headers=headers)


def event(kind: str, value: object, write: Callable[[object], str] = dumps) -> bytes:
    """A server-sent event with its name."""
    return f"event: {kind}\ndata: {write(value)}\n\n".encode()
