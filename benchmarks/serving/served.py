"""`tokenwright serve` in a process of its own, with its memory, its metrics and the times of its /health.

    python -m benchmarks.serving.served serve JSON      # {"model", "llm": options of LLM, "settings": of the server}
    python -m benchmarks.serving.served health HOST PORT  # ask /health until stdin ends; prints the seconds as JSON

The server is the one of the command; this file opens its model with options that the command does not have (the number
of pages, of sequences). /health is asked by a process of its own, so that a busy load generator does not delay it.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from benchmarks.serving.http_client import Address

HANGS_S = 120.0  # whatever takes longer will not happen any more
EVERY_S = 0.02  # between two requests to /health


class Server:
    """A running server, once its model is loaded. address: host and port. Use it in a `with`.

    llm, settings: options of `LLM` and of `Settings`, without host and port. threads: None for as many as the command
    takes. command: another server's, which says its address as ours does. Raises RuntimeError if it does not start.
    """

    def __init__(
        self,
        model: str | Path,
        llm: Mapping[str, Any],
        settings: Mapping[str, Any],
        threads: int | None = None,
        command: Sequence[str] = (),
    ) -> None:
        raise_files_limit()
        self.settings = dict(settings)
        asked = {"model": str(model), "llm": dict(llm), "settings": dict(settings), "threads": threads}
        command = command or [sys.executable, "-m", "benchmarks.serving.served", "serve", json.dumps(asked)]
        self.process = subprocess.Popen(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None, "a pipe was asked for"
        self.said: list[str] = []
        self._found = threading.Event()
        self._reader = threading.Thread(target=self._read, args=(self.process.stderr,), daemon=True)
        self._reader.start()
        try:
            self.address = self._address()
            self._wait_until_ready()
        except BaseException:
            self.process.kill()
            raise

    def _read(self, stderr: IO[str]) -> None:
        for line in stderr:
            self.said.append(line.rstrip())
            self._found.set()
        self._found.set()

    def _address(self) -> Address:
        self._found.wait(HANGS_S)
        for line in self.said:
            if found := re.search(r"http://([\d.]+):(\d+)/v1", line):
                return found[1], int(found[2])
        raise RuntimeError("the server does not start:\n" + "\n".join(self.said))

    def _wait_until_ready(self) -> None:
        until = time.monotonic() + HANGS_S
        while get(self.address, "/ready")[0] != 200:
            if time.monotonic() > until or self.process.poll() is not None:
                raise RuntimeError("the model does not load:\n" + "\n".join(self.said))
            time.sleep(0.05)

    def metrics(self) -> dict[str, float]:
        """The server's metrics without the prefix "tokenwright_", summed over labels."""
        found: dict[str, float] = {}
        for line in get(self.address, "/metrics")[1].decode().splitlines():
            if line.startswith("tokenwright_"):
                name = line.split("{")[0].split(" ")[0].removeprefix("tokenwright_")
                found[name] = found.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
        return found

    def at_rest(self) -> bool:
        """Whether nothing runs or waits, and requests can take every page."""
        now = self.metrics()
        return not now["requests_running"] and not now["requests_waiting"] and now["pages_available"] == now["pages"]

    def rest_s(self, limit: float = HANGS_S) -> float | None:
        """Wait until the server is at rest; the seconds that it took, None: not within `limit`."""
        began = time.monotonic()
        while not self.at_rest():
            if time.monotonic() - began > limit:
                return None
            time.sleep(0.01)
        return time.monotonic() - began

    def memory(self) -> int:
        """Anonymous memory of the process in bytes, swapped out or not: what it has allocated itself."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        return 1024 * sum(int(kib) for kib in re.findall(r"^(?:RssAnon|VmSwap):\s+(\d+) kB$", status, re.MULTILINE))

    def terminate(self) -> None:
        """Ask the server to end, as a service manager does."""
        self.process.send_signal(signal.SIGTERM)

    def wait(self) -> int | None:
        """The exit status; None: it does not end."""
        try:
            return self.process.wait(HANGS_S)
        except subprocess.TimeoutExpired:
            return None

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.terminate()
            if kind is not None or self.wait() is None:
                self.process.kill()
        self.process.wait()
        self._reader.join(HANGS_S)
        assert self.process.stderr is not None, "a pipe was asked for"
        self.process.stderr.close()


class Health:
    """Asks /health all the time in a `with`. Then `seconds` has the times, `failures` counts other answers than 200."""

    def __init__(self, server: Server) -> None:
        self._address = server.address
        self.seconds: list[float] = []
        self.failures = 0

    def __enter__(self) -> Health:
        command = [sys.executable, "-m", "benchmarks.serving.served", "health", self._address[0], str(self._address[1])]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None, "a pipe was asked for"
        self._process.stdout.readline()  # the first request has been answered
        return self

    def __exit__(self, *_: object) -> None:
        said = self._process.communicate(timeout=HANGS_S)[0]
        found = json.loads(said)
        self.seconds, self.failures = found["seconds"], found["failures"]


def quantile(values: list[float], share: float) -> float:
    """The value below which this share of `values` lies; 0.0 without any."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def get(address: Address, path: str) -> tuple[int, bytes]:
    """The status and the body of a GET."""
    connection = http.client.HTTPConnection(*address, timeout=HANGS_S)
    try:
        connection.request("GET", path, headers={"connection": "close"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def family(process: int) -> list[int]:
    """A process and those that it has started."""
    found = [process]
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        for child in path.read_text(encoding="ascii").split():
            found += family(int(child))
    return found


def raise_files_limit() -> None:
    """Let this process, and those that it starts, open as many files (thus connections) as the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def serve(asked: Mapping[str, Any]) -> None:
    """Serve a model until a signal ends it."""
    from tokenwright.cli.commands.serve import _listen
    from tokenwright.cli.options.shared import loader
    from tokenwright.serve.app import make_app
    from tokenwright.serve.service.model_host import ModelHost, uncollected
    from tokenwright.serve.settings import Settings

    host = ModelHost("tiny", uncollected(loader(asked["model"], threads=asked["threads"], **asked["llm"])))
    settings = Settings(port=0, **asked["settings"])
    named = settings.served_model_name
    _listen("tiny", lambda policy, page, served: make_app(host, policy, page, replace(served, names=named)), settings)


def poll_health(address: Address) -> None:
    """Ask /health until stdin ends."""
    seconds: list[float] = []
    failures = 0
    while not select.select([sys.stdin], [], [], EVERY_S)[0]:
        began = time.perf_counter()
        try:
            failures += get(address, "/health")[0] != 200
        except OSError:
            failures += 1
        seconds.append(time.perf_counter() - began)
        if len(seconds) == 1:
            print("polling", flush=True)
    print(json.dumps({"seconds": seconds, "failures": failures}))


def main() -> None:
    os.environ.setdefault("NO_COLOR", "1")
    if sys.argv[1] == "serve":
        serve(json.loads(sys.argv[2]))
    else:
        poll_health((sys.argv[2], int(sys.argv[3])))


if __name__ == "__main__":
    main()
