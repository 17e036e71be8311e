"""Kill replicas of a server under mixed clients, then the server itself.

    python -m benchmarks.serving.kills [--replicas 3] [--kills 300] [--out build/benchmarks/kills.json]

Starts `tokenwright serve MODEL --replicas N` with a small random model and asks every request of `traffic.py` once
undisturbed. Then eight clients ask them again and again, streamed and not:

    kills     SIGKILL to a random replica, as soon as two replicas take requests, again and again
    ingress   SIGKILL to the server itself

Invariants: no request fails and no text changes while replicas die; the server has as many open files and threads as
before; each client of the killed server gets an error; no process is left. The exit status is 1 if one is
broken. Kills follow each other faster than a text ends, so the server gets --retries.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.serving import traffic
from benchmarks.serving.reliability_parts import about
from benchmarks.serving.served import HANGS_S, Server, family, get
from benchmarks.serving.traffic import Told, Wanted, answer, mixed
from benchmarks.serving.verdicts import HEAD, Report

CLIENTS, REQUESTS = 8, 64
TAKING = 2  # replicas, at least, when one is killed
WARM = 10  # kills before open files and threads are counted
SPARE = 4  # files and threads of helpers that start on demand


@dataclass
class Replicas:
    """The replicas of a server. dying: killed ones that the server still lists. seen: start times of processes."""

    server: Server
    kills: int = 0
    dying: set[str] = field(default_factory=set)
    seen: dict[int, str] = field(default_factory=dict)

    def taking(self) -> list[str]:
        """The names, which are process ids, of the replicas that take requests."""
        rooms = [room for room in json.loads(get(self.server.address, "/replicas")[1])["rooms"] if room["name"]]
        self.dying &= {room["name"] for room in rooms}
        return [room["name"] for room in rooms if room["state"] == "taking" and room["name"] not in self.dying]

    def kill(self, draws: random.Random) -> None:
        """Kill one replica if enough take requests. Only descendants of the server are ever killed."""
        names = self.taking()
        if len(names) < TAKING:
            return
        name = draws.choice(names)
        processes = family(self.server.process.pid)[1:]
        self.note(processes)
        if int(name) in processes:
            with suppress(ProcessLookupError):
                os.kill(int(name), signal.SIGKILL)
                self.kills += 1
                self.dying.add(name)

    def note(self, processes: Sequence[int]) -> None:
        """Remember processes, to look for them after the server's end."""
        self.seen |= {one: began(one) for one in processes}

    def left(self) -> list[int]:
        """The processes that still run."""
        return [process for process, then in self.seen.items() if then and began(process) == then]


def began(process: int) -> str:
    """The start time of a process, which tells it from a later one with its id; "" for one that has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


@dataclass
class Clients:
    """Clients that ask until `done`. wrong: failures and changed texts. stop_at_error: a client ends at its first."""

    server: Server
    asked: Sequence[Wanted]
    right: Sequence[Told]
    stop_at_error: bool = False
    whole: int = 0
    wrong: list[str] = field(default_factory=list)
    done: bool = False

    async def run(self) -> None:
        await asyncio.gather(*(self._client(random.Random(number)) for number in range(CLIENTS)))

    async def _client(self, draws: random.Random) -> None:
        while not self.done:
            at = draws.randrange(len(self.asked))
            try:
                text = await answer(self.server.address, self.asked[at])
            except (ValueError, OSError) as error:
                self.wrong.append(f"{self.asked[at].path}: {type(error).__name__}: {error}")
                if self.stop_at_error:
                    return
                await asyncio.sleep(0.2)
                continue
            self.whole += 1
            if text != self.right[at]:
                self.wrong.append(f"{self.asked[at].path}: {text!r}, not {self.right[at]!r}")


async def settle(done: Callable[[], bool], within_s: float = 3 * HANGS_S) -> bool:
    """Wait for a condition; False where it does not hold in time."""
    until = time.monotonic() + within_s
    while not await asyncio.to_thread(done):
        if time.monotonic() > until:
            return False
        await asyncio.sleep(0.05)
    return True


@dataclass
class Trial:
    """A server of `count` replicas, and the undisturbed texts of all requests."""

    server: Server
    count: int
    asked: Sequence[Wanted]

    def __post_init__(self) -> None:
        self.replicas = Replicas(self.server)
        self.right: list[Told] = []

    async def whole(self) -> bool:
        """Wait until all replicas take requests and nothing runs."""
        return await settle(lambda: len(self.replicas.taking()) == self.count and self.server.at_rest())

    def held(self) -> tuple[int, int]:
        """Open files and threads of the server's process."""
        self.replicas.note(family(self.server.process.pid))
        at = Path(f"/proc/{self.server.process.pid}")
        return len(list((at / "fd").iterdir())), len(list((at / "task").iterdir()))

    async def kills(self, report: Report, kills: int) -> None:
        await self.whole()
        self.right = [await answer(self.server.address, one) for one in self.asked]
        clients = Clients(self.server, self.asked, self.right)
        running, draws = asyncio.create_task(clients.run()), random.Random(1)
        before = (0, 0)
        while self.replicas.kills < kills and not running.done():
            await asyncio.to_thread(self.replicas.kill, draws)
            if self.replicas.kills == min(WARM, kills) and before == (0, 0):
                before = await asyncio.to_thread(self.held)
            await asyncio.sleep(0.02)
        clients.done = True
        await asyncio.wait_for(running, 3 * HANGS_S)
        report.invariant("replicas killed", self.replicas.kills >= kills, self.replicas.kills, f"{kills}")
        report.figure("whole replies meanwhile", f"{clients.whole:,}")
        report.invariant("failed or changed", not clients.wrong, f"{len(clients.wrong)} {clients.wrong[:1] or ''}", "0")
        report.invariant("at the end all take requests, nothing runs", await self.whole(), len(self.replicas.taking()))
        after = await asyncio.to_thread(self.held)
        for what, then, now in zip(("files", "threads"), before, after, strict=True):
            report.invariant(f"{what} of the server, before and after", now <= then + SPARE, f"{then}, {now}")

    async def ingress(self, report: Report) -> None:
        """Kill the server, and look at what is left."""
        clients = Clients(self.server, self.asked, self.right, stop_at_error=True)
        running = asyncio.create_task(clients.run())
        await settle(lambda: self.server.metrics()["requests_running"] >= 1)
        await asyncio.to_thread(self.held)
        self.server.process.kill()
        await asyncio.wait_for(running, HANGS_S)
        report.invariant("clients with an error", len(clients.wrong) == CLIENTS, len(clients.wrong), f"{CLIENTS}")
        await settle(lambda: not self.replicas.left(), HANGS_S)
        report.invariant("processes left", not self.replicas.left(), len(self.replicas.left()), "0")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--retries", type=int, default=100, help="deaths with one text before it fails (the server's)")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks/kills.json"))
    arguments = parser.parse_args()
    if arguments.replicas < TAKING or arguments.kills < 1:
        parser.error(f"--replicas from {TAKING}, --kills from 1")
    return arguments


def main() -> int:
    arguments = parse()
    reports = [Report("kills"), Report("ingress")]
    with TemporaryDirectory() as folder:
        model = str(traffic.write_model(Path(folder) / "model"))
        command = [sys.executable, "-m", "tokenwright", "serve", model, "--served-model-name", traffic.NAME]
        command += ["--port", "0", "--kv-memory", "192MB", "--replicas", f"{arguments.replicas}"]
        command += ["--retries", f"{arguments.retries}"]
        print(f"{arguments.replicas} replicas; {about()}\n{HEAD}", flush=True)
        with Server(model, {}, {}, command=command) as server:
            trial = Trial(server, arguments.replicas, mixed(REQUESTS, 6, 512))
            asyncio.run(trial.kills(reports[0], arguments.kills))
            print(reports[0].table(), flush=True)
            asyncio.run(trial.ingress(reports[1]))
            print(reports[1].table(), flush=True)
    record = {"about": about(), "findings": [one for report in reports for one in report.record()]}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 1 if any(report.broken for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
