"""Simulates a cluster: the router, the scheduler and the page pool as they are, over replicas that only take time.

    python -m benchmarks.serving.cluster LOAD... [--replicas 16] [--policy router --policy "round robin"] [--costs FILE]
    python -m benchmarks.serving.cluster bursty --replicas 1 4 16 64 256 1000

A load is a trace, of Mooncake (JSON lines: timestamp, input_length, output_length, hash_ids of blocks of 512 tokens) or
Azure (CSV: TIMESTAMP, ContextTokens, GeneratedTokens; no two prompts share anything); or chats whose sessions begin
at random times: `poisson`, or `bursty`, with six times as many in a burst of some 6 seconds as in the 24 between two.
The chats grow with the replicas; traces stay as they are.

Time is simulated: a step takes

    base + prompt tokens x token + sequences x sequence + cached tokens that are read x key (prompt_key by a prompt)

whose costs are assumptions for a model of some 70 billion parameters on one node, or costs of a file (--costs). One
simulated token stands for `--scale` tokens, in prompts and in answers, so first tokens are late by
up to that many steps.

Hits are the share of prompt tokens that were found cached; "of ideal": of what one endless cache of all replicas would
find. Goodput are the requests a second with a first token within --ttft-s and at most --itl-ms between two others.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path
from statistics import mean, quantiles

from benchmarks.serving.cluster_arrivals import BLOCK, Ask, Chats, asks_of, read_trace
from benchmarks.serving.cluster_costs import ASSUMED, Source, read_costs
from benchmarks.serving.cluster_simulation import POLICIES, ModelledReplica, Simulation

BURSTS = {"poisson": 1.0, "bursty": 6.0}
TRACES = (".jsonl", ".csv")
BLOCKS = 5000  # of 512 tokens that a replica has memory for
COLUMNS = {
    "replicas": "replicas",
    "policy": "policy",
    "hits": "hits",
    "of_ideal": "of ideal",
    "ttft_p50_s": "TTFT p50, s",
    "ttft_p99_s": "p99",
    "itl_ms": "ITL, ms",
    "goodput": "goodput, 1/s",
    "met": "of all",
    "choice_ms": "a choice, ms",
    "took_s": "simulated in, s",
}
SHARES = ("hits", "of_ideal", "met")
Figures = dict[str, str | float]


def asks_for(load: str, replicas: int, options: argparse.Namespace) -> list[Ask]:
    """The requests of a load, none of them served yet."""
    if load in BURSTS:
        rate, seconds = options.rate * replicas, options.seconds
        return Chats(rate, seconds, groups=2 * replicas, burst=BURSTS[load], seed=options.seed).asks(options.scale)
    return asks_of(read_trace(Path(load))[: options.requests], options.scale)


def simulate(load: str, replicas: int, policy: str, source: Source, options: argparse.Namespace) -> Figures:
    """The figures of one policy."""
    scale, began = options.scale, time.perf_counter()
    blocks = options.blocks or (source.memory // BLOCK if source.memory else BLOCKS)
    made = (blocks, BLOCK // scale, options.budget // scale, options.sequences, scale)
    machines = [ModelledReplica(*made) for _ in range(replicas)]
    simulation = Simulation(machines, source.costs, POLICIES[policy])
    simulation.run(asks_for(load, replicas, options))
    for replica in machines:
        assert not replica.scheduler.sequences, "every request has ended"
    found = figures(simulation.asks, options)
    choice = 1000 * simulation.choosing / len(simulation.asks)
    took = time.perf_counter() - began
    return {"replicas": replicas, "policy": policy, **found, "choice_ms": choice, "took_s": took}


def figures(asks: list[Ask], options: argparse.Namespace) -> Figures:
    """The figures of served requests."""
    tokens, firsts, gaps, met = 0, [], [], 0
    for ask in asks:
        assert ask.first is not None and ask.sequence is not None, "every request is answered"
        tokens += len(ask.tokens)
        firsts.append(ask.first - ask.arrival.at)
        gap = (ask.ended - ask.first) / ((ask.written - 1) * options.scale) if ask.written > 1 else 0.0
        met += firsts[-1] <= options.ttft_s and 1000 * gap <= options.itl_ms
        if ask.written > 1:
            gaps.append(gap)
    hits = sum(ask.sequence.counts.prefix_hit for ask in asks if ask.sequence) / tokens
    best = sum(ask.findable for ask in asks) / tokens
    cuts = quantiles(firsts, n=100)
    return {
        "requests": len(asks),
        "hits": hits,
        "of_ideal": hits / best if best else 0.0,
        "ttft_p50_s": cuts[49],
        "ttft_p99_s": cuts[98],
        "ttft_mean_s": mean(firsts),
        "itl_ms": 1000 * mean(gaps),
        "goodput": met / asks[-1].arrival.at,
        "met": met / len(asks),
    }


def cell(name: str, found: str | float) -> str:
    if isinstance(found, str):
        return found
    return f"{found:.1%}" if name in SHARES else f"{found:.3g}" if found < 100 else f"{found:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Simulate a cluster.")
    parser.add_argument("loads", nargs="+", help="traces, poisson or bursty")
    parser.add_argument("--replicas", type=int, nargs="+", default=[16])
    parser.add_argument("--policy", action="append", choices=POLICIES)
    parser.add_argument("--costs", type=Path, help="a file with costs of steps")
    parser.add_argument("--requests", type=int, help="of traces: only the first so many")
    parser.add_argument("--rate", type=float, default=2.0, help="of chats: requests a second for each replica, about")
    parser.add_argument("--seconds", type=float, default=60.0, help="of chats")
    parser.add_argument("--seed", type=int, default=1, help="of chats")
    parser.add_argument("--scale", type=int, default=8, help="tokens that one simulated token stands for")
    parser.add_argument("--blocks", type=int, help=f"of 512 tokens in a replica's memory; else the file's, or {BLOCKS}")
    parser.add_argument("--budget", type=int, default=4096, help="tokens of a step")
    parser.add_argument("--sequences", type=int, default=128, help="sequences that a replica runs at once")
    parser.add_argument("--ttft-s", type=float, default=2.0, help="goodput: seconds to the first token at most")
    parser.add_argument("--itl-ms", type=float, default=50.0, help="goodput: milliseconds between tokens at most")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each line of the table")
    options = parser.parse_args()
    for load in options.loads:
        if load not in BURSTS and Path(load).suffix not in TRACES:
            parser.error(f"{load} is neither {' nor '.join((*BURSTS, *TRACES))}")
    source = read_costs(options.costs) if options.costs else ASSUMED
    gc.disable()  # what a simulation leaves behind has no cycles
    for load in options.loads:
        if not options.json:
            print(f"\n{Path(load).name}; costs of steps: {source.source}\n\n| {' | '.join(COLUMNS.values())} |")
            print("|--:|---|" + "--:|" * (len(COLUMNS) - 2))
        for replicas in options.replicas:
            for policy in options.policy or POLICIES:
                found = simulate(load, replicas, policy, source, options)
                if options.json:
                    print(json.dumps({"load": load, "costs": source.source, **found}), flush=True)
                else:
                    print(f"| {' | '.join(cell(name, found[name]) for name in COLUMNS)} |", flush=True)


if __name__ == "__main__":
    main()
