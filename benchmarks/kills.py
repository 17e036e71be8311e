"""Replicas that are killed under load, replaced in turn, and left without their server, with clients of five SDKs.

    python benchmarks/kills.py [--replicas 3] [--kills 500] [--ray] [--out build/benchmarks/kills.json]

Starts `tokenwright serve stories --replicas N` (with --ray on a Ray cluster of its own), asks every request of
sdk_streams.py once undisturbed, and compares plain texts with an engine in this process. Then, under eight clients at
once that ask these requests again and again:

    kills     SIGKILL to a random replica, as soon as two take texts, again and again
    roll      SIGHUP: all replicas are replaced, one after another
    ingress   SIGKILL to the server itself

Invariants: no error and no changed stream (texts, calls, log-probabilities, ends); no more open files and threads of
the server than before; each client of the killed server gets an error; no process and no shared memory is left. The
exit status is 1 if one is broken. Pauses are of streams that moved, between two events at most. Kills follow each other
faster than a text ends, so the server gets --retries; the table has the most moves of one text.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from reliability_parts import MB, about
from replica_processes import Footprint, Replicas, settle
from sdk_streams import MODEL, Ask, Clients, Told, asks
from served import HANGS_S, Server, quantile
from verdicts import HEAD, Report

from tokenwright import LLM

CLIENTS = 8
TAKING = 2  # replicas, at least, when one is killed
WARM = 10  # kills before open files, threads and memory are counted
SPARE = 4  # files and threads of helpers that start on demand: two files for the second of two grammar workers
AGAIN_S = 0.2  # before a client asks again after an error
SHOWN = 5  # wrong streams, and lines of the server
RAY = {  # as tests/cluster/test_ray.py: without it Ray ends what takes long to start on a busy machine
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_OVERRIDE_RESOURCES": json.dumps({"CPU": 64}),  # Ray counts them, and gives out no more
    "RAY_worker_niceness": "0",
    "RAY_agent_register_timeout_ms": f"{HANGS_S * 1000:.0f}",
}


@dataclass
class Load:
    """Clients that ask again and again in a `with`. right: what each request says. last: an error ends its client.

    errors, changed: what was wrong. pauses: of streams that moved. ended: when each client did.
    """

    url: str
    asked: Sequence[Ask]
    right: Sequence[Told]
    last: bool = False
    streams: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    most: int = 0
    ended: list[float] = field(default_factory=list)
    hang: int = 0

    def __enter__(self) -> Load:
        self._done = threading.Event()
        self._lock = threading.Lock()
        self.threads = [threading.Thread(target=self._client, args=(at,), daemon=True) for at in range(CLIENTS)]
        for one in self.threads:
            one.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._done.set()
        self.hang = self.join(2 * HANGS_S)

    def join(self, within_s: float) -> int:
        """Wait for the clients; how many hang."""
        until = time.monotonic() + within_s
        for one in self.threads:
            one.join(max(0.0, until - time.monotonic()))
        return sum(one.is_alive() for one in self.threads)

    def _client(self, number: int) -> None:
        draws = random.Random(number)
        with Clients(self.url, HANGS_S) as clients:
            while not self._done.is_set():
                at = draws.randrange(len(self.asked))
                try:
                    told = clients.told(self.asked[at])
                except Exception as error:
                    with self._lock:
                        self.errors.append(f"{self.asked[at].name}: {type(error).__name__}: {error}")
                        if self.last:
                            self.ended.append(time.monotonic())
                            return
                    time.sleep(AGAIN_S)
                else:
                    with self._lock:
                        self._take(self.asked[at], told, self.right[at])

    def _take(self, ask: Ask, told: Told, right: Told) -> None:
        self.streams[ask.kind] += 1
        if told.moves:
            self.pauses.append(told.pause_s)
            self.most = max(self.most, told.moves)
        if told.said != right.said:
            self.changed.append(f"{ask.name}, {told.moves} moves: {told.said!r}, not {right.said!r}")

    def findings(self, report: Report) -> None:
        """What holds of all of them."""
        count = sum(self.streams.values())
        kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(self.streams.items()))
        report.figure("streams, with all that they said", f"{count:,} ({kinds})")
        report.invariant("clients that hang", not self.hang, self.hang, "0")
        report.invariant("errors", not self.errors, len(self.errors), "0")
        report.invariant("changed streams", not self.changed, len(self.changed), "0")
        for wrong in (*self.errors[:SHOWN], *self.changed[:SHOWN]):
            print(f"{report.part}: {wrong}", file=sys.stderr)
        report.figure("streams that moved, where the SDK tells", f"{len(self.pauses):,}; one {self.most} times")
        pauses = [quantile(self.pauses, share) for share in (0.5, 0.99, 1)]
        report.figure("their pauses: p50, p99, the longest", "{:.2f}, {:.2f}, {:.2f} s".format(*pauses))


@dataclass
class Kills:
    """A server, what it says undisturbed, and what becomes of it. hangs_s: whatever takes longer never happens."""

    server: Server
    replicas: Replicas
    wanted: int
    hangs_s: float
    asked: list[Ask] = field(default_factory=asks)
    right: list[Told] = field(default_factory=list)

    @property
    def url(self) -> str:
        return "http://{}:{}".format(*self.server.address)

    def load(self, *, last: bool = False) -> Load:
        return Load(self.url, self.asked, self.right, last)

    def whole(self) -> bool:
        """Wait until all replicas take texts and nothing runs."""
        return settle(lambda: len(self.replicas.taking()) == self.wanted and self.server.at_rest(), self.hangs_s)

    def undisturbed(self, report: Report) -> None:
        """Ask everything once, and compare plain texts with an engine in this process."""
        with Clients(self.url, HANGS_S) as clients:
            self.right = [clients.told(ask) for ask in self.asked]
        plain = [(ask, told) for ask, told in zip(self.asked, self.right, strict=True) if ask.form == "plain"]
        with LLM(MODEL, kv_memory="64MB") as llm:
            other = [ask.name for ask, told in plain if ask.alone(llm) != told.said[0]]
        report.figure("requests", len(self.asked))
        report.invariant("plain texts other than an engine's here", not other, f"{len(other)} of {len(plain)}", "0")

    def kills(self, report: Report, kills: int) -> None:
        self.whole()
        with self.load() as load:
            texts = self._kill(load, min(WARM, kills))
        back = self.whole()
        before = self.replicas.footprint()
        began = time.monotonic()
        with load:
            texts += self._kill(load, kills)
        took = time.monotonic() - began
        report.invariant("replicas killed", self.replicas.kills == kills, self.replicas.kills, f"{kills}")
        report.figure("of these, with texts; seconds for one", f"{texts:,}; {took / max(1, kills - WARM):.2f} s")
        load.findings(report)
        report.invariant("streams that moved", bool(load.pauses), len(load.pauses), "> 0")
        back = back and self.whole()
        report.invariant("at the end all take texts, nothing runs", back, len(self.replicas.taking()))
        same(report, before, self.replicas.footprint())

    def _kill(self, load: Load, until: int) -> int:
        """Kill until so many were killed in all; how many of these had texts."""
        draws, met, last = random.Random(until), 0, time.monotonic()
        while self.replicas.kills < until and time.monotonic() - last < self.hangs_s:
            texts = self.replicas.kill(draws, TAKING)
            if texts is None:
                time.sleep(0.02)
            else:
                last, met = time.monotonic(), met + bool(texts)
            progress(f"{self.replicas.kills} of {until} killed", load)
        return met

    def roll(self, report: Report) -> None:
        """Replace all replicas."""
        self.whole()
        before, began = self.replicas.taking(), time.monotonic()
        with self.load() as load:
            self.server.process.send_signal(signal.SIGHUP)

            def replaced() -> bool:
                progress("rolling", load)
                return len(now := self.replicas.taking()) == self.wanted and not now & before

            done = settle(replaced, self.hangs_s)
            took = time.monotonic() - began
        report.invariant("all replicas replaced", done, f"after {took:.1f} s" if done else "no")
        load.findings(report)

    def ingress(self, report: Report) -> None:
        """Kill the server alone."""
        self.whole()
        with self.load(last=True) as load:
            settle(lambda: self.server.metrics()["requests_running"] >= CLIENTS, self.hangs_s)
            self.replicas.footprint()
            self.server.process.kill()
            began = time.monotonic()
            load.join(HANGS_S)
        early = sum(at < began for at in load.ended)
        all_told = len(load.errors) == CLIENTS and not early
        report.invariant("clients with an error", all_told, len(load.errors), f"{CLIENTS}")
        report.invariant("clients that hang", not load.hang, load.hang, "0")
        report.invariant("changed streams", not load.changed, len(load.changed), "0")
        report.target("until the last client has its error", max(load.ended, default=began) - began, 5, "s")
        kinds = Counter(error.split(": ")[1] for error in load.errors)
        report.figure("errors of the SDKs", ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items())))
        last: list[str] = []

        def ended() -> bool:
            running, _ = self.replicas.left()
            last[:] = running or last
            return not running

        settle(ended, HANGS_S)
        report.figure("until the last process ended", f"{time.monotonic() - began:.1f} s ({', '.join(last) or 'all'})")
        running, segments = self.replicas.left()
        report.invariant("processes left", not running, f"{len(running)} of {len(self.replicas.seen)}", "0")
        report.invariant("shared memory left", not segments, f"{segments or 0} of {len(self.replicas.segments)}", "0")


def same(report: Report, before: Footprint, after: Footprint) -> None:
    """The server holds what it held before."""
    for what in ("files", "threads"):
        then, now = (getattr(one, what) for one in (before, after))
        report.invariant(f"{what} of the server, before and after", now <= then + SPARE, f"{then}, {now}")
    report.figure("processes, before and after", f"{before.processes}, {after.processes}")
    report.target("growth of memory (RssAnon + swap)", (after.memory - before.memory) / MB, 5, "MB")


def progress(what: str, load: Load, every_s: float = 1.0) -> None:
    """A line on stderr, once in a while."""
    now = time.monotonic()
    if now - progress.last >= every_s:  # type: ignore[attr-defined]
        progress.last = now  # type: ignore[attr-defined]
        told = f"{sum(load.streams.values())} streams, {len(load.pauses)} moved"
        print(f"{what}; {told}, {len(load.errors)} errors, {len(load.changed)} changed", file=sys.stderr, flush=True)


progress.last = 0.0  # type: ignore[attr-defined]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--retries", type=int, default=100, help="deaths with one text before it fails (the server's)")
    parser.add_argument("--ray", action="store_true", help="replicas on a Ray cluster that the server starts")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks/kills.json"))
    arguments = parser.parse_args()
    if arguments.replicas < TAKING or arguments.kills < 1:
        parser.error(f"--replicas from {TAKING}, --kills from 1")
    return arguments


def main() -> int:
    arguments = parse()
    command = [sys.executable, "-m", "tokenwright", "serve", MODEL, "--port", "0", "--timings", "--kv-memory", "192MB"]
    command += ["--stored-responses", "0"]  # they would fill memory
    command += ["--replicas", f"{arguments.replicas}", "--retries", f"{arguments.retries}"]
    if arguments.ray:
        os.environ.update(RAY)
        command += ["--ray-address", "local", "--threads", "1"]
    where = "a local Ray cluster" if arguments.ray else "own processes"
    print(f"{arguments.replicas} replicas, {where}; --retries {arguments.retries}; {about()}\n{HEAD}", flush=True)
    reports = [Report(name) for name in ("undisturbed", "kills", "roll", "ingress")]
    with Server(MODEL, {}, {}, command=command) as server:
        one = Kills(server, Replicas(server), arguments.replicas, 3 * HANGS_S)
        parts = one.undisturbed, lambda report: one.kills(report, arguments.kills), one.roll, one.ingress
        for part, report in zip(parts, reports, strict=True):
            part(report)
            print(report.table(), flush=True)
        broken = [finding for report in reports for finding in report.broken]
        if broken:
            print("\n".join(server.said[-SHOWN:]), file=sys.stderr)
    print(f"at the end: {about()}")
    findings = [one for report in reports for one in report.record()]
    record = {"about": about(), "where": where, "kills": arguments.kills, "findings": findings}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for finding in broken:
        print(f"BROKEN: {finding.part}: {finding.what}: {finding.figure}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
