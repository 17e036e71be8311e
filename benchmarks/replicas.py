"""Two real replicas of this machine: how near the simulator is, and what the router is worth for chats.

    python benchmarks/replicas.py predict [--replicas 2] [--requests 150] [--loads .2 .4 .6] [--rounds 5]
    python benchmarks/replicas.py chats [--replicas 2] [--sessions 64] [--turns 5] [--rounds 3]

predict: the simulator of cluster.py, with costs of steps that are fitted here on some loads, for others
(replica_prediction.py says which are which). The output compares medians, and what they are made of.

chats: sessions in groups that share a system prompt; each asks on, some time after it was answered. The same sessions
through the router and in turn, over fresh replicas; the share of prompt tokens found cached, and TTFT. Each system
prompt is computed once in any case, and with 8 of them among 320 requests such first turns are the 99th percentile of
all; so that of later turns stands beside it.
"""

from __future__ import annotations

import argparse
import heapq
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from queue import Empty

import numpy as np
from reliability_parts import about
from replica_loads import Load, Told, opened
from replica_prediction import predict
from served import quantile

from tokenwright.cluster.cluster_llm import ClusterLLM
from tokenwright.cluster.router import RoutedReplica, Router
from tokenwright.engine.prefix_index import PrefixHashes


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
    for seed in range(options.rounds or 3):
        for name, router in (("router", Router()), ("in turn", ByTurns())):
            with opened(options) as llm:
                llm.cluster.dispatcher.router = router
                told = chatted(llm, options, seed)
            hits = sum(one.handle.sequence.counts.prefix_hit for one in told if one.handle is not None)
            ttft = [1e3 * one.ttft for one in told]
            share = hits / sum(len(one.prompt) for one in told)
            later = [1e3 * one.ttft for one in told if len(one.prompt) > options.system + options.said]
            figures = quantile(ttft, 0.5), quantile(ttft, 0.99), np.mean(ttft), quantile(later, 0.99)
            cells = (f"{share:.1%}", *(f"{one:.1f}" for one in figures))
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


def predicted(options: argparse.Namespace) -> None:
    """The simulator against these replicas."""
    print(f"{about()}; {options.model}, {options.replicas} replicas")
    with opened(options) as llm:
        warm = Load(llm, 0)
        for _ in range(4 * options.replicas):
            warm.ask(warm.request(warm.prompt(100), 20))
        warm.wait(4 * options.replicas)
        predict(llm, options.requests, options.rounds or 5, options.loads, options.save)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure two real replicas.")
    parser.add_argument("what", choices=("predict", "chats"))
    parser.add_argument("--model", default="stories")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--kv-memory", type=int, default=64, help="MiB of all replicas")
    parser.add_argument("--requests", type=int, default=150, help="predict: of each load")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.2, 0.4, 0.6], help="predict: shares of the most")
    parser.add_argument(
        "--save", type=Path, metavar="FILE", help="predict: keep the costs for `cluster.py --costs FILE`"
    )
    parser.add_argument("--sessions", type=int, default=64, help="chats, as the following")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--groups", type=int, default=8, help="that share a system prompt")
    parser.add_argument("--system", type=int, default=200, help="tokens")
    parser.add_argument("--said", type=int, default=24, help="tokens of a turn")
    parser.add_argument("--answer", type=int, default=24, help="tokens")
    parser.add_argument("--think", type=float, default=2.0, help="seconds between turns, the mean")
    parser.add_argument("--rounds", type=int, help="of the fit (5), or of all sessions (3)")
    options = parser.parse_args()
    (predicted if options.what == "predict" else chats)(options)


if __name__ == "__main__":
    main()
