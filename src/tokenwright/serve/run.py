"""Runs the app on a socket: uvicorn, signals, and the end of the server.

The first SIGTERM or SIGINT stops to listen and refuses new requests; what runs has `drain_s` seconds to finish. A
second signal ends everything at once.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from tokenwright.serve.connection import Connection
from tokenwright.serve.service import Service
from tokenwright.serve.sockets import BACKLOG


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
                timeout_graceful_shutdown=max(1, round(drain_s)),
                backlog=BACKLOG,
                **options,
            )
        )
        self._service: Service = app.state.service
        self._said = said

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: finish what runs; the second one: end now."""
        if self.should_exit:
            self.force_exit = True
            self._service.stop()
        else:
            self._service.draining = True
            if running := self._service.running + self._service.admission.waiting:
                self._said(f"{running} requests may finish; a second Ctrl-C ends them")
            self.should_exit = True
            return
        super().handle_exit(sig, frame)
