"""A race of one text with the KV cache and without it: a RaceCard, RaceSteps, a RaceEnd. One race runs at a time."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from tokenwright.errors import EngineError
from tokenwright.explorer.dataclass_reader import Between
from tokenwright.explorer.explorer import Explorer, MessageStream, PanelError, Seed, Text, seeded
from tokenwright.trace.schema import TokenCard
from tokenwright.trace.wire import COUNTED, DERIVED, MEASURED, READ

if TYPE_CHECKING:
    from tokenwright.explorer.views.lanes import Race

_M, _C, _D, _R = MEASURED, COUNTED, DERIVED, READ
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RaceSums:
    """Times and work are sums over the steps of both lanes."""

    steps: Annotated[int, _C("", "steps", "steps of the cached lane")]
    compared: Annotated[int, _C("", "compared", "of these, steps that the uncached lane computed too")]
    cached_us: Annotated[int, _M("us", "time, cached", "of the compared steps, with the cache")]
    uncached_us: Annotated[int, _M("us", "time, uncached", "of the same steps, without it")]
    cached_flops: Annotated[int, _C("FLOP", "FLOPs, cached", "of the compared steps, with the cache")]
    uncached_flops: Annotated[int, _C("FLOP", "FLOPs, uncached", "of the same steps, without it")]
    cached_tokens: Annotated[int, _C("tokens", "tokens, cached", "sent through the layers, cached")]
    uncached_tokens: Annotated[int, _C("tokens", "tokens, uncached", "sent through the layers, uncached")]
    times: Annotated[float | None, _M("times", "slower", "time without the cache, divided by that with it")]
    equal: Annotated[int, _C("", "argmax equal", "compared steps at which both lanes have the same argmax")]
    max_delta: Annotated[
        float | None, _R("", "largest difference", "max |difference| of any logit at any compared step")
    ]
    kl: Annotated[float | None, _R("nat", "KL", "mean of KL(cached || uncached) over the compared steps")]
    divergent: Annotated[
        int | None, _C("", "first divergent step", "the first step whose argmax differs; none: no step")
    ]


@dataclass(frozen=True, slots=True)
class RaceStep:
    """The uncached lane's numbers are null at steps that it leaves out."""

    step: int
    context: Annotated[int, _C("tokens", "t", "tokens of the text that the step's token was chosen after")]
    token: TokenCard
    text: str
    cached_us: Annotated[int, _M("us", "time, cached", "of the step, with the cache")]
    cached_flops: Annotated[int, _C("FLOP", "FLOPs, cached", "of the step, with the cache")]
    cached_tokens: Annotated[int, _C("tokens", "tokens, cached", "sent through the layers, cached")]
    uncached_us: Annotated[int | None, _M("us", "time, uncached", "of the step, without the cache")]
    uncached_flops: Annotated[int | None, _C("FLOP", "FLOPs, uncached", "of the step, without the cache")]
    uncached_tokens: Annotated[int | None, _C("tokens", "tokens, uncached", "sent through the layers, uncached")]
    recomputed: Annotated[float | None, _D("share", "computed again", "(t - 1) / t of the uncached step's tokens")]
    max_delta: Annotated[float | None, _R("", "largest difference", "max |difference| of any logit")]
    kl: Annotated[float | None, _R("nat", "KL", "KL(cached || uncached), natural logarithm")]
    equal: bool | None  # both lanes have the same argmax
    sums: RaceSums
    kind: Literal["step"] = "step"


@dataclass(frozen=True, slots=True)
class RaceCard:
    prompt: str
    prompt_tokens: int
    max_tokens: int
    every: int  # the uncached lane computes one step in `every`
    budget_s: float
    dtype: str
    weights: str
    kernels: str
    device: str
    layers: int
    kind: Literal["race"] = "race"


@dataclass(frozen=True, slots=True)
class RaceEnd:
    reason: str  # why the cached lane ended (eos, stop, length, context), budget, or failed
    context: int  # tokens of the final text
    message: str
    kind: Literal["end"] = "end"


MESSAGES = (RaceSums, RaceStep, RaceCard, RaceEnd)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRace:
    prompt: Text
    max_tokens: Annotated[int, Between(1, 4096)] = 64
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: Seed | None = None
    ignore_eos: bool = False
    every: Annotated[int, Between(1, 256)] = 1
    budget_s: Annotated[float, Between(0, 120)] = 20.0


def race(explorer: Explorer, body: NewRace) -> MessageStream:
    """Raises what `Explorer.begin` raises, and PanelError during another race."""
    from tokenwright.explorer.views.lanes import Race

    if not explorer.locks["race"].acquire(blocking=False):
        why = "a race is under way on this server, and a second one would slow both; try again in a while"
        raise PanelError("busy", why)
    with ExitStack() as stack:
        stack.callback(explorer.locks["race"].release)
        params = seeded(explorer.llm, body)
        race = Race(explorer.llm, body.prompt, params, every=body.every, budget_s=body.budget_s)
        stack.callback(race.close)
        stack.enter_context(explorer.runs.guests([race.run, race.run]))  # the uncached lane needs as much again
        return MessageStream(_messages(race, body), stack.pop_all().close)


def _messages(race: "Race", body: NewRace) -> Iterator[RaceCard | RaceStep | RaceEnd]:
    llm, context, reason, message = race.llm, len(race.run.start.prompt), "failed", ""
    yield RaceCard(
        prompt=body.prompt,
        prompt_tokens=context,
        max_tokens=body.max_tokens,
        every=body.every,
        budget_s=body.budget_s,
        dtype=llm.dtype,
        weights=str(llm.weights),
        kernels=llm.kernels,
        device=llm.device,
        layers=llm.config.layers,
    )
    try:
        for step in race:
            context = step.context
            yield step
        reason = race.reason or "failed"
    except EngineError:
        log.exception("a race failed")
        message = "the engine failed on this race; the server's log says more"
    yield RaceEnd(reason, context, message)
