"""The sampler applies the logits processors, then takes the argmax or the inverse CDF at one uniform number.

    logits  ->  adjusted  ->  greedy: the argmax, the lowest id on ties
                          ->  filtered  ->  softmax  ->  XTC  ->  inverse CDF, in id order

A draw depends only on the row, the text, the seed, the position and the choice number, and with Mirostat on the sum of
the text's sampler logprobs: never on the batch or the step. `_verified` accepts a draft if its row draws that token.
"""

import math
from collections.abc import Callable, Container, Iterable, Mapping
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokenwright import engine
from tokenwright.arrays import Floats
from tokenwright.decode.logits_processors import Doubles, adjusted, filtered, mirostat_bound, softmax, without_top
from tokenwright.engine.step import ALL, HIDDEN
from tokenwright.errors import EngineError, GrammarError

BLOCK = 1 << 22  # logits exponentiated at a time
RANGE = 128
RUN = 64  # positions whose uniform numbers are computed at a time


def uniform(seed: int, position: int, choice: int = 0, word: int = 0) -> float:
    """The uniform number in [0, 1) of a seed (64 bits), a position and a choice: Philox 4x64, counter-based.

    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3". word: 0 draws the token, 1 is for XTC.
    """
    return _uniforms(seed, position // RUN, choice, word)[position % RUN]


@lru_cache(maxsize=1024)
def _uniforms(seed: int, run: int, choice: int, word: int) -> list[float]:
    """For `RUN` positions at once: creating a generator takes longer than drawing them all."""
    bits = np.random.Philox(key=seed, counter=run * RUN + (choice << 64)).random_raw(4 * RUN)[word::4]
    numbers: list[float] = ((bits >> np.uint64(11)) * 2.0**-53).tolist()
    return numbers


def probabilities(logits: Floats, params: engine.SamplingParams, bound: float = math.inf) -> Doubles | None:
    """The distribution [V], fp64, before XTC, of an `adjusted` row; 0 at ids that were cut. None if greedy."""
    return None if params.greedy else softmax(filtered(logits, params, bound))


def of_choice(chances: Doubles | None, params: engine.SamplingParams, position: int, choice: int = 0) -> Doubles | None:
    """The distribution that one choice draws from: `chances`, after XTC if its uniform number at `position` says so."""
    if chances is None or not params.xtc_probability or params.mirostat:
        return chances
    assert params.seed is not None, "the seed is resolved before a request reaches the engine"
    excludes = uniform(params.seed, position, choice, 1) < params.xtc_probability
    return without_top(chances, params.xtc_threshold) if excludes else chances


def _bound(request: engine.Request, text: "_Text") -> float:
    params, count = request.params, len(text.tokens) - request.prompt_length
    return mirostat_bound(params.mirostat_tau, params.mirostat_eta, -text.sampler_logprob / math.log(2.0), count)


def choose(
    logits: Floats, chances: Doubles | None, seed: int | None, position: int, choices: ListLike[int] = (0,)
) -> list[int]:
    """The token for each choice: the inverse CDF of its uniform number over `chances` [V], or the logits' argmax."""
    if chances is None:
        return [int(logits.argmax())] * len(choices)
    assert seed is not None, "the seed is resolved before a request reaches the engine"
    mass = chances.cumsum()
    last = mass.searchsorted(mass[-1])  # the last id of nonzero probability, an upper bound against rounding
    marks = [uniform(seed, position, choice) * mass[-1] for choice in choices]
    return [int(min(mass.searchsorted(mark, "right"), last)) for mark in marks]


def top_ids(logits: Floats | Doubles, n: int) -> list[int]:
    """The ids of the min(n, V) highest of logits [V], the highest first and the lower id on ties."""
    if (n := min(n, len(logits))) == 0:
        return []
    ids = _candidates(logits, n)
    values = logits[ids]
    ids = ids[values >= np.partition(values, -n)[-n]]
    first: list[int] = ids[np.argsort(-logits[ids], kind="stable")][:n].tolist()
    return first


def _candidates(logits: Floats | Doubles, n: int) -> NDArray[np.int64]:
    """Ids that include the n highest of logits [V], in ascending order; most logits are read once.

    The n highest lie in the ranges of the n highest maxima.
    """
    whole = len(logits) // RANGE * RANGE
    if whole <= n * RANGE:
        return np.arange(len(logits))
    maxima = logits[:whole].reshape(-1, RANGE).max(1)
    ranges = np.flatnonzero(maxima >= np.partition(maxima, -n)[-n])
    return np.append((ranges[:, None] * RANGE + np.arange(RANGE)).ravel(), np.arange(whole, len(logits)))


def log_totals(logits: Floats) -> list[float]:
    """The logsumexp of each row of logits [n, V]."""
    step = max(1, BLOCK // logits.shape[1])
    totals: list[float] = []
    for start in range(0, len(logits), step):
        rows = logits[start : start + step]
        highest = rows.max(axis=1)
        above = rows - highest[:, None]
        sums = np.exp(above, out=above).sum(axis=1)
        totals += [top + math.log(rest) for top, rest in zip(highest.tolist(), sums.tolist(), strict=True)]
    return totals


def score(chunk: engine.Chunk, logits: Floats, totals: ListLike[float] = ()) -> engine.PromptLogprobs:
    """The log-probabilities of a chunk's following tokens, from logits [n, V] and their `log_totals`."""
    known = len(chunk.following)
    logits = logits[:known]
    rows = list(zip(logits, totals[:known] or log_totals(logits), strict=True))
    logprobs = tuple(float(row[token]) - total for token, (row, total) in zip(chunk.following, rows, strict=True))
    tops: tuple[tuple[engine.TopLogprob, ...], ...] = ()
    if n := chunk.request.params.prompt_logprobs:
        tops = tuple(
            tuple(engine.TopLogprob(i, float(row[i]) - total, 0.0) for i in top_ids(row, n)) for row, total in rows
        )
    return engine.PromptLogprobs(chunk.sequence.id, chunk.start + 1, logprobs, tops)


_Beam = tuple[engine.Chunk, Floats, tuple[float, ...]]  # its logits [n, V], and their `log_totals` [n], if known
Observe = Callable[[engine.Chunk, Floats, Doubles | None], None]


def unobserved(chunk: engine.Chunk, logits: Floats, chances: Doubles | None) -> None: ...


class RowSampler:
    """Picks tokens for the chunks of a step, in fp64. A row with a NaN fails only its own sequence or search."""

    def pick(
        self, output: engine.Output[Floats], step: engine.Step, observe: Observe = unobserved
    ) -> list[engine.Result]:
        """The results of a step, beam searches last. `observe` gets the logits and `probabilities` of each pick."""
        results: list[engine.Result] = []
        searches: dict[int, list[_Beam]] = {}  # by id() of the search
        values = output.logits
        pairs = list(zip(step.chunks, output.rows, strict=True))
        totals: Mapping[int, float] | tuple[float, ...] = output.log_totals
        if totals:
            unsound = {row for row, total in enumerate(totals) if not math.isfinite(total)}
        else:
            unsound = set(np.flatnonzero(~np.isfinite(values).all(axis=1)).tolist())
            totals = _totals(values, unsound, pairs)
        for chunk, rows in pairs:
            picks, search = chunk.picks, chunk.sequence.request.search
            if chunk.logits_needed is HIDDEN:
                results.append(_hidden(chunk, output.hidden, rows))
            elif picks and search is not None:
                beams = searches.setdefault(id(search), [])
                beams.append((chunk, values[rows.start : rows.stop], output.log_totals[rows.start : rows.stop]))
            elif chunk.drafts:
                each = [None if i in unsound else _row(output, values, totals, i) for i in rows]
                results.append(_verified(chunk, each, observe))
            elif not unsound.isdisjoint(rows):
                results.append(engine.Failed(chunk.sequence.id, _unsound()))
            else:
                if chunk.logits_needed is ALL:
                    known = output.log_totals[rows.start : rows.stop]
                    results.append(score(chunk, values[rows.start : rows.stop], known))
                if picks:
                    sequence = chunk.sequence
                    text = _Text(sequence.tokens, sequence.stop_checker, sequence.counts.sampler_logprob)
                    results += _picked(chunk, _row(output, values, totals, rows.stop - 1), text, observe)
        for beams in searches.values():
            results += _searched(beams, observe)
        return results


def _hidden(chunk: engine.Chunk, hidden: Floats | None, rows: range) -> engine.HiddenStates | engine.Failed:
    """The chunk's rows of hidden [N, width], or a Failed if a number of them is not finite."""
    assert hidden is not None, "the runner answers every chunk"
    found = hidden[rows.start : rows.stop]
    if not _sound(found):
        return engine.Failed(chunk.sequence.id, _unsound())
    return engine.HiddenStates(chunk.sequence.id, chunk.start, found)


def _totals(logits: Floats, unsound: Container[int], pairs: ListLike[tuple[engine.Chunk, range]]) -> dict[int, float]:
    """The `log_totals`, by row number, of the finite rows of logits [rows, V] that a token is sampled from."""
    each = [rows[-1 - len(chunk.drafts) :] for chunk, rows in pairs if chunk.picks and chunk.request.search is None]
    picking = [row for ends in each for row in ends if row not in unsound]
    chosen = logits if len(picking) == len(logits) else logits[picking]
    return dict(zip(picking, log_totals(chosen), strict=True))


def _row(
    output: engine.Output[Floats], logits: Floats, totals: Mapping[int, float] | tuple[float, ...], i: int
) -> "_Row":
    return _Row(logits[i], totals[i], output.best[i] if output.best else None)


def _sound(logits: Floats) -> bool:
    return bool(np.isfinite(logits).all())


def _unsound() -> EngineError:
    return EngineError("the model's results are not finite; its weights or its dtype cannot carry this text")


class _Row(NamedTuple):
    """A row of logits [V], its `log_totals`, and its argmax if the kernel computed it."""

    logits: NDArray[np.float32]
    total: float
    best: int | None


@dataclass(slots=True)
class _Text:
    tokens: list[int]
    checker: engine.StopChecker
    sampler_logprob: float


def _picked(chunk: engine.Chunk, found: _Row, text: _Text, observe: Observe) -> list[engine.Pick] | list[engine.Failed]:
    sequence = chunk.sequence
    request = sequence.request
    params = request.params
    try:
        mask = text.checker.mask()
    except Exception as error:  # of this request's stop checker: others must not fail with it
        return [engine.Failed(sequence.id, error)]
    values, total, best = found
    position = len(text.tokens)
    known = best if request.argmax and mask is None and position - request.prompt_length >= params.min_tokens else None
    if known is not None and not params.logprobs:
        if observe is not unobserved:
            observe(chunk, values, None)
        tokens, logprobs = (known,), (values.item(known) - total,)
        return [engine.Pick(sequence.id, tokens, logprobs, (0.0,), ((),), choice) for choice in sequence.choices]
    row = adjusted(values, text.tokens, request.prompt_length, params, request.constraints, mask)
    if row is not values and row.max() == -math.inf:
        return [engine.Failed(sequence.id, exhausted())]
    whole = params.logprobs or observe is not unobserved
    ids, row = (None, np.asarray(row)) if whole else _few(row, params)
    chances = probabilities(row, params, _bound(request, text) if params.mirostat else math.inf)
    each = [of_choice(chances, params, position, choice) for choice in sequence.choices]
    if known is not None:
        chosen = [known] * len(sequence.choices)
    elif params.xtc_probability:
        pairs = zip(each, sequence.choices, strict=True)
        chosen = [choose(row, drawn, params.seed, position, (choice,))[0] for drawn, choice in pairs]
    else:
        chosen = choose(row, chances, params.seed, position, sequence.choices)
    if whole:
        values = np.asarray(values)  # a GPU's are read when they are needed
        observe(chunk, values, each[0])
    first = top_ids(values, params.logprobs) if params.logprobs else []
    picks: list[engine.Pick] = []
    for choice, place, drawn in zip(sequence.choices, chosen, each, strict=True):
        token = place if ids is None else int(ids[place])
        top = tuple(engine.TopLogprob(i, float(values[i]) - total, _logprob(drawn, token, i)) for i in first)
        of_model, of_sampler = values.item(token) - total, _logprob(drawn, place, place)
        picks.append(engine.Pick(sequence.id, (token,), (of_model,), (of_sampler,), (top,), choice))
    return picks


def _few(row: Any, params: engine.SamplingParams) -> tuple[NDArray[np.int64] | None, Floats]:
    """The ids, ascending, of logits [V] that may be drawn, or None for all of them, and these logits."""
    k = params.top_k
    if not k or params.top_n_sigma or params.mirostat:
        return None, np.asarray(row)
    if (found := row.few(k) if hasattr(row, "few") else None) is not None:  # a GPU's
        return found  # type: ignore[no-any-return]
    row = np.asarray(row)
    ids = _candidates(row, k)
    return ids, row[ids]


def _verified(chunk: engine.Chunk, rows: Iterable[_Row | None], observe: Observe) -> engine.Pick | engine.Failed:
    """Accept drafts: a Pick of the tokens that the rows choose, up to and including the first that is not its draft.

    rows: None for one that is not finite. A fault after the first row ends the Pick: the next step computes it again.
    """
    sequence = chunk.sequence
    text = _Text(list(sequence.tokens), sequence.stop_checker, sequence.counts.sampler_logprob)
    picks: list[engine.Pick] = []
    for row, draft in zip(rows, (*chunk.drafts, None), strict=True):
        [one] = [engine.Failed(sequence.id, _unsound())] if row is None else _picked(chunk, row, text, observe)
        if isinstance(one, engine.Failed):
            if picks:
                break
            return one
        picks.append(one)
        if one.tokens[0] != draft or not _goes_on(chunk, text, one):
            break
    tokens = tuple(one.tokens[0] for one in picks)
    logprobs, drawn = tuple(one.logprobs[0] for one in picks), tuple(one.sampler_logprobs[0] for one in picks)
    return engine.Pick(sequence.id, tokens, logprobs, drawn, tuple(one.tops[0] for one in picks), picks[0].choice)


class Guessing:
    """Tokens that a draft model adds to a text, drawn as this sampler draws. ended: nothing may follow the last."""

    def __init__(self, sequence: engine.Sequence) -> None:
        self.sequence = sequence
        self.tokens: list[int] = []
        self.ended = False
        self._text = _Text(list(sequence.tokens), sequence.stop_checker, sequence.counts.sampler_logprob)

    def guess(self, chunk: engine.Chunk, output: engine.Output[Floats], row: int) -> float | None:
        """Add the token that a row of the draft model chooses, and return its probability; None if it has no choice."""
        totals = output.log_totals or {row: log_totals(output.logits[row : row + 1])[0]}
        if not math.isfinite(totals[row]):
            return None
        [pick] = _picked(chunk, _row(output, output.logits, totals, row), self._text, unobserved)
        if isinstance(pick, engine.Failed):
            return None
        self.tokens.append(pick.tokens[0])
        self.ended = not _goes_on(chunk, self._text, pick)
        return math.exp(pick.logprobs[0])


def _goes_on(chunk: engine.Chunk, text: _Text, pick: engine.Pick) -> bool:
    """Extend a copy of a chunk's text by a pick. False: its stop checker ends the text, or fails, as in the commit."""
    [token], [logprob] = pick.tokens, pick.sampler_logprobs
    text.tokens.append(token)
    text.sampler_logprob += logprob
    try:
        if not text.checker.constrained and text.checker.mask() is None:
            return True
        if text.checker is chunk.sequence.stop_checker:  # the commit advances this one
            text.checker = text.checker.fork()
        return text.checker.advance(token) is None
    except Exception:
        return False


def _logprob(chances: Doubles | None, chosen: int, token: int) -> float:
    """The log-probability with which the sampler draws a token; if greedy, 0 for the chosen one and -inf for others."""
    chance = float(token == chosen) if chances is None else float(chances[token])
    return math.log(chance) if chance else -math.inf


def exhausted() -> GrammarError:
    return GrammarError(
        "nothing is left to choose: together, the grammar, min_tokens, bad_words, allowed_ids and banned_ids forbid "
        "every token here; loosen one of them"
    )


def _searched(beams: list[_Beam], observe: Observe) -> list[engine.Result]:
    if not all(_sound(logits) for _, logits, _ in beams):
        return [engine.Failed(chunk.sequence.id, _unsound()) for chunk, _, _ in beams]
    results: list[engine.Result] = [score(*beam) for beam in beams if beam[0].logits_needed is ALL]
    try:
        results += beams[0][0].request.search.pick([(chunk, logits[-1]) for chunk, logits, _ in beams])
    except Exception as error:  # of the beams' stop checkers
        return [engine.Failed(chunk.sequence.id, error) for chunk, _, _ in beams]
    for chunk, logits, _ in beams:
        observe(chunk, logits[-1], None)
    return results
