"""A race of two lanes over the same ids: each step with the KV cache, and computed whole without it.

The uncached lane is teacher-forced. The lanes take turns on one engine, so both meet the same machine.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Self

import numpy as np

from tokenwright.arrays import Floats
from tokenwright.checks import check_whole
from tokenwright.decode.logits_processors import log_softmax
from tokenwright.errors import RequestError
from tokenwright.explorer.panels.race import RaceStep, RaceSums
from tokenwright.llm.input_processor import Prompt
from tokenwright.llm.llm import LLM
from tokenwright.llm.run_trace import token_cards
from tokenwright.sampling_params import SamplingParams
from tokenwright.trace.schema import StepFrame

MOST_BUDGET_S = 600.0


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


class Race(AbstractContextManager["Race"]):
    """Iterate over it for its steps; `close` it, or use it in a `with`. Raises as `LLM.run`, and for its options."""

    def __init__(
        self,
        llm: LLM,
        prompt: Prompt,
        params: SamplingParams,
        *,
        every: int = 1,  # the uncached lane computes one step in `every`
        budget_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_whole("every", every, 1)
        if budget_s is not None and not 0 < budget_s <= MOST_BUDGET_S:
            raise RequestError(f"budget_s must be above 0 and at most {MOST_BUDGET_S:g} seconds, not {budget_s!r}")
        self.llm = llm
        self.every = every
        self.budget_s = budget_s
        self.reason: str | None = None  # "budget", "closed", or the text's finish reason
        self.run = llm.run(prompt, params)
        self._clock = clock
        self._closed = threading.Event()
        self._sums = Sums()

    def __iter__(self) -> Iterator[RaceStep]:
        until = None if self.budget_s is None else self._clock() + self.budget_s
        while not self.run.ended:
            if self._closed.is_set():
                self.reason = "closed"
                return
            if until is not None and self._clock() >= until and self._sums.steps:
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

    def __exit__(self, *_: object) -> None:
        self.close()
