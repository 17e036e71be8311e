"""Panel Sampler: what other settings would draw from the logits of a computed step, without the engine's thread."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np

from tokenwright.arrays import Floats
from tokenwright.decode.logits_processors import Doubles, filtered, softmax
from tokenwright.decode.sampler import choose, of_choice, probabilities, uniform
from tokenwright.engine import SamplingParams
from tokenwright.explorer.explorer import Explorer
from tokenwright.llm.run import Run
from tokenwright.trace.schema import TokenCard
from tokenwright.trace.wire import COUNTED, GIVEN, READ

LISTED = 24
POINTS = 600


@dataclass(frozen=True, slots=True)
class Ranked:
    token: TokenCard
    p: float  # the model's, over the whole vocabulary at temperature 1
    sampled: float  # after the sampler; 0: cut
    low: float  # the sampler's probabilities of all lower ids: a draw u in [low, low + sampled) takes this token


@dataclass(frozen=True, slots=True)
class SamplerView:
    step: int
    vocab: Annotated[int, COUNTED("", "vocabulary", "ids that have a logit")]
    after_top_k: Annotated[int, COUNTED("", "after top-k", "ids left by top-k")]
    after_top_p: Annotated[int, COUNTED("", "after top-p", "ids left by top-k and top-p")]
    kept: Annotated[int, COUNTED("", "kept", "ids that can be drawn, after all cuts")]
    kept_mass: Annotated[float, READ("", "their share", "the model's probability of the ids kept")]
    entropy: Annotated[float, READ("bit", "entropy before", "of the model's distribution")]
    sampled_entropy: Annotated[float, READ("bit", "entropy after", "of the sampler's distribution")]
    uniform: Annotated[
        float | None, READ("", "draw u", "the random number of this seed and position; none when greedy")
    ]
    token: int
    drawn: Annotated[int | None, COUNTED("", "drawn", "the id that these settings take with the same u")]
    drawn_card: TokenCard | None
    top: tuple[Ranked, ...]  # of the first ranks
    ranks: tuple[int, ...]  # by logit after the penalty, from 1; of a large vocabulary some, closer at the top
    p: tuple[float, ...]  # the model's, at these ranks
    sampled: tuple[float, ...]  # the sampler's, at these ranks
    temperature: Annotated[float, GIVEN("", "temperature", "as asked for")]
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    kind: Literal["sampler"] = "sampler"


MESSAGES = (Ranked, SamplerView)


def logits(explorer: Explorer, identity: str, step: int) -> bytes:
    """fp32, little-endian, one for each id."""
    return explorer.run(identity).logits(step).astype("<f4").tobytes()


def sampler(
    explorer: Explorer,
    identity: str,
    step: int,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
) -> SamplerView:
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    wanted = zip(names, (temperature, top_k, top_p, min_p, repetition_penalty), strict=True)
    return view(explorer, explorer.run(identity), step, {name: one for name, one in wanted if one is not None})


def view(explorer: Explorer, run: Run, step: int, wanted: Mapping[str, float]) -> SamplerView:
    params = replace(run.start.params, **wanted)  # type: ignore[arg-type]  # it checks them itself
    logits, row, position = run.logits(step), run.adjusted_logits(step, params), run.context(step)
    chances = probabilities(row, params)
    if params.seed is not None:
        chances = of_choice(chances, params, position)
    drawn = choose(row, chances, params.seed, position)[0] if params.greedy or params.seed is not None else None
    if chances is None:
        chances = _one(row, drawn or 0)
    p = softmax(logits.astype("f8"))  # [V]
    order = (-row).argsort(stable=True)  # the cuts go by it; the model's own without a penalty
    ranks = spread(len(p))
    shown = order[[rank - 1 for rank in ranks]]
    low = chances.cumsum() - chances
    first = order[:LISTED].tolist()
    cards = dict(zip(first, explorer.looks(first), strict=True))
    return SamplerView(
        step=step,
        vocab=len(p),
        after_top_k=_left(row, replace(params, top_p=1.0, min_p=0.0, typical_p=1.0)),
        after_top_p=_left(row, replace(params, min_p=0.0, typical_p=1.0)),
        kept=int((chances > 0).sum()),
        kept_mass=float(p[chances > 0].sum()),
        entropy=_entropy(p),
        sampled_entropy=_entropy(chances),
        uniform=None if params.greedy or params.seed is None else uniform(params.seed, position),
        token=run.tokens[position],
        drawn=drawn,
        drawn_card=None if drawn is None else explorer.looks([drawn])[0],
        top=tuple(Ranked(cards[i], float(p[i]), float(chances[i]), float(low[i])) for i in first),
        ranks=ranks,
        p=tuple(p[shown].tolist()),
        sampled=tuple(chances[shown].tolist()),
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
    )


def _one(row: Floats, token: int) -> Doubles:
    chances = row.astype("f8") * 0
    chances[token] = 1.0
    return chances


def _left(row: Floats, params: SamplingParams) -> int:
    return 1 if params.greedy else int((filtered(row, params) > -math.inf).sum())


def _entropy(p: Doubles) -> float:
    some = p[p > 0]
    return float(-(some * np.log2(some)).sum())


def spread(size: int) -> tuple[int, ...]:
    """The ranks 1 .. size; of a large vocabulary about POINTS of them, by equal steps of their logarithm."""
    if size <= POINTS:
        return tuple(range(1, size + 1))
    return tuple(sorted({round(size ** (i / (POINTS - 1))) for i in range(POINTS)}))
