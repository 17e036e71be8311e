"""A connection of a client: uvicorn's, with limits on what it costs beside the bodies, which the guard bounds.

Headers must arrive in time, nothing but a body may be long, and a client must read what it has asked for. Without these
limits a client could hold connections, and memory for each, as long as it likes. A client that goes away is seen to go,
also while nothing is read from it.
"""

from __future__ import annotations

import asyncio
import math
import select
import sys
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEADERS_S = 15.0  # seconds from the connection, or from the first byte of a later request, to the end of the headers
STALL_S = 120.0  # seconds within which a client must read something of what was written for it
MOST_AROUND = 2**17  # bytes of a message around its body: request line, headers, trailers
LOOK_S = 0.1  # seconds between two looks at whether a client is there from which nothing is read
MOST_PER_BYTE = 8  # bytes around each byte of a body at most: a chunk of one has five
_GONE = select.POLLHUP | select.POLLERR | (select.POLLRDHUP if sys.platform == "linux" else 0)


class Connection(AutoHTTPProtocol):  # type: ignore[misc,valid-type]  # which of two it is depends on what is installed
    """Closes itself where headers do not arrive within HEADERS_S, are too long, or a client reads nothing any more."""

    _headers_timer: asyncio.TimerHandle | None = None
    _reading_timer: asyncio.TimerHandle | None = None
    _peer_timer: asyncio.TimerHandle | None = None
    _cycles: list[Any]  # uvicorn's, of the request under way and of those that came behind it
    _allowed = math.inf  # bytes that the message under way may have still; httptools' parser has no limit of its own

    def connection_made(self, transport: Any) -> None:
        self._cycles = []
        super().connection_made(transport)
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        self._allowed -= len(data)
        super().data_received(data)
        if self.cycle is not before or self.transport.get_protocol() is not self:  # a request, or a WebSocket
            self._stop_timer()
        elif self._headers_timer is None and (before is None or before.response_complete):
            self._await_headers()
        if self._allowed < 0 and not self.transport.is_closing():
            self._refuse()
        if self._peer_timer is None and self.flow.read_paused:
            self._await_peer()

    def on_message_begin(self) -> None:
        """httptools: a message begins in the data that is being read."""
        self._allowed = MOST_AROUND
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """httptools: a request."""
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is before:
            return  # it becomes a WebSocket
        if before is None or before.response_complete:
            self._cycles.clear()
        self._cycles.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        """httptools: a part of a body."""
        self._allowed += (1 + MOST_PER_BYTE) * len(body)
        super().on_body(body)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        self._stop_reading_timer()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_reading_timer()
        self._stop_peer_timer()
        super().connection_lost(exc)
        for cycle in self._cycles:  # uvicorn has told the last one
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def _refuse(self) -> None:
        """The message is too long around its body. While an earlier request is being answered, no answer can say so."""
        if self.cycle is None or self.cycle.response_complete:
            self.send_400_response(f"the headers are longer than {MOST_AROUND} bytes")
        else:
            self.transport.abort()

    def _await_reader(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._reading_timer = self.loop.call_later(STALL_S, self._look_at_reader, unread)

    def _look_at_reader(self, before: int) -> None:
        if self.transport.get_write_buffer_size() < before:
            self._await_reader()
        else:
            self.transport.abort()  # `close` would wait for the reader

    def _await_peer(self) -> None:
        self._peer_timer = self.loop.call_later(LOOK_S, self._look_at_peer)

    def _look_at_peer(self) -> None:
        """Nothing is read, because another request waits behind the one under way: so the client's end is not seen."""
        self._peer_timer = None
        if not self.flow.read_paused or self.transport.is_closing():
            return
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), _GONE)
        if poll.poll(0):
            self.transport.abort()
        else:
            self._await_peer()

    def _stop_peer_timer(self) -> None:
        if self._peer_timer is not None:
            self._peer_timer.cancel()
            self._peer_timer = None

    def _stop_reading_timer(self) -> None:
        if self._reading_timer is not None:
            self._reading_timer.cancel()
            self._reading_timer = None

    def _await_headers(self) -> None:
        self._headers_timer = self.loop.call_later(HEADERS_S, self.transport.close)

    def _stop_timer(self) -> None:
        if self._headers_timer is not None:
            self._headers_timer.cancel()
            self._headers_timer = None
