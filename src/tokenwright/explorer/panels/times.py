"""How long the text of a finished run takes with the KV cache at each step, and with none.

A few steps of each are computed on the run's tokens, unobserved, and the sums derived: a pass over t tokens takes about
a + b t + c t².
"""

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Annotated

from tokenwright.errors import RequestError
from tokenwright.explorer.explorer import Explorer
from tokenwright.explorer.panels.race import LaneStep
from tokenwright.llm.llm import LLM
from tokenwright.llm.run import Run, start_run
from tokenwright.trace.schema import StepFrame, Summary
from tokenwright.trace.summary import RunHalf, contexts
from tokenwright.trace.wire import DERIVED

POLL_S, MOST_S = 0.1, 60.0


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


def run_halves(
    run: Run, budget_s: float = MOST_S, clock: Callable[[], float] = time.monotonic
) -> Generator[list[RunHalf] | None, None, None]:
    """The halves that the run lacks, a step at a time; the last item is the answer. Raises as `LLM.run`."""
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
        pictures=run.pictures,
    ) as lane:
        for own in chosen:
            fresh = lane.step()
            if not fresh or fresh[-1].token != own.token:
                return
            yield fresh


REPEATS = 3  # of a pass, and of three times as many cached steps: the fastest was disturbed least
REPEAT_US = 100_000  # of repetitions, at most
LONGEST_US = 2_000_000  # of the middle pass, so that the shortest and longest are measured too
MOST_US = 60_000_000  # of one pass, if each token took a step's time: longer ones are not tried


class _Passes:
    def __init__(self, llm: LLM, run: Run) -> None:
        self.llm, self.run = llm, run
        self.first = len(run.start.prompt)
        self.count = 0

    def _lane(self, context: int, cache: bool) -> Run:
        start, pictures, written = self.run.start, self.run.pictures, self.run.tokens[self.first : context]
        return self.llm.run(start.prompt, start.params, cache=cache, written=written, pictures=pictures)

    def whole(self, context: int) -> int:
        """µs of one pass over the first `context` tokens."""
        times: list[int] = []
        while not times or (len(times) < REPEATS and sum(times) < REPEAT_US):
            with self._lane(context, cache=False) as lane:
                times.append(self._step(lane))
        return min(times)

    def decode(self, context: int) -> int:
        """µs of a step with the cache."""
        with self._lane(context, cache=True) as lane:
            self._step(lane)  # fills the cache
            times = [self._step(lane)]
            while len(times) < 3 * REPEATS and sum(times) < REPEAT_US and not lane.ended:
                times.append(self._step(lane))
        return min(times)

    def _step(self, lane: Run) -> int:
        self.count += 1
        return LaneStep.of(lane.step()).step_us


def run_times(llm: LLM, run: Run) -> Generator[RunTimes | None, None, None]:
    """Measure and derive, one pass at a time; the last item is the answer. `run` has ended."""
    summary = run.summary
    assert summary is not None and summary.written > 1, "one token is written in the same time either way"
    lengths = contexts(run.steps)
    first, middle, last = lengths[0], lengths[(len(lengths) - 1) // 2], lengths[-1]
    passes = _Passes(llm, run)
    shortest = passes.whole(first)
    yield None
    cached = shortest + (summary.written - 1) * passes.decode(middle)
    yield None
    naive = None
    if _middle_us(summary, middle) <= MOST_US:
        whole = passes.whole(middle)
        if whole <= LONGEST_US:
            yield None
            whole = (shortest + 4 * whole + passes.whole(last)) // 6
        naive = summary.written * whole
    slower = naive / cached if naive is not None and cached else None
    yield RunTimes(cached, naive, slower, passes.count)


def _middle_us(summary: Summary, context: int) -> int:
    """µs of a pass over `context` tokens at most, if each token takes as long as a cached step."""
    if summary.layer_tokens == summary.naive:
        return summary.engine_us // summary.written  # the run made such passes
    return context * (int(1e6 / summary.tokens_per_s) if summary.tokens_per_s else summary.ttft_us)
