"""Predicts real replicas of this machine by the simulator, with costs that are fitted on other loads.

Requests come at random times, at shares of what all replicas could do about. The lengths of prompts and answers are
drawn from FITTED for the fit (replica_costs.py), and from HELD_OUT for the comparison. The shares stay far from
saturation, where a queue's length is chance.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import inf
from pathlib import Path
from statistics import mean, median

from cluster_arrivals import Arrival, Ask
from cluster_costs import Costs, Source
from cluster_simulation import ModelledReplica, Simulation, by_router
from reliability_parts import about
from replica_costs import Fit, SharedCosts, Work, equations, fitted, keys_of
from replica_loads import Load, Told

from tokenwright.cluster.cluster_llm import ClusterLLM
from tokenwright.cluster.router import Router

Lengths = tuple[tuple[int, int], tuple[int, int]]  # tokens of prompts, and those that are written
FITTED: Mapping[str, Lengths] = {
    "even": ((40, 250), (20, 80)),
    "brief": ((10, 120), (10, 30)),
    "large": ((200, 400), (30, 60)),
}
HELD_OUT: Mapping[str, Lengths] = {
    "mixed": ((30, 450), (10, 60)),
    "short": ((20, 80), (30, 100)),
    "long": ((300, 450), (8, 24)),
}
FIRST = 10  # texts of each fitted set that come one after another, for a first idea of the costs
SHARED = 4  # texts that are assumed to share a step when all replicas do what they can


@dataclass
class Running:
    """A step under way. left: its share that is still to be computed."""

    work: Work
    left: float = 1.0


@dataclass
class SharedMachine(Simulation):
    """Replicas whose steps take longer while others compute. started: when each text's first step began."""

    shared: SharedCosts = field(kw_only=True)
    started: dict[int, float] = field(default_factory=dict)  # by the ask's id
    places: dict[int, int] = field(default_factory=dict)  # by the ask's id

    def run(self, asks: Sequence[Ask]) -> None:
        coming, running = deque(asks), dict[int, Running]()
        while coming or running:
            whole = {place: self._whole(place, running) for place in running}
            ends = ((self.seconds + one.left * whole[place], place) for place, one in running.items())
            at, place = min(ends, default=(inf, -1))
            arrives = bool(coming) and coming[0].arrival.at <= at
            at = coming[0].arrival.at if arrives else at
            for each, one in running.items():
                one.left -= (at - self.seconds) / whole[each]
            self.seconds = at
            if arrives:
                ask = coming.popleft()
                place = self.places[id(ask)] = self._take(ask)
            else:
                del running[place]
                self._end_step(self.replicas[place])
            self._begin(place, running)

    def _whole(self, place: int, running: Mapping[int, Running]) -> float:
        """The seconds of a step, if the other replicas went on as now."""
        others, every = [one.work for at, one in running.items() if at != place], max(1, len(self.replicas) - 1)
        prompts = sum(work.tokens > 0 for work in others)
        return running[place].work.seconds(self.shared, prompts / every, (len(others) - prompts) / every)

    def _begin(self, place: int, running: dict[int, Running]) -> None:
        replica = self.replicas[place]
        if replica.step is None and replica.begin():
            assert replica.step is not None, "it has begun"
            for chunk in replica.step.chunks:
                self.started.setdefault(id(replica.texts[chunk.sequence.id]), self.seconds)
            running[place] = Running(work_of(replica))


def work_of(replica: ModelledReplica) -> Work:
    """The step that it has begun."""
    assert replica.step is not None, "it has begun"
    tokens = sequences = starts = 0
    keys = prompt_keys = 0.0
    for chunk in replica.step.chunks:
        read, prompt = keys_of(chunk.start, chunk.stop), len(chunk.request.prompt)
        if chunk.start < prompt:
            tokens, prompt_keys = tokens + chunk.stop - chunk.start, prompt_keys + read
        else:
            sequences, keys, starts = sequences + 1, keys + read, starts + (chunk.start == prompt)
    return Work(1, tokens, sequences, keys, prompt_keys, starts)


@dataclass(frozen=True)
class Seen:
    """A request, real or simulated: seconds of its wait, and the times when it was submitted and its tokens came."""

    submitted: float
    wait: float
    place: int
    prompt: Sequence[int]
    times: Sequence[float]

    @property
    def figures(self) -> tuple[float, float, float]:
        """Seconds to the first token, between tokens, and of the whole."""
        first, last = self.times[0], self.times[-1]
        return first - self.submitted, (last - first) / (len(self.times) - 1), last - self.submitted


def at_random(llm: ClusterLLM, lengths: Lengths, rate: float, count: int, seed: int) -> list[Told]:
    """Requests that come at random, all of them answered. rate: a second."""
    load, found = Load(llm, seed), []
    prompt, written = lengths
    drawn = [(load.draws.randint(*prompt), load.draws.randint(*written)) for _ in range(count)]
    requests = [load.request(load.prompt(tokens), writes) for tokens, writes in drawn]
    at = time.perf_counter()
    for request in requests:
        at += load.draws.expovariate(rate)
        time.sleep(max(0.0, at - time.perf_counter()))
        found.append(load.ask(request))
    load.wait(count)
    return found


def one_by_one(llm: ClusterLLM, lengths: Lengths, seed: int) -> list[Told]:
    """Requests each of which comes after the one before has ended."""
    load, found = Load(llm, seed), []
    for _ in range(FIRST):
        prompt, written = (load.draws.randint(*one) for one in lengths)
        found.append(load.ask(load.request(load.prompt(prompt), written)))
        load.wait(1)
    return found


def simulated(machine: SharedMachine, told: Sequence[Told | Seen]) -> list[Seen]:
    """The same requests at the same times on a simulated machine."""
    asks = []
    for one in told:
        written = len(one.times)
        arrival = Arrival(one.submitted, len(one.prompt), written, ())
        asks.append(Ask(arrival, tuple(one.prompt), written=written, most=written))
    machine.run(asks)
    found = []
    for ask in asks:
        times = [at + machine.shared.way for at in ask.times]
        wait = machine.started[id(ask)] - ask.arrival.at
        found.append(Seen(ask.arrival.at, wait, machine.places[id(ask)], ask.tokens, times))
    return found


def machine_of(llm: ClusterLLM, costs: SharedCosts, expected: float) -> SharedMachine:
    """These replicas, simulated. expected: tokens of a text, as the router has it."""
    shape, router = llm.llm_engine.shape, Router()
    router.written = expected
    made = (shape.groups[0].pages, shape.page_size, shape.token_budget, shape.max_sequences, 1)
    replicas = [ModelledReplica(*made) for _ in range(llm.cluster.replicas)]
    return SharedMachine(replicas, Costs(0.0, 0.0, 0.0), by_router, router, shared=costs)


def terms(seen: Sequence[Seen]) -> str:
    """The middle wait and the middle time between two tokens of a text in ms, and the texts that share a step."""
    together = Counter(at for one in seen for at in one.times[1:])
    gaps = [after - at for one in seen for at, after in zip(one.times[1:], one.times[2:], strict=False)]
    sizes = [together[at] for one in seen for at in one.times[1:]]
    return f"{1e3 * median(one.wait for one in seen):.2f}, {1e3 * median(gaps):.2f}, {mean(sizes):.2f}"


def predict(llm: ClusterLLM, count: int, rounds: int, loads: Sequence[float], save: Path | None) -> None:
    """Fit, and compare on loads that are held out. save: where the costs of a replica that computes alone are kept.

    Each round has all loads, fitted and held out, so that a machine which slows down does so for both.
    """
    seeds = itertools.count(1)  # no prompt comes twice: it would be found cached
    found = [one for lengths in FITTED.values() for one in equations(one_by_one(llm, lengths, next(seeds)))]
    cells = {(name, share): list[tuple[list[Told], float]]() for name in HELD_OUT for share in loads}
    each = -(-count // rounds)
    for _ in range(rounds):
        costs = fitted(found).costs
        for share, lengths in itertools.product(loads, FITTED.values()):
            rate = share * most_of(llm, costs, lengths)
            found += equations(at_random(llm, lengths, rate, each, next(seeds)))
        for (name, share), batches in cells.items():
            expected, rate = llm.cluster.dispatcher.router.written, share * most_of(llm, costs, HELD_OUT[name])
            batches.append((at_random(llm, HELD_OUT[name], rate, each, next(seeds)), expected))
    fit = fitted(found)
    show_fit(fit, len(found))
    if save is not None:
        alone = Costs(**{one.name: getattr(fit.costs, one.name) for one in fields(Costs)})
        Source(alone, f"fitted on this machine with {llm.llm_engine.facts.name}, {about()}").save(save)
    errors: dict[str, list[float]] = {"TTFT": [], "ITL": [], "whole": []}
    for (name, share), batches in cells.items():
        real = [Seen(one.submitted, one.wait, one.place, one.prompt, one.times) for told, _ in batches for one in told]
        said = [one for told, expected in batches for one in simulated(machine_of(llm, fit.costs, expected), told)]
        row = [f"{name}, {share:.0%}"]
        for number, wrong in enumerate(errors.values()):
            one, other = (median(seen.figures[number] for seen in both) for both in (real, said))
            wrong.append(abs(other / one - 1))
            row += [f"{1e3 * one:.2f}", f"{1e3 * other:.2f}", f"{other / one - 1:+.1%}"]
        print(f"| {' | '.join((*row, terms(real), terms(said)))} |", flush=True)
    print("\nmedian error: " + ", ".join(f"{name} {median(wrong):.1%}" for name, wrong in errors.items()))


def show_fit(fit: Fit, count: int) -> None:
    """The costs, what they miss, and the head of the table of predictions."""
    print("fitted, in us: " + ", ".join(f"{name} {1e6 * cost:.3g}" for name, cost in fit.costs._asdict().items()))
    print(f"the fit is wrong by {fit.error:.1%} in the middle of {count} times")
    print(
        "\n| held out | TTFT p50 ms: real | simulated | error | ITL | | | whole | | "
        "| wait p50 ms, gap p50 ms, texts a step | simulated |\n|---|" + "--:|" * 11
    )


def most_of(llm: ClusterLLM, costs: SharedCosts, lengths: Lengths) -> float:
    """About the requests a second of such lengths that all replicas could serve, if SHARED texts shared a step."""
    prompt, written = (round(sum(one) / 2) for one in lengths)
    prefill = Work(1, prompt, prompt_keys=keys_of(0, prompt))
    decode = Work(1, 0, SHARED, SHARED * (prompt + written / 2))
    seconds = prefill.seconds(costs, 0, 1) + written / SHARED * decode.seconds(costs, 0, 1)
    return llm.cluster.replicas / seconds
