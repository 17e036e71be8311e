"""Access control: any web page can reach a local socket, so the server checks Host and Origin of every request.

A foreign page's request carries that page's Origin; a DNS name rebound to this address carries its own Host. This
middleware also limits the size of request bodies before the app reads them.
"""

import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MOST_BODY = 4 * 2**20  # bytes


class OriginGuard:
    """Passes requests to `hosts` ("name:port") whose Origin is one of these or absent, and refuses all others."""

    def __init__(self, app: App, hosts: Iterable[str]) -> None:
        self.app = app
        self.hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        problem = self._problem(scope)
        if problem is None and scope["type"] == "http":
            await self._bounded(scope, receive, send)
        elif problem is None:
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await _refuse(send, 403, "forbidden", problem)
        else:
            await receive()  # ASGI: receive the handshake before refusing it
            await send({"type": "websocket.close", "code": 4403, "reason": problem})

    def _problem(self, scope: Scope) -> str | None:
        hosts, origins = _headers(scope, b"host"), _headers(scope, b"origin")
        if len(hosts) != 1 or hosts[0] not in self.hosts:
            return f"this server answers as {', '.join(sorted(self.hosts))} only; open one of these"
        if any(origin.removeprefix("http://") not in self.hosts for origin in origins):
            return "pages of other origins may not call this server"
        return None

    async def _bounded(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the whole body, up to MOST_BODY bytes, and pass it to the app."""
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > MOST_BODY:
                await _refuse(send, 413, "bad_request", f"the body is larger than {MOST_BODY} bytes")
                return
        taken = False

        async def once() -> Message:
            nonlocal taken
            if taken:
                return await receive()
            taken = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, once, send)


def _headers(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1").lower() for key, value in scope["headers"] if key == name]


async def _refuse(send: Send, status: int, kind: str, message: str) -> None:
    body = json.dumps({"error": {"kind": kind, "message": message}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
