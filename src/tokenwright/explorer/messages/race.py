"""The messages of a race: one text with the KV cache and without it, step by step, and how far the results agree."""

from dataclasses import dataclass
from typing import Annotated, Literal

from tokenwright.trace.schema import TokenCard
from tokenwright.trace.wire import COUNTED, DERIVED, MEASURED, READ, Wire

_M, _C, _D, _R = MEASURED, COUNTED, DERIVED, READ


@dataclass(frozen=True, slots=True)
class RaceSums:
    """A race so far. Times and work are sums over the steps that both lanes computed, so that they can be compared."""

    steps: Annotated[int, Wire("Q", _C, "", "steps", "steps of the cached lane")]
    compared: Annotated[int, Wire("Q", _C, "", "compared", "of these, steps that the uncached lane computed too")]
    cached_us: Annotated[int, Wire("Q", _M, "us", "time, cached", "of the compared steps, with the cache")]
    uncached_us: Annotated[int, Wire("Q", _M, "us", "time, uncached", "of the same steps, without it")]
    cached_flops: Annotated[int, Wire("Q", _C, "FLOP", "FLOPs, cached", "of the compared steps, with the cache")]
    uncached_flops: Annotated[int, Wire("Q", _C, "FLOP", "FLOPs, uncached", "of the same steps, without it")]
    cached_tokens: Annotated[int, Wire("Q", _C, "tokens", "tokens, cached", "sent through the layers, cached")]
    uncached_tokens: Annotated[int, Wire("Q", _C, "tokens", "tokens, uncached", "sent through the layers, uncached")]
    times: Annotated[float | None, Wire("d", _M, "times", "slower", "time without the cache, divided by that with it")]
    equal: Annotated[int, Wire("Q", _C, "", "argmax equal", "compared steps at which both lanes have the same argmax")]
    max_delta: Annotated[
        float | None, Wire("d", _R, "", "largest difference", "max |difference| of any logit at any compared step")
    ]
    kl: Annotated[float | None, Wire("d", _R, "nat", "KL", "mean of KL(cached || uncached) over the compared steps")]
    divergent: Annotated[
        int | None, Wire("Q", _C, "", "first divergent step", "the first step whose argmax differs; none: no step")
    ]


@dataclass(frozen=True, slots=True)
class RaceStep:
    """One step. The uncached lane's numbers are null at steps that it leaves out."""

    step: int
    context: Annotated[int, Wire("Q", _C, "tokens", "t", "tokens of the text that the step's token was chosen after")]
    token: TokenCard
    text: str
    cached_us: Annotated[int, Wire("Q", _M, "us", "time, cached", "of the step, with the cache")]
    cached_flops: Annotated[int, Wire("Q", _C, "FLOP", "FLOPs, cached", "of the step, with the cache")]
    cached_tokens: Annotated[int, Wire("Q", _C, "tokens", "tokens, cached", "sent through the layers, cached")]
    uncached_us: Annotated[int | None, Wire("Q", _M, "us", "time, uncached", "of the step, without the cache")]
    uncached_flops: Annotated[int | None, Wire("Q", _C, "FLOP", "FLOPs, uncached", "of the step, without the cache")]
    uncached_tokens: Annotated[
        int | None, Wire("Q", _C, "tokens", "tokens, uncached", "sent through the layers, uncached")
    ]
    recomputed: Annotated[
        float | None,
        Wire("d", _D, "share", "computed again", "(t - 1) / t of the uncached step's tokens"),
    ]
    max_delta: Annotated[float | None, Wire("d", _R, "", "largest difference", "max |difference| of any logit")]
    kl: Annotated[float | None, Wire("d", _R, "nat", "KL", "KL(cached || uncached), natural logarithm")]
    equal: bool | None  # whether both lanes have the same argmax
    sums: RaceSums
    kind: Literal["step"] = "step"


@dataclass(frozen=True, slots=True)
class RaceCard:
    """The first message of POST /race: what is being raced."""

    prompt: str
    prompt_tokens: int
    max_tokens: int
    every: int  # the uncached lane computes every so many-th step
    budget_s: float
    dtype: str
    weights: str
    kernels: str
    device: str
    layers: int
    kind: Literal["race"] = "race"


@dataclass(frozen=True, slots=True)
class RaceEnd:
    """The last message. reason: why the cached lane ended (eos, stop, length, context), budget, or failed."""

    reason: str
    context: int  # tokens of the text at the end
    message: str  # of a failure
    kind: Literal["end"] = "end"


MESSAGES = (RaceSums, RaceStep, RaceCard, RaceEnd)
