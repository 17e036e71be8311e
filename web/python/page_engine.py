"""The explorer in a worker of a page (web/src/worker/engine.ts), which hands over the page's messages and lends turns.

It answers by the table (table.py), as the server does, and computes nothing between two turns: a turn is one step of
each run that plays, a message of each stream and a part of each answer in parts, so that the page's messages come in
between. `tell` gets the answers: (kind, key, ...), as engine.ts passes them on.
"""

import json
import logging
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from tokenwright.errors import CapacityError, ContextError, RequestError, TokenwrightError
from tokenwright.explorer.explorer import Download, Explorer, MessageStream, OpenedModel, PanelError, Text
from tokenwright.explorer.table import PanelRoute, find, values_of
from tokenwright.explorer.viewer import Viewer
from tokenwright.llm.llm import LLM

Tell = Callable[..., object]

KV_MEMORY = 64 * 2**20  # bytes: of a phone there is little
_STATUS = {"gone": 404, "missing": 404, "busy": 503}  # of a PanelError
_JSON = "application/json"

log = logging.getLogger(__name__)


def begin(tell: Tell, own: str = "", device: str = "cpu") -> "PageEngine":
    """The engine over the small model in the package, or over the visitor's own, by its path. A GPU shows no runs."""
    names = ("page_chat", "renderer_here", "kept_kv", "own_model")  # of this folder, as a page has it
    page_chat, renderer_here, kept_kv, own_model = map(import_module, names)
    renderer_here.install()
    if own:

        def report(done: int, total: int) -> None:
            tell("loaded", 0, done, total)

        options = {"kv_memory": own_model.KV_MEMORY, "report": report}
    else:
        options = {"kv_memory": KV_MEMORY}
    try:
        llm = LLM(own or "stories", threads=0, device=device, trace=device == "cpu", **options)
    except RequestError as error:
        if device == "cpu":
            raise
        raise RequestError(f"{str(error).partition(';')[0]}; the options have a link to the processor") from error
    kept_kv.restore(llm)
    return PageEngine(Explorer(OpenedModel(Path(own).stem or "stories", llm)), tell, page_chat.ROUTES)


class PageEngine:
    """Answers one page. Keys are the page's numbers of its requests and streams. own: routes beside the table's."""

    def __init__(self, explorer: Explorer, tell: Tell, own: Iterable[PanelRoute] = ()) -> None:
        self._explorer, self._tell = explorer, tell
        self._own = {(one.method, one.path): one for one in (_TOKENIZE, *own)}
        self._parts: dict[int, tuple[PanelRoute, Generator[Any, None, None], Any]] = {}  # answers, and their last items
        self._streams: dict[int, MessageStream] = {}
        self._viewers: dict[int, tuple[Viewer, Callable[[], object]]] = {}
        self._fresh: set[int] = set()  # viewers whose runs have changed

    def add(self, module: str) -> None:
        """Answer by the routes of one more module of the page."""
        self._own |= {(one.method, one.path): one for one in import_module(module).ROUTES}

    def ask(self, key: int, method: str, path: str, body: str) -> None:
        """Answer a request, or begin to."""
        place, _, query = path.partition("?")
        with self._refusing(key):
            own = self._own.get((method, f"/{place}"))
            route, places = (own, {}) if own is not None else find(method, f"/{place}")
            given = route.arguments(places, dict(parse_qsl(query)), json.loads(body) if body else None)
            if "salt" in route.parameters:
                given["salt"] = "page"
            if "work" in route.parameters:
                from tokenwright.explorer.learn import CheckWork

                given["work"] = CheckWork(self._explorer.llm)
            answer = route.answer(self._explorer, **given)
            if route.in_parts:
                self._parts[key] = (route, answer, None)
            else:
                self._answer(key, route, answer)

    def open(self, key: int, path: str) -> None:
        """Open the stream of a run's frames."""
        place, _, query = path.partition("?")
        player = self._explorer.runs.get(place.split("/")[1])
        if player is None:
            self._tell("closed", key, 4404)
            return
        viewer = Viewer(self._explorer, player, int(dict(parse_qsl(query)).get("since_step", 0)))
        changed = partial(self._fresh.add, key)
        self._viewers[key] = viewer, changed
        player.enter(changed)
        changed()

    def say(self, key: int, text: str) -> None:
        """A command of a viewer."""
        if key not in self._viewers:
            return
        try:
            self._viewers[key][0].obey(text)
            self._fresh.add(key)
        except RequestError:
            self.leave(key)
            self._tell("closed", key, 4400)

    def leave(self, key: int) -> None:
        """End what the page does not wait for any more."""
        if key in self._parts:
            self._parts.pop(key)[1].close()
        if key in self._streams:
            self._streams.pop(key).close()
        if key in self._viewers:
            viewer, changed = self._viewers.pop(key)
            viewer.player.leave(changed)
        self._fresh.discard(key)

    def turn(self) -> float | None:
        """Do what is due. Returns the seconds until the next turn; None: not before the page says something."""
        loop = self._explorer.llm.llm_engine.local("a page").loop
        rests = [self._explorer.runs.turn(), self._explorer.batches.turn()]
        if loop.due:
            loop.turn()
        for key in list(self._parts):
            self._part(key)
        for key in list(self._streams):
            self._message(key)
        for key in self._fresh & self._viewers.keys():
            self._fresh.discard(key)
            for message in self._viewers[key][0].news():
                self._tell("message", key, message)
        if self._parts or self._streams or self._fresh or loop.due:
            return 0.0
        return min((rest for rest in rests if rest is not None), default=None)

    def _part(self, key: int) -> None:
        """Make the next part of an answer."""
        route, work, last = self._parts[key]
        with self._refusing(key):
            try:
                item = next(work)
                self._parts[key] = (route, work, last if item is None else item)
                return
            except StopIteration:
                self._answer(key, route, last)
        self._parts.pop(key, None)

    def _message(self, key: int) -> None:
        """Make the next message of a stream."""
        stream = self._streams[key]
        try:
            message = next(stream.messages, None)
        except TokenwrightError as error:
            message = {"error": {"type": "engine", "message": str(error)}}
        if message is not None:
            self._tell("part", key, f"data: {json.dumps(values_of(message))}\n\n")
            return
        self.leave(key)
        self._tell("end", key)

    def _answer(self, key: int, route: PanelRoute, answer: object) -> None:
        if isinstance(answer, MessageStream):
            self._streams[key] = answer
            self._tell("answer", key, route.status, "text/event-stream")
            return
        if answer is None:
            self._tell("answer", key, 204, _JSON)
        elif isinstance(answer, bytes):
            self._tell("answer", key, route.status, "application/octet-stream")
            self._tell("part", key, answer)
        else:
            content = answer.content if isinstance(answer, Download) else answer
            self._tell("answer", key, route.status, _JSON)
            self._tell("part", key, json.dumps(values_of(content)))
        self._tell("end", key)

    @contextmanager
    def _refusing(self, key: int) -> Iterator[None]:
        """Answer an error as the page reads it."""
        try:
            yield
        except Exception as error:
            status, kind, message = _refusal(error)
            self._tell("answer", key, status, _JSON)
            self._tell("part", key, json.dumps({"error": {"kind": kind, "message": message}}))
            self._tell("end", key)


def _refusal(error: Exception) -> tuple[int, str, str]:
    """The status, the kind and the sentence of an error."""
    match error:
        case ContextError():
            return 400, "context_overflow", str(error)
        case CapacityError():
            return 503, "capacity", str(error)
        case PanelError(kind=kind):
            return _STATUS[kind], "bad_request" if kind == "missing" else kind, str(error)
        case TokenwrightError() | ValueError():
            return 400, "bad_request", str(error)
    log.error("a request of the page met a fault", exc_info=error)
    return 500, "engine", "this request met a fault of ours; the console says more"


@dataclass(frozen=True, slots=True, kw_only=True)
class PageText:
    """POST /tokenize, of which the page uses the text."""

    text: Text


def _tokenize(explorer: Explorer, body: PageText) -> dict[str, Any]:
    return {"tokens": explorer.looks(explorer.llm.tokenizer.encode(body.text, parse_special=False))}


_TOKENIZE = PanelRoute("POST", "/tokenize", _tokenize)  # the server has it among the routes of its API
