"""Two editions in turn on one machine: the speed of the new one over the old one's, with its 95 % interval.

    python -m benchmarks.kernels.pairs OLD_PYTHON NEW_PYTHON [--pairs 30] [--cases stories-1 'qwen05*']
                                      [--threads 2] [--busy] [--kv native] [--root FOLDER] [--out FILE]

OLD_PYTHON and NEW_PYTHON are the interpreters of two installations of Tokenwright. Each runs this file as a worker that
loads a model once and receives one measurement after another (JSON lines over pipes); while one measures, the other
waits for its next line. Nothing is drafted. In each pair both measure the same random prompts once, in alternating
order. The workers use only the public API. This interpreter's Tokenwright writes missing models with random weights.

    *-1, *-8, *-16      tokens/s of that many streams of 128 tokens (`qwen05`: 32) after 32, once all run
    qwen05-prefill      prefill of 512 tokens, from the time to first token: tokens/s
    qwen05-long         tokens/s of one stream after 2,048
    step-generate       steps/s of a model so small that a step is nearly all overhead, through generate;
    step-stream         through stream, by the client's clock
    256-generate        tokens/s of 256 texts of 24 tokens in one call, from the call to its end;
    256-astream         as 256 tasks of one event loop

A ratio compares the two measurements of one pair; the output gives the median, and the interval between the order
statistics that contain the true median with 95 % (with fewer than six pairs: the lowest and the highest, a lower
confidence). It also gives the overhead in microseconds, and astream's speed over generate's in each edition's pairs.

--busy: `stories-1` and `qwen05-1` with one thread and with two, while another process runs an endless loop; each
edition measures both in every turn. The output gives the speed of two threads over the better of one and two.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import inspect
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import comb
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Literal

from benchmarks.kernels import random_model
from tokenwright import LLM, SamplingParams

Way = Literal["generate", "stream", "whole", "astream"]
LEAST = random_model.CONFIG | {
    "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 1,
    "num_key_value_heads": 1, "max_position_embeddings": 4096,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A number of streams of a model, each with a prompt of random ids and a number of new tokens.

    way: `generate` and `stream` (by the client's clock) time from the first token to the last; `whole` (generate) and
    `astream` (tasks of one event loop) time from the call to its end.
    """

    model: str
    streams: int
    prompt: int
    tokens: int
    way: Way = "generate"


CASES: Mapping[str, Case] = {
    "tiny-1": Case("tiny", 1, 32, 128),
    "tiny-8": Case("tiny", 8, 32, 128),
    "tiny-16": Case("tiny", 16, 32, 128),
    "stories-1": Case("stories", 1, 32, 128),
    "stories-8": Case("stories", 8, 32, 128),
    "stories-16": Case("stories", 16, 32, 128),
    "256-generate": Case("stories", 256, 16, 24, "whole"),
    "256-astream": Case("stories", 256, 16, 24, "astream"),
    "step-generate": Case("least", 1, 16, 2000),
    "step-stream": Case("least", 1, 16, 2000, "stream"),
    "qwen05-1": Case("qwen05", 1, 32, 32),
    "qwen05-8": Case("qwen05", 8, 32, 32),
    "qwen05-16": Case("qwen05", 16, 32, 32),
    "qwen05-prefill": Case("qwen05", 1, 512, 1),
    "qwen05-long": Case("qwen05", 1, 2048, 32),
}
BUSY = ("stories-1", "qwen05-1")
OPTIONS: Mapping[str, dict[str, Any]] = {"qwen05": {"weights": "int8", "pages": 160}}
DEFAULTS: dict[str, Any] = {"pages": 1024, "max_sequences": 256}


def figure(llm: LLM, case: Case, turn: int) -> float:
    """Tokens per second of one measurement."""
    draws = random.Random(turn)
    prompts = [[draws.randrange(5, 260) for _ in range(case.prompt)] for _ in range(case.streams)]
    params = SamplingParams(temperature=0.0, max_tokens=case.tokens, ignore_eos=True)
    salt = f"{case} {turn} {time.perf_counter_ns()}"  # no cached page of an earlier text matches
    began = time.perf_counter()
    if case.way == "stream":
        times = [time.perf_counter() for _ in llm.stream(prompts[0], params, salt=salt)]
        return (len(times) - 1) / (times[-1] - times[0])
    if case.way == "astream":
        written = asyncio.run(_astream(llm, prompts, params, salt))
        assert written == case.streams * case.tokens, "no text ends early"
        return written / (time.perf_counter() - began)
    done = llm.generate(prompts, params, salt=salt)
    if case.way == "whole":
        return case.streams * case.tokens / (time.perf_counter() - began)
    started = max(one.usage.token_s[0] for one in done)
    if case.tokens == 1:
        return case.streams * case.prompt / started
    later = [at for one in done for at in one.usage.token_s if at > started]
    return len(later) / (max(later) - started)


async def _astream(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams, salt: str) -> int:
    async def read(prompt: list[int]) -> int:
        return len([piece async for piece in llm.astream(prompt, params, salt=salt)])

    return sum(await asyncio.gather(*(read(prompt) for prompt in prompts)))


def work() -> None:
    """The worker's main function: answer requests, one JSON line each."""
    llm: LLM | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["do"] == "load":
            if llm is not None:
                llm.close()
            options = {**DEFAULTS, **OPTIONS.get(asked["model"], {}), "kv": asked["kv"]}
            if "speculate" in inspect.signature(LLM).parameters:  # random models repeat themselves and are guessed
                options["speculate"] = "off"
            gc.unfreeze()
            llm = LLM(asked["path"], device="cpu", **options)
            gc.collect()
            gc.freeze()  # docs/python.md, asyncio: a full collection takes as long as several steps of 256 texts
            answer: object = llm.kernels
        else:
            assert llm is not None, "a model was loaded"
            answer = figure(llm, CASES[asked["case"]], asked["turn"])
        print(json.dumps(answer), flush=True)


class Worker:
    """An edition in a process of its own, with a number of threads."""

    def __init__(self, name: str, python: str, threads: int, cache: Path) -> None:
        self.name = name
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENWRIGHT_CACHE": str(cache)}
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.kernels.pairs", "work"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def ask(self, do: str, **what: object) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None, "pipes were asked for"
        self._process.stdin.write(json.dumps({"do": do, **what}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with code {self._process.wait()} on {do} {what}")
        return json.loads(line)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None:
            self._process.kill()
        self._process.communicate()  # closing its stdin ends it


# An endless loop that ends with the process that started it.
NEIGHBOUR = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""


@contextmanager
def busy(process: bool) -> Iterator[None]:
    """Run an endless loop in another process meanwhile, if `process`."""
    if not process:
        yield
        return
    with subprocess.Popen([sys.executable, "-c", NEIGHBOUR]) as neighbour:
        try:
            yield
        finally:
            neighbour.kill()


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and the order statistics that contain the true median with 95 %, if there are enough values."""
    ordered, n = sorted(values), len(values)
    cut, outside = 0, 0.0  # probability that the true median lies beyond the `cut` lowest or the `cut` highest
    while cut < n // 2 and outside + 2 * comb(n, cut) / 2**n <= 0.05:
        outside += 2 * comb(n, cut) / 2**n
        cut += 1
    low = max(0, cut - 1)
    return median(ordered), ordered[low], ordered[n - 1 - low]


def told(values: Sequence[float]) -> str:
    middle, low, high = interval(values)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


Figures = dict[str, dict[str, list[float]]]  # by case and worker, one value per pair


def measure(
    workers: Sequence[Worker], cases: Sequence[str], pairs: int, models: Mapping[str, str], kv: str = "native"
) -> Figures:
    """Measure all figures. The cases of a model run together; every pair has one measurement of each case."""
    figures: Figures = {case: {worker.name: [] for worker in workers} for case in cases}
    for model in dict.fromkeys(CASES[case].model for case in cases):
        its = [case for case in cases if CASES[case].model == model]
        for worker in workers:
            worker.ask("load", model=model, path=models[model], kv=kv)
            for case in its:
                worker.ask("measure", case=case, turn=-1)  # warm-up
        for turn in range(pairs):
            for case in its:
                for worker in workers if turn % 2 == 0 else workers[::-1]:
                    figures[case][worker.name].append(worker.ask("measure", case=case, turn=turn))
        print(f"{model}: measured, load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    return figures


def ratios(figures: Mapping[str, Sequence[float]], name: str, to: str) -> list[float]:
    return [one / other for one, other in zip(figures[name], figures[to], strict=True)]


def report(figures: Figures) -> str:
    """A line for each case, with its notes."""
    lines = [f"{'':>16} {'old':>12} {'new':>12}  new / old"]
    for case, its in figures.items():
        middles = " ".join(f"{median(its[name]):>12,.1f}" for name in ("old", "new"))
        lines.append(f"{case:>16} {middles}  {told(ratios(its, 'new', 'old'))}")
    for name in ("old", "new"):
        for case in ("step-generate", "step-stream"):
            if case in figures:
                middle, low, high = interval([1e6 / value for value in figures[case][name]])
                lines.append(f"{name}, {case}: {middle:.1f} us a step ({low:.1f} to {high:.1f})")
        if {"256-generate", "256-astream"} <= figures.keys():
            both = {case: figures[case][name] for case in ("256-generate", "256-astream")}
            lines.append(f"{name}, 256 in astream / in generate: {told(ratios(both, '256-astream', '256-generate'))}")
    return "\n".join(lines)


def busy_report(figures: Figures) -> str:
    lines = ["beside a busy process; two threads / the better of one and two, by turns"]
    for case, its in figures.items():
        for name in ("old", "new"):
            one, two = its[f"{name} 1"], its[f"{name} 2"]
            shares = [b / max(a, b) for a, b in zip(one, two, strict=True)]
            lines.append(f"{case:>12}, {name}: one {median(one):,.1f}, two {median(two):,.1f} tok/s, {told(shares)}")
        gains = {threads: ratios(its, f"new {threads}", f"old {threads}") for threads in (1, 2)}
        lines += [f"{case:>12}, new / old with {threads}: {told(gain)}" for threads, gain in gains.items()]
    return "\n".join(lines)


def prepared(cases: Sequence[str], root: Path, folder: Path) -> dict[str, str]:
    """The path of each model; writes missing models of published shapes under `root`."""
    from tokenwright.bench import shapes

    models = {"stories": "stories", "least": str(folder / "least")}
    random_model.write_model(folder / "least", LEAST)
    for model in {CASES[case].model for case in cases} - models.keys():
        models[model] = str(shapes.ready(model, root))
    return models


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", metavar="OLD_PYTHON")
    parser.add_argument("new", metavar="NEW_PYTHON")
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--cases", nargs="+", default=["*"], help=f"names or patterns of {', '.join(CASES)}")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--kv", default="native", help="format of the KV cache, in both editions")
    parser.add_argument("--root", type=Path, default=Path("build/models"), help="of the models with random weights")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks/pairs.json"))
    arguments = parser.parse_args()
    known = BUSY if arguments.busy else tuple(CASES)
    arguments.cases = [case for case in known if any(fnmatchcase(case, pattern) for pattern in arguments.cases)]
    if not arguments.cases or arguments.pairs < 1:
        parser.error(f"a pair or more, and cases out of {', '.join(known)}")
    return arguments


def main() -> None:
    if sys.argv[1:] == ["work"]:
        work()
        return
    arguments = parse()
    threads = (1, 2) if arguments.busy else (arguments.threads,)
    with TemporaryDirectory() as folder, ExitStack() as stack:
        models = prepared(arguments.cases, arguments.root, Path(folder))
        workers = [
            stack.enter_context(
                Worker(f"{name} {count}" if arguments.busy else name, python, count, arguments.root / f"cache-{name}")
            )
            for count in threads
            for name, python in (("old", arguments.old), ("new", arguments.new))
        ]
        with busy(arguments.busy):
            figures = measure(workers, arguments.cases, arguments.pairs, models, arguments.kv)
    text = busy_report(figures) if arguments.busy else report(figures)
    about = f"{arguments.pairs} pairs, threads {' and '.join(map(str, threads))}, load {os.getloadavg()[0]:.1f}"
    print(f"{about}\n{text}")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    record = {"about": about, "old": arguments.old, "new": arguments.new, "figures": figures}
    arguments.out.write_text(json.dumps(record) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
