"""Two real replicas of this machine: how near the simulator is, and what the router is worth for chats.

    python benchmarks/replicas.py predict [--model stories] [--replicas 2] [--requests 80] [--loads 0.3 0.6 0.8]
    python benchmarks/replicas.py chats [--model stories] [--replicas 2] [--sessions 64] [--turns 5] [--rounds 3]

predict: fits the costs of a step (always, for each token of a prompt, for each sequence that writes, for each cached
token that is read) and the time on the way, by least squares of relative errors. Fitted: prompts alone, of FIT_PROMPTS
tokens, and FIT_STREAMS streams at each replica behind prompts of FIT_BEHIND tokens; all replicas compute at once. Held
out: requests of other lengths that come at random, at shares of what the replicas could do. The simulator of cluster.py
gets the same arrivals, and the output compares medians.

chats: sessions in groups that share a system prompt; each asks on, some time after it was answered. The same sessions
through the router and in turn, over fresh replicas; the share of prompt tokens found cached, and TTFT.
"""

from __future__ import annotations

import argparse
import heapq
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from statistics import median
from typing import Any

import numpy as np
from cluster import Arrival, Ask, Costs, ModelledReplica, Simulation, by_router
from reliability_parts import about
from served import quantile

from tokenwright.cluster.cluster_llm import ClusterLLM
from tokenwright.cluster.processes import open_cluster
from tokenwright.cluster.router import RoutedReplica, Router
from tokenwright.engine import SamplingParams, Token
from tokenwright.engine.loop import Delivery, RequestHandle
from tokenwright.engine.prefix_index import PrefixHashes

FIT_PROMPTS = (24, 48, 96, 200, 360, 500)
FIT_STREAMS = (1, 2, 4, 8)
FIT_BEHIND = (16, 300)
FIT_ROUNDS = 5
FIT_WRITTEN = 48
PROMPT, WRITTEN = (30, 450), (10, 60)  # tokens of the requests that are held out
LEAST_ID = 300  # token ids from here on are ordinary ones


@dataclass(eq=False)
class Told:
    """A request's listener: when its tokens came. ended: is told it when the request has ended."""

    ended: SimpleQueue[Told]
    prompt: Sequence[int]
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    handle: RequestHandle | None = None

    def deliver(self, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            written = [event.token for event in delivery.events if isinstance(event, Token)]
            self.tokens += written
            self.times += [delivery.time] * len(written)
            if delivery.ended:
                self.handle = delivery.handle
                self.ended.put(self)

    @property
    def ttft(self) -> float:
        assert self.handle is not None, "it has ended"
        return self.times[0] - self.handle.submitted

    @property
    def itl(self) -> float:
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1)

    @property
    def whole(self) -> float:
        assert self.handle is not None, "it has ended"
        return self.times[-1] - self.handle.submitted


class Load:
    """Asks replicas for texts of random tokens. vocabulary: of the model."""

    def __init__(self, llm: ClusterLLM, seed: int) -> None:
        self.llm = llm
        self.ended: SimpleQueue[Told] = SimpleQueue()
        self.draws = random.Random(seed)
        self._most = llm.llm_engine.facts.config.vocab_size - 1

    def prompt(self, tokens: int) -> list[int]:
        return [self.draws.randint(min(LEAST_ID, self._most // 2), self._most) for _ in range(tokens)]

    def ask(self, prompt: Sequence[int], written: int) -> Told:
        told = Told(self.ended, prompt)
        params = SamplingParams(max_tokens=written, ignore_eos=True, temperature=0.0)
        self.llm.submit([self.llm.llm_engine.inputs.build(list(prompt), params)], told)
        return told

    def wait(self, count: int) -> None:
        for _ in range(count):
            self.ended.get()


@contextmanager
def opened(options: argparse.Namespace) -> Iterator[ClusterLLM]:
    llm = open_cluster(options.model, options.replicas, {"kv_memory": options.kv_memory << 20, "speculate": "off"})
    try:
        while len(llm.cluster.names) < options.replicas:
            time.sleep(0.05)
        yield llm
    finally:
        llm.close()


def keys_of(start: int, stop: int) -> float:
    """Cached tokens that the rows [start, stop) of a text read."""
    return (stop - start) * (start + stop + 1) / 2


def fitted(llm: ClusterLLM, replicas: int, budget: int) -> tuple[Costs, float]:
    """The costs of a step, and the seconds on the way of a first token."""
    load = Load(llm, 1)
    seconds: dict[tuple[float, ...], list[float]] = {}  # by how often base, token, sequence, key and way are in them
    for _ in range(FIT_ROUNDS):
        for tokens in FIT_PROMPTS:
            told = [load.ask(load.prompt(tokens), 1) for _ in range(replicas)]
            load.wait(replicas)
            steps = -(-tokens // budget)
            case = steps, tokens, 0, keys_of(0, tokens), 1
            seconds.setdefault(case, []).extend(one.ttft for one in told)
        for streams in FIT_STREAMS:
            for behind in FIT_BEHIND:
                told = [load.ask(load.prompt(behind), FIT_WRITTEN) for _ in range(streams * replicas)]
                load.wait(len(told))
                start, stop = max(one.times[0] for one in told), min(one.times[-1] for one in told)
                for one in told:
                    between = [at for at in one.times if start <= at <= stop]
                    if len(between) > FIT_WRITTEN // 3:
                        each = (between[-1] - between[0]) / (len(between) - 1)
                        case = 1, 0, streams, streams * (behind + FIT_WRITTEN / 2), 0
                        seconds.setdefault(case, []).append(each)
    found = np.array([(*case, median(each)) for case, each in seconds.items()])
    scaled = found / found[:, -1:]
    base, token, sequence, key, way = _positive(scaled[:, :-1], scaled[:, -1])
    return Costs(base, token, sequence, key), way


def _positive(left: Any, right: Any) -> list[float]:
    """Least squares without negative costs: those that would be are left out."""
    used = list(range(left.shape[1]))
    while True:
        solved = np.linalg.lstsq(left[:, used], right, rcond=None)[0]
        if (solved >= 0).all():
            return [float(solved[used.index(at)]) if at in used else 0.0 for at in range(left.shape[1])]
        used.pop(int(solved.argmin()))


def held_out(llm: ClusterLLM, rate: float, requests: int, seed: int) -> list[Told]:
    """Requests that come at random, all of them answered."""
    load, found = Load(llm, seed), []
    at = time.perf_counter()
    for _ in range(requests):
        at += load.draws.expovariate(rate)
        time.sleep(max(0.0, at - time.perf_counter()))
        found.append(load.ask(load.prompt(load.draws.randint(*PROMPT)), load.draws.randint(*WRITTEN)))
    load.wait(requests)
    return found


def simulated(llm: ClusterLLM, replicas: int, costs: Costs, told: Iterable[Told]) -> list[Ask]:
    """The same requests at the same times in simulated replicas."""
    shape = llm.llm_engine.shape
    made = (shape.groups[0].pages, shape.page_size, shape.token_budget, shape.max_sequences, 1)
    asks = [
        Ask(
            Arrival(one.handle.submitted, len(one.prompt), len(one.tokens), ()),
            tuple(one.prompt),
            written=len(one.tokens),
        )
        for one in told
        if one.handle is not None
    ]
    Simulation([ModelledReplica(*made) for _ in range(replicas)], costs, by_router).run(asks)
    return asks


def predict(options: argparse.Namespace) -> None:
    """Fit, and compare on loads that are held out."""
    with opened(options) as llm:
        shape, replicas = llm.llm_engine.shape, options.replicas
        warm = Load(llm, 0)
        for _ in range(4 * replicas):
            warm.ask(warm.prompt(100), 20)
        warm.wait(4 * replicas)
        costs, way = fitted(llm, replicas, shape.token_budget)
        print(
            f"{about()}; {options.model}, {replicas} replicas\nfitted: {1e3 * costs.base:.2f} ms a step, "
            f"{1e6 * costs.token:.1f} us a prompt token, {1e6 * costs.sequence:.0f} us a sequence, "
            f"{1e9 * costs.key:.0f} ns a cached token read, {1e3 * way:.2f} ms on the way\n\n"
            "| load | TTFT p50 ms: real | simulated | error | ITL | | | whole | | |\n|---|" + "--:|" * 9
        )
        prompt, written = (sum(one) / 2 for one in (PROMPT, WRITTEN))
        alone = costs.base + prompt * costs.token + keys_of(0, int(prompt)) * costs.key
        alone += written * (costs.base / 4 + costs.sequence + (prompt + written / 2) * costs.key)  # four share a step
        errors: dict[str, list[float]] = {"TTFT": [], "ITL": [], "whole": []}
        for seed, share in enumerate(options.loads):
            told = held_out(llm, share * replicas / alone, options.requests, 100 + seed)
            asks = simulated(llm, replicas, costs, told)
            pairs = {
                "TTFT": ([one.ttft for one in told], [ask.first - ask.arrival.at + way for ask in asks if ask.first]),
                "ITL": (
                    [one.itl for one in told],
                    [(ask.ended - ask.first) / (ask.written - 1) for ask in asks if ask.first],
                ),
                "whole": ([one.whole for one in told], [ask.ended - ask.arrival.at + way for ask in asks]),
            }
            cells = [f"{share:.0%}"]
            for name, (real, said) in pairs.items():
                error = median(said) / median(real) - 1
                errors[name].append(abs(error))
                cells += [f"{1e3 * median(real):.2f}", f"{1e3 * median(said):.2f}", f"{error:+.1%}"]
            print(f"| {' | '.join(cells)} |", flush=True)
        print("\nmedian error: " + ", ".join(f"{name} {median(found):.1%}" for name, found in errors.items()))


class ByTurns(Router):
    """Takes the replicas in turn."""

    turn = 0

    def choose(
        self, replicas: Iterable[RoutedReplica], hashes: PrefixHashes, tokens: Sequence[int]
    ) -> tuple[RoutedReplica, int] | None:
        taking = [one for one in replicas if one.taking]
        if not taking:
            return None
        self.turn += 1
        chosen = taking[self.turn % len(taking)]
        return chosen, chosen.pages.cached(hashes, tokens)


def chatted(llm: ClusterLLM, options: argparse.Namespace, seed: int) -> list[Told]:
    """All turns of all sessions."""
    load, found = Load(llm, seed), []
    systems = [load.prompt(options.system) for _ in range(options.groups)]
    texts = [list(systems[at % options.groups]) for at in range(options.sessions)]
    began = time.perf_counter()
    coming = [(began + load.draws.random() * options.think, at) for at in range(options.sessions)]
    heapq.heapify(coming)
    sessions: dict[int, int] = {}  # of the requests that run, by the listener's id
    left = dict.fromkeys(range(options.sessions), options.turns)
    while coming or sessions:
        wait = coming[0][0] - time.perf_counter() if coming else None
        if wait is not None and wait <= 0:
            _, at = heapq.heappop(coming)
            texts[at] += load.prompt(options.said)
            found.append(told := load.ask(texts[at], options.answer))
            sessions[id(told)] = at
            continue
        try:
            told = load.ended.get(timeout=wait)
        except Empty:
            continue
        at = sessions.pop(id(told))
        texts[at] = [*told.prompt, *told.tokens]
        left[at] -= 1
        if left[at]:
            heapq.heappush(coming, (time.perf_counter() + load.draws.expovariate(1 / options.think), at))
    return found


def chats(options: argparse.Namespace) -> None:
    """The router against taking turns."""
    print(
        f"{about()}; {options.model}, {options.replicas} replicas, {options.sessions} sessions of {options.turns} "
        f"turns in {options.groups} groups, {options.kv_memory} MiB of KV memory\n\n"
        "| policy | hits | TTFT p50, ms | p99 | mean |\n|---|--:|--:|--:|--:|"
    )
    for seed in range(options.rounds):
        for name, router in (("router", Router()), ("in turn", ByTurns())):
            with opened(options) as llm:
                llm.cluster.dispatcher.router = router
                told = chatted(llm, options, seed)
            hits = sum(one.handle.sequence.counts.prefix_hit for one in told if one.handle is not None)
            ttft = [1e3 * one.ttft for one in told]
            share = hits / sum(len(one.prompt) for one in told)
            cells = (f"{share:.1%}", *(f"{quantile(ttft, at):.1f}" for at in (0.5, 0.99)), f"{np.mean(ttft):.1f}")
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure two real replicas.")
    parser.add_argument("what", choices=("predict", "chats"))
    parser.add_argument("--model", default="stories")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--kv-memory", type=int, default=64, help="MiB of all replicas")
    parser.add_argument("--requests", type=int, default=80, help="predict: of each load")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.3, 0.6, 0.8], help="predict: shares of the most")
    parser.add_argument("--sessions", type=int, default=64, help="chats, as the following")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--groups", type=int, default=8, help="that share a system prompt")
    parser.add_argument("--system", type=int, default=200, help="tokens")
    parser.add_argument("--said", type=int, default=24, help="tokens of a turn")
    parser.add_argument("--answer", type=int, default=24, help="tokens")
    parser.add_argument("--think", type=float, default=2.0, help="seconds between turns, the mean")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    (predict if options.what == "predict" else chats)(options)


if __name__ == "__main__":
    main()
