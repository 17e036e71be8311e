"""A page's connection to a run: new frames go out, as far as its credit allows, and its commands come in.

The page acknowledges the frames that it has shown, and the server sends at most `WINDOW` frames beyond these: further
ones wait here, and the server later sends them without attention rows, which the page can request. The engine never
waits for a page.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Annotated, Literal

from fastapi import WebSocket, WebSocketDisconnect
from pydantic import Field, TypeAdapter, ValidationError

from tokenwright.errors import RequestError
from tokenwright.serve.explorer.explorer import Explorer, Index, Step, Strict
from tokenwright.serve.explorer.player import Player
from tokenwright.serve.http.api import close_reason
from tokenwright.serve.http.complaints import complaint
from tokenwright.trace.frame_codec import named_ids, pack
from tokenwright.trace.schema import Labels, RunState

WINDOW = 8  # unacknowledged frames of a page at most
SAMPLE = 4  # a page that is behind gets the attention row of every fourth step


class Ack(Strict):
    op: Literal["ack"]
    step: Step


class Play(Strict):
    op: Literal["play"]
    pace: Annotated[float, Field(ge=0.01, le=1000)] | None


class PlainMessage(Strict):
    op: Literal["pause", "step"]


class UseCache(Strict):
    op: Literal["cache"]
    on: bool


class WatchMessage(Strict):
    op: Literal["watch"]
    layer: Index
    head: Index


Command = Ack | Play | PlainMessage | UseCache | WatchMessage
COMMAND: TypeAdapter[Command] = TypeAdapter(Annotated[Command, Field(discriminator="op")])


def command_of(text: str | bytes) -> Command:
    """The command of a message. Raises RequestError for anything else, naming the field."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise RequestError("a command is a JSON object") from None
    try:
        return COMMAND.validate_python(data)
    except ValidationError as error:
        raise RequestError(complaint(error, data).message) from None


class Viewer:
    """One page that watches one run: sends new frames, as far as its credit allows, and executes its commands."""

    def __init__(self, explorer: Explorer, player: Player, socket: WebSocket, since_step: int) -> None:
        self.explorer = explorer
        self.player = player
        self.socket = socket
        first = player.run.first_step
        self.next = min(max(since_step, first), first + len(player.run.frames))  # the next step to send
        self.shown = self.next - 1  # the last acknowledged step
        self.throttled = False
        self._said: RunState | None = None
        self._told: set[int] = set()  # ids whose token cards the page has
        self._news = asyncio.Event()

    async def serve(self) -> None:
        """Serve the page until it disconnects."""
        loop = asyncio.get_running_loop()

        def changed() -> None:
            with suppress(RuntimeError):  # the loop is closing
                loop.call_soon_threadsafe(self._news.set)

        self.player.enter(changed)
        try:
            await self.socket.send_text(self.player.card_text)
            self._news.set()
            async with asyncio.TaskGroup() as tasks:  # an error of one ends the other, and the connection
                speaker = tasks.create_task(self._speak())
                await self._listen()
                speaker.cancel()
        except* (WebSocketDisconnect, RuntimeError):  # the page disconnected, perhaps during a message
            pass
        finally:
            # Not `to_thread`: where this task is cancelled too, a call that waits for a thread would be lost.
            await asyncio.shield(loop.run_in_executor(None, self.player.leave, changed))

    async def _listen(self) -> None:
        while True:
            message = await self.socket.receive()
            if message["type"] == "websocket.disconnect":
                return
            try:
                self._obey(command_of(message.get("text") or message.get("bytes") or ""))
            except RequestError as error:
                await self.socket.close(4400, close_reason(str(error)))
                return

    def _obey(self, command: Command) -> None:
        match command:
            case Ack(step=step):
                self.shown = max(self.shown, min(step, self.next - 1))
                self._news.set()
            case Play(pace=pace):
                self.player.play(pace)
            case PlainMessage(op="pause"):
                self.player.pause()
            case PlainMessage():
                self.player.step()
            case UseCache(on=on):
                self.player.use_cache(on)
            case WatchMessage(layer=layer, head=head):
                self.player.watch(layer, head)

    async def _speak(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            await self._send_frames()
            state = self.player.state(throttled=self.throttled)
            if self._said is None or _lasting(state) != _lasting(self._said):
                self._said = state
                await self._say(state)

    async def _send_frames(self) -> None:
        frames, first = self.player.run.frames, self.player.run.first_step
        while (behind := first + len(frames) - self.next) > 0 and self.next - 1 - self.shown < WINDOW:
            frame = frames[self.next - first]
            fresh = [token for token in named_ids(frame) if token not in self._told]
            if fresh:
                self._told.update(fresh)
                await self._say(Labels(self.explorer.looks(fresh)))
            self.throttled = self.throttled and behind > 1
            dropped = self.throttled and frame.step % SAMPLE > 0
            await self.socket.send_bytes(pack(replace(frame, attention=None) if dropped else frame))
            self.next += 1
        if behind > 0:  # the credit is spent
            self.throttled = True

    async def _say(self, message: RunState | Labels) -> None:
        await self.socket.send_text(json.dumps(asdict(message)))


def _lasting(state: RunState) -> RunState:
    """A state without the counts that change constantly: a change of the rest causes a message."""
    return replace(state, lease_s=None, steps=0)
