"""Runs the app on a socket until a signal, or until its model fails.

After the first SIGTERM or SIGINT, new requests are refused and running ones have `drain_s` seconds; then each stream
ends with an error of its API. The second signal ends everything at once, if need be by companion.py.
"""

import asyncio
import errno
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from types import FrameType
from typing import Any, Protocol

import uvicorn
from fastapi import FastAPI

from tokenwright.serve.transport.companion import Companion
from tokenwright.serve.transport.connection import Connection, connections_of
from tokenwright.serve.transport.sockets import BACKLOG, TAKEN_AT_ONCE, most_connections, repeated

USED_UP = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
CANCELLED_S = 2  # after the drain, until uvicorn cancels with a traceback


class Drainable(Protocol):
    """The service of an app. draining: it accepts no new requests."""

    draining: bool

    @property
    def failure(self) -> Exception | None: ...

    @property
    def pending(self) -> int: ...

    def stop(self) -> None: ...


class Seldom(logging.Filter):
    """Passes one record a second of each line of code, so that clients cannot fill the log."""

    def __init__(self) -> None:
        super().__init__()
        self._passed: dict[tuple[str, int], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        place, now = (record.pathname, record.lineno), time.monotonic()
        if now - self._passed.get(place, -1.0) < 1.0:
            return False
        self._passed[place] = now
        return True


class Server(uvicorn.Server):
    """uvicorn, which lets requests finish when it is stopped. said(text): tells the user."""

    def __init__(self, app: FastAPI, drain_s: float, said: Callable[[str], object], **options: Any) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                log_level="warning",
                access_log=False,
                server_header=False,
                ws_max_size=2**16,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=round(drain_s) + CANCELLED_S,
                backlog=TAKEN_AT_ONCE,
                **options,
            )
        )
        self._service: Drainable = app.state.service
        self._renew: Callable[[], object] | None = app.state.renew
        self._companion: Companion | None = None
        self._in_terminal = os.isatty(2)
        self._said = said
        self._drain_s = drain_s

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._fault)
        # uvloop accepts one connection of each socket in an iteration.
        by_asyncio = isinstance(loop, asyncio.BaseEventLoop)
        await super().serve(sockets if sockets is None or by_asyncio else repeated(sockets))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for one in sockets or ():
            one.listen(BACKLOG)
        if self._companion is not None:
            connections_of(self.server_state).most = most_connections()

    def keep(self, listener: socket.socket) -> None:
        """Serve on a listening socket until a signal. Raises the model's failure."""
        for name in ("asyncio", "uvicorn.error"):
            logging.getLogger(name).addFilter(Seldom())
        with closing(Companion(listener.getsockname())) as self._companion:
            self.run(sockets=[listener])
        if (failure := self._service.failure) is not None:
            raise failure

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        connections_of(self.server_state).over = True
        over = asyncio.get_running_loop().call_later(self._drain_s, self._service.stop)
        try:
            await super().shutdown(sockets)
        finally:
            over.cancel()

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self._service.failure is not None

    def _fault(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """asyncio's exception handler. If descriptors run out, close an idle connection."""
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in USED_UP:
            connections_of(self.server_state).close_idle()
        loop.default_exception_handler(context)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        with super().capture_signals():
            if self._companion is None or threading.current_thread() is not threading.main_thread():
                yield
                return
            signal.signal(signal.SIGHUP, self.handle_hangup)
            with self._companion.watching():
                yield
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def handle_hangup(self, sig: int, frame: FrameType | None) -> None:
        """SIGHUP: replace the replicas without ending a stream, or exit if the terminal is closed."""
        if self._in_terminal and not os.isatty(2):
            self.handle_exit(sig, frame)
        elif self._renew is not None:
            self._renew()
        else:
            self._said("SIGHUP replaces replicas, and this server has none; restart it to load its model again")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
            self._service.stop()
        else:
            self._service.draining = True
            if not self._drain_s:
                self._service.stop()
            elif running := self._service.pending:
                self._said(f"{running} request{'s' * (running > 1)} may finish; a second Ctrl-C ends what is left")
            self.should_exit = True
            return
        super().handle_exit(sig, frame)
