"""Simulates a cluster: the router, the scheduler and the page pool as they are, over replicas that only take time.

    python benchmarks/cluster.py TRACE... [--replicas 16] [--policy router --policy "round robin"] [--scale 8]

A trace is Mooncake's (JSON lines: timestamp, input_length, output_length, hash_ids of blocks of 512 tokens) or Azure's
(CSV: TIMESTAMP, ContextTokens, GeneratedTokens; no two prompts share anything). Time is simulated: a step takes

    base + prompt tokens x per prompt token + sequences x per sequence

whose defaults are assumptions for a model of some 70 billion parameters on one node, not measurements. One simulated
token stands for `--scale` tokens, in prompts and in answers, so first tokens are late by up to that many steps.

The hit rate is the share of prompt tokens that were found cached, in blocks of 512; "of ideal": of what one endless
cache of all replicas would find.
"""

from __future__ import annotations

import argparse
import csv
import heapq
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import chain, repeat
from pathlib import Path
from statistics import mean, quantiles

from tokenwright.cluster.replica import PageNews
from tokenwright.cluster.replica_pages import ReplicaPages
from tokenwright.cluster.router import RoutedReplica, Router
from tokenwright.engine import (
    Engine,
    Finished,
    Group,
    Output,
    PagePool,
    Pick,
    PrefixIndex,
    Request,
    SamplingParams,
    Scheduler,
    Step,
    Token,
)
from tokenwright.engine import (
    Sequence as Text,
)

BLOCK = 512  # tokens of a block of the traces
MOST = 1 << 30  # tokens that a request allows: the router does not know how long an answer will be
OWN = 1 << 31  # tokens from here on are those of answers, which no prompt has


@dataclass(frozen=True)
class Arrival:
    """at: seconds from the start. hashes: of the prompt's blocks, the last of which may not be full."""

    at: float
    prompt: int
    written: int
    hashes: tuple[int, ...]


def read_trace(path: Path) -> list[Arrival]:
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
            count = -(-prompt // BLOCK)
            yield Arrival((at - start).total_seconds(), prompt, written, tuple(range(blocks, blocks + count)))
            blocks += count


def ideal(arrivals: Sequence[Arrival]) -> float:
    """The share of prompt tokens that one endless cache finds."""
    seen: set[int] = set()
    found = 0
    for one in arrivals:
        for block in one.hashes[: (one.prompt - 1) // BLOCK]:
            if block not in seen:
                break
            found += BLOCK
        seen.update(one.hashes[: one.prompt // BLOCK])
    return found / sum(one.prompt for one in arrivals)


@dataclass(frozen=True)
class Costs:
    """Seconds of a step: always, for each token of a prompt, and for each sequence that writes.

    key, prompt_key: for each cached token that is read by a sequence that writes, and by a token of a prompt.
    """

    base: float
    token: float
    sequence: float
    key: float = 0.0
    prompt_key: float = 0.0


class Timed:
    """A runner and sampler that compute nothing; each text writes a token of its own."""

    def forward(self, step: Step) -> Output[None]:
        return Output(rows=(range(0),) * len(step.chunks), logits=None)

    def pick(self, _: Output[None], step: Step) -> list[Pick]:
        return [
            Pick(chunk.sequence.id, (OWN + chunk.sequence.id,), (0.0,), (0.0,), ((),))
            for chunk in step.chunks
            if chunk.picks
        ]


class ModelledReplica:
    """An engine whose steps take simulated time. routed: as the router knows it."""

    def __init__(self, pages: int, page_size: int, budget: int, sequences: int, scale: int) -> None:
        pool = PagePool([Group(pages)], page_size)
        scheduler = Scheduler(pool, budget, sequences, PrefixIndex(pool, b"", b""))
        timed = Timed()
        self.engine: Engine[None] = Engine(timed, timed, scheduler, 1 << 30)
        self.news = PageNews()
        pool.listen(self.news)
        self.routed = RoutedReplica(ReplicaPages(pool.groups, page_size, b"", b""))
        self.step: Step | None = None
        self.texts: dict[int, Ask] = {}
        self._scale = scale

    def begin(self) -> bool:
        """Begin a step; False where there is nothing to compute."""
        step = self.engine.scheduler.schedule()
        self.step = step if step.chunks else None
        return self.step is not None

    def seconds(self, costs: Costs) -> float:
        """How long the step takes that has begun."""
        assert self.step is not None, "a step has begun"
        prompts = writing = 0
        keys = prompt_keys = 0.0
        for chunk in self.step.chunks:
            read = (chunk.stop - chunk.start) * (chunk.start + chunk.stop + 1) / 2
            if chunk.start < len(chunk.request.prompt):
                prompts += chunk.stop - chunk.start
                prompt_keys += read
            else:
                writing += 1
                keys += read
        steps = self._scale if writing else 1
        spent = prompts * costs.token + writing * costs.sequence
        spent += self._scale * (keys * costs.key + prompt_keys * costs.prompt_key)
        return steps * costs.base + self._scale * spent

    def end(self) -> list[Token | Finished]:
        """End the step: its tokens and the texts that have ended."""
        assert self.step is not None, "a step has begun"
        timed = self.engine.sampler
        picks = timed.pick(self.engine.runner.forward(self.step), self.step)
        events = self.engine.scheduler.commit(self.step, picks)
        self.step = None
        self.routed.pages.apply(self.news.take())
        return [event for event in events if isinstance(event, Token | Finished)]


@dataclass
class Ask:
    """A request and what became of it. most: tokens that the router expects of it at most."""

    arrival: Arrival
    tokens: tuple[int, ...]
    sequence: Text | None = None
    times: list[float] = field(default_factory=list)  # of its tokens
    ended: float = 0.0
    written: int = 0
    most: int = MOST

    @property
    def first(self) -> float | None:
        return self.times[0] if self.times else None


Choose = Callable[["Simulation", Ask], ModelledReplica]


def by_turns(simulation: Simulation, _: Ask) -> ModelledReplica:
    simulation.turn += 1
    return simulation.replicas[simulation.turn % len(simulation.replicas)]


def least_loaded(simulation: Simulation, _: Ask) -> ModelledReplica:
    return min(simulation.replicas, key=lambda one: (len(one.texts), one.routed.chosen))


def power_of_two(simulation: Simulation, _: Ask) -> ModelledReplica:
    return min(simulation.random.sample(simulation.replicas, 2), key=lambda one: len(one.texts))


def by_router(simulation: Simulation, ask: Ask) -> ModelledReplica:
    hashes = simulation.replicas[0].routed.pages.hashes(b"")
    chosen = simulation.router.choose((one.routed for one in simulation.replicas), hashes, ask.tokens)
    assert chosen is not None, "all take texts"
    return next(one for one in simulation.replicas if one.routed is chosen[0])


POLICIES: dict[str, Choose] = {
    "router": by_router,
    "least loaded": least_loaded,
    "power of two": power_of_two,
    "round robin": by_turns,
}


@dataclass
class Simulation:
    """Replicas, and the requests that come to them. seconds: of simulated time."""

    replicas: list[ModelledReplica]
    costs: Costs
    choose: Choose
    router: Router = field(default_factory=Router)
    random: random.Random = field(default_factory=lambda: random.Random(1))
    turn: int = 0
    seconds: float = 0.0

    def run(self, asks: Sequence[Ask]) -> None:
        """Serve all requests to their ends."""
        coming = iter(asks)
        ask = next(coming, None)
        ends: list[tuple[float, int]] = []  # of steps: when, and whose
        while ask is not None or ends:
            if ask is not None and (not ends or ask.arrival.at <= ends[0][0]):
                self.seconds = ask.arrival.at
                place = self._take(ask)
                ask = next(coming, None)
            else:
                self.seconds, place = heapq.heappop(ends)
                self._end_step(self.replicas[place])
            replica = self.replicas[place]
            if replica.step is None and replica.begin():
                heapq.heappush(ends, (self.seconds + replica.seconds(self.costs), place))

    def _take(self, ask: Ask) -> int:
        replica = self.choose(self, ask)
        most = max(1, ask.written)
        request = Request(ask.tokens, SamplingParams(temperature=0.0, max_tokens=most))
        ask.sequence, ask.written = replica.engine.submit(request), 0
        number, routed = ask.sequence.id, replica.routed
        replica.texts[number] = ask
        hashes = routed.pages.hashes(b"")
        cached = routed.pages.cached(hashes, ask.tokens)
        self.router.assign(routed, number, hashes, len(ask.tokens), cached, ask.most)
        return self.replicas.index(replica)

    def _end_step(self, replica: ModelledReplica) -> None:
        for event in replica.end():
            ask = replica.texts[event.sequence]
            if isinstance(event, Token):
                ask.times.append(self.seconds)
                ask.written += 1
                self.router.wrote(replica.routed, event.sequence, 1)
            else:
                ask.ended = self.seconds
                self.router.ended(replica.routed, event.sequence, ask.written)
                del replica.texts[event.sequence]


def asks_of(arrivals: Sequence[Arrival], scale: int) -> list[Ask]:
    """The requests with prompts of simulated tokens: each block is its hash, as often as it has such tokens."""
    size = BLOCK // scale
    found = []
    for one in arrivals:
        length = max(1, one.prompt // scale)
        tokens = tuple(chain.from_iterable(repeat(block, size) for block in one.hashes))[:length]
        found.append(Ask(one, tokens, written=max(1, one.written // scale)))
    return found


def simulate(arrivals: Sequence[Arrival], policy: str, options: argparse.Namespace) -> dict[str, float]:
    """The figures of one policy."""
    scale, began = options.scale, time.perf_counter()
    made = (options.blocks, BLOCK // scale, options.budget // scale, options.sequences, scale)
    replicas = [ModelledReplica(*made) for _ in range(options.replicas)]
    costs = Costs(options.base_ms / 1000, 1 / options.prefill_rate, options.sequence_ms / 1000)
    asks = asks_of(arrivals, scale)
    Simulation(replicas, costs, POLICIES[policy]).run(asks)
    for replica in replicas:
        replica.engine.scheduler.check()
    firsts = [ask.first - ask.arrival.at for ask in asks if ask.first is not None]
    assert len(firsts) == len(asks), "every request is answered"
    hits = sum(ask.sequence.counts.prefix_hit for ask in asks if ask.sequence) / sum(len(ask.tokens) for ask in asks)
    gaps = [(ask.ended - ask.first) / ((ask.written - 1) * scale) for ask in asks if ask.first and ask.written > 1]
    cuts = quantiles(firsts, n=100)
    return {
        "hits": hits,
        "ttft_p50_s": cuts[49],
        "ttft_p99_s": cuts[98],
        "ttft_mean_s": mean(firsts),
        "itl_ms": 1000 * mean(gaps),
        "took_s": time.perf_counter() - began,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Simulate a cluster over traces of arrivals.")
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--replicas", type=int, default=16)
    parser.add_argument("--policy", action="append", choices=POLICIES)
    parser.add_argument("--requests", type=int, help="only the first so many")
    parser.add_argument("--scale", type=int, default=8, help="tokens that one simulated token stands for")
    parser.add_argument("--blocks", type=int, default=5000, help="blocks of 512 tokens that a replica has memory for")
    parser.add_argument("--budget", type=int, default=4096, help="tokens of a step")
    parser.add_argument("--sequences", type=int, default=128, help="sequences that a replica runs at once")
    parser.add_argument("--prefill-rate", type=float, default=8000.0, help="tokens of prompts a second (assumed)")
    parser.add_argument("--base-ms", type=float, default=15.0, help="milliseconds of a step (assumed)")
    parser.add_argument("--sequence-ms", type=float, default=0.1, help="milliseconds for each that writes (assumed)")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each line of the table")
    options = parser.parse_args()
    for path in options.traces:
        arrivals = read_trace(path)[: options.requests]
        best = ideal(arrivals)
        if not options.json:
            print(f"\n{path.name}: {len(arrivals):,} requests, {options.replicas} replicas, ideal hits {best:.1%}")
            print(
                "| policy | hits | of ideal | TTFT p50, s | p99 | mean | ITL, ms | simulated in, s |\n|---|"
                + "--:|" * 7
            )
        for policy in options.policy or POLICIES:
            found = simulate(arrivals, policy, options)
            if options.json:
                print(json.dumps({"trace": path.name, "policy": policy, "ideal": best, **found}))
                continue
            share = f"{found['hits'] / best:.1%}" if best else "-"
            names = ("ttft_p50_s", "ttft_p99_s", "ttft_mean_s", "itl_ms", "took_s")
            times = " | ".join(f"{found[name]:.{0 if name == 'took_s' else 2}f}" for name in names)
            print(f"| {policy} | {found['hits']:.1%} | {share} | {times} |")


if __name__ == "__main__":
    main()
