"""The processes of a server of replicas: those that take texts, those to be killed, and what they leave behind.

The server names its replicas (GET /replicas): by process, or on Ray by the address at which one listens. Every process
here descends from the server that this program started, so nobody else's is ever killed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from served import Server, family, get

LISTENS = "0A"  # the state of a socket, in /proc/net/tcp


@dataclass(frozen=True)
class Footprint:
    """What a server at rest holds. memory: in bytes, of the process with the sockets, as files and threads are."""

    files: int
    threads: int
    memory: int
    processes: int


@dataclass
class Replicas:
    """kills: how many there were. dying: names of replicas that the server has not missed yet.

    seen: when each process of the server began, and what it is. segments: shared memory of these.
    """

    server: Server
    kills: int = 0
    dying: set[str] = field(default_factory=set)
    seen: dict[int, tuple[str, str]] = field(default_factory=dict)
    segments: set[Path] = field(default_factory=set)

    def rooms(self) -> list[dict[str, Any]]:
        """The replicas that are there, as the server knows them, without those that are dying."""
        status, body = get(self.server.address, "/replicas")
        if status != 200:
            raise RuntimeError(f"the server answers {status}: {body[:300]!r}")
        rooms = [room for room in json.loads(body)["rooms"] if room["name"]]
        self.dying &= {room["name"] for room in rooms}
        return [room for room in rooms if room["name"] not in self.dying]

    def taking(self) -> set[str]:
        """The names of those that take texts."""
        return {room["name"] for room in self.rooms() if room["state"] == "taking"}

    def kill(self, draws: Random, least: int) -> int | None:
        """Kill one of them with SIGKILL, rather one with texts, if at least so many take texts.

        Returns how many texts it had; None: none was killed.
        """
        rooms = self.rooms()
        if sum(room["state"] == "taking" for room in rooms) < least:
            return None
        [room] = draws.choices(rooms, [1 + room["texts"] for room in rooms])
        process = self._process(room["name"])
        if process is None:
            return None
        self._note(family(process))
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:  # it has ended by itself
            return None
        self.kills += 1
        self.dying.add(room["name"])
        return int(room["texts"])

    def _process(self, name: str) -> int | None:
        """The process of a replica, out of the server's own."""
        processes = family(self.server.process.pid)[1:]
        if name.isdecimal():
            return int(name) if int(name) in processes else None
        socket = listener(int(name.rpartition(":")[2]))
        return next((one for one in processes if socket in targets(one, "fd")), None)

    def footprint(self) -> Footprint:
        """Of the server at rest, with all its replicas."""
        processes = family(self.server.process.pid)
        self._note(processes)
        at = Path(f"/proc/{self.server.process.pid}")
        files, threads = (len(list((at / what).iterdir())) for what in ("fd", "task"))
        return Footprint(files, threads, self.server.memory(), len(processes))

    def _note(self, processes: list[int]) -> None:
        for one in processes:
            with suppress(OSError):
                self.seen[one] = began(one), Path(f"/proc/{one}/comm").read_text(encoding="utf-8").strip()
                self.segments |= {Path(path) for path in mapped(one) if path.startswith("/dev/shm/")}

    def left(self) -> tuple[list[str], list[Path]]:
        """After the server's end: its processes that still run, and its shared memory that is still there."""
        return self._running(), [path for path in self.segments if path.exists()]

    def _running(self) -> list[str]:
        found = []
        for process, (then, name) in self.seen.items():
            with suppress(OSError):
                if began(process) == then:
                    found.append(f"{process} {name}")
        return found


def settle(done: Callable[[], bool], within_s: float) -> bool:
    """Wait until something is so; False where it is not in time."""
    until = time.monotonic() + within_s
    while not done():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def began(process: int) -> str:
    """When a process began, which tells it from another one of its number. Raises OSError for one that has ended."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    if fields[0] in "ZX":
        raise ProcessLookupError(process)
    return fields[19]


def targets(process: int, what: str) -> set[str]:
    """Where the links of a folder of a process lead to, such as its open files."""
    found = set()
    with suppress(OSError):
        for link in Path(f"/proc/{process}/{what}").iterdir():
            with suppress(OSError):
                found.add(str(link.readlink()))
    return found


def mapped(process: int) -> set[str]:
    """The files that a process has mapped or open."""
    maps = Path(f"/proc/{process}/maps").read_text(encoding="utf-8")
    return {*re.findall(r"(/\S+)$", maps, re.MULTILINE), *targets(process, "fd")}


def listener(port: int) -> str:
    """The socket that listens at a port of this machine, as a link to it says."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == LISTENS and int(local.rpartition(":")[2], 16) == port:
                return f"socket:[{rest[5]}]"
    return "none"
