"""A connection of a client: uvicorn's, with a limit on the time in which a request's headers must arrive.

Without it, a client that sends a byte now and then holds a connection for ever, and many of them all that there are.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEADERS_S = 15.0  # seconds from the connection, or from the first byte of a later request, to the end of the headers


class Connection(AutoHTTPProtocol):  # type: ignore[misc,valid-type]  # which of two it is depends on what is installed
    """Closes itself where headers do not arrive within HEADERS_S."""

    _headers_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before or self.transport.get_protocol() is not self:  # a request, or a WebSocket
            self._stop_timer()
        elif self._headers_timer is None and (before is None or before.response_complete):
            self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _await_headers(self) -> None:
        self._headers_timer = self.loop.call_later(HEADERS_S, self.transport.close)

    def _stop_timer(self) -> None:
        if self._headers_timer is not None:
            self._headers_timer.cancel()
            self._headers_timer = None
