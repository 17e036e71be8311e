"""A server at its limits: of descriptors, and of what its interpreter still does; most in a process of its own."""

from __future__ import annotations

import asyncio
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import httpx2
import pytest
import uvicorn
from fastapi import FastAPI

from tests.engines import HANGS_S, until
from tests.processes import running
from tokenwright.serve.transport.companion import GRACE_S, MARK, SignalCount
from tokenwright.serve.transport.server import Seldom, Server
from tokenwright.serve.transport.sockets import listen

WITHOUT_UVLOOP = "import sys; sys.modules['uvloop'] = None\n"
SERVE = """
import sys
from tokenwright.__main__ import main
sys.argv = ["tokenwright", "serve", "stories", "--port", "0", "--drain-timeout", "60"]
main()
"""
# From when the file is there, the event loop runs a pattern that takes 2 ** 60 steps, with the interpreter's lock held.
HANG = """
import re, sys
from pathlib import Path
from tokenwright.serve.transport.server import Server
tick, stuck_at = Server.on_tick, Path(sys.argv[1])
async def stuck(self, counter):
    if stuck_at.exists():
        stuck_at.unlink()
        re.match("(a+)+$", "a" * 60 + "!")
    return await tick(self, counter)
Server.on_tick = stuck
"""


class Serving:
    """A server in a process. url: its address. said: its lines on standard error."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.said: list[str] = []
        assert process.stderr is not None
        self._lines = threading.Thread(target=lambda: self.said.extend(process.stderr or ()), daemon=True)
        self._lines.start()
        self.url = until(lambda: next((found[0] for line in self.said if (found := URL.search(line))), ""))
        until(lambda: httpx2.get(f"{self.url}/ready", timeout=HANGS_S).status_code == 200)

    @property
    def place(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)


URL = re.compile(r"http://127\.0\.0\.1:\d+")


@contextmanager
def serving(program: str, *arguments: str, descriptors: tuple[int, int] | None = None) -> Iterator[Serving]:
    """descriptors: the soft and the hard limit."""

    def limited() -> None:
        if descriptors is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, descriptors)

    command = [sys.executable, "-c", program, *arguments]
    with running(command, stderr=subprocess.PIPE, text=True, preexec_fn=limited) as process:
        yield Serving(process)


@pytest.mark.parametrize(
    ("loop", "ending"), [("", "two signals"), (WITHOUT_UVLOOP, "a hangup and one")], ids=["uvloop", "asyncio"]
)
def test_more_silent_connections_than_descriptors_and_the_signals_after_them(loop: str, ending: str) -> None:
    """They had a server of 1,024 descriptors unreachable for as long as they stayed, with 250 MB of log.

    And a hangup ended a server without replicas at once.
    """
    with serving(loop + SERVE, descriptors=(64, 128)) as server, ExitStack() as silent:
        with streamed(server) as lines:
            for number in range(400):
                silent.enter_context(closing(socket.create_connection(server.place, HANGS_S)))
                if number % 100 == 99:
                    began = time.monotonic()
                    assert httpx2.get(f"{server.url}/health", timeout=HANGS_S).status_code == 200
                    assert time.monotonic() - began < HANGS_S / 4, "it is not kept waiting for silent ones"
            assert list(lines)[-2:] == ["data: [DONE]", ""], "a stream goes on"
        silent.close()
        assert refused(server).startswith(b"HTTP/1.1 503"), "where all have requests, there is no room"
        assert len(server.said) < 50, "a client cannot fill the log"
        until(lambda: httpx2.get(f"{server.url}/health", timeout=HANGS_S).status_code == 200)
        if "hangup" in ending:
            with streamed(server) as lines:
                server.process.send_signal(signal.SIGHUP)
                assert list(lines)[-2:] == ["data: [DONE]", ""]
            assert httpx2.get(f"{server.url}/health").status_code == 200
            until(lambda: any("restart it to load its model again" in line for line in server.said))
        ends_after(server, 2 if ending == "two signals" else 1)


@contextmanager
def streamed(server: Serving) -> Iterator[Iterator[str]]:
    """The lines of a stream that has begun."""
    body = {"model": "stories", "prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx2.stream("POST", f"{server.url}/v1/completions", json=body, timeout=HANGS_S) as stream:
        lines = stream.iter_lines()
        next(lines)
        yield lines


def refused(server: Serving) -> bytes:
    """The answer to the first of many connections that is not kept open, each with a body that does not come."""
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {server.place[0]}\r\ncontent-length: 9\r\n\r\n"
    with ExitStack() as busy:
        for _ in range(128):
            client = busy.enter_context(closing(socket.create_connection(server.place, HANGS_S)))
            client.sendall(head.encode())
            client.settimeout(0.02)
            with suppress(TimeoutError):
                return client.recv(100)
    return b""


def ends_after(server: Serving, signals: int) -> None:
    """The server, and the process beside it."""
    [companion] = children(server.process.pid)
    for _ in range(signals):
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    assert server.process.wait(HANGS_S) in (0, -signal.SIGTERM)
    until(lambda: not Path(f"/proc/{companion}").exists())


def children(process: int) -> list[int]:
    tasks = Path(f"/proc/{process}/task").glob("*/children")
    found = [int(one) for task in tasks for one in task.read_text().split()]
    return [one for one in found if b"companion.py" in Path(f"/proc/{one}/cmdline").read_bytes()]


def test_systemd_hears_that_the_server_lives_and_the_second_signal_ends_one_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for systemd's socket; where the interpreter hangs, the signs of life end."""
    place, stuck = tmp_path / "notify", tmp_path / "stuck"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(place))
        systemd.settimeout(HANGS_S)
        monkeypatch.setenv("NOTIFY_SOCKET", str(place))
        monkeypatch.setenv("WATCHDOG_USEC", "900000")  # a sign of life each 0.3 s
        with serving(HANG + SERVE, str(stuck)) as server:
            assert [systemd.recv(100) for _ in range(3)] == [b"READY=1", b"WATCHDOG=1", b"WATCHDOG=1"]
            stuck.touch()
            until(lambda: not stuck.exists())
            time.sleep(1.0)
            while select.select([systemd], [], [], 0)[0]:  # signs of life before it hung
                systemd.recv(100)
            time.sleep(1.0)
            assert not select.select([systemd], [], [], 0)[0]
            server.process.send_signal(signal.SIGTERM)
            assert systemd.recv(100) == b"STOPPING=1"
            with pytest.raises(subprocess.TimeoutExpired):
                server.process.wait(GRACE_S + 0.5)  # one signal lets requests finish
            server.process.send_signal(signal.SIGINT)
            assert server.process.wait(HANGS_S) == -signal.SIGKILL


def test_a_connection_that_comes_as_the_server_ends_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvicorn asks those that it has to end, and then waits for all: a later one kept a server for its whole grace."""
    app, ended = FastAPI(), uvicorn.Server.shutdown
    app.state.service, app.state.renew = SimpleNamespace(failure=None, stop=list), None
    ours, its = socket.socketpair()

    async def shutdown(server: uvicorn.Server, sockets: list[socket.socket]) -> None:
        made = server.servers[0]._protocol_factory  # type: ignore[attr-defined]
        late = asyncio.create_task(asyncio.get_running_loop().connect_accepted_socket(made, its))
        await ended(server, sockets)
        await late

    async def main() -> None:
        server = Server(app, 0.0, print)
        task = asyncio.create_task(server.serve([listen("127.0.0.1", (0,))]))
        while not server.started:
            await asyncio.sleep(0.01)
        server.should_exit = True
        await task

    monkeypatch.setattr(uvicorn.Server, "shutdown", shutdown)
    with ours:
        ours.setblocking(False)
        asyncio.run(main())
        assert ours.recv(1) == b""


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_signals_are_counted_however_the_pipe_cuts_them(size: int) -> None:
    text, count = (b"\n" + MARK + b":\n  File x\n") * 3, SignalCount()
    for at in range(0, len(text), size):
        count.add(text[at : at + size])
    assert count.count == 3


def test_a_line_of_code_logs_once_a_second() -> None:
    import logging

    seldom = Seldom()
    records = [logging.LogRecord("a", 30, "/x.py", line, "m", (), None) for line in (1, 2)]
    assert [seldom.filter(one) for one in records * 3] == [True, True, False, False, False, False]
