"""Runs command lines quickly: one process imports everything once, and forks for each command line.

    with ForkServer(home) as server:
        ended = server.run(["generate", "x"], folder, stdout="full", interrupt=0.3)

`run` opens stdin, stdout and stderr as asked: a path, "closed", "full" (a device without space) or "gone" (a pipe whose
reader went away). The parent opens no model, so nothing but imports is shared.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Self

HANG = 120.0  # seconds after which a command is taken to hang, and killed


class Ended(NamedTuple):
    """How a command line ended: its exit code as a shell shows it, and the seconds after the interrupt, if any."""

    code: int
    seconds: float


class ForkServer:
    """A context manager around the server's process; `home`: the folder of its caches and settings."""

    def __init__(self, home: Path) -> None:
        own = {"HOME": home, "XDG_CACHE_HOME": home / "cache", "XDG_CONFIG_HOME": home / "config"}
        environment = {name: text for name, text in os.environ.items() if not name.startswith("TOKENWRIGHT_")}
        environment |= {name: str(place) for name, place in own.items()}
        environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in (str(Path.cwd()), *sys.path) if path)
        command = [sys.executable, "-m", "tests.cli.fork_server"]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, words: Sequence[str], folder: Path, **asked: Any) -> Ended:
        """Run a command line in `folder`. asked: stdin, stdout, stderr, and interrupt, seconds until a Ctrl-C."""
        assert self._process.stdin is not None and self._process.stdout is not None
        escaped = json.dumps({"words": words, "folder": str(folder), **asked})
        self._process.stdin.write(escaped + "\n")
        self._process.stdin.flush()
        return Ended(*json.loads(self._process.stdout.readline()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with self._process:  # closes the pipes: the server ends with its input
            pass


def _open(kind: str, number: int) -> None:
    """Make the descriptor `number` what was asked for."""
    if kind == "closed":
        os.close(number)
        return
    if kind == "gone":
        reading, opened = os.pipe()
        os.close(reading)
    else:
        flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND
        opened = os.open("/dev/full" if kind == "full" else kind, flags)
    os.dup2(opened, number)
    if opened != number:
        os.close(opened)


def _command(asked: dict[str, Any]) -> NoReturn:
    """Be the command: with its own streams, as if Python had just started."""
    os.chdir(asked["folder"])
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        _open(asked[name], number)
        mode, errors = ("r", "surrogateescape") if number == 0 else ("w", "backslashreplace")
        text = None if asked[name] == "closed" else os.fdopen(number, mode, encoding="utf-8", errors=errors)
        setattr(sys, name, text)
    sys.argv = ["tokenwright", *asked["words"]]
    try:
        from tokenwright.__main__ import main

        main()
        code: Any = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 70
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(code)


def _serve() -> None:
    import tokenwright.llm
    import tokenwright.planner  # noqa: F401 - what most commands import

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # as __main__ sets it, before anything can interrupt a child
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if child == 0:
            _command(asked)
        began = time.monotonic() + (asked.get("interrupt") or 0.0)
        timers = [threading.Timer(HANG, os.kill, (child, signal.SIGKILL))]
        if asked.get("interrupt") is not None:
            timers.append(threading.Timer(asked["interrupt"], os.kill, (child, signal.SIGINT)))
        for timer in timers:
            timer.start()
        _, status = os.waitpid(child, 0)
        for timer in timers:
            timer.cancel()
            timer.join()
        code = os.waitstatus_to_exitcode(status)
        print(json.dumps([128 - code if code < 0 else code, time.monotonic() - began]), flush=True)


if __name__ == "__main__":
    _serve()
