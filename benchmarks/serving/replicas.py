"""The router's worth for chats on two real replicas of this machine.

    python -m benchmarks.serving.replicas [--replicas 2] [--sessions 64] [--turns 5] [--rounds 3]

Sessions in groups share a system prompt; each sends its next turn some time after its last answer. The same sessions go
through the router and to the replicas in turn, each time over fresh replicas. The table has the share of prompt tokens
found cached, and TTFT. Each system prompt is computed once in any case, and with 8 of them among 320 requests such
first turns are the 99th percentile of all; the table also has the 99th percentile of later turns.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

import numpy as np

from benchmarks.serving.reliability_parts import about
from benchmarks.serving.served import quantile
from tokenwright import LLM
from tokenwright.cluster.cluster_llm import cluster_of
from tokenwright.cluster.cluster_loop import ClusterLoop
from tokenwright.cluster.processes import open_cluster
from tokenwright.cluster.router import RoutedReplica, Router
from tokenwright.engine import Request, SamplingParams, Token
from tokenwright.engine.port import Delivery, RequestHandle
from tokenwright.engine.prefix_index import PrefixHashes

LEAST_ID = 300  # token ids from here on are ordinary ones


@dataclass(eq=False)
class Told:
    """The listener of a request, which keeps the times of its tokens and puts itself into `ended` at the end."""

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


class Load:
    """Asks replicas for texts of random tokens."""

    def __init__(self, llm: LLM, seed: int) -> None:
        self.llm = llm
        self.ended: SimpleQueue[Told] = SimpleQueue()
        self.draws = random.Random(seed)
        self._most = llm.llm_engine.facts.config.vocab_size - 1

    def prompt(self, tokens: int) -> list[int]:
        return [self.draws.randint(min(LEAST_ID, self._most // 2), self._most) for _ in range(tokens)]

    def request(self, prompt: list[int], written: int) -> Request:
        """A request that writes this number of tokens."""
        params = SamplingParams(max_tokens=written, ignore_eos=True, temperature=0.0)
        return self.llm.llm_engine.inputs.build(prompt, params)

    def ask(self, request: Request) -> Told:
        told = Told(self.ended, request.prompt)
        self.llm.submit([request], told)
        return told


def loop_of(llm: LLM) -> ClusterLoop:
    cluster = cluster_of(llm)
    assert cluster is not None, "it was opened over replicas"
    return cluster.loop


@contextmanager
def opened(options: argparse.Namespace) -> Iterator[LLM]:
    llm = open_cluster(options.model, options.replicas, {"kv_memory": options.kv_memory << 20, "speculate": "off"})
    try:
        while len(loop_of(llm).names) < options.replicas:
            time.sleep(0.05)
        gc.collect()
        gc.freeze()  # as the server does
        yield llm
    finally:
        llm.close()


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


def chatted(llm: LLM, options: argparse.Namespace, seed: int) -> list[Told]:
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
            found.append(told := load.ask(load.request(texts[at], options.answer)))
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
        "| policy | hits | TTFT p50, ms | p99 | mean | later turns: p99 |\n|---|--:|--:|--:|--:|--:|"
    )
    for seed in range(options.rounds):
        for name, router in (("router", Router()), ("in turn", ByTurns())):
            with opened(options) as llm:
                loop_of(llm).dispatcher.router = router
                told = chatted(llm, options, seed)
            hits = sum(one.handle.sequence.counts.prefix_hit for one in told if one.handle is not None)
            ttft = [1e3 * one.ttft for one in told]
            share = hits / sum(len(one.prompt) for one in told)
            later = [1e3 * one.ttft for one in told if len(one.prompt) > options.system + options.said]
            figures = quantile(ttft, 0.5), quantile(ttft, 0.99), np.mean(ttft), quantile(later, 0.99)
            cells = (f"{share:.1%}", *(f"{one:.1f}" for one in figures))
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="stories")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--kv-memory", type=int, default=64, help="MiB of all replicas")
    parser.add_argument("--sessions", type=int, default=64, help="of chats")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--groups", type=int, default=8, help="that share a system prompt")
    parser.add_argument("--system", type=int, default=200, help="tokens")
    parser.add_argument("--said", type=int, default=24, help="tokens of a turn")
    parser.add_argument("--answer", type=int, default=24, help="tokens")
    parser.add_argument("--think", type=float, default=2.0, help="seconds between turns, the mean")
    parser.add_argument("--rounds", type=int, default=3)
    chats(parser.parse_args())


if __name__ == "__main__":
    main()
