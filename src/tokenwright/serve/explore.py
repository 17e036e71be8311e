"""The explorer's server: serves the page, and the engine's runs to the page.

Every answer is a message of `trace.schema`. A run's frames go over a WebSocket. The page acknowledges the frames that
it has shown, and the server sends at most `WINDOW` frames beyond these: further ones wait here, and the server later
sends them without attention rows, which the page can request. The engine never waits for a page.
"""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import FastAPI, Response, WebSocket, WebSocketDisconnect
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

import tokenwright
from tokenwright.checks import MAX_TOKENS
from tokenwright.engine import SamplingParams
from tokenwright.errors import CapacityError, ContextError, RequestError
from tokenwright.serve.api import Api
from tokenwright.serve.contract import NotReady, Problem
from tokenwright.serve.host import Host, Load
from tokenwright.serve.player import Player, Runs, new_identity
from tokenwright.text import TextStream
from tokenwright.trace.schema import (
    VERSION,
    HeadMasses,
    Labels,
    Loading,
    ModelCard,
    RunCard,
    RunState,
    StepFrame,
    TokenCard,
    Trace,
    as_json,
    pack,
)

if TYPE_CHECKING:  # torch is loaded with the model, not with the server
    from tokenwright.llm import LLM

WINDOW = 8  # unacknowledged frames of a page at most
SAMPLE = 4  # a page that is behind gets the attention row of every fourth step

Step = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
Index = Annotated[int, Field(ge=0, le=2**16)]


class Strict(BaseModel):
    """A message from a client: unknown fields are errors, and 1 is not True."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class NewRun(Strict):
    """POST /runs. `written`: ids already generated after the prompt, where a lost run resumes at `first_step`."""

    prompt: str
    written: list[int] = []
    max_tokens: int = 64
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: Annotated[int, Field(ge=0, lt=2**53)] | None = None
    stop: list[str] = []
    ignore_eos: bool = False
    cache: bool = True
    layer: Index = 0
    head: Index = 0
    first_step: Step = 0


class Ack(Strict):
    op: Literal["ack"]
    step: Step


class Play(Strict):
    op: Literal["play"]
    pace: Annotated[float, Field(ge=0.01, le=1000)] | None


class Plain(Strict):
    op: Literal["pause", "step"]


class UseCache(Strict):
    op: Literal["cache"]
    on: bool


class Watch(Strict):
    op: Literal["watch"]
    layer: Index
    head: Index


Command = Ack | Play | Plain | UseCache | Watch
COMMAND: TypeAdapter[Command] = TypeAdapter(Annotated[Command, Field(discriminator="op")])


class Gone(Exception):
    """The run does not exist, or no longer exists."""


class Explorer:
    """One model and its runs."""

    def __init__(self, name: str, load: Load) -> None:
        self.name = name
        self.host = Host(name, load)
        self.runs = Runs()

    def start(self) -> None:
        """Start to load the model."""
        self.host.start()

    def close(self) -> None:
        """End all runs and free the memory. Does not wait for a model that is still loading."""
        self.runs.close()
        self.host.close()

    @property
    def loading(self) -> Loading:
        return self.host.loading

    @property
    def llm(self) -> LLM:
        return self.host.llm

    def player(self, identity: str) -> Player:
        player = self.runs.get(identity)
        if player is None:
            raise Gone
        return player

    def model(self) -> ModelCard:
        llm, config, costs = self.llm, self.llm.config, self.llm.costs
        suggested = llm.sampling()
        return ModelCard(
            name=self.name,
            version=tokenwright.__version__,
            device=llm.device,
            dtype=llm.dtype,
            layers=config.layers,
            width=config.width,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_size=config.head_size,
            vocab_size=config.vocab_size,
            context=config.context,
            windows=config.windows,
            block_weights=costs.block_weights,
            head_weights=costs.head_weights,
            weight_bytes=llm.weight_bytes,
            kv_bytes_per_token=costs.bytes_per_token,
            page_size=llm.engine.pool.page_size,
            pages=llm.engine.pool.pages,
            eos_ids=tuple(sorted(llm.eos_ids)),
            temperature=suggested.temperature,
            top_k=suggested.top_k,
            top_p=suggested.top_p,
        )

    def begin(self, wanted: NewRun) -> RunCard:
        """A new run, paused before its first step.

        Raises NotReady while the model loads, RequestError for an invalid request, CapacityError without room for it.
        """
        llm = self.llm
        names = ("temperature", "top_k", "top_p", "max_tokens", "stop", "ignore_eos")
        params = llm.sampling(**{name: getattr(wanted, name) for name in names})
        seed = wanted.seed if wanted.seed is not None else secrets.randbits(32)
        params = replace(params, seed=None if params.greedy else seed)
        run = llm.run(
            wanted.prompt,
            params,
            cache=wanted.cache,
            written=wanted.written,
            layer=wanted.layer,
            head=wanted.head,
            first_step=wanted.first_step,
        )
        prompt = run.tokens[: len(run.tokens) - len(wanted.written)]
        written = TextStream(llm.tokenizer, params.stop, prompt)  # their text as a viewer has seen it
        for token in wanted.written:
            written.push(token)
        card = RunCard(
            run=new_identity(),
            model=self.name,
            prompt=wanted.prompt,
            tokens=self.looks(prompt),
            written=self.looks(wanted.written),
            written_text=written.text,
            **_sampling(params),
            first_step=wanted.first_step,
            watched=run.watched,
        )
        self.runs.add(run, card)
        return card

    def looks(self, ids: Iterable[int]) -> tuple[TokenCard, ...]:
        tokenizer = self.llm.tokenizer
        return tuple(TokenCard(i, tokenizer.token_text(i), i in tokenizer.special_ids) for i in ids)

    def trace(self, player: Player) -> dict[str, Any]:
        """A run as the content of a trace file."""
        frames = list(player.run.frames)
        named = {token for frame in frames for token in _named(frame)}
        labels, state = self.looks(sorted(named)), player.state()
        whole = asdict(Trace("tokenwright-trace", VERSION, self.model(), player.card, state, labels, ()))
        return whole | {"steps": [as_json(frame) for frame in frames]}


def _sampling(params: SamplingParams) -> dict[str, Any]:
    names = ("temperature", "top_k", "top_p", "seed", "max_tokens", "stop", "ignore_eos")
    return {name: getattr(params, name) for name in names}


def _lasting(state: RunState) -> RunState:
    """A state without the counts that change constantly: a change of the rest causes a message."""
    return replace(state, lease_s=None, steps=0)


def _named(frame: StepFrame) -> list[int]:
    """The token ids of a frame's candidates."""
    return [candidate.token for candidate in frame.candidates]


def problem(error: Exception) -> Problem | None:
    """The problem of an error as the page knows it; None: the server's own answer will do."""
    match error:
        case ContextError():
            return Problem(400, "invalid", str(error), code="context_overflow")
        case CapacityError():
            return Problem(503, "unavailable", str(error), code="capacity")
        case NotReady():
            return Problem(503, "unavailable", str(error), code="loading", retry_after_s=1)
        case Gone():
            why = "there is no such run, or no longer; begin a new one"
            return Problem(404, "missing", why, code="gone")
        case _:
            return None


def error_body(problem: Problem, request_id: str) -> dict[str, Any]:  # noqa: ARG001  (other APIs repeat the id)
    """An error as the page reads it."""
    kind = problem.code or _KINDS.get(problem.kind, problem.kind)
    return {"error": {"kind": kind, "message": problem.message}}


_KINDS = {"invalid": "bad_request", "size": "bad_request", "missing": "bad_request"}
API = Api((), error_body, problem)
HIDDEN: dict[str, Any] = {"include_in_schema": False}  # the page's own protocol, which changes with the page


def add(app: FastAPI, explorer: Explorer) -> None:
    """Add the routes of the page."""
    _add_model(app, explorer)
    _add_runs(app, explorer)


def _add_model(app: FastAPI, explorer: Explorer) -> None:
    @app.get("/status", **HIDDEN)
    def status() -> Loading:
        return explorer.loading

    @app.get("/model", **HIDDEN)
    def model() -> ModelCard:
        return explorer.model()


def _add_runs(app: FastAPI, explorer: Explorer) -> None:
    @app.post("/runs", **HIDDEN, status_code=201)
    def begin(body: NewRun) -> RunCard:
        return explorer.begin(body)

    @app.get("/runs/{identity}", **HIDDEN)
    def state(identity: str) -> RunState:
        return explorer.player(identity).state()

    @app.delete("/runs/{identity}", **HIDDEN, status_code=204)
    def end(identity: str) -> Response:
        if not explorer.runs.remove(identity):
            raise Gone
        return Response(status_code=204)

    @app.get("/runs/{identity}/steps/{step}", **HIDDEN)
    def one_step(identity: str, step: int) -> JSONResponse:
        return JSONResponse(as_json(explorer.player(identity).run.frame(step)))

    @app.get("/runs/{identity}/attention", **HIDDEN)
    def attention(identity: str, step: int, layer: int, head: int, reference: bool = False) -> dict[str, Any]:
        player = explorer.player(identity)
        player.renew()
        run, row = player.run, player.run.attention(step, layer, head)
        answer = asdict(row) | {"codes": base64.b64encode(row.codes).decode()}
        return answer | ({"weights": run.reference(step, layer, head)} if reference else {})

    @app.get("/runs/{identity}/heads", **HIDDEN)
    def heads(identity: str, step: int) -> HeadMasses:
        player = explorer.player(identity)
        player.renew()
        return player.run.heads(step)

    @app.get("/runs/{identity}/trace.json", **HIDDEN)
    def trace(identity: str) -> JSONResponse:
        name = f'attachment; filename="trace-{identity}.json"'
        return JSONResponse(explorer.trace(explorer.player(identity)), headers={"content-disposition": name})

    @app.websocket("/runs/{identity}/stream")
    async def stream(socket: WebSocket, identity: str, since_step: int = 0) -> None:
        await socket.accept()
        player = explorer.runs.get(identity)
        if player is None:
            await socket.close(4404, "there is no such run, or no longer")
            return
        await Viewer(explorer, player, socket, since_step).serve()


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
            await asyncio.to_thread(self.player.leave, changed)

    async def _listen(self) -> None:
        while True:
            message = await self.socket.receive()
            if message["type"] == "websocket.disconnect":
                return
            try:
                self._obey(COMMAND.validate_json(message.get("text") or message.get("bytes") or ""))
            except (ValidationError, RequestError) as error:
                reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
                await self.socket.close(4400, reason[:120])
                return

    def _obey(self, command: Command) -> None:
        match command:
            case Ack(step=step):
                self.shown = max(self.shown, min(step, self.next - 1))
                self._news.set()
            case Play(pace=pace):
                self.player.play(pace)
            case Plain(op="pause"):
                self.player.pause()
            case Plain():
                self.player.step()
            case UseCache(on=on):
                self.player.use_cache(on)
            case Watch(layer=layer, head=head):
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
            fresh = [token for token in _named(frame) if token not in self._told]
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
