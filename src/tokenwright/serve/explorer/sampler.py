"""The sampler on held logits: what other settings would make of a step that was computed.

The engine's own sampler is applied to logits that the run holds, in the thread of the request: the engine thread is not
asked, and computes no step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from fastapi import FastAPI, Response

from tokenwright.engine import SamplingParams
from tokenwright.explorer.messages.sampler import Ranked, SamplerView
from tokenwright.serve.explorer.explorer import HIDDEN, Explorer

if TYPE_CHECKING:  # NumPy is loaded with the model, not with the server
    from tokenwright.arrays import Floats
    from tokenwright.decode.logits_processors import Doubles
    from tokenwright.llm.run import Run

LISTED = 24  # tokens by name
POINTS = 600  # ranks of a large vocabulary


def add(app: FastAPI, explorer: Explorer) -> None:
    """Add the routes."""

    @app.get("/runs/{identity}/logits", **HIDDEN)
    def logits(identity: str, step: int) -> Response:
        """The model's logits of a step: fp32, little-endian, one for each id."""
        player = explorer.player(identity)
        player.renew()
        return Response(player.run.logits(step).astype("<f4").tobytes(), media_type="application/octet-stream")

    @app.get("/runs/{identity}/sampler", **HIDDEN)
    def sampler(
        identity: str,
        step: int,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
    ) -> SamplerView:
        player = explorer.player(identity)
        player.renew()
        wanted = {
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
        }
        return view(explorer, player.run, step, {name: value for name, value in wanted.items() if value is not None})


def view(explorer: Explorer, run: Run, step: int, wanted: Mapping[str, float]) -> SamplerView:
    """The result of the run's sampler for a step's logits, with its own settings except the ones in `wanted`.

    Raises RequestError for a step whose logits are not held, and for settings out of range.
    """
    from tokenwright.decode.logits_processors import softmax
    from tokenwright.decode.sampler import choose, of_choice, probabilities, uniform

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
    """All of the probability at one id: greedy decoding as a distribution [V]."""
    chances = row.astype("f8") * 0
    chances[token] = 1.0
    return chances


def _left(row: Floats, params: SamplingParams) -> int:
    """How many ids the cuts of `params` leave; one for greedy decoding."""
    from tokenwright.decode.logits_processors import filtered

    return 1 if params.greedy else int((filtered(row, params) > -math.inf).sum())


def _entropy(p: Doubles) -> float:
    """In bits, of a distribution [V]."""
    import numpy as np

    some = p[p > 0]
    return float(-(some * np.log2(some)).sum())


def spread(size: int) -> tuple[int, ...]:
    """The ranks 1 .. size, or of a large vocabulary about POINTS of them, by equal steps of their logarithm."""
    if size <= POINTS:
        return tuple(range(1, size + 1))
    return tuple(sorted({round(size ** (i / (POINTS - 1))) for i in range(POINTS)}))
