"""The seconds of a run with the cache and without. The page's types are generated from this module (typescript.py)."""

from dataclasses import dataclass
from typing import Annotated

from tokenwright.trace.wire import DERIVED, Wire


@dataclass(frozen=True, slots=True)
class RunTimes:
    """GET /runs/ID/times: a run's text with the cache and without, derived from a few steps that are measured for it.

    Both ways are measured alike, one after the other and unobserved. Null: measuring would take too long.
    """

    cached_us: Annotated[
        int,
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
