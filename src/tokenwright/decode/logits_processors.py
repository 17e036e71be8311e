"""The logits processors: pure functions on a row of logits [V], applied in the order of the fields of SamplingParams.

    adjusted   logit_bias -> allowed and banned ids -> bad words -> grammar -> min_tokens
               -> repetition -> presence and frequency -> DRY
    filtered   temperature -> top-n-sigma -> top-k -> top-p -> min-p -> typical-p, or temperature -> mirostat
    without_top  XTC, on the probabilities of what `filtered` leaves

Greedy decoding and beam search choose from the `adjusted` row; sampling draws from the `filtered` row, in fp64. An id
with -inf cannot be chosen, and no processor changes that; a filter leaves at least one id.
"""

import math
from collections import Counter
from collections.abc import Collection
from collections.abc import Sequence as ListLike
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenwright.arrays import Array
from tokenwright.engine import SamplingParams, TokenConstraints

Doubles = NDArray[np.float64]
Mask = NDArray[np.bool_]

MOST_PENALTY = 1e30  # the most that DRY subtracts: more than any logit, finite in fp32


@lru_cache(maxsize=64)
def _members(ids: tuple[int, ...] | frozenset[int], size: int) -> NDArray[np.bool_]:
    inside = np.zeros(size, np.bool_)
    inside[[token for token in ids if token < size]] = True
    inside.flags.writeable = False
    return inside


def biased(logits: Array, biases: ListLike[tuple[int, float]]) -> Array:
    """Add a bias at each given id, as in the OpenAI API."""
    known = [(token, bias) for token, bias in biases if token < len(logits)]
    return _added(logits, [token for token, _ in known], [bias for _, bias in known]) if known else logits


def allowed(logits: Array, ids: tuple[int, ...] | None) -> Array:
    """Forbid all other ids; None allows all."""
    return logits if ids is None else _without(logits, ~_members(ids, len(logits)))


def banned(logits: Array, ids: tuple[int, ...] | frozenset[int]) -> Array:
    return _without(logits, _members(ids, len(logits))) if ids else logits


def without_words(logits: Array, text: ListLike[int], words: ListLike[tuple[int, ...]]) -> Array:
    """Forbid the last token of each word whose other tokens end the text."""
    last = text[-1] if len(text) else None
    ids = [w[-1] for w in words if len(w) == 1 or (w[-2] == last and tuple(text[1 - len(w) :]) == w[:-1])]
    inside = sorted({token for token in ids if token < len(logits)})
    return _without(logits, inside) if inside else logits


def masked(logits: Array, words: Any) -> Array:
    """Forbid ids with a 0 bit in uint32 `words`, an array or bytes, the lowest bit first."""
    if words is None:
        return logits
    packed = words if isinstance(words, np.ndarray) else np.frombuffer(words, "<u4")
    octets = np.ascontiguousarray(packed, "<u4").view(np.uint8)
    open_ids = np.unpackbits(octets, count=len(logits), bitorder="little").view(np.bool_)
    return _without(logits, ~open_ids)


def repetition(logits: Array, text: ListLike[int], penalty: float) -> Array:
    """At ids in `text`, divide positive logits by the penalty and multiply others (arXiv 1909.05858)."""
    ids = sorted({token for token in text if token < len(logits)})
    found = logits[ids].astype(np.float64)
    with np.errstate(over="ignore"):
        changed = np.where(found < 0, found * penalty, found / penalty)
    row = logits.copy()
    row[ids] = changed.clip(max=np.finfo(logits.dtype).max)
    return row


def occurrences(logits: Array, written: ListLike[int], presence: float, frequency: float) -> Array:
    """Subtract `presence` at each id in `written`, and `frequency` per occurrence, as in the OpenAI API."""
    counts = {token: count for token, count in Counter(written).items() if token < len(logits)}
    amounts = [-presence - frequency * count for count in counts.values()]
    return _added(logits, list(counts), amounts)


def repeats(text: ListLike[int], breakers: Collection[int] = frozenset()) -> dict[int, int]:
    """For each token that would continue a repetition: how many tokens at the text's end also precede it earlier.

    The longest match without breakers counts. The Z-function of the reversed text (Main and Lorentz 1984) is linear.
    """
    back = text[::-1]
    most = next((place for place, token in enumerate(back) if token in breakers), len(back))
    if most == 0:
        return {}
    longest: dict[int, int] = {}
    lengths: dict[int, int] = {}  # index in `back` -> number of tokens from there on that equal back's beginning
    left = right = 0  # the match with the furthest end
    for place in (place for place, token in enumerate(back) if token == back[0] and place):
        length = min(right - place, lengths[place - left]) if place < right else 1
        while place + length < len(back) and back[length] == back[place + length]:
            length += 1
        lengths[place] = length
        if place + length > right:
            left, right = place, place + length
        follower = back[place - 1]
        if follower not in breakers:
            longest[follower] = max(longest.get(follower, 0), min(length, most))
    return longest


def dry(
    logits: Array, text: ListLike[int], breakers: Collection[int], multiplier: float, base: float, allowed_length: int
) -> Array:
    """Subtract multiplier * base ** (length - allowed_length) at each token that continues a repetition (`repeats`).

    DRY, by P. E. Weidmann (text-generation-webui, pull request 5677).
    """
    lengths = {token: n for token, n in repeats(text, breakers).items() if n >= allowed_length and token < len(logits)}
    exponents = [math.log(multiplier) + (n - allowed_length) * math.log(base) for n in lengths.values()]
    return _added(logits, list(lengths), [-math.exp(min(x, math.log(MOST_PENALTY))) for x in exponents])


def _added(logits: Array, ids: list[int], amounts: list[float]) -> Array:
    row = logits.copy()
    np.add.at(row, np.array(ids, np.int64), np.array(amounts, logits.dtype))  # an id may be there twice
    return row


def _without(logits: Array, ids: NDArray[np.bool_] | list[int]) -> Array:
    row = logits.copy()
    row[ids] = -math.inf
    return row


def softmax(logits: Doubles) -> Doubles:
    chances: Doubles = np.exp(logits - logits.max(-1, keepdims=True))
    chances /= chances.sum(-1, keepdims=True)
    return chances


def log_softmax(logits: Array) -> Doubles:
    """log(softmax) of logits [..., V] over the last dimension, in fp64."""
    below = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    found: Doubles = below - np.log(np.exp(below).sum(-1, keepdims=True))
    return found


def adjusted(
    logits: Array,
    text: ListLike[int],
    prompt_length: int,
    params: SamplingParams,
    constraints: TokenConstraints = TokenConstraints(),  # noqa: B008  (it is frozen)
    mask: Any = None,
) -> Array:
    """The row [V] with bans and penalties applied, before temperature; `logits` itself if the request has none.

    text: the prompt of `prompt_length` tokens and the tokens written. Beam search passes log-probabilities.
    """
    early = len(text) - prompt_length < params.min_tokens
    if not (mask is not None or early or constraints.bad or params.adjusts):
        return logits
    row = biased(np.asarray(logits), params.logit_bias)  # a GPU's are read when they are needed
    row = banned(allowed(row, params.allowed_ids), params.banned_ids)
    row = without_words(row, text, constraints.bad) if constraints.bad else row
    row = masked(row, mask)
    if early:
        row = banned(row, constraints.end_ids)
    if params.repetition_penalty != 1.0:
        row = repetition(row, text[-params.repetition_window :], params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        row = occurrences(row, text[prompt_length:], params.presence_penalty, params.frequency_penalty)
    if params.dry_multiplier:
        recent = text[-params.dry_window :]
        row = dry(row, recent, constraints.breakers, params.dry_multiplier, params.dry_base, params.dry_allowed_length)
    return row


def tempered(logits: Array, temperature: float) -> Array:
    """The logits in fp64 without their maximum, divided by the temperature > 0."""
    # Shifted first: dividing by a tiny temperature then gives -inf at worst, never inf - inf.
    with np.errstate(over="ignore"):
        found: Doubles = (logits.astype(np.float64) - logits.max()) / temperature
    return found


def top_n_sigma(logits: Array, n: float) -> Array:
    """Keep finite logits within n standard deviations of the highest (arXiv 2411.07641). 0: all."""
    if n == 0.0:
        return logits
    below = logits.max() - logits[np.isfinite(logits)]
    widest = float(below.max()) or 1.0  # the scale, so that no square overflows
    return _cut(logits, float(logits.max()) - n * float((below / widest).std()) * widest)


def top_k(logits: Array, k: int) -> Array:
    """Keep the k highest logits and those tied with the k-th. 0: all."""
    return _cut(logits, float(np.partition(logits, -k)[-k])) if 0 < k < len(logits) else logits


def min_p(logits: Array, p: float) -> Array:
    """Keep ids at least p times as probable as the most probable one (arXiv 2407.01082). 0: all."""
    return _cut(logits, logits.max() + math.log(p)) if p else logits


MIROSTAT_TOP = 100  # the most probable ids, from which version 1 estimates the exponent of Zipf's law


def mirostat_bound(tau: float, eta: float, surprises: float, count: int) -> float:
    """The surprise, in bits, up to which Mirostat keeps ids after `count` tokens whose surprises sum to `surprises`."""
    return 2.0 * tau - eta * (surprises - count * tau)


def mirostat(logits: Array, version: int, bound: float) -> Array:
    """Keep the most probable of logits [V], fp64, up to a surprise of `bound` bits, at least one (arXiv 2007.14966).

    Version 1 keeps the k most probable, with the k for which Zipf's law has that surprise.
    """
    if version == 2:
        logp = log_softmax(logits)
        return _without(logits, logp < min(-bound * math.log(2.0), float(logp.max())))
    return top_k(logits, _zipf_rank(logits, bound))


def _zipf_rank(logits: Array, bound: float) -> int:
    """The k of Mirostat's version 1: k ** s = (s - 1) * 2 ** bound / (1 - V ** (1 - s)), with the estimated s."""
    size, finite = len(logits), logits[logits > -math.inf]
    ranked = np.sort(finite)[::-1][:MIROSTAT_TOP]
    steps = np.diff(np.log(np.arange(1, len(ranked) + 1)))
    exponent = float((steps * -np.diff(ranked)).sum() / max(float((steps * steps).sum()), 1e-300))
    if exponent == 0.0:  # a level row: each id has the surprise log2(V)
        return size
    over = exponent - 1.0
    scale = 1.0 / math.log(size) if abs(over) < 1e-9 else over / -math.expm1(-over * math.log(size))
    rank = (math.log(scale) + bound * math.log(2.0)) / exponent  # log of k
    return size if rank >= math.log(size) else max(1, int(math.exp(rank)))


def without_top(chances: Doubles, threshold: float) -> Doubles:
    """chances [V], fp64, with only the least probable (the highest id) of all at least `threshold`; they sum to 1.

    XTC, by P. E. Weidmann (text-generation-webui, pull request 6335).
    """
    top = np.flatnonzero((chances >= threshold) & (chances > 0))
    if len(top) < 2:
        return chances
    least = chances[top].min()
    spared = int(top[chances[top] == least][-1])
    left = chances.copy()
    left[top[top != spared]] = 0.0
    left /= left.sum()
    return left


def _cut(logits: Array, least: Any) -> Array:
    return _without(logits, logits < least)


def filtered(logits: Array, params: SamplingParams, bound: float = math.inf) -> Array:
    """The sampler's logits [V], fp64: divided by the temperature, with -inf at every id that cannot be drawn.

    logits: an `adjusted` row with a finite logit; the temperature is not 0.
    """
    row = tempered(logits, params.temperature)
    if params.mirostat:
        return mirostat(row, params.mirostat, bound)
    row = top_n_sigma(row, params.top_n_sigma)
    row = top_p(top_k(row, params.top_k), params.top_p)
    return typical_p(min_p(row, params.min_p), params.typical_p)


# ---- The smallest set of ids with a mass, without sorting the vocabulary ----

FEW = 1024  # more keys are partitioned, fewer sorted


def last_key(keys: Doubles, weights: Doubles, need: float) -> float:
    """The highest key such that the weights [n], n > 0, of all keys >= it sum to at least `need`; else the lowest."""
    held = 0.0
    while len(keys) > FEW:
        middle = len(keys) // 2
        order = np.argpartition(keys, middle)
        lower, upper = order[:middle], order[middle:]
        heavier = weights[upper]
        mass = float(heavier.sum())
        if held + mass >= need:
            keys, weights = keys[upper], heavier
        else:
            held += mass
            keys, weights = keys[lower], weights[lower]
    order = np.argsort(-keys)
    place = np.searchsorted(held + weights[order].cumsum(), need)
    return float(keys[order[min(int(place), len(keys) - 1)]])


def top_p(logits: Array, p: float) -> Array:
    """Keep the smallest set of most probable ids whose mass reaches p, on ties the lower ids (arXiv 1904.09751)."""
    if p >= 1.0:
        return logits
    weights = np.exp(logits - logits.max())
    total = float(weights.sum())
    need = p * total
    # All weights below this sum to less than 1 - p of the mass: none of them can be in the set.
    heavy = weights >= (1 - p) * total / len(weights)
    if np.count_nonzero(heavy) < len(weights) // 4:  # only then is selecting quicker than partitioning all
        least = last_key(logits[heavy], weights[heavy], need)
    else:
        least = last_key(logits, weights, need)
    kept: Mask = heavy & (logits >= least)
    ties = np.flatnonzero(logits == least)
    if len(ties) > 1 and kept[ties[0]]:
        above = float(weights[logits > least].sum())
        kept[ties[max(1, math.ceil((need - above) / float(weights[ties[0]]))) :]] = False
    return _without(logits, ~kept)


def typical_p(logits: Array, p: float) -> Array:
    """Keep ids with surprisal nearest to the entropy until their mass reaches p; ties stay (arXiv 2202.00666)."""
    if p >= 1.0:
        return logits
    finite = logits > -math.inf
    logp = logits - logits.max()
    logp -= math.log(float(np.exp(logp).sum()))
    chances = np.exp(logp)
    entropy = -float(np.multiply(chances, logp, where=finite, out=np.zeros_like(logp)).sum())  # 0 log 0 is 0
    nearness = -np.abs(-logp - entropy)
    return _without(logits, ~(finite & (nearness >= last_key(nearness, chances, p))))
