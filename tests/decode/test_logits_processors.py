"""Every processor against transformers' own class, or, where it has none, against the definition written out.

Rows are fp64 on both sides, so that the borders of the filters agree to 1e-9: nearer than that an example is passed
over, and how many may be is bounded by Hypothesis' own health check.
"""

import math

import numpy as np
import pytest
import torch
import transformers
from hypothesis import assume, example, given
from hypothesis import strategies as st

from tests.profiles import examples
from tests.tensors import Processors
from tokenwright.decode import logits_processors
from tokenwright.decode.logits_processors import FEW, last_key, top_p, typical_p
from tokenwright.engine import SamplingParams, TokenConstraints

ours = Processors(logits_processors)

SIZE = 24  # ids
NEAR = 1e-9
ids = st.integers(0, SIZE - 1)
texts = st.lists(ids, max_size=30) | st.lists(st.integers(0, 3), max_size=30)
# A coarse grid makes ties, which is where rules differ; None is an id that is out already.
coarse = st.integers(-12, 12).map(lambda n: n / 2)
fine = st.floats(-20, 20, width=32)


def rows_of(values):
    return st.lists(values, min_size=SIZE, max_size=SIZE).map(lambda row: torch.tensor(row, dtype=torch.float64))


rows = rows_of(coarse | fine)
# Further apart than the shift of `tempered` rounds: else it makes ties.
distinct = st.lists(st.integers(-20_000, 20_000), min_size=SIZE, max_size=SIZE, unique=True).map(
    lambda row: torch.tensor(row, dtype=torch.float64) / 1000
)


@st.composite
def cut_rows(draw, base=rows):
    """Rows of which some ids, never all, are out already."""
    row = draw(base).clone()
    row[draw(st.lists(ids, max_size=SIZE - 1, unique=True))] = -math.inf
    return row


def theirs(processor, row, text=()):
    return processor(torch.tensor([list(text)], dtype=torch.int64), row[None].clone())[0]


def same(ours, theirs):
    return torch.equal(ours, theirs.to(ours.dtype))


def distance(values, border):
    """How near any of `values` comes to the border, as the closest of them all."""
    return float((torch.as_tensor(values, dtype=torch.float64) - border).abs().min())


# What may be written


@given(rows, st.integers(0, 2**SIZE - 1), st.sampled_from(["array", "bytes", "memoryview"]))
def test_a_mask_keeps_the_ids_whose_bits_are_set(row, bits, kind):
    constraints = np.array([bits], np.uint32)
    mask = {"array": constraints, "bytes": constraints.tobytes(), "memoryview": memoryview(constraints.tobytes())}[kind]
    right = [value if bits >> i & 1 else -math.inf for i, value in enumerate(row.tolist())]
    assert ours.masked(row, mask).tolist() == right


@pytest.mark.parametrize("size", [1, 31, 32, 33, 64, 70, 100])
def test_a_mask_of_several_words_and_ids_past_it(size):
    constraints = np.array([0x80000001, 0b110], np.uint32)  # 0, 31, 33 and 34
    kept = ours.masked(torch.zeros(size), constraints).isfinite().nonzero().flatten().tolist()
    assert kept == [i for i in (0, 31, 33, 34) if i < size]


# What the text makes less likely


@given(rows, texts, st.integers(0, 40))
def test_repetition_looks_back_as_far_as_its_window(row, text, window):
    params = SamplingParams(repetition_penalty=1.5, repetition_window=window)
    inside = set(text[len(text) - min(window or SIZE**2, len(text)) :])
    right = [value * (1 if i not in inside else 1.5 if value < 0 else 1 / 1.5) for i, value in enumerate(row.tolist())]
    assert ours.adjusted(row, text, 0, params).tolist() == pytest.approx(right)


def test_the_smallest_penalty_leaves_numbers():
    row = torch.tensor([5.0, 0.0, -3.0, -math.inf])
    found = ours.repetition(row, (0, 1, 2, 3), 5e-324)
    assert not found.isnan().any() and found[0] > 1e38 and found[1] == 0 and found[3] == -math.inf


@given(cut_rows(), texts, st.integers(0, 30), st.floats(-3, 3), st.floats(-3, 3))
@example(torch.ones(SIZE), [5, 4, 4, 4, 6], 1, 0.5, 0.25)
def test_presence_and_frequency_are_the_definition(row, text, prompt_length, presence, frequency):
    written = text[prompt_length:]
    right = [value - presence * (i in written) - frequency * written.count(i) for i, value in enumerate(row.tolist())]
    params = SamplingParams(presence_penalty=presence, frequency_penalty=frequency)
    assert ours.adjusted(row, text, prompt_length, params).tolist() == pytest.approx(right)


def naive_repeats(text, breakers):
    """For each token: the most tokens, none a breaker, that stand before one of its places and at the text's end."""
    found = {}
    for place, token in enumerate(text):
        length = 0
        while (
            length < place
            and text[place - 1 - length] == text[len(text) - 1 - length]
            and text[len(text) - 1 - length] not in breakers
        ):
            length += 1
        if length and token not in breakers:
            found[token] = max(found.get(token, 0), length)
    return found


@examples(400)
@given(st.lists(st.integers(0, 2), max_size=40), st.frozensets(st.integers(0, 2), max_size=1))
@example([0, 1] * 12, frozenset())
@example([1] * 20, frozenset())
@example([0, 0, 1, 0, 0, 0, 1, 0, 0], frozenset({2}))
def test_repeats_are_the_definition(text, breakers):
    assert ours.repeats(text, breakers) == naive_repeats(text, breakers)


@given(
    cut_rows(),
    st.lists(st.integers(0, 3), max_size=30),
    st.frozensets(st.integers(0, 3), max_size=1),
    st.floats(0.1, 5),
    st.floats(1, 3),
    st.integers(1, 6),
)
@example(torch.ones(SIZE), [0, 1, 0], frozenset(), 1.0, 2.0, 1)  # just long enough
@example(torch.ones(SIZE), [0, 1, 2, 3, 0, 1, 2], frozenset(), 0.5, 2.0, 3)
@example(torch.ones(SIZE), [0, 1, 2, 3, 0, 1, 2], frozenset(), 0.5, 2.0, 4)
def test_dry_is_the_definition(row, text, breakers, multiplier, base, allowed_length):
    lengths = naive_repeats(text, breakers)
    right = [
        value - (multiplier * base ** (lengths[i] - allowed_length) if lengths.get(i, 0) >= allowed_length else 0)
        for i, value in enumerate(row.tolist())
    ]
    params = SamplingParams(dry_multiplier=multiplier, dry_base=base, dry_allowed_length=allowed_length)
    assert ours.adjusted(row, text, 0, params, TokenConstraints(breakers=breakers)).tolist() == pytest.approx(right)


def test_dry_looks_at_each_place_of_a_uniform_text_a_few_times():
    """Steps are counted, not timed: 20,000 equal tokens, which a naive search would compare 200 million times."""
    looked = 0

    class Counting(list):
        def __getitem__(self, place):
            nonlocal looked
            if isinstance(place, slice):
                return Counting(super().__getitem__(place))
            looked += 1
            assert looked < 8 * 20_000, "each place is looked at again and again"
            return super().__getitem__(place)

    for text in ([7] * 20_000, [7, 8] * 10_000, [7] * 9_999 + [8] + [7] * 10_000):
        looked = 0
        assert max(ours.repeats(Counting(text)).values()) >= 9_999
    row = ours.dry(torch.zeros(9), [7] * 20_000, (), 1.0, 100.0, 1)
    assert row[7] < -1e29 and row.isfinite().all()


# How daring the draw is


@given(cut_rows(distinct), st.floats(0.01, 0.99))
def test_top_p_is_transformers(row, p):
    assume(distance(row.softmax(-1).sort().values.cumsum(-1), 1 - p) > NEAR)
    assert same(ours.top_p(row, p), theirs(transformers.TopPLogitsWarper(p), row))


def typical_margin(row, p):
    """How near a row comes to another answer: its masses to p, and two surprises, not equal, to each other."""
    logp = row.log_softmax(-1)
    chances = logp.exp()
    off = (-logp - torch.where(chances > 0, -logp * chances, 0).sum()).abs()
    ordered = off.sort()
    gaps = ordered.values[row[ordered.indices].isfinite()].diff()
    apart = float(gaps[gaps > 1e-13].min()) if (gaps > 1e-13).any() else 1.0
    return min(apart, distance(chances[ordered.indices].cumsum(-1), p))


@given(cut_rows(), st.floats(0.01, 4))
def test_top_n_sigma_is_the_definition(row, n):
    finite = [value for value in row.tolist() if value > -math.inf]
    mean = sum(finite) / len(finite)
    border = max(finite) - n * math.sqrt(sum((value - mean) ** 2 for value in finite) / len(finite))
    assume(distance(finite, border) > NEAR or len(set(finite)) == 1)
    right = [value if value >= border - NEAR else -math.inf for value in row.tolist()]
    assert ours.top_n_sigma(row, n).tolist() == right


def naive_top_p(row, p):
    """The definition by a full sort; None where rounding would decide."""
    order = sorted(np.flatnonzero(row > -math.inf).tolist(), key=lambda i: (-row[i], i))
    chances = np.exp(row - row.max())
    masses = np.array([math.fsum(chances[order[: n + 1]]) for n in range(len(order))]) / math.fsum(chances)
    if np.abs(masses - p).min() < 1e-12:
        return None
    return sorted(order[: int((masses < p).sum()) + 1])


@given(cut_rows(rows_of(coarse)), st.floats(0.01, 0.999))
def test_top_p_keeps_the_fewest_and_the_lower_id_on_ties(row, p):
    right = naive_top_p(row.numpy(), p)
    assume(right is not None)
    assert ours.top_p(row, p).isfinite().nonzero().flatten().tolist() == right


def wide(kind, size, seed):
    generator = np.random.default_rng(seed)
    row = generator.standard_normal(size)
    match kind:
        case "flat":
            row *= 0.01
        case "level":
            row[:] = 1.5
        case "tied":
            row = np.round(row)
        case "peaked":
            row[generator.integers(size)] += 30
        case "cut":
            row[generator.random(size) < 0.9] = -math.inf
        case "steep":
            row *= 300
    return row


@pytest.mark.parametrize("kind", ["normal", "flat", "level", "tied", "peaked", "cut", "steep"])
@pytest.mark.parametrize("size", [FEW + 1, 20_000, 151_936])
def test_selection_on_wide_rows_is_the_sort(kind, size):
    row = wide(kind, size, size)
    order = np.argsort(-row, kind="stable")
    chances = np.exp(row - row.max())
    masses = chances[order].cumsum() / chances.sum()
    for p in (1e-9, 0.3, 0.5, 0.95, 0.999):
        if np.abs(masses - p).min() > 1e-12 * math.sqrt(size):
            right = np.zeros(size, bool)
            right[order[: np.searchsorted(masses, p) + 1]] = True
            assert (np.isfinite(top_p(row, p)) == right & np.isfinite(row)).all(), p
        logp = np.log(np.maximum(chances, 1e-320) / chances.sum())
        off = np.where(np.isfinite(row), np.abs(-logp + (chances / chances.sum() * logp).sum()), math.inf)
        kept = np.isfinite(typical_p(row, p))
        assert chances[kept].sum() / chances.sum() >= p - 1e-9
        nearer = off < off[kept].max() - 1e-9  # without the last ones it is not enough
        assert kept[nearer & (off < 700)].all()
        assert chances[nearer].sum() / chances.sum() < p + 1e-9


@given(st.integers(0, 2**32), st.sampled_from([5, 300, 5000]), st.floats(0, 1.2), st.booleans())
@examples(60)
def test_last_key_is_the_sort(seed, size, need, tied):
    generator = np.random.default_rng(seed)
    keys = generator.integers(0, 9, size).astype(float) if tied else generator.standard_normal(size)
    weights = generator.integers(0, 64, size) / 64.0  # sums of these are exact
    need = round(need * weights.sum() * 64) / 64
    enough = [key for key in np.unique(keys) if weights[keys >= key].sum() >= need]
    assert last_key(keys, weights, need) == (max(enough) if enough else keys.min())


@pytest.mark.parametrize("p", [5e-324, 1e-9, 1 - 2**-53])
@pytest.mark.parametrize("row", [[0.0], [3.0, 3.0], [0.0, -math.inf], [0.0, -1000.0, -math.inf], [-1e300, 1e300]])
def test_every_filter_keeps_one_at_least(row, p):
    logits = torch.tensor(row, dtype=torch.float64)
    params = SamplingParams(top_p=p, min_p=p, typical_p=p, top_k=1, top_n_sigma=5e-324, temperature=1e-300)
    kept = ours.filtered(logits, params).isfinite()
    assert kept.any() and bool(kept[int(logits.argmax())])
    assert not (kept & ~logits.isfinite()).any()


# Together, in the documented order


@st.composite
def orders(draw):
    """Sampling parameters, and transformers' classes for them in the documented order."""
    params, chain = {}, []
    text = draw(st.lists(ids, min_size=1, max_size=30))
    prompt_length = draw(st.integers(0, len(text)))
    constraints = {}
    if draw(st.booleans()):
        biases = draw(st.dictionaries(ids, st.integers(-80, 80).map(lambda n: n / 8), min_size=1, max_size=5))
        params["logit_bias"] = biases
        chain.append(transformers.SequenceBiasLogitsProcessor([[[i], b] for i, b in biases.items()]))
    banned = draw(st.lists(ids, max_size=4, unique=True))
    if draw(st.booleans()):
        kept = draw(st.lists(ids, min_size=9, max_size=SIZE, unique=True))
        params["allowed_ids"] = kept
        chain.append(transformers.PrefixConstrainedLogitsProcessor(lambda batch, sent: kept, 1))
    if banned:
        params["banned_ids"] = banned
        chain.append(transformers.SuppressTokensLogitsProcessor(banned))
    if draw(st.booleans()):
        bad = [[draw(ids)], [text[-1], draw(ids)]]
        constraints["bad"] = tuple(map(tuple, bad))
        chain.append(transformers.NoBadWordsLogitsProcessor(bad))
    if draw(st.booleans()):
        params["min_tokens"] = draw(st.integers(0, 6))
        ends = draw(st.lists(ids, min_size=1, max_size=2, unique=True))
        constraints["end_ids"] = frozenset(ends)
        chain.append(transformers.MinNewTokensLengthLogitsProcessor(prompt_length, params["min_tokens"], ends))
    if draw(st.booleans()):
        params["repetition_penalty"] = draw(st.floats(0.5, 2).filter(lambda x: x != 1))
        chain.append(transformers.RepetitionPenaltyLogitsProcessor(params["repetition_penalty"]))
    return text, prompt_length, params, TokenConstraints(**constraints), chain


def run(chain, row, text):
    """The row after each of transformers' classes in turn."""
    return theirs(transformers.LogitsProcessorList(chain), row, text)


@examples(200)
@given(cut_rows(), orders())
def test_products_of_processors_are_transformers(row, order):
    text, prompt_length, params, constraints, chain = order
    found = ours.adjusted(row, text, prompt_length, SamplingParams(**params), constraints)
    assume(bool(found.max() > -math.inf))  # where no allowed id is left, transformers opens some
    assert same(found, run(chain, row, text))


def steps(temperature, k, p, least, typical):
    """The filters, in order: field and value, transformers' class, and how near a row is to another answer."""
    tops = torch.sort
    return [
        ("temperature", temperature, transformers.TemperatureLogitsWarper(temperature), lambda row: 1.0),
        ("top_k", k, transformers.TopKLogitsWarper(k), lambda row: float((d := row.unique().diff())[d > 0].min())),
        (
            "top_p",
            p,
            transformers.TopPLogitsWarper(p),
            lambda row: distance(tops(row.softmax(-1)).values.cumsum(-1), 1 - p),
        ),
        (
            "min_p",
            least,
            transformers.MinPLogitsWarper(least),
            lambda row: distance(row.softmax(-1) / row.softmax(-1).max(), least),
        ),
        ("typical_p", typical, transformers.TypicalLogitsWarper(typical), lambda row: typical_margin(row, typical)),
    ]


@examples(200)
@given(
    distinct.map(lambda row: row / 10),  # flat enough for every filter to cut
    st.floats(0.3, 3),
    st.integers(2, SIZE),
    st.floats(0.2, 0.99),
    st.floats(0.001, 0.2),
    st.floats(0.2, 0.99),
    st.sets(st.integers(0, 4), min_size=2),
)
@example(torch.linspace(1, 0, SIZE).double(), 1.0, 4, 0.6, 0.1, 0.5, {1, 2})
@example(torch.linspace(1, 0, SIZE).double(), 2.0, 4, 0.6, 0.8, 0.5, {0, 3})
@example(torch.linspace(1, 0, SIZE).double(), 1.0, 4, 0.6, 0.8, 0.5, {2, 4})
def test_products_of_filters_are_transformers(row, temperature, k, p, least, typical, used):
    params, right = {}, row
    for place, (field, value, processor, margin) in enumerate(steps(temperature, k, p, least, typical)):
        if place in used:
            assume(right.isfinite().sum() < 2 or margin(right) > NEAR)
            params[field], right = value, theirs(processor, right)
    found = ours.filtered(row, SamplingParams(**params))
    assert torch.equal(found.isfinite(), right.isfinite())
    assert torch.allclose(found.softmax(-1), right.softmax(-1), atol=1e-12)


def test_nothing_asked_for_is_nothing_done():
    row = torch.arange(4.0)
    assert ours.adjusted(row, (1, 2), 1, SamplingParams()) is row
    assert ours.adjusted(row, (1, 2), 1, SamplingParams(dry_allowed_length=9, repetition_window=3)) is row


def test_ids_past_the_vocabulary_choose_nothing():
    row = torch.arange(4.0)
    params = SamplingParams(
        logit_bias={9: 3.0}, banned_ids=(9, 1), allowed_ids=(0, 1, 2, 9), presence_penalty=1.0, repetition_penalty=2.0
    )
    constraints = TokenConstraints(bad=((9,), (9, 9)), end_ids=frozenset({9}))
    found = ours.adjusted(row, (9, 2, 9), 0, params, constraints)
    assert found.tolist() == [0.0, -math.inf, 0.0, -math.inf]
    assert ours.dry(row, (9, 9, 9), (), 1.0, 2.0, 1).tolist() == row.tolist()


@given(cut_rows(), texts, st.sampled_from([0.3, 5.0]))
def test_what_is_out_stays_out(row, text, penalty):
    out = ~row.isfinite()
    params = SamplingParams(
        logit_bias=dict.fromkeys(range(SIZE), 100.0),
        repetition_penalty=penalty,
        presence_penalty=-5.0,
        frequency_penalty=-5.0,
        dry_multiplier=1.0,
        temperature=0.5,
        top_n_sigma=2.0,
        top_k=9,
        top_p=0.9,
        min_p=0.01,
        typical_p=0.9,
    )
    found = ours.adjusted(row, text, 0, params)
    assert not found.isnan().any() and (found[out] == -math.inf).all()
    final = ours.filtered(found, params)
    assert not final.isnan().any() and (final[out] == -math.inf).all() and final.isfinite().any()
