"""The costs of replicas that share a machine, found again from the times of requests that a simulated one served."""

import random
import sys
from pathlib import Path
from statistics import median

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # they are scripts, found beside each other

from cluster_costs import Costs
from cluster_simulation import ModelledReplica, by_router
from replica_costs import SharedCosts, equations, fitted
from replica_prediction import FITTED, HELD_OUT, Lengths, Seen, SharedMachine, simulated

TRUE = SharedCosts(
    base=4e-4,
    token=1e-4,
    sequence=1.5e-4,
    key=3e-7,
    prompt_key=8e-8,
    start=5e-4,
    way=2e-3,
    prompt_base=3e-5,
    prompt_token=1e-5,
    writing_base=1e-4,
    writing_token=2e-5,
)


def requests(lengths: Lengths, rate: float, count: int, seed: int) -> list[Seen]:
    """Requests at random times. Their tokens' times are only as many as they write."""
    draws, at, found = random.Random(seed), 0.0, []
    for _ in range(count):
        at += draws.expovariate(rate)
        prompt, written = (draws.randint(*one) for one in lengths)
        tokens = [draws.randrange(1 << 20) for _ in range(prompt)]
        found.append(Seen(at, 0.0, 0, tokens, [0.0] * written))
    return found


def served(costs: SharedCosts, asked: list[Seen]) -> list[Seen]:
    replicas = [ModelledReplica(2000, 16, 512, 64, 1) for _ in range(2)]
    return simulated(SharedMachine(replicas, Costs(0.0, 0.0, 0.0), by_router, shared=costs), asked)


@pytest.fixture(scope="module")
def found() -> SharedCosts:
    loads = [requests(lengths, rate, 150, seed) for seed, lengths in enumerate(FITTED.values()) for rate in (5, 15)]
    return fitted([one for load in loads for one in equations(served(TRUE, load))]).costs


def test_costs_are_found_again(found: SharedCosts) -> None:
    """The tolerance: when another replica's tokens come tells its state only up to the way of a token."""
    for name in ("base", "token", "sequence", "start", "way", "writing_base", "writing_token"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.1), name


@pytest.mark.parametrize("name", HELD_OUT)
def test_other_loads_are_predicted(found: SharedCosts, name: str) -> None:
    asked = requests(HELD_OUT[name], 15, 200, 9)
    real, said = served(TRUE, asked), served(found, asked)
    for figure in range(3):
        one, other = (median(seen.figures[figure] for seen in each) for each in (real, said))
        assert other == pytest.approx(one, rel=0.02)


def test_the_costs_are_right_on_average() -> None:
    """Noise that only ever makes a time longer, as a machine's does, is in the costs."""
    draws = np.random.default_rng(3)
    counts = [(*draws.integers(1, 30, 2), *(0.0,) * 9) for _ in range(400)]
    noise = 1 + draws.exponential(0.2, len(counts))
    times = [(2 * one[0] + 3 * one[1]) * factor for one, factor in zip(counts, noise, strict=True)]
    costs = fitted(list(zip(counts, times, strict=True))).costs
    said = [costs.base * one[0] + costs.token * one[1] for one in counts]
    assert np.mean(np.array(times) / said) == pytest.approx(1.0, abs=0.01)
    assert costs.base == pytest.approx(2 * 1.2, rel=0.1)
