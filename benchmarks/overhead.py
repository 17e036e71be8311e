"""The cost of a step without the model: the engine's own time, by streams and context.

    python -m benchmarks.overhead [--streams 1 2 4 ..] [--contexts 64 8192] [--rounds 9] [--vocabulary 4096]
                                  [--model MODEL] [--out build/benchmarks]

Every stream has computed its prompt and decodes one token per step, greedily. A round is 64 steps (each stream fills
and hashes four pages); the output gives medians of the rounds, in microseconds per step:

    prepared   the runner returns precomputed logits, with the argmax and logsumexp that native kernels return: the
               remaining cost is the engine, the sampler and the engine loop
    real       the same with a loaded model (--model) and its batch. `model` is then the call of the native kernels;
               with the reference kernels, all work of the runner but the batch

`whole` is the wall-clock time of a round. The parts come from separate rounds in which a stopwatch times each part: a
part excludes the parts that it calls, and the stopwatch's own cost is subtracted. All of it runs in the engine thread:
`rest` is the engine loop with the delivery of events, `text` the stop checkers, which decode tokens to text (prepared
runs decode none). A least-squares fit gives the line of growth.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.quality import COLOURS, canvas, save, table
from tokenwright import LLM, SamplingParams
from tokenwright.arrays import Floats
from tokenwright.backends.device import compute_with
from tokenwright.backends.native.program import NativeBackend
from tokenwright.backends.runner import ModelRunner
from tokenwright.decode import RowSampler, TextStopChecker
from tokenwright.decode.sampler import log_totals
from tokenwright.engine import Engine, Group, LogitsNeeded, Output, PagePool, Request, Scheduler, Step
from tokenwright.engine.loop import EngineLoop, Inbox

PAGE = 16  # tokens
STEPS = 64  # in a round
WARM = 32  # steps before the first round
PARTS = ("schedule", "batch", "model", "sampler", "commit", "expire", "text", "rest")
Turn = Callable[[], None]  # one step: one more token for every stream


class Silent:
    """A text sink that decodes nothing."""

    stopped = None

    def push(self, token: int, armed: bool = True) -> str:  # noqa: ARG002  (a sink gets every token)
        return ""

    def finish(self) -> str:
        return ""

    def fork(self) -> Silent:
        return self


class Prepared:
    """A runner that returns precomputed logits [S, V]."""

    def __init__(self, streams: int, vocabulary: int) -> None:
        self.logits = np.random.default_rng(0).standard_normal((streams, vocabulary), np.float32)
        self.best = tuple(self.logits.argmax(1).tolist())
        self.log_totals = tuple(log_totals(self.logits))

    def forward(self, step: Step) -> Output[Floats]:
        logits_needed = [chunk.logits_needed is not LogitsNeeded.NONE for chunk in step.chunks]
        rows, row = [], 0
        for one in logits_needed:
            rows.append(range(row, row + one))
            row += one
        return Output(tuple(rows), self.logits[:row], self.best[:row], self.log_totals[:row])


class Stopwatch:
    """Nanoseconds of each part, without the parts that it calls."""

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._inner = [0]  # stack of the active parts: nanoseconds spent in the parts that they called

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        clock, inner, spent, calls = time.perf_counter_ns, self._inner, self.spent, self.calls

        @wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            inner.append(0)
            began = clock()
            try:
                return function(*arguments, **options)
            finally:
                took = clock() - began
                spent[part] += took - inner.pop()
                calls[part] += 1
                inner[-1] += took

        return call

    @staticmethod
    def price() -> float:
        """Nanoseconds that timing adds to a call."""
        watch, turns = Stopwatch(), 20_000
        timed = watch.timed("nothing", int)
        seconds = [min(_loop(one, turns) for _ in range(5)) for one in (int, timed)]
        return (seconds[1] - seconds[0]) / turns * 1e9


def _loop(function: Callable[[], object], turns: int) -> float:
    began = time.perf_counter()
    for _ in range(turns):
        function()
    return time.perf_counter() - began


def model_of(runner: Any) -> list[tuple[Any, str, str]]:
    """The methods in which a runner calls its model and builds the batch, with the names of their parts."""
    if not isinstance(runner, ModelRunner):
        return [(runner, "forward", "model")]
    if not isinstance(runner.backend, NativeBackend):
        return [(runner, "forward", "model"), (runner.backend, "batcher", "batch")]
    return [(runner, "forward", "batch"), (runner.backend.program.model.kernels.library, "tw_forward", "model")]


@contextmanager
def watched(engine: Engine[Any]) -> Iterator[Stopwatch]:
    """Attach a stopwatch to every part of an engine, and remove it at the end."""
    watch, runner, scheduler = Stopwatch(), engine.runner, engine.scheduler
    places: list[tuple[Any, str, str]] = [
        (scheduler, "schedule", "schedule"),
        *model_of(runner),
        (engine.sampler, "pick", "sampler"),
        (scheduler, "commit", "commit"),
        (scheduler, "expire", "expire"),
        (TextStopChecker, "advance", "text"),
        (TextStopChecker, "take_text", "text"),
    ]
    before = [vars(owner).get(name) for owner, name, _ in places]
    for owner, name, part in places:
        setattr(owner, name, watch.timed(part, getattr(owner, name)))
    try:
        yield watch
    finally:
        for (owner, name, _), old in zip(places, before, strict=True):
            if old is None:
                delattr(owner, name)
            else:
                setattr(owner, name, old)


@dataclass(frozen=True)
class Point:
    """Medians of the rounds, in microseconds per step. `outside`: the whole without the model and the text."""

    way: str
    streams: int
    context: int
    whole: float
    outside: float
    parts: dict[str, float]


def rounds_of(engine: Engine[Any], turn: Turn, rounds: int) -> tuple[list[float], list[dict[str, float]]]:
    """Microseconds per step of each round: wall-clock time, and the times of the parts."""
    for _ in range(WARM):
        turn()
    wholes = [_loop(turn, STEPS) / STEPS * 1e6 for _ in range(rounds)]
    price, parts = Stopwatch.price(), []
    for _ in range(rounds):
        with watched(engine) as watch:
            whole = _loop(turn, STEPS) * 1e9
        own = {part: watch.spent[part] - watch.calls[part] * price / 2 for part in PARTS[:-1]}
        rest = whole - sum(watch.spent.values()) - sum(watch.calls.values()) * price / 2
        parts.append({part: ns / STEPS / 1e3 for part, ns in {**own, "rest": rest}.items()})
    return wholes, parts


def point(way: str, streams: int, context: int, engine: Engine[Any], turn: Turn, rounds: int) -> Point:
    wholes, rows = rounds_of(engine, turn, rounds)
    parts = {part: max(0.0, median(row[part] for row in rows)) for part in PARTS}
    whole = median(wholes)
    elsewhere = median((row["model"] + row["text"]) for row in rows)
    return Point(way, streams, context, whole, whole - elsewhere, parts)


def written(rounds: int) -> int:
    """The tokens that each stream generates in a measurement, with a margin: no stream may end."""
    return WARM + 2 * rounds * STEPS + 8


def prepared(streams: int, context: int, vocabulary: int, rounds: int) -> Point:
    most = written(rounds)
    pages = streams * (-(-(context + most) // PAGE) + 1)
    pool = PagePool([Group(pages)], PAGE)
    scheduler = Scheduler(pool, token_budget=max(512, context), max_sequences=streams)
    engine = Engine(Prepared(streams, vocabulary), RowSampler(), scheduler, context + most)
    params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)
    prompts = [tuple((5 + stream + place) % vocabulary for place in range(context)) for stream in range(streams)]
    requests = [Request(prompt, params, TextStopChecker(Silent(), ())) for prompt in prompts]
    loop = EngineLoop(engine)
    try:
        return started("prepared", loop, requests, context, rounds)
    finally:
        loop.close()


def started(way: str, loop: EngineLoop, requests: Sequence[Request], context: int, rounds: int) -> Point:
    """Measure requests in the engine thread, once all have computed their prompts."""
    inbox = Inbox(at_end=len(requests))
    handles = loop.submit(requests, inbox)

    def measure(engine: Engine[Any]) -> Point:
        while any(not handle.sequence.written for handle in handles):
            loop._step()
        return point(way, len(requests), context, engine, loop._step, rounds)

    try:
        return loop.call(measure)
    finally:
        for handle in handles:
            handle.cancel()
        inbox.get()


def real(llm: LLM, streams: int, context: int, rounds: int) -> Point:
    params = SamplingParams(temperature=0.0, max_tokens=written(rounds), ignore_eos=True)
    size = llm.config.vocab_size
    prompts = [[5 + (stream + place) % (size - 5) for place in range(context)] for stream in range(streams)]
    requests = [llm.prepare(prompt, params, salt=str(number)) for number, prompt in enumerate(prompts)]
    return started("real", llm.llm_engine.loop, requests, context, rounds)


def growth(points: Sequence[Point]) -> tuple[float, float]:
    """Microseconds of a step with no stream, and of each further stream, by least squares."""
    each, once = np.polyfit([one.streams for one in points], [one.outside for one in points], 1)
    return float(once), float(each)


def lines(points: Sequence[Point]) -> Iterator[tuple[str, int, list[Point]]]:
    """The points of one way and context, in the order of their streams."""
    for way, context in dict.fromkeys((one.way, one.context) for one in points):
        yield way, context, [one for one in points if (one.way, one.context) == (way, context)]


def report(points: Sequence[Point]) -> str:
    head = ["", "context", "streams", "whole", "**outside**", *PARTS]
    rows = [
        [one.way, f"{one.context:,}", str(one.streams), f"{one.whole:,.1f}", f"**{one.outside:,.1f}**"]
        + [f"{one.parts[part]:,.1f}" for part in PARTS]
        for one in points
    ]
    text = "Microseconds a step; outside: the whole without the model and the text.\n\n" + table(head, rows)
    for way, context, its in lines(points):
        if len(its) > 1:
            once, each = growth(its)
            text += f"\n{way}, context {context:,}: {once:.1f} + {each:.2f} a stream"
    return text


def picture(points: Sequence[Point], path: Path) -> None:
    figure, axes = canvas(figsize=(6.5, 3.6))
    for colour, (way, context, its) in zip(COLOURS, lines(points), strict=False):
        streams = [one.streams for one in its]
        axes.plot(streams, [one.outside for one in its], "o-", color=colour, label=f"{way}, context {context:,}")
    axes.set(xlabel="streams", ylabel="µs a step outside the model and the text", ylim=(0, None))
    axes.legend()
    save(figure, path)


def measure(arguments: argparse.Namespace) -> list[Point]:
    rounds = arguments.rounds
    points = [
        prepared(streams, context, arguments.vocabulary, rounds)
        for context in arguments.contexts
        for streams in arguments.streams
    ]
    if arguments.model is None:
        return points
    pages = max(arguments.streams) * (-(-(max(arguments.contexts) + written(rounds)) // PAGE) + 1)
    with LLM(arguments.model, page_size=PAGE, pages=pages, speculate="off") as llm:
        fits = [context for context in arguments.contexts if context + written(rounds) <= llm.context]
        points += [real(llm, streams, context, rounds) for context in fits for streams in arguments.streams]
    return points


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 8192])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--model", help="a folder or a name: measure with a real model, too")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    arguments = parser.parse_args()
    compute_with(1)
    before = os.getloadavg()[0]
    points = measure(arguments)
    print(f"{platform.machine()}, load {before:.1f} before and {os.getloadavg()[0]:.1f} after\n\n{report(points)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    record = {"vocabulary": arguments.vocabulary, "points": [asdict(one) for one in points]}
    (arguments.out / "overhead.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    picture(points, arguments.out / "overhead.svg")


if __name__ == "__main__":
    main()
