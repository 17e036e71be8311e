"""How long a finished run takes with the KV cache, and without it."""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Annotated

from tokenwright.errors import RequestError
from tokenwright.explorer.explorer import Explorer
from tokenwright.trace.wire import DERIVED

POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class RunTimes:
    """GET /runs/ID/times. Both are measured alike and unobserved. Null: measuring would take too long."""

    cached_us: Annotated[
        int, DERIVED("us", "with the cache", "a measured pass over the prompt + (T - 1) x a measured decode step")
    ]
    naive_us: Annotated[
        int | None, DERIVED("us", "without", "T / 6 x (the shortest + 4 x the middle + the longest measured pass)")
    ]
    slower: Annotated[float | None, DERIVED("times", "slower", "time without the cache, divided by the time with it")]
    measured: int  # steps computed for this


MESSAGES = (RunTimes,)


def times(explorer: Explorer, identity: str) -> Generator[RunTimes | None, None, None]:
    from tokenwright.explorer.views.run_times import run_times

    run = explorer.run(identity)
    if not run.ended or run.summary is None or run.summary.written < 2:
        raise RequestError("the times of a run are measured after its end, and for at least two tokens")
    while not explorer.locks["times"].acquire(timeout=POLL_S):  # two measurements would slow each other
        yield None  # the client may have gone
    try:
        with explorer.runs.guests([run]):
            yield from run_times(explorer.llm, run)
    finally:
        explorer.locks["times"].release()
