"""The time of a finished run the other way: without the KV cache if it ran with it, with it if it ran without.

A run measures its own steps. Of the other way a few steps are computed, on the run's own tokens, and the sum over all
steps is derived from them: a pass over t tokens takes about a + b t + c t², whose mean Simpson's rule takes from three.
"""

from __future__ import annotations

from collections.abc import Generator

from tokenwright.bench.race import Lane
from tokenwright.llm import LLM
from tokenwright.run import Run
from tokenwright.trace.schema import Summary
from tokenwright.trace.times import RunTimes

DECODES = 3  # steps with the cache that are measured
LONGEST_US = 2_000_000  # of the middle pass, for the shortest and the longest to be measured too
MOST_US = 60_000_000  # of one pass, if each token took as long as a step: longer ones are not tried


class _Passes:
    """Steps computed for the measurement, each on the tokens that the run had then."""

    def __init__(self, llm: LLM, run: Run) -> None:
        self.llm, self.run = llm, run
        self.first = len(run.start.prompt)
        self.count = 0

    def _lane(self, context: int, cache: bool) -> Run:
        start = self.run.start
        return self.llm.run(start.prompt, start.params, cache=cache, written=self.run.tokens[self.first : context])

    def whole(self, context: int) -> int:
        """µs of one pass over the first `context` tokens."""
        with self._lane(context, cache=False) as lane:
            return self._step(lane)

    def decode(self, context: int) -> int:
        """µs of a step with the cache, behind about `context` tokens: the mean of some."""
        with self._lane(context, cache=True) as lane:
            self._step(lane)  # fills the cache
            times: list[int] = []
            while len(times) < DECODES and not lane.ended:
                times.append(self._step(lane))
        return sum(times) // len(times)

    def _step(self, lane: Run) -> int:
        self.count += 1
        return Lane.of(lane.step()).step_us


def run_times(llm: LLM, run: Run) -> Generator[RunTimes | None, None, None]:
    """Measure and derive, one pass at a time; the last item is the answer. `run` has ended and wrote several tokens."""
    summary = run.summary
    assert summary is not None and summary.written > 1, "there is another way for several tokens only"
    contexts = [frame.start + frame.length for frame in run.frames if frame.token is not None]
    first, middle, last = contexts[0], contexts[(len(contexts) - 1) // 2], contexts[-1]
    passes, cached, naive = _Passes(llm, run), None, None
    if summary.layer_tokens != summary.cached:
        begin = passes.whole(first)
        yield None
        cached = begin + (summary.written - 1) * passes.decode(middle)
        yield None
    if summary.layer_tokens != summary.naive and middle * _slowest_token(summary) <= MOST_US:
        whole = passes.whole(middle)
        if whole <= LONGEST_US:
            yield None
            whole = (passes.whole(first) + 4 * whole + passes.whole(last)) // 6
        naive = summary.written * whole
    with_it = cached if cached is not None else summary.engine_us
    without = naive if naive is not None else summary.engine_us if summary.layer_tokens == summary.naive else None
    slower = without / with_it if without is not None and with_it else None
    yield RunTimes(cached, naive, slower, passes.count)


def _slowest_token(summary: Summary) -> int:
    """µs that a token of a long pass takes at most: those of a step with the cache."""
    return int(1e6 / summary.tokens_per_s) if summary.tokens_per_s else summary.ttft_us
