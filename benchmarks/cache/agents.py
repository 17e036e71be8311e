"""Replays recorded sessions of coding agents over the prefix cache in simulated time, without a model.

    python -m benchmarks.cache.agents TRACE [--agents 6] [--memory 150k 300k] [--disk 0 3m] [--sessions 60]
    python -m benchmarks.cache.agents TRACE --guide

TRACE has a line of JSON for each session (gzip): its requests with the lengths of prompt and answer, the pause before
each, and the prompt as runs of block numbers; equal numbers in a session are equal prefixes. The page pool, the prefix
index and the slots of the disk tier are the engine's own. Prompts are computed one after another at
--prefill tokens/s, answers are written beside each other at --decode tokens/s, and pages are read at --disk-rate
bytes/s if that is faster than computing them. A request waits until memory has room for its prompt and answer. Memory
and disk are in tokens, so one table holds for all formats of the cache; --kv-bytes says how many bytes a token takes.

Found is the share of prompt tokens that are not computed. The others are new, edited (behind the first difference from
the prompt before, which nothing could have kept), or lost: an endless cache would have found them. A prompt longer than
memory is left out and counted. Answers are not looked for in the next prompt, and sessions share no prefix.
--guide searches the least memory, without and with a disk, that finds 95 % of what an endless cache finds.
"""

from __future__ import annotations

import argparse
import gzip
import heapq
import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import count
from pathlib import Path
from statistics import quantiles
from typing import Any

from tokenwright.cache.page_file import FileSlots
from tokenwright.engine import Group, PagePool, PrefixIndex
from tokenwright.engine.layer_group import PageTables
from tokenwright.engine.prefix_index import PrefixHashes
from tokenwright.units import read_tokens

BLOCK = 64  # tokens, which stand for one in a page
PAGE = 4  # blocks
GOAL = 0.95  # of what an endless cache finds
GUIDE_AGENTS = (1, 2, 6, 20)
SIZES = [round(25 * 1.25**step) * 10_000 for step in range(21)]  # tokens that --guide tries


@dataclass(frozen=True, slots=True)
class Ask:
    """A request. blocks: of its prompt. hashes: of its full pages."""

    think_s: float
    tokens: int
    answer: int
    blocks: tuple[int, ...]
    hashes: tuple[bytes, ...]

    @property
    def length(self) -> int:
        """Blocks of the prompt and the answer."""
        return -(-(max(self.tokens, len(self.blocks) * BLOCK) + self.answer) // BLOCK)


def read_sessions(trace: Path, most: int) -> list[list[Ask]]:
    """The first sessions of a trace. A subagent's requests stand where it was started."""
    with gzip.open(trace, "rt", encoding="utf-8") as lines:
        found = [json.loads(line) for line, _ in zip(lines, range(most), strict=False)]
    return [list(_asks(str(one["id"]).encode(), one["requests"])) for one in found]


def _asks(session: bytes, requests: Sequence[dict[str, Any]]) -> Iterator[Ask]:
    for one in requests:
        if one["type"] == "subagent":
            yield from _asks(session, one["requests"])
            continue
        blocks = tuple(block for first, length in one["runs"] for block in range(first, first + length))
        hashes = tuple(sha256(session + block.to_bytes(8, "little")).digest() for block in blocks[PAGE - 1 :: PAGE])
        yield Ask(one.get("think", 0.0), one["in"], one["out"], blocks, hashes)


@dataclass(frozen=True, slots=True)
class Machine:
    """memory, disk: tokens. prefill, decode: tokens/s. disk_rate: bytes/s. kv_bytes: of a token."""

    memory: int
    disk: int
    prefill: float
    decode: float
    disk_rate: float
    kv_bytes: int


class SimulatedDisk:
    """The slots of a disk tier, whose reading takes simulated time. seconds: since it was last asked for them."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._slots = FileSlots()
        self.seconds = 0.0

    def held(self, group: int, hashes: Sequence[bytes]) -> list[bool]:  # noqa: ARG002  (of the protocol)
        return [one in self._slots.pages for one in hashes]

    def wanted(self, group: int, hashes: Sequence[bytes]) -> list[int]:  # noqa: ARG002
        return [index for index, one in enumerate(hashes) if one not in self._slots.pages]

    def write(self, group: int, hashes: Sequence[bytes], contents: Any) -> None:  # noqa: ARG002
        for one in hashes:
            self._slots.take(one, grow=(self._slots.count + 1) * PAGE * BLOCK <= self._machine.disk)

    def worth_reading(self, tokens: int, nbytes: int) -> bool:
        return nbytes / self._machine.disk_rate < tokens * BLOCK / self._machine.prefill

    def read(self, group: int, hashes: Sequence[bytes], memory: Any, pages: Sequence[int]) -> list[int]:  # noqa: ARG002
        self.seconds += len(hashes) * PAGE * BLOCK * self._machine.kv_bytes / self._machine.disk_rate
        return list(range(len(hashes)))

    def used(self, group: int, hashes: Sequence[bytes]) -> None:  # noqa: ARG002
        self._slots.touch(hashes)


@dataclass(slots=True)
class Tally:
    """Prompt tokens by what became of them, and the seconds to the first tokens."""

    prompt: int = 0
    found: int = 0
    read: int = 0  # of the found ones, from the disk
    ideal: int = 0  # that an endless cache would have found
    new: int = 0
    edited: int = 0
    lost: int = 0
    left_out: int = 0  # requests longer than memory
    first_s: list[float] = field(default_factory=list)

    @property
    def share(self) -> float:
        return self.found / max(1, self.prompt)

    @property
    def of_ideal(self) -> float:
        return self.found / max(1, self.ideal)


class Replay:
    """Some agents, each with one session after another, on one machine."""

    def __init__(self, sessions: Sequence[Sequence[Ask]], agents: int, machine: Machine) -> None:
        self.machine = machine
        self.tally = Tally()
        pages = machine.memory // (PAGE * BLOCK)
        self.pool = PagePool([Group(pages, page_bytes=PAGE * BLOCK * machine.kv_bytes)], PAGE)
        self.disk = SimulatedDisk(machine)
        self.prefixes = PrefixIndex(self.pool, tier=self.disk if machine.disk else None)
        self._left = deque(sessions)
        self._events: list[tuple[float, int, Any]] = []  # (time, order, what is called)
        self._order = count()
        self._waiting: deque[tuple[float, Ask, deque[Ask], Sequence[bytes]]] = deque()
        self._busy_until = 0.0  # when the last prompt is computed
        self._seen: set[bytes] = set()
        for _ in range(agents):
            self._next_session(0.0)

    def run(self) -> Tally:
        while self._events:
            now, _, call = heapq.heappop(self._events)
            call(now)
            self._admit(now)
        assert self.pool.available == self.pool.pages, "every page is free or cached"
        assert not self._waiting, "every request is served"
        return self.tally

    def _at(self, when: float, call: Any) -> None:
        heapq.heappush(self._events, (when, next(self._order), call))

    def _next_session(self, now: float) -> None:
        if self._left:
            self._next_ask(now, deque(self._left.popleft()), [])

    def _next_ask(self, now: float, session: deque[Ask], before: Sequence[bytes]) -> None:
        """Let an agent send the next request of its session. before: the hashes of its last prompt."""
        while session and session[0].length > self.pool.pages * PAGE:
            session.popleft()
            self.tally.left_out += 1
        if not session:
            self._next_session(now)
            return
        ask = session.popleft()
        self._at(now + ask.think_s, lambda at: self._waiting.append((at, ask, session, before)))

    def _admit(self, now: float) -> None:
        while self._waiting and now >= self._busy_until and self._begin(now, *self._waiting[0]):
            self._waiting.popleft()

    def _begin(self, now: float, asked: float, ask: Ask, session: deque[Ask], before: Sequence[bytes]) -> bool:
        """Compute a prompt; False: a text that is being written has to make room first."""
        hashes = PrefixHashes(self.prefixes.hashes().root, PAGE, list(ask.hashes))
        length = len(ask.blocks)
        cached = self.prefixes.match_prefix(hashes, ask.blocks, length, tails=False)
        if not self.prefixes.can_admit(hashes, ask.blocks, cached, [-(-ask.length // PAGE)]):
            return False
        self.disk.seconds, restored, done = 0.0, 0, self.prefixes.tier is None
        while not done:
            more, done = self.prefixes.restore(hashes, ask.blocks, length)
            restored += more
        found = cached + restored
        tables = self.pool.tables()
        self.prefixes.attach_prefix(tables, hashes, ask.blocks, found)
        assert self.pool.reserve(tables, found, ask.length, ask.length), "there is room"
        self.prefixes.cache_pages(tables, hashes, ask.blocks, found, length)
        self.prefixes.use(hashes)
        self._count(ask, found, restored, before)
        first = now + self.disk.seconds + (ask.tokens - found * BLOCK) / self.machine.prefill
        self.tally.first_s.append(first - asked)
        self._busy_until = first
        self._at(first, lambda _: None)  # the next prompt begins
        self._at(first + ask.answer / self.machine.decode, lambda at: self._end(at, tables, session, ask.hashes))
        return True

    def _end(self, now: float, tables: PageTables, session: deque[Ask], before: Sequence[bytes]) -> None:
        self.pool.release(tables)
        self._next_ask(now, session, before)

    def _count(self, ask: Ask, found: int, restored: int, before: Sequence[bytes]) -> None:
        tally, pages = self.tally, len(ask.hashes)
        known = next((n for n, one in enumerate(ask.hashes) if one not in self._seen), pages)
        self._seen.update(ask.hashes)
        same = next((n for n, (a, b) in enumerate(zip(ask.hashes, before, strict=False)) if a != b), len(before))
        ideal, edited = known * PAGE, max(0, min(pages, len(before)) - max(same, known)) * PAGE
        tally.prompt += ask.tokens
        tally.found += found * BLOCK
        tally.read += restored * BLOCK
        tally.ideal += ideal * BLOCK
        tally.lost += (ideal - found) * BLOCK
        tally.edited += edited * BLOCK
        tally.new += ask.tokens - (ideal + edited) * BLOCK


def shown(agents: int, machine: Machine, tally: Tally) -> str:
    cut = quantiles(tally.first_s, n=20) if len(tally.first_s) > 1 else tally.first_s * 19
    gib = machine.kv_bytes / 2**30
    shares = "".join(f"{100 * one / tally.prompt:8.1f}" for one in (tally.found, tally.read, tally.new, tally.edited))
    lost = f"{100 * tally.lost / tally.prompt:8.1f}{100 * tally.of_ideal:10.1f}"
    room = f"{machine.memory:10,}{machine.memory * gib:7.1f}{machine.disk:12,}{machine.disk * gib:8.1f}"
    return f"{agents:6}{room}{shares}{lost}{cut[9]:10.1f}{cut[18]:9.1f}{tally.left_out:8}"


HEAD = (
    f"{'agents':>6}{'memory':>10}{'GiB':>7}{'disk':>12}{'GiB':>8}{'found %':>8}{'read':>8}{'new':>8}{'edited':>8}"
    f"{'lost':>8}{'of ideal':>10}{'TTFT p50':>10}{'p95, s':>9}{'too long':>9}"
)


def least(sessions: Sequence[Sequence[Ask]], agents: int, machine: Machine, name: str) -> tuple[Machine, Tally] | None:
    """The least `memory` or `disk` of SIZES that finds GOAL of what an endless cache finds; None: none does."""
    best, low, high = None, 0, len(SIZES)
    while low < high:
        middle = (low + high) // 2
        tried = replace(machine, **{name: SIZES[middle]})
        tally = Replay(sessions, agents, tried).run()
        if tally.of_ideal >= GOAL:
            best, high = (tried, tally), middle
        else:
            low = middle + 1
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--agents", type=int, nargs="+", default=[6])
    parser.add_argument("--memory", nargs="+", default=["150k", "300k"])
    parser.add_argument("--disk", nargs="+", default=["0", "3m"])
    parser.add_argument("--sessions", type=int, default=60)
    parser.add_argument("--guide", action="store_true")
    parser.add_argument("--prefill", type=float, default=500.0)
    parser.add_argument("--decode", type=float, default=30.0)
    parser.add_argument("--disk-rate", type=float, default=1e9)
    parser.add_argument("--kv-bytes", type=int, default=131072, help="128 KiB: 32 layers, 8 KV heads of 128, bfloat16")
    asked = parser.parse_args()
    sessions = read_sessions(asked.trace, asked.sessions)
    speeds = asked.prefill, asked.decode, asked.disk_rate, asked.kv_bytes
    print(HEAD, flush=True)
    if asked.guide:
        for agents in GUIDE_AGENTS:
            for name in ("memory", "disk"):
                if found := least(sessions, agents, Machine(SIZES[0], 0, *speeds), name):
                    print(shown(agents, *found), flush=True)
        return
    for agents in asked.agents:
        for memory in asked.memory:
            for disk in asked.disk:
                machine = Machine(
                    read_tokens(memory, "memory"), 0 if disk == "0" else read_tokens(disk, "disk"), *speeds
                )
                print(shown(agents, machine, Replay(sessions, agents, machine).run()), flush=True)


if __name__ == "__main__":
    main()
