"""Predicts real replicas of this machine by the simulator, with costs that are fitted on other loads.

Fitted: prompts of FIT_PROMPTS tokens that write one token, and FIT_STREAMS streams behind prompts of FIT_BEHIND tokens,
each at one replica while the others rest, and at all replicas together. A step costs something always, for each token
of a prompt, each sequence that writes and each cached token that either of them reads (rows of a prompt read it
together, in a fraction of the time). It costs more while other replicas compute:
they share caches and memory, and the router and the client need cores, too. So there are two sets of these costs, and a
step goes on between them by how many replicas compute. Least squares of relative errors find them, and the time that a
request and its first token are on the way.

Held out: requests at random times, whose lengths are drawn from HELD_OUT, at shares of what all replicas could do. The
shares stay far from saturation, where a queue's length is chance.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from statistics import mean, median
from typing import Any

import numpy as np
from cluster import Arrival, Ask, Costs, ModelledReplica, Simulation, by_router
from replica_loads import Load, Told

from tokenwright.cluster.cluster_llm import ClusterLLM
from tokenwright.cluster.cluster_loop import ClusterLoop
from tokenwright.cluster.router import Router

FIT_PROMPTS = (24, 48, 96, 200, 360, 500)
FIT_STREAMS = (1, 2, 4, 8)
FIT_BEHIND = (16, 300)
FIT_WRITTEN = 48
COSTS = 5  # of a step: base, token, sequence, key, prompt_key
HELD_OUT: Mapping[str, tuple[tuple[int, int], tuple[int, int]]] = {  # tokens of prompts, and those that are written
    "mixed": ((30, 450), (10, 60)),
    "short": ((20, 80), (30, 100)),
    "long": ((300, 450), (8, 24)),
}


@dataclass(frozen=True)
class Fit:
    """alone, crowded: the costs while no other replica computes, and while all do. way: seconds on the way.

    errors: of the cases that were fitted, relative, by their names.
    """

    alone: Costs
    crowded: Costs
    way: float
    errors: dict[str, float]


def keys_of(start: int, stop: int) -> float:
    """Cached tokens that the rows [start, stop) of a text read."""
    return (stop - start) * (start + stop + 1) / 2


@contextmanager
def taking(cluster: ClusterLoop, count: int) -> Iterator[None]:
    """Only this number of replicas takes texts."""
    members = cluster.dispatcher.members
    for at, member in enumerate(members):
        member.routed.taking = at < count
    try:
        yield
    finally:
        for member in members:
            member.routed.taking = True


@dataclass
class Fitting:
    """The seconds of cases: their names, and how often each cost and the way are in them."""

    load: Load
    budget: int  # tokens of a step at most
    found: dict[tuple[str, tuple[float, ...]], list[float]] = field(default_factory=dict)

    def add(self, name: str, crowded: bool, costs: tuple[float, ...], way: int, seconds: float) -> None:
        none = (0.0,) * COSTS
        case = (*none, *costs, way) if crowded else (*costs, *none, way)
        self.found.setdefault((f"{name}{', all' if crowded else ', one'}", case), []).append(seconds)

    def round(self, cluster: ClusterLoop) -> None:
        """All cases once."""
        for busy in (1, cluster.replicas):
            with taking(cluster, busy):
                for tokens in FIT_PROMPTS:
                    self.prompts(tokens, busy)
                for streams in FIT_STREAMS:
                    for behind in FIT_BEHIND:
                        self.streams(streams, behind, busy)

    def prompts(self, tokens: int, replicas: int) -> None:
        told = self.run(replicas, tokens, 1)
        for one in told:
            costs = (-(-tokens // self.budget), tokens, 0, 0, keys_of(0, tokens))
            self.add(f"prompt {tokens}", replicas > 1, costs, 1, one.ttft)

    def streams(self, streams: int, behind: int, replicas: int) -> None:
        told = self.run(streams * replicas, behind, FIT_WRITTEN)
        start, stop = max(one.times[0] for one in told), min(one.times[-1] for one in told)
        for one in told:
            between = [at for at in one.times if start <= at <= stop]
            if len(between) > FIT_WRITTEN // 3:
                each = (between[-1] - between[0]) / (len(between) - 1)
                costs = 1, 0, streams, streams * (behind + FIT_WRITTEN / 2), 0
                self.add(f"{streams} streams behind {behind}", replicas > 1, costs, 0, each)

    def run(self, count: int, prompt: int, written: int) -> list[Told]:
        requests = [self.load.request(self.load.prompt(prompt), written) for _ in range(count)]
        told = [self.load.ask(one) for one in requests]
        self.load.wait(count)
        return told

    def solved(self) -> Fit:
        cases = np.array([case for _, case in self.found])
        seconds = np.array([median(each) for each in self.found.values()])
        costs = _positive(cases / seconds[:, None], np.ones(len(seconds)))
        said = cases @ np.array(costs)
        errors = {name: float(error) for (name, _), error in zip(self.found, said / seconds - 1, strict=True)}
        return Fit(Costs(*costs[:COSTS]), Costs(*costs[COSTS:-1]), costs[-1], errors)


def _positive(left: Any, right: Any) -> list[float]:
    """Least squares without negative costs: those that would be are left out."""
    used = list(range(left.shape[1]))
    while True:
        solved = np.linalg.lstsq(left[:, used], right, rcond=None)[0]
        if (solved >= 0).all():
            return [float(solved[used.index(at)]) if at in used else 0.0 for at in range(left.shape[1])]
        used.pop(int(solved.argmin()))


@dataclass
class Running:
    """A step under way. alone, crowded: its seconds while one replica computes, and while all do. left: its share."""

    alone: float
    crowded: float
    left: float = 1.0

    def whole(self, others: float) -> float:
        """Its seconds while this share of the other replicas computes."""
        return self.alone + others * (self.crowded - self.alone)


@dataclass
class SharedMachine(Simulation):
    """Replicas whose steps take longer while others compute. started: when each text's first step began."""

    crowded: Costs = field(kw_only=True)
    started: dict[int, float] = field(default_factory=dict)  # by the ask's id

    def run(self, asks: Sequence[Ask]) -> None:
        coming, running = deque(asks), dict[int, Running]()
        while coming or running:
            others = (len(running) - 1) / max(1, len(self.replicas) - 1)
            ends = ((self.seconds + one.left * one.whole(others), place) for place, one in running.items())
            at, place = min(ends, default=(inf, -1))
            arrives = bool(coming) and coming[0].arrival.at <= at
            at = coming[0].arrival.at if arrives else at
            for one in running.values():
                one.left -= (at - self.seconds) / one.whole(others)
            self.seconds = at
            if arrives:
                place = self._take(coming.popleft())
            else:
                del running[place]
                self._end_step(self.replicas[place])
            self._begin(place, running)

    def _begin(self, place: int, running: dict[int, Running]) -> None:
        replica = self.replicas[place]
        if replica.step is None and replica.begin():
            assert replica.step is not None, "it has begun"
            for chunk in replica.step.chunks:
                self.started.setdefault(id(replica.texts[chunk.sequence.id]), self.seconds)
            running[place] = Running(replica.seconds(self.costs), replica.seconds(self.crowded))


@dataclass(frozen=True)
class Seen:
    """A request, real or simulated: seconds of its wait, and the times when it was submitted and its tokens came."""

    submitted: float
    wait: float
    times: Sequence[float]

    @property
    def figures(self) -> tuple[float, float, float]:
        first, last = self.times[0], self.times[-1]
        return first - self.submitted, (last - first) / (len(self.times) - 1), last - self.submitted


def held_out(llm: ClusterLLM, name: str, rate: float, count: int, seed: int) -> list[Told]:
    """Requests of a set that come at random, all of them answered."""
    load, found = Load(llm, seed), []
    prompt, written = HELD_OUT[name]
    lengths = [(load.draws.randint(*prompt), load.draws.randint(*written)) for _ in range(count)]
    requests = [load.request(load.prompt(tokens), writes) for tokens, writes in lengths]
    at = time.perf_counter()
    for request in requests:
        at += load.draws.expovariate(rate)
        time.sleep(max(0.0, at - time.perf_counter()))
        found.append(load.ask(request))
    load.wait(count)
    return found


def simulated(llm: ClusterLLM, fit: Fit, told: Sequence[Told], expected: float) -> list[Seen]:
    """The same requests at the same times in simulated replicas. expected: tokens of a text, as the router has it."""
    shape, router = llm.llm_engine.shape, Router()
    router.written = expected
    made = (shape.groups[0].pages, shape.page_size, shape.token_budget, shape.max_sequences, 1)
    asks = []
    for one in told:
        arrival = Arrival(one.submitted, len(one.prompt), len(one.tokens), ())
        asks.append(Ask(arrival, tuple(one.prompt), written=len(one.tokens), most=len(one.tokens)))
    replicas = [ModelledReplica(*made) for _ in range(llm.cluster.replicas)]
    machine = SharedMachine(replicas, fit.alone, by_router, router, crowded=fit.crowded)
    machine.run(asks)
    started = [machine.started[id(ask)] - ask.arrival.at for ask in asks]
    times = [[at + fit.way for at in ask.times] for ask in asks]
    return [Seen(ask.arrival.at, wait, each) for ask, wait, each in zip(asks, started, times, strict=True)]


def terms(seen: Sequence[Seen]) -> str:
    """The middle wait and the middle time between two tokens of a text in ms, and the texts that share a step."""
    together = Counter(at for one in seen for at in one.times[1:])
    gaps = [after - at for one in seen for at, after in zip(one.times[1:], one.times[2:], strict=False)]
    sizes = [together[at] for one in seen for at in one.times[1:]]
    return f"{1e3 * median(one.wait for one in seen):.2f}, {1e3 * median(gaps):.2f}, {mean(sizes):.2f}"


def predict(llm: ClusterLLM, count: int, rounds: int, loads: Sequence[float]) -> None:
    """Fit, and compare on loads that are held out.

    Each round has all loads, fitted and held out, so that a machine which slows down does so for both.
    """
    fitting = Fitting(Load(llm, 1), llm.llm_engine.shape.token_budget)
    cells = {(name, share): list[tuple[list[Told], float]]() for name in HELD_OUT for share in loads}
    for turn in range(rounds):
        fitting.round(llm.cluster)
        most = fitting.solved().crowded
        for at, ((name, share), batches) in enumerate(cells.items()):
            expected, rate = llm.cluster.dispatcher.router.written, share * most_of(llm, most, name)
            batches.append((held_out(llm, name, rate, -(-count // rounds), 100 * turn + at), expected))
    fit = fitting.solved()
    show_fit(fit)
    errors: dict[str, list[float]] = {"TTFT": [], "ITL": [], "whole": []}
    for (name, share), batches in cells.items():
        real = [Seen(one.submitted, one.wait, one.times) for told, _ in batches for one in told]
        said = [one for told, expected in batches for one in simulated(llm, fit, told, expected)]
        row = [f"{name}, {share:.0%}"]
        for each, found in enumerate(errors.values()):
            one, other = (median(seen.figures[each] for seen in both) for both in (real, said))
            found.append(abs(other / one - 1))
            row += [f"{1e3 * one:.2f}", f"{1e3 * other:.2f}", f"{other / one - 1:+.1%}"]
        print(f"| {' | '.join((*row, terms(real), terms(said)))} |", flush=True)
    print("\nmedian error: " + ", ".join(f"{name} {median(found):.1%}" for name, found in errors.items()))


def show_fit(fit: Fit) -> None:
    """The costs, what they miss, and the head of the table of predictions."""
    for name, costs in (("one computes", fit.alone), ("all compute", fit.crowded)):
        print(
            f"{name}: {1e3 * costs.base:.3f} ms a step, {1e6 * costs.token:.1f} us a prompt token, "
            f"{1e6 * costs.sequence:.0f} us a sequence, {1e9 * costs.key:.0f} ns a cached token read by it, "
            f"{1e9 * costs.prompt_key:.0f} ns by a prompt's"
        )
    middle, worst = median(map(abs, fit.errors.values())), sorted(fit.errors.items(), key=lambda one: -abs(one[1]))
    print(f"{1e3 * fit.way:.2f} ms on the way; the fit is wrong by {middle:.1%} (median); most for")
    print(", ".join(f"{name} {error:+.0%}" for name, error in worst[:6]))
    print(
        "\n| held out | TTFT p50 ms: real | simulated | error | ITL | | | whole | | "
        "| wait p50 ms, gap p50 ms, texts a step | simulated |\n|---|" + "--:|" * 11
    )


def most_of(llm: ClusterLLM, costs: Costs, name: str) -> float:
    """About the requests a second of a set that all replicas could serve, if four texts shared a step."""
    prompt, written = (sum(one) / 2 for one in HELD_OUT[name])
    seconds = costs.base + prompt * costs.token + keys_of(0, int(prompt)) * costs.prompt_key
    seconds += written * (costs.base / 4 + costs.sequence + (prompt + written / 2) * costs.key)
    return llm.cluster.replicas / seconds
