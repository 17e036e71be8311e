"""Runs the app on a socket: uvicorn, signals, and the end of the server.

The first SIGTERM or SIGINT stops to listen and refuses new requests; what runs has `drain_s` seconds to finish, and is
then ended, each stream with an error of its API. A second signal ends everything at once. A server whose model cannot
be read ends too.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

import uvicorn
from fastapi import FastAPI

from tokenwright.serve.transport.connection import Connection
from tokenwright.serve.transport.sockets import BACKLOG, repeated

CANCELLED_S = 2  # after the drain's time: then uvicorn cancels what did not end, with a traceback


class Drainable(Protocol):
    """The service behind an app, as its server sees it. draining: it takes no new requests."""

    draining: bool

    @property
    def failure(self) -> Exception | None: ...

    @property
    def pending(self) -> int: ...

    def stop(self) -> None: ...


class Server(uvicorn.Server):
    """uvicorn, with requests that may finish when it is stopped. said(text): tells the user what is going on."""

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
                backlog=BACKLOG,
                **options,
            )
        )
        self._service: Drainable = app.state.service
        self._said = said
        self._drain_s = drain_s

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve on sockets that listen, until a signal ends it."""
        await super().serve(None if sockets is None else repeated(sockets))

    def keep(self, listener: socket.socket) -> None:
        """Serve on a socket that listens, until a signal. Raises what keeps the model from being read."""
        self.run(sockets=[listener])
        if (failure := self._service.failure) is not None:
            raise failure

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for what runs, and end it when its time is over."""
        over = asyncio.get_running_loop().call_later(self._drain_s, self._service.stop)
        try:
            await super().shutdown(sockets)
        finally:
            over.cancel()

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether to end."""
        return await super().on_tick(counter) or self._service.failure is not None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: finish what runs; the second one: end now."""
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
