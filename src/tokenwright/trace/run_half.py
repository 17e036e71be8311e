"""One way of a run: its steps with the KV cache at each, or at none."""

from dataclasses import dataclass, field

from tokenwright.trace.messages.schema import StepFrame


@dataclass(frozen=True, slots=True)
class RunHalf:
    """A run's steps with the cache at each (`cache`) or at none. frames: fewer than the run's where time ran out."""

    cache: bool
    frames: list[StepFrame] = field(default_factory=list)
