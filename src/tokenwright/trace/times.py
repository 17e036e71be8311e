"""The seconds of a run with the cache and without. The page's types are generated from this module (typescript.py)."""

from dataclasses import dataclass
from typing import Annotated

from tokenwright.trace.wire import DERIVED, Wire


@dataclass(frozen=True, slots=True)
class RunTimes:
    """GET /runs/ID/times: what the run did not do itself, derived from a few steps that are measured for it.

    Null is what the run measured itself (its summary has it), and what would take too long to measure.
    """

    cached_us: Annotated[
        int | None,
        Wire(
            "Q", DERIVED, "us", "with the cache", "a measured pass over the prompt + (T - 1) x a measured decode step"
        ),
    ]
    naive_us: Annotated[
        int | None,
        Wire(
            "Q", DERIVED, "us", "without",
            "T / 6 x (the shortest + 4 x the middle + the longest pass), each measured: Simpson's rule",
        ),
    ]  # fmt: skip
    slower: Annotated[
        float | None, Wire("d", DERIVED, "times", "slower", "time without the cache, divided by the time with it")
    ]
    measured: int  # steps that were computed for this


MESSAGES = (RunTimes,)
