"""A run's steps both ways, for a page that plays without an engine: with the KV cache at each step, and at none.

The way that the run did not go is computed from the same ids, parameters and seed, so its text is the same. Where
rounding lets the engine choose another token, that half ends before it.
"""

import time
from collections.abc import Callable, Generator

from tokenwright.llm.run import Run
from tokenwright.llm.run_start import start_run
from tokenwright.trace.schema import StepFrame
from tokenwright.trace.summary import RunHalf

MOST_S = 60.0


def run_halves(
    run: Run, budget_s: float = MOST_S, clock: Callable[[], float] = time.monotonic
) -> Generator[list[RunHalf] | None, None, None]:
    """The halves that the run itself is not, a step at a time; the last item is the answer. Raises as `LLM.run`."""
    frames, until = list(run.frames), clock() + budget_s
    halves: list[RunHalf] = []
    for cache in (True, False):
        if all(frame.cache is cache for frame in frames):
            continue
        half = RunHalf(cache)
        for fresh in _steps(run, frames, cache):
            half.frames.extend(fresh)
            yield None
            if clock() >= until:
                break
        halves.append(half)
    yield halves


def _steps(run: Run, frames: list[StepFrame], cache: bool) -> Generator[list[StepFrame], None, None]:
    """The steps go on as long as the engine chooses the run's tokens."""
    chosen = [frame for frame in frames if frame.token is not None]
    if not chosen:
        return
    start = run.start
    given = run.tokens[len(start.prompt) : chosen[0].start + chosen[0].length]
    with start_run(
        run.engine,
        start.prompt,
        start.params,
        cache=cache,
        written=given,
        watched=run.watched,
        first_step=run.first_step,
        earlier=start.earlier,
    ) as lane:
        for own in chosen:
            fresh = lane.step()
            if not fresh or fresh[-1].token != own.token:
                return
            yield fresh
