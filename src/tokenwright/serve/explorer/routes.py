"""The explorer over HTTP: the page's requests (explorer/table.py) as routes, and a run's stream."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

from fastapi import FastAPI, Request, Response, WebSocket, WebSocketDisconnect
from fastapi.responses import JSONResponse
from pydantic_core import to_json
from starlette.concurrency import run_in_threadpool

from tokenwright.errors import CapacityError, RequestError
from tokenwright.explorer.explorer import Download, Explorer, MessageStream, PanelError
from tokenwright.explorer.panels.chat import ChatPrompt
from tokenwright.explorer.player import Driven, Turn
from tokenwright.explorer.table import TABLE, PanelRoute, values_of
from tokenwright.explorer.viewer import Viewer
from tokenwright.serve.http.api import RefusedRequest, about, body_of, close_reason, parsed_json, read_body
from tokenwright.serve.http.exchange import Streamed, unless_gone
from tokenwright.serve.http.fields import MOST_ITEMS, Body, Text, many
from tokenwright.serve.http.reply_text import dumps_in_parts
from tokenwright.serve.openai.generation_request import messages_of
from tokenwright.serve.openai.message_bodies import AnyMessage
from tokenwright.serve.service.admission import retrieved
from tokenwright.serve.service.service import Service
from tokenwright.serve.service.types import Busy, GenerationRequest, Missing, Problem

if TYPE_CHECKING:
    from tokenwright.explorer.learn import CheckWork


T = TypeVar("T")

HIDDEN: dict[str, Any] = {"include_in_schema": False}  # the page's own protocol, which changes with it
_END: object = object()


def add(app: FastAPI, service: Service) -> Callable[[], object]:
    explorer = app.state.explorer = Explorer(service.host, service.names[0], in_thread)
    desk = Desk(explorer)
    for route in TABLE:
        app.add_api_route(route.path, _handler(route, explorer, desk), methods=[route.method], **HIDDEN)

    @app.post("/chat/prompt", **HIDDEN)
    async def chat_prompt(request: Request) -> Response:
        return await rendered(service, explorer, request)

    @app.websocket("/runs/{identity}/stream")
    async def stream(socket: WebSocket, identity: str, since_step: int = 0) -> None:
        await socket.accept()
        player = explorer.runs.get(identity)
        if player is None:
            await socket.close(4404, "there is no such run, or no longer")
            return
        await _watched(Viewer(explorer, player, since_step), socket)

    def close() -> None:
        desk.close()
        explorer.close()

    return close


def _handler(route: PanelRoute, explorer: Explorer, desk: "Desk") -> Callable[[Request], Awaitable[Response]]:
    async def handler(request: Request) -> Response:
        try:
            given = await _arguments(route, request)
            if "work" in route.parameters:
                work = desk.do(lambda work: route.answer(explorer, work=work, **given))
                return _response(route, await unless_gone(request, work))
            if route.in_parts:
                answer = await unless_gone(request, in_parts(route.answer(explorer, **given)))
                return await run_in_threadpool(_response, route, answer)
            return await run_in_threadpool(lambda: _response(route, route.answer(explorer, **given)))
        except PanelError as error:
            raise _as_problem(error) from None

    handler.__name__ = route.answer.__name__
    return handler


async def _arguments(route: PanelRoute, request: Request) -> dict[str, Any]:
    def parse(raw: bytes) -> dict[str, Any]:
        return route.arguments(request.path_params, request.query_params, parsed_json(raw) if raw else None)

    given = await read_body(request, about(request), parse) if "body" in route.parameters else parse(b"")
    caller = about(request).caller
    known = {"salt": caller.salt, "owner": caller.key}
    return given | {name: value for name, value in known.items() if name in route.parameters}


def _as_problem(error: PanelError) -> Exception:
    match error.kind:
        case "gone":
            return RefusedRequest(Problem(404, "missing", str(error), code="gone"))
        case "busy":
            return Busy(str(error))
    return Missing(str(error))


def _response(route: PanelRoute, answer: object) -> Response:
    if answer is None:
        return Response(status_code=204)
    if isinstance(answer, bytes):
        return Response(answer, media_type="application/octet-stream")
    if isinstance(answer, MessageStream):
        return Streamed(_lines(answer), answer.close)
    if isinstance(answer, Download):
        headers = {"content-disposition": f'attachment; filename="{answer.name}"'}
        return Response(dumps_in_parts(answer.content), media_type="application/json", headers=headers)
    return Response(to_json(answer, inf_nan_mode="null"), route.status, media_type="application/json")


async def _lines(events: MessageStream) -> AsyncIterator[bytes]:
    while (message := await asyncio.to_thread(next, events.messages, None)) is not None:
        yield f"data: {json.dumps(values_of(message))}\n\n".encode()


async def in_parts(work: Generator[T | None, None, None]) -> T:
    """The last item of `work`, whose parts run in another thread. A cancelled task ends its part and closes `work`."""
    found: T | None = None
    part: asyncio.Future[T | object | None] | None = None
    try:
        while part is None or part.result() is not _END:
            part = asyncio.ensure_future(asyncio.to_thread(next, work, _END))
            part.add_done_callback(retrieved)
            item = await asyncio.shield(part)
            found = found if item is _END else cast("T | None", item)
    finally:
        if part is not None and not part.done():
            await asyncio.wait([part])
        await asyncio.to_thread(work.close)
    assert found is not None, "the last part is the answer"
    return found


async def _watched(viewer: Viewer, socket: WebSocket) -> None:
    loop, news = asyncio.get_running_loop(), asyncio.Event()

    def changed() -> None:
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(news.set)

    viewer.player.enter(changed)
    try:
        news.set()
        async with asyncio.TaskGroup() as tasks:  # an error of one ends the other, and the connection
            speaker = tasks.create_task(_speak(viewer, socket, news))
            await _listen(viewer, socket, news)
            speaker.cancel()
    except* (WebSocketDisconnect, RuntimeError):  # the page disconnected, perhaps during a message
        pass
    finally:
        # Not `to_thread`: where this task is cancelled too, a call that waits for a thread would be lost.
        await asyncio.shield(loop.run_in_executor(None, viewer.player.leave, changed))


async def _speak(viewer: Viewer, socket: WebSocket, news: asyncio.Event) -> None:
    while True:
        await news.wait()
        news.clear()
        for message in viewer.news():
            await (socket.send_text(message) if isinstance(message, str) else socket.send_bytes(message))


async def _listen(viewer: Viewer, socket: WebSocket, news: asyncio.Event) -> None:
    while True:
        message = await socket.receive()
        if message["type"] == "websocket.disconnect":
            return
        try:
            viewer.obey(message.get("text") or message.get("bytes") or "")
        except RequestError as error:
            await socket.close(4400, close_reason(str(error)))
            return
        news.set()


def in_thread(turn: Turn, name: str) -> Driven:
    """Drive a run, or a batch, in a new thread (explorer/player.py)."""
    woken = threading.Event()

    def drive() -> None:
        while (rest := turn()) is not None:
            if rest > 0:
                woken.wait(rest)
                woken.clear()  # a later command wakes it again; earlier ones are in the next turn

    thread = threading.Thread(target=drive, name=name, daemon=True)
    thread.start()
    return Driven(woken.set, thread.join)


MOST_WAITING, AT_ONCE = 64, 4  # checks: a class has 64 pupils, and no long check makes them all wait


class Desk:
    """Does the lesson's checks, a few at once, in threads; cancels one whose client has gone."""

    def __init__(self, explorer: Explorer) -> None:
        self.explorer = explorer
        self.working: set[CheckWork] = set()
        self._waiting = 0
        self._turn = asyncio.Semaphore(AT_ONCE)
        self._threads = ThreadPoolExecutor(AT_ONCE, "tokenwright checks")

    def close(self) -> None:
        for work in tuple(self.working):
            work.cancel()
        self._threads.shutdown(wait=True, cancel_futures=True)

    async def do(self, do: "Callable[[CheckWork], T]") -> T:
        """Raises CapacityError if too many checks wait already."""
        if self._waiting > MOST_WAITING:
            raise CapacityError(f"{MOST_WAITING} checks wait already; try again in a minute")
        self._waiting += 1
        try:
            async with self._turn:
                return await self._done(do)
        finally:
            self._waiting -= 1

    async def _done(self, do: "Callable[[CheckWork], T]") -> T:
        from tokenwright.explorer.learn import CheckWork

        self.working.add(work := CheckWork(self.explorer.llm))
        task = asyncio.get_running_loop().run_in_executor(self._threads, do, work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            work.cancel()
            with suppress(Exception):
                await task
            raise
        finally:
            self.working.discard(work)


class PromptBody(Body):
    """POST /chat/prompt: the messages of a conversation, or a text to continue."""

    messages: Annotated[list[AnyMessage], many(MOST_ITEMS, 1)] | None = None
    prompt: Text | None = None


async def rendered(service: Service, explorer: Explorer, request: Request) -> JSONResponse:
    """The token ids of an answer's prompt; its text, tokenised anew, turns typed control tokens into real ones."""
    body = await body_of(request, PromptBody)
    if (body.messages is None) == (body.prompt is None):
        raise RequestError("prompt: give one of prompt and messages")

    def read() -> ChatPrompt:
        messages = None if body.messages is None else messages_of(body.messages)
        prompt = preparer.prompt(GenerationRequest(prompt=body.prompt, messages=messages))
        return ChatPrompt(prompt.text, explorer.looks(prompt.ids), explorer.hold(prompt.ids, prompt.pictures))

    preparer = (await unless_gone(request, service.opened())).preparer
    found = await unless_gone(request, service.read(about(request).caller.key, read))
    return JSONResponse(asdict(found))
