"""Panel Race: each step of one text with the KV cache, and computed whole without it. One race runs at a time.

The uncached lane is teacher-forced. The lanes take turns on one engine, so both meet the same machine.
"""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated, Literal, Self

import numpy as np

from tokenwright.arrays import Floats
from tokenwright.decode.logits_processors import log_softmax
from tokenwright.errors import EngineError, RequestError
from tokenwright.explorer.dataclass_reader import Between
from tokenwright.explorer.explorer import Explorer, MessageStream, PanelError, Seed, Text, seeded
from tokenwright.llm.input_processor import Prompt
from tokenwright.llm.llm import LLM
from tokenwright.llm.run_trace import token_cards
from tokenwright.sampling_params import SamplingParams
from tokenwright.trace.schema import StepFrame, TokenCard
from tokenwright.trace.wire import COUNTED, DERIVED, MEASURED, READ

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


@dataclass(frozen=True, slots=True)
class Agreement:
    max_delta: float
    kl: float  # KL(cached || uncached) in nats
    equal: bool


def agreement(cached: Floats, uncached: Floats) -> Agreement:
    """Compare two rows of logits [V], in fp64."""
    log_p, log_q = log_softmax(cached), log_softmax(uncached)
    kl = float((np.exp(log_p) * (log_p - log_q)).sum())
    apart = float(np.abs(cached.astype(np.float64) - uncached).max())
    return Agreement(apart, max(0.0, kl), bool(cached.argmax() == uncached.argmax()))


@dataclass(frozen=True, slots=True)
class LaneStep:
    """Sums over the step's frames, of which a long chunk has several."""

    step_us: int
    flops: int
    tokens: int

    @classmethod
    def of(cls, frames: Sequence[StepFrame]) -> Self:
        return cls(
            sum(frame.step_us for frame in frames),
            sum(frame.flops for frame in frames),
            sum(frame.length for frame in frames),
        )

    def __add__(self, other: "LaneStep") -> "LaneStep":
        return LaneStep(self.step_us + other.step_us, self.flops + other.flops, self.tokens + other.tokens)


@dataclass(slots=True)
class Sums:
    cached: LaneStep = LaneStep(0, 0, 0)  # of the compared steps, as `uncached`
    uncached: LaneStep = LaneStep(0, 0, 0)
    steps: int = 0
    compared: int = 0
    equal: int = 0
    max_delta: float = 0.0
    kl: float = 0.0
    divergent: int | None = None

    def compare(self, step: int, cached: LaneStep, uncached: LaneStep, found: Agreement) -> None:
        self.cached += cached
        self.uncached += uncached
        self.compared += 1
        self.equal += found.equal
        self.max_delta = max(self.max_delta, found.max_delta)
        self.kl += found.kl
        if not found.equal and self.divergent is None:
            self.divergent = step

    def message(self) -> RaceSums:
        some = self.compared > 0
        return RaceSums(
            steps=self.steps,
            compared=self.compared,
            cached_us=self.cached.step_us,
            uncached_us=self.uncached.step_us,
            cached_flops=self.cached.flops,
            uncached_flops=self.uncached.flops,
            cached_tokens=self.cached.tokens,
            uncached_tokens=self.uncached.tokens,
            times=self.uncached.step_us / max(1, self.cached.step_us) if some else None,
            equal=self.equal,
            max_delta=self.max_delta if some else None,
            kl=self.kl / self.compared if some else None,
            divergent=self.divergent,
        )


class Race:
    """Iterate over it for its steps, and `close` it. The uncached lane computes one step in `every`."""

    def __init__(self, llm: LLM, prompt: Prompt, params: SamplingParams, every: int, budget_s: float) -> None:
        """Raises as `LLM.run`, and RequestError without a budget."""
        if not budget_s:
            raise RequestError(f"budget_s must be above 0, not {budget_s!r}")
        self.llm = llm
        self.every = every
        self.budget_s = budget_s
        self.reason: str | None = None  # "budget", "closed", or the text's finish reason
        self.run = llm.run(prompt, params)
        self._closed = threading.Event()
        self._sums = Sums()

    def __iter__(self) -> Iterator[RaceStep]:
        until = time.monotonic() + self.budget_s
        while not self.run.ended:
            if self._closed.is_set():
                self.reason = "closed"
                return
            if time.monotonic() >= until and self._sums.steps:
                self.reason = "budget"
                return
            frames = self.run.step()
            if frames and frames[-1].token is not None:
                yield self._raced(frames)
        self.reason = "closed" if self._closed.is_set() else self.run.reason and self.run.reason.value

    def _raced(self, frames: Sequence[StepFrame]) -> RaceStep:
        last, cached = frames[-1], LaneStep.of(frames)
        context = last.start + last.length
        number, uncached, found = self._sums.steps, None, None
        self._sums.steps += 1
        if number % self.every == 0:
            uncached, logits = self._uncached(last.step, context)
            found = agreement(self.run.logits(last.step), logits)
            self._sums.compare(last.step, cached, uncached, found)
        again = uncached is not None and number > 0
        return RaceStep(
            step=last.step,
            context=context,
            token=token_cards(self.llm.tokenizer, [last.token or 0])[0],
            text=last.text,
            cached_us=cached.step_us,
            cached_flops=cached.flops,
            cached_tokens=cached.tokens,
            uncached_us=None if uncached is None else uncached.step_us,
            uncached_flops=None if uncached is None else uncached.flops,
            uncached_tokens=None if uncached is None else uncached.tokens,
            recomputed=(context - 1) / context if again else None,
            max_delta=None if found is None else found.max_delta,
            kl=None if found is None else found.kl,
            equal=None if found is None else found.equal,
            sums=self._sums.message(),
        )

    def _uncached(self, step: int, context: int) -> tuple[LaneStep, Floats]:
        """The work, and the last row's logits [V]."""
        start = self.run.start
        forced = self.run.tokens[len(start.prompt) : context]
        with self.llm.run(start.prompt, start.params, cache=False, written=forced, first_step=step) as lane:
            frames = lane.step()
            return LaneStep.of(frames), lane.logits(frames[-1].step)

    def close(self) -> None:
        """End the race after the step under way. Any thread may call it."""
        self._closed.set()
        self.run.close()


def race(explorer: Explorer, body: NewRace) -> MessageStream:
    """Raises what `Explorer.begin` raises, and PanelError during another race."""
    if not explorer.locks["race"].acquire(blocking=False):
        why = "a race is under way on this server, and a second one would slow both; try again in a while"
        raise PanelError("busy", why)
    with ExitStack() as stack:
        stack.callback(explorer.locks["race"].release)
        params = seeded(explorer.llm, body)
        race = Race(explorer.llm, body.prompt, params, body.every, body.budget_s)
        stack.callback(race.close)
        stack.enter_context(explorer.runs.guests([race.run, race.run]))  # the uncached lane needs as much again
        return MessageStream(_messages(race, body), stack.pop_all().close)


def _messages(race: Race, body: NewRace) -> Iterator[RaceCard | RaceStep | RaceEnd]:
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
