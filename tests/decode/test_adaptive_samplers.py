"""XTC and Mirostat, by their definitions in plain Python; and DRY within a window."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tests.decode.test_draws import LOGITS, fits
from tests.engine.hand import sequence_of
from tests.profiles import examples
from tests.tensors import TensorSampler, over_tensors
from tokenwright.decode.logits_processors import adjusted as adjusted_of_arrays
from tokenwright.decode.logits_processors import filtered as filtered_of_arrays
from tokenwright.decode.logits_processors import mirostat as mirostat_of_arrays
from tokenwright.decode.logits_processors import mirostat_bound
from tokenwright.decode.logits_processors import without_top as without_top_of_arrays
from tokenwright.decode.sampler import of_choice as of_choice_of_arrays
from tokenwright.decode.sampler import probabilities as probabilities_of_arrays
from tokenwright.decode.sampler import uniform
from tokenwright.engine import Chunk, LogitsNeeded, Output, Request, SamplingParams, Step
from tokenwright.errors import RequestError

adjusted = over_tensors(adjusted_of_arrays)
filtered = over_tensors(filtered_of_arrays)
mirostat = over_tensors(mirostat_of_arrays)
without_top = over_tensors(without_top_of_arrays)
of_choice = over_tensors(of_choice_of_arrays)
probabilities = over_tensors(probabilities_of_arrays)

# Values on a coarse grid make ties.
rows = st.lists(st.integers(-12, 12).map(lambda n: n / 4), min_size=1, max_size=30).map(
    lambda values: torch.tensor(values, dtype=torch.float64)
)


def ranked(values):
    """Ids, the most probable first and the lower id on ties."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


# XTC


def xtc(chances, threshold):
    """All ids that reach the threshold go, but for the last of them."""
    order = [i for i in ranked(chances) if chances[i] >= threshold and chances[i] > 0]
    gone = set(order[:-1])
    left = [0.0 if i in gone else p for i, p in enumerate(chances)]
    return [p / sum(left) for p in left]


@given(rows, st.floats(0, 1), st.booleans())
@example(torch.zeros(2, dtype=torch.float64), 0.5, False)
@example(torch.zeros(3, dtype=torch.float64), 0.0, True)
def test_xtc_is_its_definition(logits, threshold, cut):
    if cut and len(logits) > 1:
        logits[0] = -math.inf
    chances = logits.softmax(-1)
    assert without_top(chances, threshold).tolist() == pytest.approx(xtc(chances.tolist(), threshold), abs=1e-15)


@given(rows, st.floats(0.5001, 1))
def test_xtc_above_a_half_does_nothing(logits, threshold):
    chances = logits.softmax(-1)
    assert without_top(chances, threshold) is chances


def test_xtc_comes_as_often_as_asked_and_by_a_number_of_its_own():
    params = SamplingParams(seed=5, xtc_probability=0.3, xtc_threshold=0.05)
    chances = probabilities(LOGITS, params)
    assert chances is not None
    places = [(position, choice) for position in range(2000) for choice in range(5)]
    excluded = np.array([of_choice(chances, params, *place) is not chances for place in places])
    assert fits([excluded.sum(), (~excluded).sum()], [0.3, 0.7])
    assert not fits([excluded.sum(), (~excluded).sum()], [0.33, 0.67])
    upper = np.array([uniform(5, *place) >= 0.5 for place in places])  # the number that draws the token
    joint = np.bincount(upper * 2 + excluded, minlength=4)
    assert fits(joint, np.outer([0.5, 0.5], [0.7, 0.3]))


@given(st.integers(0, 2**64 - 1), st.integers(0, 300), st.integers(0, 9), st.integers(0, 3))
def test_each_word_of_the_generator_is_a_number_of_its_own(seed, position, choice, word):
    bits = np.random.Philox(key=seed, counter=position + (choice << 64)).random_raw(4)
    assert uniform(seed, position, choice, word) == (int(bits[word]) >> 11) * 2.0**-53


# Mirostat


def second(logits, bound):
    """The ids whose surprise is at most the bound; the most probable ones if there is none."""
    surprises = [-math.log2(p) for p in logits.softmax(-1).tolist()]
    least = min(surprises)
    return {i for i, surprise in enumerate(surprises) if surprise <= max(bound, least) + 1e-12}


def first(logits, bound, top=100):
    """The ranks up to k of the estimated law of Zipf."""
    values = sorted((v for v in logits.tolist() if v > -math.inf), reverse=True)[:top]
    steps = [math.log((i + 2) / (i + 1)) for i in range(len(values) - 1)]
    falls = [a - b for a, b in pairwise(values)]
    s = sum(t * b for t, b in zip(steps, falls, strict=True)) / sum(t * t for t in steps) if steps else 0.0
    if s == 0:
        return len(logits)
    scale = 1 / math.log(len(logits)) if s == 1 else (s - 1) / (1 - len(logits) ** (1 - s))
    return (scale * 2**bound) ** (1 / s)


@given(rows, st.floats(-3, 20))
def test_mirostat_2_is_its_definition(logits, bound):
    surprises = -torch.log2(logits.softmax(-1))
    if (surprises - bound).abs().min() > 1e-9:
        kept = mirostat(logits, 2, bound).isfinite().nonzero()[:, 0].tolist()
        assert set(kept) == second(logits, bound)


@given(rows, st.floats(-3, 12))
@examples(200)
def test_mirostat_1_is_its_definition(logits, bound):
    k = first(logits, bound)
    if abs(k - round(k)) < 1e-6 or (len(logits) > 1 and k > 1e6):
        return
    count = min(max(1, int(k)), len(logits))
    kept = mirostat(logits, 1, bound).isfinite().nonzero()[:, 0].tolist()
    least = sorted(logits.tolist(), reverse=True)[count - 1]
    assert kept == [i for i, value in enumerate(logits.tolist()) if value >= least]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bound", [-1e6, -1.0, 0.0, 1e6])
@pytest.mark.parametrize("row", [[0.0], [3.0, 3.0], [0.0, -math.inf], [0.0, -1000.0, -math.inf], [-1e300, 1e300]])
def test_mirostat_keeps_one_at_least_and_brings_none_back(version, bound, row):
    logits = torch.tensor(row, dtype=torch.float64)
    kept = mirostat(logits, version, bound).isfinite()
    assert bool(kept[int(logits.argmax())])
    assert not (kept & ~logits.isfinite()).any()


@given(st.lists(st.floats(0, 20), max_size=30), st.floats(0, 10), st.floats(0, 1))
def test_the_bound_is_that_of_a_correction_after_each_token(surprises, tau, eta):
    mu = 2 * tau
    for surprise in surprises:
        mu -= eta * (surprise - tau)
    assert mirostat_bound(tau, eta, math.fsum(surprises), len(surprises)) == pytest.approx(mu, abs=1e-9)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("tau", [1.5, 2.5])
def test_mirostat_holds_the_mean_surprise(version, tau):
    """Over 400 tokens of rows whose entropy changes, the mean surprise comes to tau."""
    params = SamplingParams(seed=3, mirostat=version, mirostat_tau=tau, mirostat_eta=0.1, max_tokens=999)
    sequence = sequence_of(1, asked=Request((1,), params), limit=999)
    generator = torch.Generator().manual_seed(9)
    for _ in range(400):
        logits = torch.randn(1, 200, generator=generator) * (1 + 2 * torch.rand(1, generator=generator))
        chunk = Chunk(sequence, len(sequence.tokens) - 1, len(sequence.tokens), LogitsNeeded.LAST)
        [pick] = TensorSampler().pick(Output((range(1),), logits), Step((chunk,)))
        sequence.tokens += pick.tokens
        sequence.counts.sampler_logprob += pick.sampler_logprobs[0]
    assert -sequence.counts.sampler_logprob / math.log(2) / 400 == pytest.approx(tau, abs=0.1)


@given(rows, st.integers(1, 2), st.floats(0.1, 9))
def test_mirostat_takes_the_place_of_the_filters(logits, version, bound):
    others = {"top_k": 2, "top_p": 0.3, "min_p": 0.5, "typical_p": 0.3, "top_n_sigma": 0.5}
    plain, all_of_them = SamplingParams(mirostat=version), SamplingParams(mirostat=version, **others)
    assert torch.equal(filtered(logits, plain, bound), filtered(logits, all_of_them, bound))


# DRY


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.integers(0, 30))
def test_dry_sees_the_window_alone(text, window):
    row = torch.zeros(5)
    params = {"dry_multiplier": 0.8, "dry_allowed_length": 1}
    seen = adjusted(row, text, 1, SamplingParams(dry_window=window, **params))
    recent = text[-window:] if window else text
    assert torch.equal(seen, adjusted(row, recent, 0, SamplingParams(**params)))


@pytest.mark.parametrize("given", [{"xtc_probability": 0.5}, {"mirostat": 2}])
def test_beam_search_refuses_what_draws(given):
    with pytest.raises(RequestError, match="beam search draws nothing"):
        SamplingParams(beams=2, **given)


@pytest.mark.parametrize(
    "given",
    [{"mirostat": 3}, {"mirostat": True}, {"xtc_probability": 1.1}, {"xtc_threshold": -0.1}, {"dry_window": -1}],
)
def test_values_out_of_range_are_refused(given):
    with pytest.raises(RequestError, match=next(iter(given))):
        SamplingParams(**given)
