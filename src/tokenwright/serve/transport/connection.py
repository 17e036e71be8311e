"""uvicorn's connection of a client, with limits on all but bodies, which the guard limits.

Headers must arrive in time, only a body may be long, and a client must read its reply. A closed connection is noticed
even while nothing is read from it. Offers of protocols other than WebSocket, such as h2c, are ignored.
"""

import asyncio
import math
import select
import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEADERS_S = 15.0  # from the connection, or a later request's first byte, to the end of its headers
STALL_S = 120.0  # within which a client must read some of its reply
MOST_UNREAD = 2**28  # bytes of all connections of a server
MOST_AROUND = 2**17  # bytes of a message without its body: request line, headers, trailers
FULL = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nretry-after: 1\r\nconnection: close\r\n\r\n"
LOOK_S = 0.1  # between two checks of a client that is not being read
MOST_PER_BYTE = 8  # of framing for a body's byte; a chunk of one byte has five
FRAMING = (b"content-length", b"transfer-encoding")
_GONE = select.POLLHUP | select.POLLERR | (select.POLLRDHUP if sys.platform == "linux" else 0)


class _AnyLength(int):
    """A countdown that never ends, for uvicorn's replies of unknown length to HTTP/1.0, which has no chunks."""

    def __lt__(self, other: int) -> bool:
        return False

    def __sub__(self, other: int) -> "_AnyLength":
        return self

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


class Connections:
    """The connections of one server; beyond `most`, a new one replaces one without a request.

    If more than MOST_UNREAD bytes are unread in all, the one that has been slow for longest is closed: it may read a
    byte a minute and keep a whole reply in memory.
    """

    def __init__(self) -> None:
        self.most = math.inf
        self.over = False  # the server ends: one that is only now accepted is closed
        self._idle: dict[Connection, None] = {}  # without a request, oldest first
        self._bytes: dict[Connection, int] = {}  # in the order of their pauses; these counts only shrink
        self.total = 0

    def rest(self, connection: "Connection") -> None:
        self._idle.pop(connection, None)
        self._idle[connection] = None

    def work(self, connection: "Connection") -> None:
        self._idle.pop(connection, None)

    def close_idle(self, newest: "Connection | None" = None) -> bool:
        """Close the connection that has been idle for longest. Returns whether there is one, besides the newest."""
        oldest = next(iter(self._idle), newest)
        if oldest is newest or oldest is None:
            return False
        self.work(oldest)
        oldest.transport.abort()
        return True

    def add(self, connection: "Connection") -> None:
        self._count(connection, connection.unread)
        if self.total > MOST_UNREAD:
            self._shed(connection)

    def remove(self, connection: "Connection") -> None:
        self.total -= self._bytes.pop(connection, 0)

    def _count(self, connection: "Connection", size: int) -> None:
        self.total += size - self._bytes.get(connection, 0)
        self._bytes[connection] = size

    def _shed(self, newest: "Connection") -> None:
        for one in list(self._bytes):
            self._count(one, one.unread)
        for one in list(self._bytes):
            if self.total <= MOST_UNREAD or one is newest:
                return
            self.remove(one)
            one.transport.abort()  # `close` would wait for the reader


_OF_SERVERS: WeakKeyDictionary[Any, Connections] = WeakKeyDictionary()  # by uvicorn's state of a server


def connections_of(state: Any) -> Connections:
    return _OF_SERVERS.setdefault(state, Connections())


class Connection(AutoHTTPProtocol):  # type: ignore[misc,valid-type]  # which of two it is depends on what is installed
    """Closes itself if headers are late or long, its client stops reading, or too much is unread in all."""

    _timers: dict[str, asyncio.TimerHandle]
    parser: Any
    _cycles: list[Any]  # uvicorn's: the request under way and those behind it
    _all: Connections
    _data = b""
    _offered = False  # the message offers another protocol
    _replaying = False  # its head is parsed again, without the offer
    _allowed = math.inf  # bytes left to the message; httptools' parser has no limit of its own

    def connection_made(self, transport: Any) -> None:
        self._cycles, self._timers = [], {}
        self._all = connections_of(self.server_state)
        super().connection_made(transport)
        if self._all.over:
            self.transport.close()
            return
        self._after("headers", HEADERS_S, self.transport.close)
        self._all.rest(self)
        if len(self.connections) > self._all.most and not self._all.close_idle(self):
            self.transport.write(FULL)
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        self._allowed -= len(data)
        self._data = data
        super().data_received(data)
        if self.cycle is not before or self.transport.get_protocol() is not self:
            self._stop("headers")
            self._all.work(self)
        elif "headers" not in self._timers and (before is None or before.response_complete):
            self._after("headers", HEADERS_S, self.transport.close)
        if self._allowed < 0 and not self.transport.is_closing():
            self._refuse()
        if "peer" not in self._timers and self.flow.read_paused:
            self._after("peer", LOOK_S, self._look_at_peer)

    def on_message_begin(self) -> None:
        if self._replaying:
            return
        self._allowed = MOST_AROUND
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._replaying:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._replaying:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._replaying:
            return
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is before:
            return
        self._offered = self.parser.should_upgrade()
        if self.parser.get_http_version() == "1.0":
            self.cycle.chunked_encoding, self.cycle.expected_content_length = False, _AnyLength()
        if before is None or before.response_complete:
            self._cycles.clear()
        self._cycles.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._allowed += (1 + MOST_PER_BYTE) * len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """httptools: the end of a message. One with an offer ends after its headers, even if a body follows."""
        if not self._offered:
            super().on_message_complete()

    def _unsupported_upgrade_warning(self) -> None:
        """uvicorn: httptools stopped at an offer of another protocol. Parse on as if there were none."""
        stopped = sys.exception()
        if stopped is None:
            return
        rest = self._data[stopped.args[0] :]
        framing = [b"%s: %s\r\n" % one for one in self.headers if one[0] in FRAMING]
        head = b"%s / HTTP/1.1\r\n%s\r\n" % (self.scope["method"].encode(), b"".join(framing))
        self.parser = type(self.parser)(self)
        self._offered, self._replaying = False, True
        self.parser.feed_data(head)
        self._replaying = False
        if rest:
            self._allowed += len(rest)
            self.data_received(rest)

    @property
    def unread(self) -> int:
        """Bytes written for the client that the system has not taken yet."""
        return int(self.transport.get_write_buffer_size())

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self._all.rest(self)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._after("reader", STALL_S, self._look_at_reader, self.unread)
        self._all.add(self)

    def resume_writing(self) -> None:
        self._all.remove(self)
        self._stop("reader")
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        for name in tuple(self._timers):
            self._stop(name)
        self._all.work(self)
        self._all.remove(self)
        super().connection_lost(exc)
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def _refuse(self) -> None:
        """Refuse a message with too much besides its body; while an earlier one is being answered, only by closing."""
        if self.cycle is None or self.cycle.response_complete:
            self.send_400_response(f"the headers are longer than {MOST_AROUND} bytes")
        else:
            self.transport.abort()

    def _look_at_reader(self, before: int) -> None:
        if self.unread < before:
            self._after("reader", STALL_S, self._look_at_reader, self.unread)
        else:
            self.transport.abort()

    def _look_at_peer(self) -> None:
        """Check for a closed connection, which is not noticed while a second request waits unread."""
        self._stop("peer")
        if not self.flow.read_paused or self.transport.is_closing():
            return
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), _GONE)
        if poll.poll(0):
            self.transport.abort()
        else:
            self._after("peer", LOOK_S, self._look_at_peer)

    def _after(self, name: str, seconds: float, call: Callable[..., object], *arguments: object) -> None:
        self._stop(name)
        self._timers[name] = self.loop.call_later(seconds, call, *arguments)

    def _stop(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()
