"""The access log: one line of JSON for each request."""

import json
import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

from tokenwright.llm.chat.output_parser import new_hex
from tokenwright.serve.http.api import About
from tokenwright.serve.http.reply_text import cache_header
from tokenwright.serve.transport.guard import App, Message, Receive, Scope, Send
from tokenwright.serve.transport.telemetry import describe

_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)

IGNORED, CACHE = b"x-tokenwright-ignored", b"x-tokenwright-cache"
MOST_SHOWN = 32
MOST_LOGGED = 1_000  # unknown names

access = logging.getLogger("tokenwright.access")
log = logging.getLogger(__name__)


class AccessLog:
    """Gives each request an id, and logs a line at its end. ignored: called with unknown fields."""

    def __init__(
        self,
        app: App,
        timings: bool = False,
        strict: bool = False,
        ignored: Callable[[Sequence[str]], object] = lambda _: None,
    ) -> None:
        self.app = app
        self.timings = timings
        self.strict = strict
        self.ignored = ignored
        self._named: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        timed = self.timings or (b"x-timings", b"1") in scope["headers"]
        about = scope["tokenwright"] = About(_request_id(scope), timed, strict=self.strict)
        began, status, size, traced = time.perf_counter(), 0, 0, bool(scope.get("fastapi.telemetry"))

        async def watched(message: Message) -> None:
            nonlocal status, size
            if message["type"] == "http.response.start":
                status = message["status"]
                names, identity = (b"x-request-id", b"request-id"), about.request_id.encode()
                message["headers"] = [*message.get("headers", ()), *((name, identity) for name in names)]
                if about.ignored:
                    message["headers"].append((IGNORED, _names(about.ignored)))
                if about.generations and (report := about.generations[0].cache) is not None:
                    message["headers"].append((CACHE, cache_header(report).encode()))
            elif message["type"] == "http.response.body":
                size += len(message.get("body", b""))
                if traced and not message.get("more_body"):
                    describe(scope, about)
            await send(message)

        try:
            await self.app(scope, receive, send if scope["type"] == "websocket" else watched)
        finally:
            if about.ignored:
                self._note(about.ignored)
            if traced:
                describe(scope, about)
            if access.isEnabledFor(logging.INFO):
                access.info("%s", _line(scope, about, status or 499, size, time.perf_counter() - began))

    def _note(self, names: Sequence[str]) -> None:
        self.ignored(names)
        # Keywords of schemas are left out: replies list those.
        for name in (_shown(one) for one in names if not one.startswith("schema")):
            if name not in self._named and len(self._named) < MOST_LOGGED:
                self._named.add(name)
                log.warning("requests have the unknown field %s, which has no effect", name)


def _names(names: Sequence[str]) -> bytes:
    first = list(dict.fromkeys(map(_shown, names)))
    more = f", and {len(first) - MOST_SHOWN} more" if len(first) > MOST_SHOWN else ""
    return (", ".join(first[:MOST_SHOWN]) + more).encode()


def _shown(name: str) -> str:
    return "".join(one if one.isascii() and one.isprintable() and one not in ',"' else "?" for one in name[:100])


def _request_id(scope: Scope) -> str:
    given = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"), "")
    return given if _ID.fullmatch(given) else f"req-{new_hex(12)}"


def _line(scope: Scope, about: About, status: int, size: int, seconds: float) -> str:
    """A line without texts and without keys, of which it has only a hash."""
    client = scope.get("client") or ("", 0)
    found = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "request_id": about.request_id, "client": client[0],
        "key": about.caller.key or None, "method": scope.get("method", "WEBSOCKET"), "path": scope["path"][:200],
        "status": status, "bytes": size, "ms": round(1000 * seconds, 1),
    }  # fmt: skip
    if (timings := about.timings) is not None:
        said = asdict(replace(timings, cache=None))
        said["cache"] = None if timings.cache is None else timings.cache.cause
        found |= {name: round(value, 4) if isinstance(value, float) else value for name, value in said.items()}
    return json.dumps(found)


def log_access(where: logging.Handler) -> None:
    where.setFormatter(logging.Formatter("%(message)s"))
    access.addHandler(where)
    access.setLevel(logging.INFO)
    access.propagate = False
