"""The access log: one line of JSON for each request, with its id, which the client may have given."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict

from tokenwright.serve.http.api import About
from tokenwright.serve.http.fields import Reading
from tokenwright.serve.service.ids import new_hex
from tokenwright.serve.transport.guard import App, Message, Receive, Scope, Send
from tokenwright.serve.transport.telemetry import Spans

_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)

IGNORED = b"x-tokenwright-ignored"  # fields of the body that changed nothing, because there are none of that name
MOST_NAMED = 256  # ignored fields that are logged, each once

access = logging.getLogger("tokenwright.access")
log = logging.getLogger(__name__)


class AccessLog:
    """Gives every request an id (X-Request-Id, taken or made), returns it, and logs one line at the end.

    It is returned as Request-Id as well, where Anthropic's clients look for it.

    timings: every reply says where the time went, not only those to requests with the header X-Timings: 1.
    spans: takes each request at its end as well. strict: unknown fields of bodies are refused. Where they are ignored,
    the reply has the header X-Tokenwright-Ignored, and `ignored` is called with their number.
    """

    def __init__(
        self,
        app: App,
        timings: bool = False,
        spans: Spans | None = None,
        strict: bool = False,
        ignored: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.app = app
        self.timings = timings
        self.spans = spans
        self._strict = strict
        self._ignored = ignored
        self._named: set[str] = set()  # ignored fields that have been logged

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        timed = self.timings or (b"x-timings", b"1") in scope["headers"]
        about = scope["tokenwright"] = About(_request_id(scope), timed, reading=Reading(self._strict))
        began, status, size = time.perf_counter(), 0, 0

        async def watched(message: Message) -> None:
            nonlocal status, size
            if message["type"] == "http.response.start":
                status = message["status"]
                names, identity = (b"x-request-id", b"request-id"), about.request_id.encode()
                message["headers"] = [*message.get("headers", ()), *((name, identity) for name in names)]
                if about.reading.ignored:
                    message["headers"].append((IGNORED, ", ".join(about.reading.ignored).encode()))
                    self._note(about.reading.ignored)
            elif message["type"] == "http.response.body":
                size += len(message.get("body", b""))
            await send(message)

        try:
            await self.app(scope, receive, send if scope["type"] == "websocket" else watched)
        finally:
            if self.spans is not None:
                self.spans.ended(scope, about, status or 499, began)
            if access.isEnabledFor(logging.INFO):
                access.info("%s", _line(scope, about, status or 499, size, time.perf_counter() - began))

    def _note(self, names: Iterable[str]) -> None:
        """Count the ignored fields, and log each name once."""
        new = [name for name in names if name not in self._named]
        self._ignored(len([*names]))
        for name in new[: MOST_NAMED - len(self._named)]:
            self._named.add(name)
            log.warning("the field %s of a request is ignored, as this server has none of that name", name)


def _request_id(scope: Scope) -> str:
    given = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"), "")
    return given if _ID.fullmatch(given) else f"req-{new_hex(12)}"


def _line(scope: Scope, about: About, status: int, size: int, seconds: float) -> str:
    """The line. It has no text of prompts or answers, and no key, only the name that is derived from it."""
    client = scope.get("client") or ("", 0)
    found = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "request_id": about.request_id,
        "client": client[0],
        "key": about.caller.key or None,
        "method": scope.get("method", "WEBSOCKET"),
        "path": scope["path"][:200],
        "status": status,
        "bytes": size,
        "ms": round(1000 * seconds, 1),
    }
    if (timings := about.timings) is not None:
        said = asdict(timings)
        found |= {name: round(value, 4) if isinstance(value, float) else value for name, value in said.items()}
    return json.dumps(found)


def log_access(where: logging.Handler) -> None:
    """Send the access log to a handler."""
    where.setFormatter(logging.Formatter("%(message)s"))
    access.addHandler(where)
    access.setLevel(logging.INFO)
    access.propagate = False
