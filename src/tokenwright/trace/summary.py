"""A finished run in figures: sums over its steps, and the cost of the same text with and without the cache."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tokenwright.trace.schema import StepFrame, Summary


class StepSums(Protocol):
    """The facts of a StepFrame that a summary adds up; a page keeps these of old steps."""

    @property
    def start(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def layer_tokens(self) -> int: ...
    @property
    def step_us(self) -> int: ...
    @property
    def token(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class RunHalf:
    """A run's steps with the cache or without. It has fewer frames than the run if time ran out."""

    cache: bool
    frames: list[StepFrame] = field(default_factory=list)


def contexts(steps: Sequence[StepSums]) -> list[int]:
    return [step.start + step.length for step in steps if step.token is not None]


def summarise(steps: Sequence[StepSums], layers: int) -> Summary | None:
    """The summary of a run's steps; None if no step wrote a token."""
    lengths = contexts(steps)
    if not lengths:
        return None
    first = next(index for index, step in enumerate(steps) if step.token is not None)
    times = [step.step_us for step in steps]
    decode_us, prefix = sum(times[first + 1 :]), steps[0].start
    cached = layers * (lengths[-1] - prefix)
    naive = layers * sum(lengths)
    computed = sum(step.layer_tokens for step in steps)
    return Summary(
        written=len(lengths),
        layer_tokens=computed,
        cached=cached,
        naive=naive,
        times=naive / cached,
        reused=naive - computed,
        prefix=prefix,
        ttft_us=sum(times[: first + 1]),
        engine_us=sum(times),
        tokens_per_s=(len(lengths) - 1) * 1e6 / decode_us if decode_us else None,
    )
