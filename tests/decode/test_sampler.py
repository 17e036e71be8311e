"""The sampler: the argmax, the inverse CDF, and what it answers to the chunks of a step."""

import math
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.hand import sequence_of
from tests.profiles import examples
from tests.tensors import TensorSampler, over_tensors
from tokenwright.decode import sampler
from tokenwright.decode.logits_processors import filtered as filtered_of_arrays
from tokenwright.decode.sampler import log_totals, uniform
from tokenwright.decode.sampler import probabilities as probabilities_of_arrays
from tokenwright.decode.sampler import top_ids as top_ids_of_arrays
from tokenwright.engine import (
    Chunk,
    Failed,
    LogitsNeeded,
    NoStopChecker,
    Output,
    Pick,
    PromptLogprobs,
    Request,
    SamplingParams,
    Step,
    TokenConstraints,
)
from tokenwright.errors import EngineError

filtered = over_tensors(filtered_of_arrays)
probabilities = over_tensors(probabilities_of_arrays)
top_ids = over_tensors(top_ids_of_arrays)

# Values on a coarse grid make ties, which is where rules differ.
rows = st.lists(st.integers(-12, 12).map(lambda n: n / 2), min_size=1, max_size=40).map(torch.tensor)


def choose(logits, params, position):
    [token] = over_tensors(sampler.choose)(logits, probabilities(logits, params), params.seed, position)
    return token


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


@pytest.mark.parametrize(("number", "token"), [(0.0, 1), (0.25, 2), (0.75, 4), (1 - 2**-53, 4), (1.0, 4)])
def test_a_number_at_a_border_draws_a_token_that_has_a_chance(number, token, monkeypatch):
    """Each token has its lower border, not its upper one; 1, which no number is, stands for what rounding may do."""
    monkeypatch.setattr(sampler, "uniform", lambda seed, position, choice: number)
    chances = torch.tensor([0, 0.25, 0.5, 0, 0.25, 0], dtype=torch.float64)
    assert over_tensors(sampler.choose)(chances, chances, 1, 0) == [token]


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e6])
def test_extreme_temperatures_are_the_limits(temperature):
    logits = torch.tensor([3.0, 9.0, -2.0, 9.0 - 1e-3])
    params = SamplingParams(temperature=temperature, seed=1)
    drawn = {choose(logits, params, position) for position in range(300)}
    assert drawn == ({0, 1, 2, 3} if temperature > 1 else {1})


def test_uniform_numbers_never_change():
    """Seeded text must be the same in every version: these values are part of the contract."""
    assert [round(uniform(0, 0), 12), round(uniform(7, 3), 12), round(uniform(2**64 - 1, 123456), 12)] == PINNED


PINNED = [0.011546754286, 0.442052129471, 0.273522558015]


ASKED = [
    {},
    {"logprobs": 2},
    {"logit_bias": ((3, -50.0),)},
    {"allowed_ids": (1, 2)},
    {"banned_ids": (3,)},
    {"min_tokens": 1},
    {"repetition_penalty": 50.0},
    {"presence_penalty": 50.0},
    {"frequency_penalty": 50.0},
    {"dry_multiplier": 50.0},
    {"temperature": 0.7, "seed": 5},
]


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_what_kernels_tell_of_a_row_changes_no_answer(asked):
    """The likeliest token is 3 unless something is asked for that makes it another."""
    logits = torch.tensor([[0.5, 1.0, 2.0, 4.0, 3.0]])
    params = SamplingParams(**{"temperature": 0.0, **asked})
    text, constraints = (3, 4, 3, 4), TokenConstraints(end_ids=frozenset([3]))
    prompt = text if "min_tokens" in asked else text[:1]
    request = Request(prompt, params, constraints=constraints)
    one = Chunk(sequence_of(*text, asked=request, limit=9), 3, 4, LogitsNeeded.LAST)
    plain, told = (
        TensorSampler().pick(Output((range(1),), logits, *more), Step((one,)))
        for more in ((), ((3,), tuple(log_totals(logits.numpy()))))
    )
    assert plain == told
    if asked and "logprobs" not in asked and "temperature" not in asked:
        assert told[0].tokens != (3,)


class Masked(NoStopChecker):
    def __init__(self, *constraints):
        self.constraints = constraints

    def mask(self):
        return np.array(self.constraints, np.uint32)


def chunk(
    identity, logits_needed, following=(), *, stop_checker=None, constraints=None, search=None, choices=(0,), **params
):
    """Three tokens of a text that goes on with `following` behind the first."""
    text = (1, *(following or (2, 3)))
    asked = Request(text[:3], SamplingParams(**params), constraints=constraints or TokenConstraints(), search=search)
    sequence = sequence_of(*text, identity=identity, asked=asked, limit=9, choices=choices, stop_checker=stop_checker)
    return Chunk(sequence, 0, 3, logits_needed)


def pick(chunks, logits, observe=sampler.unobserved):
    """One row for each chunk, but n for one that scores n tokens."""
    rows, first = [], 0
    for one in chunks:
        count = {LogitsNeeded.NONE: 0, LogitsNeeded.LAST: 1, LogitsNeeded.ALL: len(one.tokens)}[one.logits_needed]
        rows.append(range(first, first + count))
        first += count
    return TensorSampler().pick(Output(tuple(rows), logits), Step(tuple(chunks)), observe)


def test_the_sampler_answers_each_chunk_and_a_bad_row_fails_alone():
    logits = torch.arange(40.0).reshape(8, 5).sin()
    logits[1, 2] = math.nan
    logits[7, 0] = math.inf
    results = pick(
        [
            chunk(0, LogitsNeeded.LAST, temperature=0.0),
            chunk(1, LogitsNeeded.LAST, temperature=0.0),
            chunk(2, LogitsNeeded.NONE),
            chunk(3, LogitsNeeded.ALL, (4, 0), temperature=0.0),
            chunk(4, LogitsNeeded.ALL, (4, 0, 1)),
        ],
        logits,
    )
    assert [type(result) for result in results] == [Pick, Failed, PromptLogprobs, Pick, Failed]
    assert [result.sequence for result in results] == [0, 1, 3, 3, 4]
    right = logits.log_softmax(-1)
    assert results[0].tokens == (int(logits[0].argmax()),)
    assert results[0].logprobs == pytest.approx((float(right[0].max()),), abs=1e-6)
    assert results[2].start == 1
    assert results[2].logprobs == pytest.approx([float(right[2, 4]), float(right[3, 0])], abs=1e-6)
    assert results[2].tops == ()


FEWER = st.fixed_dictionaries(
    {"top_k": st.integers(1, 12), "seed": st.integers(0, 2**32), "temperature": st.sampled_from((0.7, 1.0, 2.5))},
    optional={
        "top_p": st.floats(0.05, 1), "min_p": st.floats(0, 0.5), "typical_p": st.floats(0.05, 1),
        "xtc_probability": st.just(1.0), "xtc_threshold": st.floats(0.01, 0.5), "repetition_penalty": st.just(2.0),
        "presence_penalty": st.just(1.5), "logit_bias": st.just({1: 2.0}), "banned_ids": st.just((2,)),
    },
)  # fmt: skip


@examples(200)
@given(rows, FEWER)
def test_a_draw_from_the_logits_that_top_k_leaves_is_one_from_all(logits, asked):
    """Who observes a pick sees all of them."""
    one, seen = chunk(0, LogitsNeeded.LAST, choices=(0, 1, 2), **asked), []
    with mock.patch.object(sampler, "RANGE", 2):  # so that short rows are narrowed
        few = pick([one], logits[None])
    whole = pick([one], logits[None], lambda *each: seen.append(each))
    assert len(seen) == 1 and [(one.tokens, one.logprobs) for one in few] == [(o.tokens, o.logprobs) for o in whole]
    for mine, other in zip(few, whole, strict=True):
        assert mine.sampler_logprobs == pytest.approx(other.sampler_logprobs, abs=1e-12)


def test_where_nothing_is_left_the_sequence_fails_alone():
    closed = Masked(0b00010)  # id 1 alone
    logits = torch.arange(15.0).reshape(3, 5)
    results = pick(
        [
            chunk(0, LogitsNeeded.LAST, stop_checker=closed, temperature=0.0),
            chunk(
                1,
                LogitsNeeded.LAST,
                stop_checker=closed,
                constraints=TokenConstraints(end_ids=frozenset({1})),
                min_tokens=1,
                seed=1,
            ),
            chunk(2, LogitsNeeded.LAST, stop_checker=closed, banned_ids=(1,), temperature=0.0),
        ],
        logits,
    )
    assert [type(result) for result in results] == [Pick, Failed, Failed]
    assert results[0].tokens == (1,)
    for fault in results[1:]:
        assert isinstance(fault.error, EngineError)
        assert "nothing is left to choose" in str(fault.error) and "loosen one" in str(fault.error)


def test_the_prompt_is_no_written_text():
    """Its tokens are repeated, but neither present nor frequent; and min_tokens are counted after it."""
    logits = torch.tensor([[0.0, 1.0, 1.1, 1.2]])
    common = {"temperature": 0.0}
    assert pick([chunk(0, LogitsNeeded.LAST, presence_penalty=5.0, frequency_penalty=5.0, **common)], logits)[
        0
    ].tokens == (3,)
    assert pick([chunk(0, LogitsNeeded.LAST, repetition_penalty=1e2, **common)], logits)[0].tokens == (
        3,
    )  # 0.012, above 0
    assert pick([chunk(0, LogitsNeeded.LAST, repetition_penalty=1e2, logit_bias={0: 0.1}, **common)], logits)[
        0
    ].tokens == (0,)
    ends = TokenConstraints(end_ids=frozenset({3}))
    assert pick([chunk(0, LogitsNeeded.LAST, constraints=ends, min_tokens=1, **common)], logits)[0].tokens == (2,)
    assert pick([chunk(0, LogitsNeeded.LAST, constraints=ends, min_tokens=0, **common)], logits)[0].tokens == (3,)


@examples(50)
@given(
    st.lists(st.integers(-6, 6).map(float), min_size=4, max_size=40),
    st.integers(0, 50),
    st.integers(0, 2**32),
    st.integers(0, 3),
    st.booleans(),
)
def test_log_probabilities_of_the_model_and_of_the_sampler(row, n, seed, k, greedy):
    """`top` is the model's own, whatever the processors do; beside it stands what the sampler made of it."""
    logits = torch.tensor([row])
    params = {"temperature": 0.0} if greedy else {"temperature": 0.7, "top_k": k, "seed": seed}
    [found] = pick([chunk(0, LogitsNeeded.LAST, logprobs=n, logit_bias={0: 2.0}, **params)], logits)
    of_model = logits[0].double().log_softmax(-1)
    row_of_sampler = logits[0].clone()
    row_of_sampler[0] += 2
    if greedy:
        of_sampler = torch.full((len(row),), -math.inf)
        of_sampler[int(row_of_sampler.argmax())] = 0.0
    else:
        of_sampler = filtered(row_of_sampler, SamplingParams(temperature=0.7, top_k=k)).log_softmax(-1)
    [token], [top] = found.tokens, found.tops
    assert found.logprobs == pytest.approx((float(of_model[token]),), abs=1e-5)
    assert found.sampler_logprobs == pytest.approx((float(of_sampler[token]),), abs=1e-9)
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))[:n]
    assert [one.token for one in top] == order
    assert [one.logprob for one in top] == pytest.approx(of_model[order].tolist(), abs=1e-5)
    assert [one.sampler_logprob for one in top] == pytest.approx(of_sampler[order].tolist(), abs=1e-9)


def test_scores_come_with_the_likeliest():
    logits = torch.randn(3, 6, generator=torch.Generator().manual_seed(2)).round()
    [score] = pick([chunk(0, LogitsNeeded.ALL, (4, 0, 1), prompt_logprobs=2)], logits)
    right = logits.double().log_softmax(-1)
    assert score.logprobs == pytest.approx([float(right[i, token]) for i, token in enumerate((4, 0, 1))], abs=1e-6)
    assert len(score.tops) == 3
    for row, top in zip(right.tolist(), score.tops, strict=True):
        order = sorted(range(6), key=lambda i: (-row[i], i))[:2]
        assert [one.token for one in top] == order
        assert [one.logprob for one in top] == pytest.approx([row[i] for i in order], abs=1e-6)
        assert {one.sampler_logprob for one in top} == {0.0}


@given(rows, st.integers(0, 50))
def test_the_likeliest_are_in_order_and_the_lower_id_first_on_ties(row, n):
    assert top_ids(row, n) == sorted(range(len(row)), key=lambda i: (-float(row[i]), i))[:n]


class Search:
    """Takes note of what it is handed, and answers with the lowest logit's id."""

    def __init__(self):
        self.asked = []

    def pick(self, pairs):
        self.asked.append([(one.sequence.id, row.tolist()) for one, row in pairs])
        return [Pick(one.sequence.id, (int(row.argmin()),), (0.0,)) for one, row in pairs]


def test_the_beams_of_a_search_choose_together():
    mine, other = Search(), Search()
    logits = torch.randn(6, 5, generator=torch.Generator().manual_seed(4))
    seen = []
    results = pick(
        [
            chunk(0, LogitsNeeded.LAST, search=mine, beams=2),
            chunk(1, LogitsNeeded.LAST, temperature=0.0),
            chunk(2, LogitsNeeded.LAST, search=other, beams=2),
            chunk(3, LogitsNeeded.NONE, search=other, beams=2),
            chunk(4, LogitsNeeded.ALL, (4, 0), search=mine, beams=2),
        ],
        logits,
        lambda one, row, chances: seen.append((one.sequence.id, chances)),
    )
    assert mine.asked == [[(0, logits[0].tolist()), (4, logits[5].tolist())]]
    assert other.asked == [[(2, logits[2].tolist())]]
    assert [(type(result), result.sequence) for result in results] == [
        (Pick, 1), (PromptLogprobs, 4), (Pick, 0), (Pick, 4), (Pick, 2),
    ]  # fmt: skip
    assert seen == [(1, None), (0, None), (4, None), (2, None)]


def test_a_bad_row_fails_its_whole_search_and_no_other():
    mine, other = Search(), Search()
    logits = torch.zeros(4, 5)
    logits[1, 3] = math.nan
    searches = (mine, mine, other, None)
    results = pick([chunk(i, LogitsNeeded.LAST, search=search, seed=1) for i, search in enumerate(searches)], logits)
    assert [(type(result), result.sequence) for result in results] == [(Pick, 3), (Failed, 0), (Failed, 1), (Pick, 2)]
    assert mine.asked == []


@examples(30)
@given(st.integers(0, 2**32), st.integers(1, 6))
def test_log_totals_are_the_logsumexp_in_blocks_of_any_size(seed, n):
    logits = torch.randn(n, 50, generator=torch.Generator().manual_seed(seed)) * 8
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "BLOCK", seed % 200)
        totals = log_totals(logits.numpy())
    assert totals == pytest.approx(logits.double().logsumexp(-1).tolist(), abs=1e-5)
    assert totals == [total for row in logits for total in log_totals(row[None].numpy())], "whatever its neighbours"
    assert log_totals(logits[:0].numpy()) == []
