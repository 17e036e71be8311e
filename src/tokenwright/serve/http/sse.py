"""Streams of an answer over HTTP: one chunk for each step, and pings while nothing is written.

Steps that came while the event loop waited for a processor share a chunk. Where a client reads slower than the engine
writes, `send` waits for it, the generation keeps a bounded number of steps, and the engine pauses the request. A client
that has gone has its request cancelled; `connection.py` closes those that read nothing for long.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

PING_S = 15.0
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"


class Streamed(Response):
    """An answer that is sent as it is written. cancel: ends what writes it. ping: sent after PING_S of silence."""

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
        """Cancel when the client has gone; meanwhile ping where nothing else is sent."""
        gone, wait_s = asyncio.create_task(_disconnect(receive)), PING_S
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


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
