"""Processes that a test starts, and that end with it, whatever happens.

`with subprocess.Popen` waits for ever where a test fails: for a server that still runs, or for a process of it
that holds the pipe which is read or closed next, such as a replica that a test has stopped.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


@contextmanager
def running(command: Sequence[object], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """subprocess.Popen. After the block neither it is there nor any process that holds one of its pipes."""
    with subprocess.Popen([str(one) for one in command], **options) as process:
        try:
            yield process
        finally:
            end(process)


def end(process: subprocess.Popen[Any]) -> None:
    """Kill it, and each other process that may write to its pipes."""
    process.kill()
    pipes = [os.fstat(pipe.fileno()) for pipe in (process.stdout, process.stderr) if pipe and not pipe.closed]
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        if pid != os.getpid() and any(_writes(folder, pipe) for pipe in pipes):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    process.wait()


def _writes(folder: Path, pipe: os.stat_result) -> bool:
    """Whether a process has the pipe as its standard output or error. folder: the process's, below /proc."""
    for descriptor in ("1", "2"):
        with suppress(OSError):
            if os.path.samestat((folder / "fd" / descriptor).stat(), pipe):
                return True
    return False
