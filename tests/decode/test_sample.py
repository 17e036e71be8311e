"""Sampling against transformers' own warpers, the definitions in numpy, and the statistics of the draws."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from tokenwright.decode import sample
from tokenwright.decode.sample import TorchSampler, filtered, logprobs, probabilities, top_k, top_p, uniform
from tokenwright.engine import Chunk, Fault, Output, Pick, Request, SamplingParams, Score, Step, Wants

# Values on a coarse grid make ties, which is where rules differ.
rows = st.lists(st.integers(-12, 12).map(lambda n: n / 2), min_size=1, max_size=40).map(torch.tensor)
distinct = st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=40, unique=True).map(torch.tensor)


def choose(logits, params, position):
    return sample.choose(logits, probabilities(logits, params), params.seed, position)


@given(rows, st.integers(1, 45))
def test_top_k_is_transformers(logits, k):
    theirs = TopKLogitsWarper(k)(torch.empty(1, 0), logits[None].clone())[0]
    assert torch.equal(top_k(logits, k), theirs)


@given(distinct, st.floats(0.01, 0.99))
def test_top_p_is_transformers_away_from_the_border(logits, p):
    mass = logits.double().softmax(-1).sort(descending=True).values.cumsum(-1)
    if (mass - p).abs().min() < 1e-5:  # fp32 and fp64 may see the border on different sides
        return
    theirs = TopPLogitsWarper(p)(torch.empty(1, 0), logits[None].clone())[0]
    assert torch.equal(top_p(logits, p), theirs)


@given(rows, st.floats(0.01, 0.999))
def test_top_p_keeps_the_smallest_set_and_the_lower_id_on_ties(logits, p):
    kept = top_p(logits, p).isfinite()
    order = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))
    chances = logits.double().softmax(-1)
    mass, needed = 0.0, 0
    while needed < len(order) and mass < p - 1e-12:
        mass += float(chances[order[needed]])
        needed += 1
    assert kept.nonzero().flatten().tolist() in (
        sorted(order[:needed]),
        sorted(order[: needed + 1]) if math.isclose(mass, p, abs_tol=1e-9) else None,
    )


@given(distinct, st.floats(0.05, 10))
def test_temperature_is_transformers_up_to_a_shift(logits, temperature):
    theirs = TemperatureLogitsWarper(temperature)(torch.empty(1, 0), logits[None].double())[0]
    ours = filtered(logits, SamplingParams(temperature=temperature))
    assert torch.allclose(ours.softmax(-1), theirs.softmax(-1), atol=1e-12)


@given(rows)
def test_greedy_is_the_argmax_and_the_lowest_id_on_ties(logits):
    best = max(range(len(logits)), key=lambda i: (float(logits[i]), -i))
    assert choose(logits, SamplingParams(temperature=0.0), 0) == best


@given(rows, st.integers(0, 2**64 - 1), st.integers(0, 10_000), st.integers(0, 5), st.floats(0.05, 1))
def test_a_draw_is_the_inverse_cdf_over_the_kept_ids(logits, seed, position, k, p):
    params = SamplingParams(seed=seed, top_k=k, top_p=p, temperature=0.7)
    kept = filtered(logits, params)
    u, mass = uniform(seed, position), 0.0
    chances = kept.softmax(-1).tolist()
    token = choose(logits, params, position)
    assert chances[token] > 0
    below = sum(chances[:token])
    assert below - 1e-9 <= u <= below + chances[token] + 1e-9, (u, mass)


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e6])
def test_extreme_temperatures_are_the_limits(temperature):
    logits = torch.tensor([3.0, 9.0, -2.0, 9.0 - 1e-3])
    params = SamplingParams(temperature=temperature, seed=1)
    drawn = {choose(logits, params, position) for position in range(300)}
    assert drawn == ({0, 1, 2, 3} if temperature > 1 else {1})


def test_uniform_numbers_are_uniform_and_differ_by_seed_and_position():
    values = np.array([uniform(seed, position) for seed in range(40) for position in range(100)])
    assert len(set(values)) == len(values)
    assert 0 <= values.min() <= values.max() < 1
    counts = np.histogram(values, bins=20, range=(0, 1))[0]
    assert ((counts - 200) ** 2 / 200).sum() < 43.8  # chi-square, 19 degrees, 1 in 1,000; the values are fixed


def test_uniform_numbers_never_change():
    """Seeded text must be the same in every version: these values are part of the contract."""
    assert [round(uniform(0, 0), 12), round(uniform(7, 3), 12), round(uniform(2**64 - 1, 123456), 12)] == PINNED


PINNED = [0.011546754286, 0.442052129471, 0.273522558015]


def test_frequencies_follow_the_probabilities():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    params = SamplingParams(seed=11)
    counts = np.bincount([choose(logits, params, position) for position in range(4000)], minlength=4)
    expected = logits.softmax(-1).numpy() * 4000
    assert ((counts - expected) ** 2 / expected).sum() < 16.3  # chi-square, 3 degrees, 1 in 1,000


def chunk(identity, wants, following=(), **params):
    request = Request((1, 2, 3), SamplingParams(**params))
    return Chunk(identity, request, 0, (1, 2, 3), (0,), 9, wants, following)


def test_the_sampler_answers_each_chunk_and_a_bad_row_fails_alone():
    logits = torch.arange(40.0).reshape(8, 5).sin()
    logits[1, 2] = math.nan
    logits[7, 0] = math.inf
    step = Step(
        (
            chunk(0, Wants.LAST, temperature=0.0),
            chunk(1, Wants.LAST, temperature=0.0),
            chunk(2, Wants.NONE),
            chunk(3, Wants.ALL, (4, 0), temperature=0.0),
            chunk(4, Wants.ALL, (4, 0, 1)),
        )
    )
    output = Output((range(1), range(1, 2), range(2, 2), range(2, 5), range(5, 8)), logits)
    results = TorchSampler().pick(output, step)
    assert [type(result) for result in results] == [Pick, Fault, Score, Pick, Fault]
    assert [result.parent for result in results] == [0, 1, 3, 3, 4]
    right = logits.log_softmax(-1)
    assert results[0].token == int(logits[0].argmax())
    assert results[0].logprob == pytest.approx(float(right[0].max()), abs=1e-6)
    assert results[2].start == 1
    assert results[2].logprobs == pytest.approx([float(right[2, 4]), float(right[3, 0])], abs=1e-6)


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.integers(1, 6))
def test_logprobs_are_the_log_softmax(seed, n):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, 50, generator=generator) * 8
    tokens = torch.randint(0, 50, (n,), generator=generator)
    right = logits.double().log_softmax(-1)[range(n), tokens]
    assert torch.allclose(logprobs(logits, tokens).double(), right, atol=1e-5)
