"""The statistics of the draws: frequencies, seeds, choices; and that nothing but these decides a draw."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.hand import sequence_of
from tests.tensors import TensorSampler, over_tensors
from tokenwright.decode.logits_processors import filtered as filtered_of_arrays
from tokenwright.decode.sampler import choose as choose_of_arrays
from tokenwright.decode.sampler import probabilities as probabilities_of_arrays
from tokenwright.decode.sampler import uniform
from tokenwright.engine import Chunk, LogitsNeeded, Output, Pick, Request, SamplingParams, Step

filtered = over_tensors(filtered_of_arrays)
choose = over_tensors(choose_of_arrays)
probabilities = over_tensors(probabilities_of_arrays)

DRAWS = 200_000
CHANCE = 1e-6  # of a right sampler failing one test; the draws are fixed by their seeds, so it is decided once


def tail(statistic, degrees):
    """The chance of a chi-square variable to exceed a value: Q(degrees / 2, value / 2), the incomplete gamma ratio."""
    halves = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(*halves))


def chi_square(counts, chances):
    """The statistic and its degrees of freedom; what has no chance must not have come at all."""
    counts, chances = np.asarray(counts).ravel(), np.asarray(chances).ravel()
    assert counts[chances == 0].sum() == 0
    counts, expected = counts[chances > 0], chances[chances > 0] * counts.sum()
    assert expected.min() >= 5, "the statistic needs five of each"
    return float(((counts - expected) ** 2 / expected).sum()), len(counts) - 1


def fits(counts, chances):
    return tail(*chi_square(counts, chances)) > CHANCE


def drawn(logits, params, positions, choices=(0,)):
    """Tokens [positions, choices]."""
    chances = probabilities(logits, params)
    return np.array([choose(logits, chances, params.seed, position, choices) for position in positions])


def test_the_tail_is_the_tables():
    assert tail(27.631, 2) == pytest.approx(math.exp(-27.631 / 2))  # two degrees are exponential
    assert tail(43.820, 19) == pytest.approx(1e-3, rel=1e-3)


WAYS = {
    "plain": {},
    "hot": {"temperature": 1.7},
    "top_k": {"top_k": 12},
    "top_p": {"top_p": 0.8},
    "together": {"temperature": 0.8, "top_k": 30, "top_p": 0.95, "min_p": 0.02, "typical_p": 0.9},
}
LOGITS = torch.from_numpy(np.random.default_rng(5).standard_normal(40)).float()


@pytest.mark.parametrize("way", WAYS)
def test_frequencies_are_the_exact_distribution(way):
    """Over positions and choices alike, 40,000 draws of each way and 200,000 in all."""
    params = SamplingParams(seed=11, **WAYS[way])
    counts = np.bincount(drawn(LOGITS, params, range(5000), range(8)).ravel(), minlength=len(LOGITS))
    assert counts.sum() * len(WAYS) == DRAWS
    exact = filtered(LOGITS, params).softmax(-1).numpy()
    assert fits(counts, exact)
    assert not fits(counts, 0.9 * exact + 0.1 * (exact > 0) / (exact > 0).sum())  # it can tell a tenth that is uniform


def quantiles(numbers, parts=8):
    return (np.asarray(numbers) * parts).astype(int)


@pytest.mark.parametrize(
    "neighbour",
    [lambda s, p, c: (s, p, c + 1), lambda s, p, c: (s, p + 1, c), lambda s, p, c: (s + 1, p, c)],
    ids=["choice", "position", "seed"],
)
def test_neighbouring_draws_are_independent(neighbour):
    """Pairs of uniform numbers fall evenly into 64 squares."""
    places = [(seed, position, choice) for seed in range(10) for position in range(300) for choice in range(8)]
    first = quantiles([uniform(*place) for place in places])
    second = quantiles([uniform(*neighbour(*place)) for place in places])
    assert fits(np.bincount(first * 8 + second, minlength=64), np.full(64, 1 / 64))


def test_choices_draw_other_tokens_at_the_same_place():
    """Joint frequencies of two choices are the products of theirs."""
    logits = LOGITS[:6]
    chances = logits.double().softmax(-1).numpy()
    tokens = drawn(logits, SamplingParams(seed=3), range(10_000), (0, 5))
    joint = np.bincount(tokens[:, 0] * 6 + tokens[:, 1], minlength=36)
    assert fits(joint, np.outer(chances, chances))


# Whatever the batch


@st.composite
def batches(draw):
    """Chunks of several requests, each with its row; and an order to ask for them in."""
    count = draw(st.integers(2, 6))
    chunks = []
    for number in range(count):
        params = SamplingParams(
            temperature=draw(st.sampled_from([0.0, 0.5, 1.0])),
            top_k=draw(st.integers(0, 9)),
            repetition_penalty=draw(st.sampled_from([1.0, 1.3])),
            presence_penalty=draw(st.sampled_from([0.0, 0.5])),
            seed=draw(st.integers(0, 2**64 - 1)),
        )
        text = tuple(draw(st.lists(st.integers(0, 39), min_size=2, max_size=12)))
        start = draw(st.integers(0, len(text) - 1))
        sequence = sequence_of(*text, identity=number, asked=Request(text[:2], params), limit=99)
        chunks.append(Chunk(sequence, start, len(text), LogitsNeeded.LAST))
    return chunks, draw(st.permutations(range(count)))


@given(batches(), st.integers(0, 2**32))
def test_a_draw_is_the_same_in_any_batch(batch, seed):
    chunks, order = batch
    logits = torch.randn(len(chunks), 40, generator=torch.Generator().manual_seed(seed)) * 3

    def picked(places):
        output = Output(tuple(range(i, i + 1) for i in range(len(places))), logits[list(places)])
        results = TensorSampler().pick(output, Step(tuple(chunks[i] for i in places)))
        return {result.sequence: result for result in results}

    together = picked(range(len(chunks)))
    assert together == picked(order)
    for place in order:
        assert picked([place]) == {place: together[place]}


def test_choices_of_one_chunk_are_those_of_each_alone():
    """Three texts leave one prompt; later each goes on in a chunk of its own, and draws as it would have."""
    params = SamplingParams(seed=9, n=3)

    def chunk(choices):
        sequence = sequence_of(1, 2, identity=4, asked=Request((1, 2), params), limit=99, choices=choices)
        return Chunk(sequence, 0, 2, LogitsNeeded.LAST)

    def picks(choices):
        return TensorSampler().pick(Output((range(1),), LOGITS[None]), Step((chunk(choices),)))

    together = picks((0, 1, 2))
    assert [pick.choice for pick in together] == [0, 1, 2]
    assert all(isinstance(pick, Pick) and pick.sequence == 4 for pick in together)
    assert [picks((choice,))[0] for choice in (0, 1, 2)] == together


def test_a_long_run_does_not_repeat():
    """Numbers do not come back after a while: at no lag up to 64 do more or fewer agree than chance allows."""
    numbers = quantiles([uniform(1, position) for position in range(20_000)], 16)
    for lag in range(1, 65):
        agree = int((numbers[lag:] == numbers[:-lag]).sum())
        assert fits([agree, len(numbers) - lag - agree], [1 / 16, 15 / 16]), lag
