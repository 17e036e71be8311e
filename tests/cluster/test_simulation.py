"""The simulator of benchmarks/: every request is answered, and the router finds what there is to be found."""

import argparse
import importlib.util
import json
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "cluster.py"


@pytest.fixture(scope="module")
def simulator():
    spec = importlib.util.spec_from_file_location("simulated_cluster", FILE)
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found  # dataclasses look their module up
    spec.loader.exec_module(found)
    yield found
    del sys.modules[spec.name]


OPTIONS = argparse.Namespace(
    replicas=4, scale=16, blocks=400, budget=2048, sequences=16, prefill_rate=8000.0, base_ms=15.0, sequence_ms=0.1
)


@pytest.fixture(scope="module")
def chats(simulator, tmp_path_factory):
    """19 conversations of 6 turns, whose turns come one after another; each turn has two blocks more."""
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
    return simulator.read_trace(path)


def test_the_ideal_is_what_one_endless_cache_finds(simulator, chats):
    turns = [512 * 2 * (turn + 1) + 64 for turn in range(6)]
    assert simulator.ideal(chats) == pytest.approx(sum(512 * 2 * turn for turn in range(6)) / sum(turns))


def test_the_router_finds_nearly_all_and_others_do_not(simulator, chats):
    found = {policy: simulator.simulate(chats, policy, OPTIONS) for policy in simulator.POLICIES}
    best = simulator.ideal(chats)
    assert 0.9 * best <= found["router"]["hits"] <= best
    for policy in ("least loaded", "power of two"):
        assert found[policy]["hits"] < 0.7 * found["router"]["hits"]
        assert found[policy]["ttft_mean_s"] > found["router"]["ttft_mean_s"]


def test_prompts_that_share_nothing_are_spread_as_evenly_as_by_the_least_loaded(simulator, tmp_path):
    rows = [
        f"2023-11-16 18:{at // 20:02}:{at % 20 * 3:02}.{at % 7}000000,{300 + 97 * (at % 9)},64" for at in range(300)
    ]
    path = tmp_path / "azure.csv"
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    arrivals = simulator.read_trace(path)
    assert simulator.ideal(arrivals) == 0
    router, least = (simulator.simulate(arrivals, policy, OPTIONS) for policy in ("router", "least loaded"))
    assert router["hits"] == 0
    assert router["ttft_p99_s"] <= 1.1 * least["ttft_p99_s"]
