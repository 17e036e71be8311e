"""Choosing a token from logits: pure functions, applied in this order.

    logits / temperature  ->  top-k  ->  top-p  ->  inverse CDF of one uniform number

Greedy (temperature 0) is the exact argmax, the lowest id on ties. A draw depends on the row of logits, the seed
and the position alone: never on the batch, the step or what was drawn before.
"""

import math
from collections.abc import Callable

import numpy as np
import torch

from tokenwright.engine import Chunk, Fault, Output, Pick, Result, SamplingParams, Score, Step, Wants
from tokenwright.errors import EngineError


def uniform(seed: int, position: int) -> float:
    """The uniform number in [0, 1) of a seed (64 bits) and a position: Philox 4x64, counter-based (Salmon 2011)."""
    bits = np.random.Philox(key=seed, counter=position).random_raw()
    return (int(bits) >> 11) * 2.0**-53


def top_k(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Keep the k highest of logits [V] and those tied with the k-th; the others become -inf. 0 keeps all."""
    if not 0 < k < len(logits):
        return logits
    return logits.masked_fill(logits < logits.topk(k).values[-1], -math.inf)


def top_p(logits: torch.Tensor, p: float) -> torch.Tensor:
    """Keep the smallest set of most probable ids whose mass reaches p, at least one (arXiv 1904.09751).

    On ties the lower id comes first. The others become -inf.
    """
    if p >= 1.0:
        return logits
    ordered, ids = logits.sort(descending=True, stable=True)
    mass = ordered.double().softmax(-1).cumsum(-1)
    kept = int((mass < p).sum()) + 1
    return logits.index_fill(0, ids[kept:], -math.inf)


def filtered(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The sampler's logits [V]: tempered, with -inf at every id that cannot be drawn."""
    # Shifted by the highest first: dividing by a tiny temperature then gives -inf at worst, never inf - inf.
    tempered = (logits.double() - logits.max()) / params.temperature
    return top_p(top_k(tempered, params.top_k), params.top_p)


def probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor | None:
    """The distribution [V], fp64, that a token is drawn from; 0 at what is cut. None: greedy draws nothing."""
    return None if params.greedy else filtered(logits, params).softmax(-1)


def choose(logits: torch.Tensor, chances: torch.Tensor | None, seed: int | None, position: int) -> int:
    """The token at `position`: the inverse CDF of its uniform number over `chances` [V]; without them, the argmax."""
    if chances is None:
        return int(logits.argmax())
    assert seed is not None, "the seed is resolved before a request reaches the engine"
    mass = chances.cumsum(-1)  # in id order
    drawn = int(torch.searchsorted(mass, uniform(seed, position) * float(mass[-1]), right=True))
    return min(drawn, int(torch.searchsorted(mass, mass[-1])))  # rounding must not step past the last kept id


def logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The model's log-probability [n] of one token in each row of logits [n, V], over all ids at temperature 1."""
    return logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1)


Look = Callable[[Chunk, torch.Tensor, torch.Tensor | None], None]


def unseen(chunk: Chunk, logits: torch.Tensor, chances: torch.Tensor | None) -> None:
    """The look of a run that nobody looks at."""


class TorchSampler:
    """Answers the chunks of a step, each row on its own. A row with a NaN fails its sequence, not its neighbours.

    It works on the CPU, in fp64 where sums decide, whatever device the model runs on: the draws are the same.
    """

    @torch.inference_mode()
    def pick(self, output: Output[torch.Tensor], step: Step, look: Look = unseen) -> list[Result]:
        """`look` is shown each chunk that picks, with its logits [V] and what `probabilities` made of them."""
        results: list[Result] = []
        everything = output.logits.cpu()
        for chunk, rows in zip(step.chunks, output.rows, strict=True):
            logits = everything[rows.start : rows.stop]
            if not bool(logits.isfinite().all()):
                fault = EngineError(
                    "the model's logits are not finite; its weights or its dtype cannot carry this text"
                )
                results.append(Fault(chunk.sequence, fault))
                continue
            if chunk.wants is Wants.ALL:
                known = torch.tensor(chunk.following, dtype=torch.int64)
                scores = logprobs(logits[: len(known)], known)
                results.append(Score(chunk.sequence, chunk.start + 1, tuple(scores.tolist())))
            if chunk.picks:
                params = chunk.request.params
                chances = probabilities(logits[-1], params)
                token = choose(logits[-1], chances, params.seed, chunk.stop)
                look(chunk, logits[-1], chances)
                score = logprobs(logits[-1:], torch.tensor([token]))
                results.append(Pick(chunk.sequence, token, float(score)))
        return results
