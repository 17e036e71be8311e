"""The simulator of benchmarks/: every request is answered, and the router finds what there is to be found."""

import argparse
import json
import sys
from dataclasses import asdict
from itertools import pairwise

import pytest

from benchmarks.serving import cluster
from benchmarks.serving.cluster_arrivals import BLOCK, Chats, asks_of, read_trace
from benchmarks.serving.cluster_costs import ASSUMED, Costs, Source, read_costs
from benchmarks.serving.cluster_simulation import POLICIES, ModelledReplica, Simulation

SCALE = 16
OPTIONS = argparse.Namespace(
    scale=SCALE,
    blocks=400,
    budget=2048,
    sequences=16,
    requests=None,
    ttft_s=2.0,
    itl_ms=50.0,
    rate=3.0,
    seed=1,
    seconds=40.0,
)


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """A trace of 19 conversations of 6 turns, whose turns come one after another; each turn has two blocks more."""
    lines = [
        {
            "timestamp": 150 * (19 * turn + chat),
            "input_length": 512 * 2 * (turn + 1) + 64,
            "output_length": 128,
            "hash_ids": [1000 * chat + at for at in range(2 * turn + 2)] + [500_000 + 100 * chat + turn],
        }
        for turn in range(6)
        for chat in range(19)
    ]
    path = tmp_path_factory.mktemp("traces") / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def served(asks, policy="router", costs=ASSUMED.costs, replicas=4):
    """The asks of a run, in the order in which they came."""
    machines = [ModelledReplica(4000, BLOCK // SCALE, 2048 // SCALE, 16, SCALE) for _ in range(replicas)]
    simulation = Simulation(machines, costs, POLICIES[policy])
    simulation.run(asks)
    return simulation.asks


def test_the_ideal_is_what_one_endless_cache_finds(chats):
    turns = [512 * 2 * (turn + 1) + 64 for turn in range(6)]
    asks = asks_of(read_trace(chats), SCALE)
    share = sum(ask.findable for ask in asks) / sum(len(ask.tokens) for ask in asks)
    assert share == pytest.approx(sum(512 * 2 * turn for turn in range(6)) / sum(turns))


def test_the_router_finds_nearly_all_and_others_do_not(chats):
    found = {policy: cluster.simulate(str(chats), 4, policy, ASSUMED, OPTIONS) for policy in POLICIES}
    assert 0.9 <= found["router"]["of_ideal"] <= 1
    for policy in ("least loaded", "power of two"):
        assert found[policy]["hits"] < 0.7 * found["router"]["hits"]
        assert found[policy]["ttft_mean_s"] > found["router"]["ttft_mean_s"]


def test_prompts_that_share_nothing_are_spread_as_evenly_as_by_the_least_loaded(tmp_path):
    rows = [
        f"2023-11-16 18:{at // 20:02}:{at % 20 * 3:02}.{at % 7}000000,{300 + 97 * (at % 9)},64" for at in range(300)
    ]
    path = tmp_path / "azure.csv"
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    router, least = (cluster.simulate(str(path), 4, policy, ASSUMED, OPTIONS) for policy in ("router", "least loaded"))
    assert router["hits"] == router["of_ideal"] == 0
    assert router["ttft_p99_s"] <= 1.1 * least["ttft_p99_s"]


def test_a_turn_of_a_chat_finds_all_that_was_computed_before_it():
    """With one replica nothing is elsewhere: the text before but for its last token, or the system prompt."""
    asks = served(Chats(rate=3.0, until=40.0, groups=3, burst=6.0).asks(SCALE), replicas=1)
    later = [ask for ask in asks if ask.findable > Chats.system // SCALE]
    assert len(later) > 20
    assert [ask.sequence.counts.prefix_hit for ask in asks] == [ask.findable for ask in asks]
    ends = {ask.answer: ask for ask in asks}
    for ask in later:
        before = ends[max(token for token in ask.tokens if token in ends)]
        assert ask.tokens[: ask.findable] == (*before.tokens, *[before.answer] * (before.written - 1))
        assert ask.arrival.at > before.ended


def test_chats_come_as_often_as_asked_for_and_in_bursts():
    """Of both processes the mean, and the variance of the number in 3 s over its mean, which is 1 without bursts."""
    spread = {}
    for burst in (1.0, 6.0):
        chats = Chats(rate=24.0, until=4000.0, groups=2, burst=burst)
        begins = [ask.arrival.at for ask in chats.asks(SCALE)][24 * 15 :]  # without those that are there already
        assert len(begins) == pytest.approx(24 * 4000 / chats.turns, rel=0.15)
        assert all(before < after for before, after in pairwise(begins))
        counts = [0] * (4000 // 3 + 1)
        for at in begins:
            counts[int(at / 3)] += 1
        mean = sum(counts) / len(counts)
        spread[burst] = sum((one - mean) ** 2 for one in counts) / len(counts) / mean
    assert spread[1.0] == pytest.approx(1, abs=0.15)
    assert spread[6.0] > 3


def test_goodput_counts_what_meets_both_targets():
    """One replica, one request at a time: a first token after the prompt's step, then SCALE steps for each token."""
    costs = Costs(base=0.01, token=0.001, sequence=0.0)
    asks = served(Chats(rate=0.05, until=400.0, groups=1).asks(SCALE), costs=costs, replicas=1)
    first = [ask.times[0] - ask.arrival.at for ask in asks]
    limit = sorted(first)[len(first) // 2]
    for most_s, most_ms, met in ((limit, 1000.0, sum(one <= limit for one in first)), (1000.0, 9.0, 0)):
        options = argparse.Namespace(scale=SCALE, ttft_s=most_s, itl_ms=most_ms)
        found = cluster.figures(asks, options)
        one_token = sum(ask.written == 1 for ask in asks)  # has no time between two
        assert found["met"] * len(asks) == pytest.approx(met + (most_ms == 9.0) * one_token)
        assert found["goodput"] * asks[-1].arrival.at == pytest.approx(found["met"] * len(asks))


COSTS = Costs(base=0.006, token=1.7e-5, sequence=1.6e-5, key=4.4e-8, prompt_key=7.3e-10)


def test_a_file_of_costs_is_read(tmp_path, monkeypatch, capsys, chats):
    source = Source(COSTS, "somebody's tables", memory=400 * BLOCK)
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(asdict(source)))
    assert read_costs(path) == source
    arguments = [str(chats), "bursty", "--seconds", "20", "--replicas", "1", "4", "--policy", "router"]
    more = ["--policy", "round robin", "--scale", "16", "--costs", str(path)]
    monkeypatch.setattr(sys, "argv", ["cluster.py", *arguments, *more])
    cluster.main()
    told = capsys.readouterr().out
    assert told.count("somebody's tables") == 2
    assert told.count("| router |") == told.count("| round robin |") == 4
