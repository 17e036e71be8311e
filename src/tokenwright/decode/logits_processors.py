"""What becomes of a row of logits [V] before a token is chosen: pure functions, in the order of SamplingParams.

    adjusted   logit_bias -> allowed and banned ids -> bad words -> grammar -> min_tokens
               -> repetition -> presence and frequency -> DRY
    filtered   temperature -> top-n-sigma -> top-k -> top-p -> min-p -> typical-p

First what may be written at all, then what the text so far makes less likely, then how daring the draw is. `adjusted`
is the row that greedy decoding and beam search choose from; `filtered`, in fp64, the one that a token is drawn from.
-inf is an id that cannot be chosen, and no function brings one back; a filter always leaves at least one. Ids past the
vocabulary choose nothing.
"""

import math
from collections import Counter
from collections.abc import Collection
from collections.abc import Sequence as ListLike
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from tokenwright.decode.top_p import nucleus, typical
from tokenwright.engine import SamplingParams, TokenConstraints

MOST_PENALTY = 1e30  # that is subtracted: far more than any logit, and still finite in fp32


@lru_cache(maxsize=64)
def _members(ids: tuple[int, ...] | frozenset[int], size: int) -> torch.Tensor:
    """Which of `size` ids are among `ids`: bool [size], to be read only."""
    inside = torch.zeros(size, dtype=torch.bool)
    inside[[token for token in ids if token < size]] = True
    return inside


def biased(logits: torch.Tensor, biases: ListLike[tuple[int, float]]) -> torch.Tensor:
    """logits [V] with a number added to each of some ids, as the OpenAI API has it."""
    known = [(token, bias) for token, bias in biases if token < len(logits)]
    if not known:
        return logits
    ids, amounts = zip(*known, strict=True)
    return logits.index_add(0, torch.tensor(ids), torch.tensor(amounts, dtype=logits.dtype))


def allowed(logits: torch.Tensor, ids: tuple[int, ...] | None) -> torch.Tensor:
    """logits [V] with -inf at all other ids; None allows all."""
    return logits if ids is None else logits.masked_fill(~_members(ids, len(logits)), -math.inf)


def banned(logits: torch.Tensor, ids: tuple[int, ...] | frozenset[int]) -> torch.Tensor:
    """logits [V] with -inf at `ids`."""
    return logits.masked_fill(_members(ids, len(logits)), -math.inf) if ids else logits


def without_words(logits: torch.Tensor, text: ListLike[int], words: ListLike[tuple[int, ...]]) -> torch.Tensor:
    """logits [V] with -inf at the last token of each word whose other tokens the text ends with."""
    last = text[-1] if len(text) else None
    ids = [w[-1] for w in words if len(w) == 1 or (w[-2] == last and tuple(text[1 - len(w) :]) == w[:-1])]
    inside = sorted({token for token in ids if token < len(logits)})
    return logits.index_fill(0, torch.tensor(inside), -math.inf) if inside else logits


def masked(logits: torch.Tensor, words: Any) -> torch.Tensor:
    """logits [V] with -inf where a bit is 0: uint32 `words`, an array or its bytes, the lowest bit first; None: all 1.

    Ids past the last word are 0.
    """
    if words is None:
        return logits
    packed = words if isinstance(words, np.ndarray) else np.frombuffer(words, "<u4")
    octets = np.ascontiguousarray(packed, "<u4").view(np.uint8)
    open_ids = np.unpackbits(octets, count=len(logits), bitorder="little").view(np.bool_)
    return logits.masked_fill(~torch.from_numpy(open_ids), -math.inf)


def repetition(logits: torch.Tensor, text: ListLike[int], penalty: float) -> torch.Tensor:
    """logits [V], those of ids in `text` divided by the penalty if positive and multiplied if not (arXiv 1909.05858).

    An id is penalised once, however often it stands there.
    """
    ids = torch.tensor(sorted({token for token in text if token < len(logits)}), dtype=torch.int64)
    found = logits[ids].double()
    changed = torch.where(found < 0, found * penalty, found / penalty)
    return logits.index_copy(0, ids, changed.clamp(max=torch.finfo(logits.dtype).max).to(logits.dtype))


def occurrences(logits: torch.Tensor, written: ListLike[int], presence: float, frequency: float) -> torch.Tensor:
    """logits [V] less `presence` at each id that was written, and less `frequency` for each time, as OpenAI has it."""
    counts = {token: count for token, count in Counter(written).items() if token < len(logits)}
    amounts = [-presence - frequency * count for count in counts.values()]
    return _added(logits, list(counts), amounts)


def repeats(text: ListLike[int], breakers: Collection[int] = frozenset()) -> dict[int, int]:
    """For each token that would go on with a repetition: how many tokens at the text's end stood before it once.

    The longest such match counts; it holds no breaker, and a breaker goes on with nothing. Matches may overlap. They
    are found by the Z-function of the text read backwards (Main and Lorentz 1984): linear time, whatever the text.
    """
    back = text[::-1]
    most = next((place for place, token in enumerate(back) if token in breakers), len(back))
    if most == 0:
        return {}
    longest: dict[int, int] = {}
    lengths: dict[int, int] = {}  # place in `back` -> tokens that agree with back's beginning from there on
    left = right = 0  # the match that reaches furthest
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
    logits: torch.Tensor,
    text: ListLike[int],
    breakers: Collection[int],
    multiplier: float,
    base: float,
    allowed_length: int,
) -> torch.Tensor:
    """logits [V] less multiplier * base ** (length - allowed_length) at each token that would go on with a repetition.

    The length is as `repeats` tells, and allowed_length at least: "Don't repeat yourself", P. E. Weidmann's penalty
    (text-generation-webui, pull request 5677).
    """
    lengths = {token: n for token, n in repeats(text, breakers).items() if n >= allowed_length and token < len(logits)}
    exponents = [math.log(multiplier) + (n - allowed_length) * math.log(base) for n in lengths.values()]
    return _added(logits, list(lengths), [-math.exp(min(x, math.log(MOST_PENALTY))) for x in exponents])


def _added(logits: torch.Tensor, ids: list[int], amounts: list[float]) -> torch.Tensor:
    added = torch.tensor(amounts, dtype=logits.dtype)
    return logits.index_add(0, torch.tensor(ids, dtype=torch.int64), added)


def adjusts(params: SamplingParams, constraints: TokenConstraints, written: int, mask: Any) -> bool:
    """Whether `adjusted` has anything to do after so many written tokens: mostly not, and then no row need be made."""
    return bool(
        mask is not None
        or params.logit_bias
        or params.allowed_ids is not None
        or params.banned_ids
        or constraints.bad
        or written < params.min_tokens
        or params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
        or params.dry_multiplier
    )


def adjusted(
    logits: torch.Tensor,
    text: ListLike[int],
    prompt_length: int,
    params: SamplingParams,
    constraints: TokenConstraints = TokenConstraints(),  # noqa: B008  (it is frozen)
    mask: Any = None,
) -> torch.Tensor:
    """The row [V] that a token is chosen from, before temperature; `logits` itself where nothing was asked for.

    text: the prompt and what was written after its `prompt_length` tokens. mask: as `masked` takes it. Of
    log-probabilities, as beam search has them, it makes scores. All -inf if nothing may be chosen.
    """
    if not adjusts(params, constraints, len(text) - prompt_length, mask):
        return logits
    row = biased(logits, params.logit_bias) if params.logit_bias else logits
    row = banned(allowed(row, params.allowed_ids), params.banned_ids)
    row = without_words(row, text, constraints.bad) if constraints.bad else row
    row = masked(row, mask)
    if len(text) - prompt_length < params.min_tokens:
        row = banned(row, constraints.end_ids)
    if params.repetition_penalty != 1.0:
        row = repetition(row, text[-params.repetition_window :], params.repetition_penalty)  # [-0:] is all of it
    if params.presence_penalty or params.frequency_penalty:
        row = occurrences(row, text[prompt_length:], params.presence_penalty, params.frequency_penalty)
    if params.dry_multiplier:
        row = dry(row, text, constraints.breakers, params.dry_multiplier, params.dry_base, params.dry_allowed_length)
    return row


def tempered(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """logits [V], fp64, less their highest and divided by the temperature, which is above 0."""
    # Shifted first: dividing by a tiny temperature then gives -inf at worst, never inf - inf.
    return (logits.double() - logits.max()) / temperature


def top_n_sigma(logits: torch.Tensor, n: float) -> torch.Tensor:
    """Keep logits within n standard deviations, of the finite ones, of the highest (arXiv 2411.07641). 0 keeps all."""
    if n == 0.0:
        return logits
    row = logits.numpy()
    below = row.max() - row[np.isfinite(row)]
    widest = float(below.max()) or 1.0  # scaled by it, no square overflows
    return _cut(logits, float(row.max()) - n * float((below / widest).std()) * widest)


def top_k(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Keep the k highest of logits [V] and those tied with the k-th; the others become -inf. 0 keeps all."""
    if not 0 < k < len(logits):
        return logits
    return _cut(logits, float(np.partition(logits.numpy(), -k)[-k]))


def top_p(logits: torch.Tensor, p: float) -> torch.Tensor:
    """Keep the smallest set of most probable ids whose mass reaches p, at least one (arXiv 1904.09751).

    On ties the lower id comes first. The others become -inf.
    """
    return logits if p >= 1.0 else logits.where(torch.from_numpy(nucleus(logits.double().numpy(), p)), -math.inf)


def min_p(logits: torch.Tensor, p: float) -> torch.Tensor:
    """Keep ids at least p times as probable as the likeliest (arXiv 2407.01082). 0 keeps all."""
    return _cut(logits, logits.max() + math.log(p)) if p else logits


def typical_p(logits: torch.Tensor, p: float) -> torch.Tensor:
    """Keep the ids whose surprise is nearest to the expected one until their mass reaches p (arXiv 2202.00666).

    Those as near as the last one stay. The others become -inf.
    """
    return logits if p >= 1.0 else logits.where(torch.from_numpy(typical(logits.double().numpy(), p)), -math.inf)


def _cut(logits: torch.Tensor, least: Any) -> torch.Tensor:
    return logits.masked_fill(logits < least, -math.inf)


def filtered(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The sampler's logits [V], fp64: tempered, with -inf at every id that cannot be drawn.

    logits: an `adjusted` row in which something is left; the temperature is not 0.
    """
    row = top_n_sigma(tempered(logits, params.temperature), params.top_n_sigma)
    row = top_p(top_k(row, params.top_k), params.top_p)
    return typical_p(min_p(row, params.min_p), params.typical_p)
