"""The access log: one line of JSON for each request, with its id, which the client may have given."""

from __future__ import annotations

import json
import logging
import re
import time
from dataclasses import asdict

from tokenwright.serve.http.api import About
from tokenwright.serve.service.ids import new_hex
from tokenwright.serve.transport.guard import App, Message, Receive, Scope, Send
from tokenwright.serve.transport.telemetry import Spans

_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)

access = logging.getLogger("tokenwright.access")


class AccessLog:
    """Gives every request an id (X-Request-Id, taken or made), returns it, and logs one line at the end.

    It is returned as Request-Id as well, where Anthropic's clients look for it.

    timings: every reply says where the time went, not only those to requests with the header X-Timings: 1.
    spans: takes each request at its end as well.
    """

    def __init__(self, app: App, timings: bool = False, spans: Spans | None = None) -> None:
        self.app = app
        self.timings = timings
        self.spans = spans

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        about = scope["tokenwright"] = About(
            _request_id(scope), self.timings or (b"x-timings", b"1") in scope["headers"]
        )
        began, status, size = time.perf_counter(), 0, 0

        async def watched(message: Message) -> None:
            nonlocal status, size
            if message["type"] == "http.response.start":
                status = message["status"]
                names, identity = (b"x-request-id", b"request-id"), about.request_id.encode()
                message["headers"] = [*message.get("headers", ()), *((name, identity) for name in names)]
            elif message["type"] == "http.response.body":
                size += len(message.get("body", b""))
            await send(message)

        try:
            await self.app(scope, receive, send if scope["type"] == "websocket" else watched)
        finally:
            if self.spans is not None:
                self.spans.ended(scope, about, status or 499, began)
            if access.isEnabledFor(logging.INFO):
                access.info("%s", _line(scope, about, status, size, time.perf_counter() - began))


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
