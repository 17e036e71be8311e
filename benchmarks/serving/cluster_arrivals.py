"""The arrivals at a simulated cluster: requests of traces, and chats at random times.

One simulated token stands for `scale` tokens, in prompts and in answers. A block of a trace is its hash, as often as it
has simulated tokens; so is each part of a chat's text.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import chain, count, repeat
from math import log
from pathlib import Path

from tokenwright.engine import Sequence as Text

BLOCK = 512  # tokens of a block of the traces
MOST = 1 << 30  # tokens that a request allows: the router does not know how long an answer will be
WRITING = 5.0  # seconds that an answer takes, about
SPREAD = 0.8  # of the lengths of turns: the deviation of their logarithms
_OWN = count(1 << 31)  # tokens of answers, which no trace has
_SAID = count(1 << 30)  # tokens of chats


@dataclass(frozen=True)
class Arrival:
    """at: seconds from the start. hashes: of the prompt's blocks, the last of which may not be full."""

    at: float
    prompt: int
    written: int
    hashes: tuple[int, ...]


@dataclass
class Ask:
    """A request and what became of it.

    most: tokens that the router expects of it at most. findable: tokens of its prompt that one endless cache of all
    replicas finds. answer: the token that it writes. follows: the next turn, given the time when this one has ended.
    """

    arrival: Arrival
    tokens: tuple[int, ...]
    sequence: Text | None = None
    times: list[float] = field(default_factory=list)  # of its tokens
    ended: float = 0.0
    written: int = 0
    most: int = MOST
    findable: int = 0
    answer: int = field(default_factory=_OWN.__next__)
    follows: Callable[[Ask], Ask | None] | None = None

    @property
    def first(self) -> float | None:
        return self.times[0] if self.times else None


def read_trace(path: Path) -> list[Arrival]:
    """A trace of Mooncake or of Azure, whose prompts share nothing."""
    if path.suffix == ".csv":
        return list(_azure(path))
    lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return [
        Arrival(one["timestamp"] / 1000, one["input_length"], one["output_length"], tuple(one["hash_ids"]))
        for one in lines
    ]


def _azure(path: Path) -> Iterator[Arrival]:
    blocks, start = 0, None
    with path.open(encoding="utf-8", newline="") as stream:
        for row in csv.DictReader(stream):
            at = datetime.fromisoformat(row["TIMESTAMP"][:26])
            start = start or at
            prompt, written = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            blocks_of = -(-prompt // BLOCK)
            yield Arrival((at - start).total_seconds(), prompt, written, tuple(range(blocks, blocks + blocks_of)))
            blocks += blocks_of


def asks_of(arrivals: Sequence[Arrival], scale: int) -> list[Ask]:
    """The requests of a trace."""
    size, seen, asks = BLOCK // scale, set[int](), []
    for one in arrivals:
        length = max(1, one.prompt // scale)
        tokens = tuple(chain.from_iterable(repeat(block, size) for block in one.hashes))[:length]
        full = one.hashes[: (length - 1) // size]
        found = next((at for at, block in enumerate(full) if block not in seen), len(full)) * size
        seen.update(one.hashes[: length // size])
        asks.append(Ask(one, tokens, written=max(1, one.written // scale), findable=found))
    return asks


@dataclass(frozen=True)
class Chats:
    """Sessions whose turns come some time after the answer before, with all of the text so far in the prompt.

    rate: requests a second, about, from the start: as many sessions as that takes are there by then. until: seconds,
    after which no turn begins. groups: of sessions that share a system prompt; some are frequent. turns, said, answer,
    think: means of a session's turns, of the tokens of each and of its answer, and of the seconds before the next.
    burst: how many times more sessions begin in a burst than between two; a burst lasts `burst_s` seconds in the mean,
    and `between_s` lie between two.
    """

    rate: float
    until: float
    groups: int
    burst: float = 1.0
    system: int = 4 * BLOCK
    turns: float = 6.0
    said: float = 400.0
    answer: float = 250.0
    think: float = 10.0
    burst_s: float = 6.0
    between_s: float = 24.0
    seed: int = 1

    def asks(self, scale: int) -> list[Ask]:
        """The first turns of all sessions; each ask has what follows."""
        draws, started = random.Random(self.seed), set[int]()
        weights = [1 / place for place in range(1, self.groups + 1)]
        found = []
        for at in sorted(self._begins(draws)):
            [group] = draws.choices(range(self.groups), weights)
            system = self.system // scale
            shared = system // (BLOCK // scale) * (BLOCK // scale) if group in started else 0
            started.add(group)
            session = Session(self, scale, random.Random(draws.random()))
            ask = session.turn(at, (group,) * system, shared)
            if ask is not None:
                found.append(ask)
        return found

    def _begins(self, draws: random.Random) -> Iterator[float]:
        """When sessions begin: a Poisson process, whose rate changes where there are bursts, the same for all rates."""
        for _ in range(round(self.rate * (self.think + WRITING))):  # those that are there already ask after a thought
            yield draws.expovariate(1 / self.think)
        bursts = random.Random(self.seed)
        inside = self.burst_s / (self.burst_s + self.between_s)
        calm = self.rate / self.turns / (1 - inside + inside * self.burst)
        at, bursting = 0.0, False
        while at < self.until:
            stop = at + bursts.expovariate(1 / (self.burst_s if bursting else self.between_s))
            rate = calm * self.burst if bursting else calm
            while (at := at + draws.expovariate(rate)) < min(stop, self.until):
                yield at
            at, bursting = stop, not bursting


@dataclass
class Session:
    """One chat. Its draws are its own, so that its turns do not depend on when others end."""

    chats: Chats
    scale: int
    draws: random.Random

    def turn(self, at: float, before: tuple[int, ...], findable: int) -> Ask | None:
        """A turn behind a text; None if it would begin too late."""
        if at >= self.chats.until:
            return None
        said, written = self._tokens(self.chats.said), self._tokens(self.chats.answer)
        tokens = (*before, *repeat(next(_SAID), said))
        arrival = Arrival(at, len(tokens) * self.scale, written * self.scale, ())
        return Ask(arrival, tokens, written=written, findable=findable, follows=self._next)

    def _next(self, ask: Ask) -> Ask | None:
        if self.draws.random() < 1 / self.chats.turns:
            return None
        text = (*ask.tokens, *repeat(ask.answer, ask.written))
        think = self.draws.expovariate(1 / self.chats.think)
        return self.turn(ask.ended + think, text, len(text) - 1)  # its last token was never computed

    def _tokens(self, mean: float) -> int:
        length = self.draws.lognormvariate(log(mean) - SPREAD**2 / 2, SPREAD)
        return max(1, round(length / self.scale))
