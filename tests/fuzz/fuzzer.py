"""Sends drawn requests to a server and watches it; finds the one request that breaks it, and makes that small.

The oracle: /health answers within a second all the time, no answer is a 5xx (but for the 503 and 504 of a limit), each
request gets an answer, no exception reaches the log, memory, files and threads stay as they are, and SIGTERM ends the
server. Whatever looks like a violation is repeated alone, request by request, before it counts.
"""

import asyncio
import json
import os
import re
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from tests.fuzz.operations import SLEEP, Asked, frames, operations_of
from tests.fuzz.served import KEY, SECRET
from tests.fuzz.values import Draw
from tests.fuzz.watch import HUNG_S, ROOT, Target, stopwatch

AT_ONCE = 6  # clients
ANSWER_S = 40.0  # a request is answered within this: the server's own limit of one is 8 s
LOOK_S = 0.2  # between two looks at the clock
REST_EVERY_S = 15.0  # between two looks at the gauges
SUSPECTS_S = 3.0  # a request that ended so long ago may still be worked on
SHRINK_S = 40.0
SENT_AGAIN = 240  # requests in all that show whether a gauge grows with them
GROWTH = {"memory": 48 * 2**20, "files": 40, "threads": 40}  # of a server at rest, from the second look on
LIMITS = (503, 504)
USUAL = ("Host", "Content-Type", "Connection", "Authorization")  # headers that a small request keeps


@dataclass
class Violation:
    """What a server did wrong, the smallest request that shows it (or several), and the file for --replay."""

    kind: str
    what: str
    asked: list[Asked]
    file: Path

    def __str__(self) -> str:
        one = self.asked[0]
        shown = f"{len(self.asked)} request(s), the first: {one.method} {one.target[:200]} {one.body[:600]!r}"
        return f"{self.kind}: {self.what[:1500]}\n  {shown}\n  python -m tests.fuzz --replay {self.file}"


@dataclass(eq=False)
class Sent:
    """A request under way or done. status: 0: none yet; -1: the server closed without one; -2: none came in time."""

    asked: Asked
    ended: float = 0.0
    status: int = 0
    reply: bytes = b""

    @property
    def wrong(self) -> str:
        """What kind of violation the answer is; "": none."""
        failed = self.status >= 500 and self.status not in LIMITS
        return "no answer" if self.status == -2 else f"status {self.status}" if failed else ""

    async def send(self, address: tuple[str, int]) -> None:
        """Send the request as it says, and read its answer until the server closes or the client leaves."""
        asked, spent = self.asked, stopwatch([os.getpid()])
        with suppress(OSError, EOFError, TimeoutError):
            reader, writer = await asyncio.open_connection(*address)
            reading = asyncio.create_task(self._read(reader, asked.replica, writer))
            try:
                with suppress(OSError, TimeoutError):  # the answer may come before the server has read all
                    for part in () if asked.replica else asked.parts():
                        writer.write(part)
                        await asyncio.wait_for(writer.drain(), ANSWER_S)
                        await asyncio.sleep(asked.pause_s if part is SLEEP else 0)
                limit = ANSWER_S - spent() if asked.leave_s is None else asked.leave_s
                done, _ = await asyncio.wait([reading], timeout=limit)
                self.status = -2 if not done and asked.leave_s is None else self.status
            finally:
                reading.cancel()
                writer.transport.abort()
        self.ended = time.monotonic()

    async def _read(self, reader: asyncio.StreamReader, replica: bool, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, EOFError):
            if replica:
                from tokenwright.cluster.served_replica import CHALLENGE, proof_of

                writer.write(proof_of(SECRET, await reader.readexactly(CHALLENGE)) + b"".join(self.asked.parts()))
            while part := await reader.read(2**16):
                self.reply += part if len(self.reply) < 2**17 else b""
        found = re.match(rb"HTTP/1\.1 (?!100)(\d+)|(?:HTTP/1\.1 100.*?\r\n\r\n)HTTP/1\.1 (\d+)", self.reply, re.DOTALL)
        self.status = int(found[1] or found[2]) if found else -1


@dataclass
class Fuzzer:
    """One run against one server. without: a pattern of field names that get no hard values.

    looks: the gauges at rest. unconfirmed: signs that showed once and not again.
    """

    kind: str
    folder: Path
    seed: str
    fault: str = ""
    without: str = ""
    out: Path = ROOT / "build" / "fuzz"
    statuses: Counter[int] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)
    looks: list[dict[str, int]] = field(default_factory=list)
    unconfirmed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.operations = operations_of(self.kind)
        self.target = Target(self.kind, self.folder, self.fault)
        self.recent: deque[Sent] = deque(maxlen=SENT_AGAIN)
        self.open: dict[Sent, asyncio.Task[None]] = {}
        self.bad: list[Sent] = []
        self.read = 0  # lines of the log that were looked at

    def run(self, seconds: float, first: bool = False) -> list[Violation]:
        """Send requests for so many seconds of a core that is free; first: or until a violation. Ends the server."""
        try:
            asyncio.run(self._run(seconds, first))
        finally:
            self.target.end(0.0)
        return self.violations

    async def _run(self, seconds: float, first: bool) -> None:
        spent, rest = stopwatch([os.getpid(), self.target.process.pid]), REST_EVERY_S / 3
        while (now := spent()) < seconds and not (first and self.violations):
            if now > rest:
                await self._rest()
                rest = spent() + REST_EVERY_S
            until = time.monotonic() + LOOK_S  # reading the clock takes as long as a request
            while time.monotonic() < until and not self._signs():
                while len(self.open) < AT_ONCE:
                    self._start()
                await asyncio.wait(self.open.values(), timeout=0.05, return_when=asyncio.FIRST_COMPLETED)
            if self._signs():
                await self._look_into()
        await self._rest()
        asked = [one.asked for one in self.recent]
        if not (first and self.violations) and not await asyncio.to_thread(self.target.end):
            await asyncio.to_thread(self.target.restart)
            await self._report("stop", "SIGTERM does not end the server", await self._narrowed(asked, self._stays))

    def _start(self) -> None:
        draw = Draw(f"{self.seed}:{self.kind}:{self.statuses.total() + len(self.open)}")
        keys = (KEY,) if self.kind == "keyed" else ()
        sent = Sent(frames(draw) if self.kind == "replica" else self.operations.ask(draw, keys, self.without))
        self.open[sent] = asyncio.create_task(sent.send(self.target.address))
        self.open[sent].add_done_callback(lambda _: self._done(sent))

    def _done(self, sent: Sent) -> None:
        del self.open[sent]
        self.recent.append(sent)
        self.statuses[sent.status] += 1
        self.bad += [sent] if sent.wrong else []
        found = re.findall(rb'"(?:id|identity|run|batch)": ?"([\w.:-]{1,99})"', sent.reply[:5000])
        self.operations.ids = [*self.operations.ids, *(one.decode() for one in found[:2])][-40:]

    def _signs(self) -> list[tuple[str, str]]:
        """The kinds of what looks wrong, and what it looks like."""
        target, traces = self.target, self.target.traces(self.read)
        late = [("late", f"/health after {seconds:.2f} s: {state}") for _, seconds, state in list(target.late)[:1]]
        crash = [] if target.alive else [("crash", "\n".join(target.log[-30:]))]
        bad = [(one.wrong, one.reply[-600:].decode(errors="replace")) for one in self.bad[:1]]
        return crash + late + [("log", one) for one in traces[:1]] + bad

    async def _look_into(self) -> None:
        """Find out which request is behind the signs: repeat each suspect alone, then all of them at once."""
        now, [(kind, what), *_] = time.monotonic(), self._signs()
        await asyncio.sleep(0.2)
        ended = [one for one in reversed(self.recent) if one.ended > now - SUSPECTS_S]
        suspects = [one.asked for one in dict.fromkeys([*self.bad, *self.open, *ended])]
        for task in list(self.open.values()):
            task.cancel()
        await asyncio.gather(*self.open.values(), return_exceptions=True)
        self.bad.clear()
        known = {(one.kind, path_of(asked)) for one in self.violations for asked in one.asked}
        if not known & {(kind, path_of(one)) for one in suspects}:
            for asked in suspects:
                if (found := await self.alone([asked]))[0]:
                    await self._report(*found, [await self._small(asked, found[0])])
                    break
            else:
                if (await self.alone(suspects))[0] == kind or kind not in ("late", "no answer"):
                    await self._report(kind, what, suspects)
                else:
                    self.unconfirmed.append(f"{kind}: {what[:200]}")
        await self._healthy(HUNG_S)

    async def _report(self, kind: str, what: str, asked: list[Asked]) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        file = self.out / f"{self.kind}-{self.seed}-{self.fault}{len(self.violations)}.json"
        about = {"kind": self.kind, "fault": self.fault, "asked": [one.dumped() for one in asked]}
        file.write_text(json.dumps(about), encoding="utf-8")
        self.violations.append(Violation(kind, what, asked, file))
        print(self.violations[-1], flush=True)

    async def _healthy(self, within_s: float) -> None:
        """Wait until the server is well again, or start it again."""
        if not await self.target.settled(within_s):
            self.looks.clear()
        self.target.late.clear()
        self.read = len(self.target.log)

    async def alone(self, asked: Sequence[Asked]) -> tuple[str, str]:
        """Send some requests to a server that is well and nothing else to do; what is wrong, and how it looks."""
        await self._healthy(2.0)
        target, sent = self.target, [Sent(one) for one in asked]
        tasks = [asyncio.create_task(one.send(target.address)) for one in sent]
        stays, count, until = 1.5 if any(one.leave_s is not None for one in asked) else 0.1, 0, 0.0
        while target.alive and not target.late and not (until and target.probes > count and time.monotonic() > until):
            await asyncio.sleep(0.02)
            if not until and all(task.done() for task in tasks):
                count, until = target.probes + 2, time.monotonic() + stays
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.bad = [one for one in sent if one.wrong]
        signs = self._signs()
        self.bad = []
        return signs[0] if signs else ("", "")

    async def _small(self, asked: Asked, kind: str) -> Asked:
        """The smallest request that is found in a while, and still shows the violation."""
        until, tried = time.monotonic() + SHRINK_S, reductions(asked)
        while (one := next(tried, None)) is not None and time.monotonic() < until:
            if (await self.alone([one]))[0] == kind:
                asked, tried = one, reductions(one)
        return asked

    async def _rest(self) -> None:
        """Wait until all requests are answered, and look at the gauges."""
        if self.open:
            await asyncio.wait(self.open.values(), timeout=2 * ANSWER_S)
        if self._signs():
            await self._look_into()
            return
        self.looks.append(await asyncio.to_thread(self.target.gauges))
        grown = {name: self.looks[-1][name] - self.looks[min(1, len(self.looks) - 1)][name] for name in GROWTH}
        for name in (one for one in GROWTH if grown[one] > GROWTH[one]):
            grows = partial(self._grows, name)
            asked = await self._narrowed([one.asked for one in self.recent], grows)
            if await grows(asked):
                await self._report(name, f"the server at rest has {grown[name]:,} more {name}", asked)
            else:
                self.unconfirmed.append(f"{name}: {grown[name]:,} more")
            self.looks.clear()
            return

    async def _grows(self, name: str, asked: Sequence[Asked]) -> bool:
        """Whether a gauge grows with some requests, sent again twice: a worker of 21 MB that starts is growth once."""
        for _ in range(2):
            before = (await asyncio.to_thread(self.target.gauges))[name]
            for at in range(0, SENT_AGAIN // 2, AT_ONCE):
                some = (Sent(asked[(at + n) % len(asked)]).send(self.target.address) for n in range(AT_ONCE))
                await asyncio.gather(*some)
            if (await asyncio.to_thread(self.target.gauges))[name] - before <= GROWTH[name] / 4:
                return False
        return True

    async def _stays(self, asked: Sequence[Asked]) -> bool:
        """Whether SIGTERM does not end the server after some requests; it is started again."""
        await asyncio.gather(*(Sent(one).send(self.target.address) for one in asked))
        ended = await asyncio.to_thread(self.target.end)
        await asyncio.to_thread(self.target.restart)
        return not ended

    async def _narrowed(self, asked: list[Asked], shows: Callable[[list[Asked]], Awaitable[bool]]) -> list[Asked]:
        """Halve a list of requests down to the one behind what `shows` finds."""
        while len(asked) > 1:
            first = asked[: len(asked) // 2]
            asked = first if await shows(first) else asked[len(first) :]
        return asked

    def summary(self) -> str:
        """What was sent and seen, in a line."""
        sent, memory = sum(self.statuses.values()), [round(one["memory"] / 2**20) for one in self.looks]
        well = f"/health at most {self.target.worst:.2f} s in {self.target.probes:,}, MiB at rest {memory}"
        return f"{self.kind}: {sent:,} requests {dict(self.statuses)}; {well}; unconfirmed {self.unconfirmed}"


def path_of(asked: Asked) -> str:
    return asked.target.partition("?")[0]


def reductions(asked: Asked) -> Iterator[Asked]:
    """Smaller requests: sent plainly, without some headers, and with parts of the body left out."""
    usual = tuple(one for one in asked.headers if one[0] in USUAL)
    plain = replace(Asked(asked.method, asked.target, usual, asked.body), replica=asked.replica, leave_s=asked.leave_s)
    tries = (replace(plain, leave_s=None), plain, replace(plain, headers=asked.headers), replace(asked, headers=usual))
    yield from (one for one in tries if one != asked)
    try:
        for value in smaller(json.loads(asked.body)):
            yield replace(asked, body=json.dumps(value).encode())
    except (ValueError, RecursionError):
        half = len(asked.body) // 2
        yield from (replace(asked, body=one) for one in (asked.body[:half], asked.body[half:]) if half)


def smaller(value: Any) -> Iterator[Any]:
    """Values with fewer parts, those that leave out most first."""
    if isinstance(value, str) and len(value) > 1:
        yield from (value[: len(value) // 2], value[:-1])
    if not isinstance(value, dict | list) or not value:
        return
    keys, copy = list(value) if isinstance(value, dict) else list(range(len(value))), type(value)
    for size in dict.fromkeys(max(1, len(keys) // part) for part in (2, 4, 8, len(keys))):
        for at in range(0, len(keys), size) if len(keys) // size <= 40 else ():
            left = keys[:at] + keys[at + size :]
            yield {one: value[one] for one in left} if copy is dict else [value[one] for one in left]
    for key in keys[:60]:
        for one in smaller(value[key]):
            changed = copy(value)
            changed[key] = one
            yield changed


def replayed(file: Path, folder: Path) -> tuple[str, str]:
    """Send the requests of a violation's file to a server, and nothing else; what is wrong then."""
    about = json.loads(file.read_text(encoding="utf-8"))
    fuzzer = Fuzzer(about["kind"], folder, "replay", about["fault"])
    try:
        return asyncio.run(fuzzer.alone([Asked.loaded(one) for one in about["asked"]]))
    finally:
        fuzzer.target.end(0.0)
