"""A server under test, and the process that asks whether it is well.

    python -m tests.fuzz.watch HOST PORT PID KIND       # until standard input ends; a line for each answer

/health is asked by a process of its own, on a connection of its own each time. Its seconds are counted without those in
which a thread of the server, or the asking process, was ready to run and the machine had no core for it (the kernel
counts them, /proc/PID/task/TID/schedstat): a busy machine is no fault of the server.
"""

import asyncio
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.fuzz.served import SECRET

ROOT = Path(__file__).parents[2]
LATE_S = 1.0  # /health answers within this
HUNG_S = 10.0  # after so long the server is ended and started again
TRACES = ("Traceback (most recent call last)", "exception was never retrieved", "Exception ignored in", "Fatal Python")


def family(process: int) -> list[int]:
    """A process and those that it has started."""
    found = [process]
    with suppress(OSError):
        for path in Path(f"/proc/{process}/task").glob("*/children"):
            with suppress(OSError):
                found += [two for one in path.read_text(encoding="ascii").split() for two in family(int(one))]
    return found


def waits(processes: list[int]) -> dict[Path, int]:
    """By thread, the nanoseconds in which it was ready to run and had no core."""
    found = {}
    for one in processes:
        with suppress(OSError):  # it has ended
            for path in Path(f"/proc/{one}/task").glob("*/schedstat"):
                with suppress(OSError):
                    found[path] = int(path.read_text(encoding="ascii").split()[1])
    return found


def stopwatch(processes: list[int]) -> Callable[[], float]:
    """Seconds from now on, without those in which one of the processes' threads waited for a core."""
    before, began = waits(processes), time.monotonic()

    def spent() -> float:
        longest = max((after - before.get(path, 0) for path, after in waits(processes).items()), default=0)
        return time.monotonic() - began - longest / 1e9

    return spent


def ask_health(address: tuple[str, int], kind: str) -> socket.socket:
    """A connection on which the server has been asked whether it is well."""
    connection = socket.create_connection(address, HUNG_S)
    if kind != "replica":
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        return connection
    from tokenwright.cluster.replica_messages import Ping, framed
    from tokenwright.cluster.served_replica import CHALLENGE, proof_of

    connection.sendall(proof_of(SECRET, connection.recv(CHALLENGE, socket.MSG_WAITALL)) + framed([Ping()]))
    return connection


def probe(address: tuple[str, int], process: int, kind: str) -> None:
    """Ask for health again and again. Prints for each time: seconds, the time of asking, ok, late or sick."""
    right = re.compile(rb".*Pong" if kind == "replica" else rb"HTTP/1.1 200", re.DOTALL)
    while not select.select([sys.stdin], [], [], 0.03)[0]:
        began, spent, data, late = time.monotonic(), stopwatch([*family(process), os.getpid()]), b"", False
        with suppress(OSError), ask_health(address, kind) as connection:
            while not right.match(data) and time.monotonic() < began + 3 * HUNG_S:
                if select.select([connection], [], [], 0.1)[0]:
                    if not (more := connection.recv(2**16)):
                        break
                    data += more
                elif not late and spent() > LATE_S:
                    late = True
                    print(f"{spent():.3f} {began} late", flush=True)
        print(f"{spent():.3f} {began} {'ok' if right.match(data) else 'sick'}", flush=True)


class Target:
    """A running server and its probe. log: lines of its standard error. late: (time of asking, seconds, state)."""

    def __init__(self, kind: str, folder: Path, fault: str = "") -> None:
        self.kind, self.command = kind, ["tests.fuzz.served", kind, str(folder), fault]
        self.worst, self.probes = 0.0, 0
        self.start()

    def start(self) -> None:
        self.log: list[str] = []
        self.prober: subprocess.Popen[str] | None = None
        self.late: deque[tuple[float, float, str]] = deque(maxlen=1000)
        self.process = self._begin(self.command, self._said, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        asks = ["tests.fuzz.watch", *map(str, self.address), str(self.process.pid), self.kind]
        self.prober = self._begin(asks, self._probed, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def _begin(self, module: list[str], read: Callable[[str], object], **pipes: Any) -> subprocess.Popen[str]:
        """Start a module of Python, read its lines in a thread, and wait for the first that `read` returns true for."""
        process = subprocess.Popen([sys.executable, "-m", *module], cwd=ROOT, text=True, errors="replace", **pipes)
        well = threading.Event()

        def reads() -> None:
            with process.stderr or process.stdout as lines:
                any(well.set() for line in lines if read(line.rstrip()))
            well.set()

        threading.Thread(target=reads, daemon=True).start()
        assert well.wait(600) and process.poll() is None, "the server does not start:\n" + "\n".join(self.log)
        return process

    def _said(self, line: str) -> bool:
        self.log.append(line[:2000])
        if found := re.search(r"http://([\d.]+):(\d+)/", line):
            self.address = found[1], int(found[2])
        return found is not None

    def _probed(self, line: str) -> bool:
        seconds, began, state = line.split()
        self.probes += 1
        if state == "ok":
            self.worst = max(self.worst, float(seconds))
        if self.prober is not None and (state != "ok" or float(seconds) > LATE_S):
            self.late.append((float(began), float(seconds), state))
        return state == "ok"

    @property
    def alive(self) -> bool:
        assert self.prober is None or self.prober.poll() is None, "the prober has ended: nobody watches the server"
        return self.process.poll() is None

    async def settled(self, within_s: float) -> bool:
        """Wait for two new answers of /health; False: none came, so the server was killed and started again."""
        now, count, spent = time.monotonic(), self.probes, stopwatch([self.process.pid])
        while self.alive and spent() < within_s:
            if self.probes >= count + 2 and not (self.late and self.late[-1][0] > now):
                return True
            await asyncio.sleep(0.02)
        await asyncio.to_thread(self.restart)
        return False

    def traces(self, since: int) -> list[str]:
        """The lines of the log that tell of an exception, each with what follows it."""
        log = self.log
        return ["\n".join(log[at : at + 60]) for at in range(since, len(log)) if any(one in log[at] for one in TRACES)]

    def gauges(self) -> dict[str, int]:
        """Once garbage is collected: bytes that the server has allocated itself, its files and its threads."""
        found = dict.fromkeys(("memory", "files", "threads"), 0)
        if self.alive:
            self.process.send_signal(signal.SIGUSR2)
        time.sleep(0.5)
        for one in family(self.process.pid):
            with suppress(OSError):
                status = Path(f"/proc/{one}/status").read_text(encoding="utf-8")
                found["memory"] += 1024 * sum(map(int, re.findall(r"(?:RssAnon|VmSwap):\s+(\d+) kB", status)))
                found["threads"] += int(re.findall(r"Threads:\s+(\d+)", status)[0])
                found["files"] += len(list(Path(f"/proc/{one}/fd").iterdir()))
        return found

    def end(self, within_s: float = 12.0) -> bool:
        """End the server by SIGTERM, and its probe; False: the server had to be killed."""
        processes, spent = family(self.process.pid), stopwatch([self.process.pid])
        if self.alive and within_s:
            self.process.terminate()
        while self.alive and spent() < within_s:
            time.sleep(0.02)
        ended = not self.alive
        if self.prober is not None:
            self.prober.kill()
            self.prober.wait()
            self.prober.stdin.close()
            self.prober = None
        for one in processes[int(ended) :]:
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        self.process.wait()
        return ended

    def restart(self) -> None:
        self.end(0.0)
        self.start()


if __name__ == "__main__":
    probe((sys.argv[1], int(sys.argv[2])), int(sys.argv[3]), sys.argv[4])
