"""A request in its handler: its body, generations and reply."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

from fastapi import Request, Response
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from tokenwright.errors import RequestError
from tokenwright.llm.chat.chat_options import read_begun, read_json
from tokenwright.sampling_params import Grammar
from tokenwright.serve.http.api import ClientGone, about, parsed_body, read_body
from tokenwright.serve.http.fields import Body
from tokenwright.serve.http.reply_text import LONG, Json, dumps, server_timing, timings_of, written
from tokenwright.serve.http.request_parts import MOST_MARKS, CacheTerms, take_marks
from tokenwright.serve.service import types
from tokenwright.serve.service.generation import Generation
from tokenwright.serve.service.service import Service
from tokenwright.text import Tokenizer

B = TypeVar("B", bound=BaseModel)
T = TypeVar("T")

log = logging.getLogger(__name__)

PING_S = 15.0
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"


class Streamed(Response):
    """A streamed reply. cancel: ends its request, and is called if the client goes. ping: sent after PING_S of silence.

    If the client reads slowly, `send` waits, and the engine pauses the request.
    """

    def __init__(
        self,
        lines: AsyncIterator[bytes],
        cancel: Callable[[], object],
        *,
        media_type: str = "text/event-stream",
        ping: bytes | None = PING,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self.media_type = media_type
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._lines = lines
        self._cancel = cancel
        self._ping = ping
        self._sending = False
        self._sent_at = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        watcher = asyncio.create_task(self._watch(receive, send))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for line in self._lines:
                self._sending = True
                await send({"type": "http.response.body", "body": line, "more_body": True})
                self._sending = False
                self._sent_at = time.monotonic()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._cancel()
            watcher.cancel()

    async def _watch(self, receive: Receive, send: Send) -> None:
        """Cancel when the client goes; until then, ping while nothing else is sent."""
        gone, wait_s = asyncio.create_task(_disconnected(receive)), PING_S
        try:
            while not (await asyncio.wait((gone,), timeout=wait_s))[0]:
                wait_s = self._sent_at + PING_S - time.monotonic()
                if wait_s <= 0:
                    wait_s = PING_S
                    if self._ping is not None and not self._sending:
                        await send({"type": "http.response.body", "body": self._ping, "more_body": True})
            self._cancel()
        finally:
            gone.cancel()


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, or ClientGone. Runs in the caller's task, since each of thousands costs memory."""
    main, left, working = asyncio.current_task(), False, True
    assert main is not None, "a request is answered in a task"

    def leave(watcher: asyncio.Task[None]) -> None:
        nonlocal left
        if working and not watcher.cancelled():
            left = True
            main.cancel()

    watcher = asyncio.create_task(_disconnected(request.receive))
    watcher.add_done_callback(leave)
    try:
        return await work
    except asyncio.CancelledError:
        if not left or main.uncancel():
            raise
        raise ClientGone from None
    finally:
        working = False
        watcher.cancel()


async def _disconnected(receive: Receive) -> None:
    """Wait until the client has gone. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Exchange:
    __slots__ = ("about", "cache_terms", "request", "service")

    def __init__(self, request: Request, service: Service) -> None:
        self.request = request
        self.about = about(request)
        self.service = service
        self.cache_terms = CacheTerms()

    @property
    def key(self) -> str:
        return self.about.caller.key

    @property
    def tokenizer(self) -> Tokenizer:
        return self.service.host.llm.tokenizer

    async def body(self, model: type[B], *, any_type: bool = False) -> B:
        known = self.about
        body = await read_body(self.request, known, lambda raw: parsed_body(raw, model, known), any_type=any_type)
        if isinstance(body, Body):
            self.cache_terms = CacheTerms.of(body, self.request.headers)
        return body

    async def off_loop(self, work: Callable[[], T]) -> T:
        return await asyncio.to_thread(work) if self.about.large else work()

    async def unless_gone(self, work: Coroutine[Any, Any, T]) -> T:
        return await unless_gone(self.request, work)

    async def read(self, work: Callable[[], T]) -> T:
        return await self.service.read(self.key, work)

    def check_model(self, name: str, *, exact: bool = False) -> str:
        """The name of the request's model, by default the server's. Raises Missing.

        A server of one model accepts any name, since agents send names of hosted models, unless `exact`.
        """
        service, name = self.service, name or self.service.names[0]
        if name not in service.names and service.limits.any_model and not (exact or self.about.strict):
            self.about.ignored.append("model")
            name = service.names[0]
        self.about.model = name
        if name not in service.names:
            raise types.no_model(name, service.names)
        return name

    def wanted(self, **fields: Any) -> types.GenerationRequest:
        """Build a request of this caller and model. tools_kept_s: how long the tools stay cached."""
        known, terms = self.about, self.cache_terms
        kept_s = fields.pop("tools_kept_s", None)
        tools = () if kept_s is None else ((-1, None, kept_s),)
        fields["priority"] = fields.get("priority") or terms.priority
        marks = (*tools, *take_marks(fields.get("messages") or (), terms))[-MOST_MARKS:]
        return types.GenerationRequest(
            caller=known.caller,
            request_id=known.request_id,
            model=known.model,
            session=terms.session,
            session_shared=terms.shared,
            session_ends=terms.last,
            cache_marks=marks,
            cache_marked_only=terms.explicit,
            **fields,
        )

    async def start(self, wanted: types.GenerationRequest) -> Generation:
        """Start a generation. Raises what `Service.start` raises."""
        generation = await self.service.start(wanted)
        self.about.generations.append(generation)
        self.about.ignored += generation.prepared.loosened
        return generation

    async def started(self, wanted: types.GenerationRequest) -> Generation:
        """Start a generation. Raises ClientGone, and what `Service.start` raises."""
        return await self.unless_gone(self.start(wanted))

    async def finished(self, wanted: types.GenerationRequest) -> tuple[Generation, list[types.Delta]]:
        generation = await self.start(wanted)
        try:
            return generation, await generation.answers()
        finally:
            generation.cancel()

    async def answered(self, wanted: types.GenerationRequest) -> tuple[Generation, types.Delta]:
        """Generate one whole text, or raise what `started` raises."""
        generation, [answer] = await self.unless_gone(self.finished(wanted))
        return generation, answer

    async def whole(self, reply: Callable[[], Mapping[str, Any]], generation: Generation) -> Response:
        timings = generation.timings() if self.about.timed else None
        return await whole(lambda: {**reply(), **said(timings)}, generation.logprobs, timings)

    def said(self, generation: Generation) -> Json:
        """The field `timings`, if the server or the request asks for it."""
        return said(generation.timings() if self.about.timed else None)

    async def events(
        self,
        generation: Generation,
        encode: Callable[[Any], bytes],
        take: Callable[[types.Delta], Iterable[Any]],
        end: Callable[[types.Delta], Iterable[Any]],
        failed: Callable[[types.Problem], Any],
        last: Callable[[], bytes] = bytes,
    ) -> AsyncIterator[bytes]:
        """Yields a chunk for each step, then `last`, or `failed` in its place. encode: writes one event."""

        def joined(events: Iterable[Any]) -> bytes:
            return b"".join(map(encode, events))

        try:
            async for deltas in generation:
                chunk = b""
                for delta in deltas:
                    chunk += joined(take(delta))
                    if delta.finish is not None:
                        long = generation.logprobs > LONG
                        chunk += await asyncio.to_thread(joined, end(delta)) if long else joined(end(delta))
                if chunk:
                    yield chunk
            if chunk := last():
                yield chunk
        except Exception as error:
            yield encode(failed(self.failure(error)))

    def failure(self, error: Exception) -> types.Problem:
        problem = types.problem_of(error)
        if problem.status >= 500 and not isinstance(error, types.NotReady):  # others are the client's fault
            log.error("request %s failed while it was streamed", self.about.request_id, exc_info=error)
        return problem


async def whole(reply: Callable[[], object], numbers: int, timings: types.Timings | None = None) -> Response:
    """A JSON response. numbers: as in `written`. timings: for the header Server-Timing."""
    headers = {} if timings is None else {"server-timing": server_timing(timings)}
    return Response(await written(reply, numbers), media_type="application/json", headers=headers)


def said(timings: types.Timings | None) -> Json:
    return {} if timings is None else {"timings": timings_of(timings)}


def schema_grammar(schema: Mapping[str, Any] | str, where: str, *, strict: bool = False) -> Grammar:
    """The grammar of a client's JSON schema (object or text) in its field `where`. Raises RequestError."""
    try:
        given = read_json(schema) if isinstance(schema, str) else schema
        text = json.dumps({} if given is True else given)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where} is not JSON: {error}") from None
    if given is not True and not isinstance(given, Mapping):
        raise RequestError(f'{where} must be an object, such as {{"type": "object"}}; false allows no text')
    return Grammar("json_schema", text, client=True, strict=where if strict else "")


def arguments_of(call: types.ToolCall) -> Json:
    """The arguments of a call; of a call that is cut off, those that are whole."""
    try:
        found = read_json(call.arguments)
    except (ValueError, RecursionError):
        found = read_begun(call.arguments)
    return found if isinstance(found, dict) else {}


def event(kind: str, value: object, write: Callable[[object], str] = dumps) -> bytes:
    return f"event: {kind}\ndata: {write(value)}\n\n".encode()
