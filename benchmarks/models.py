"""Models of published shapes beside their limits, for each format of weights.

    python -m benchmarks.models [--shapes tiny gpt2 ..] [--weights bf16 int8 int4] [--rounds 3] [--root FOLDER]
                                [--out build/benchmarks]

The measures are those of `peers.py` (docs/performance.md), for Tokenwright alone, and those of `tokenwright bench`, in
a fresh process for each model, format and round:

    a figure      the median of the rounds
    its share     of the limit, which is measured in turn with it: the bytes that a step reads over the speed of
                  reading them, or its multiplications over the machine's rate, whichever takes longer
    peak          peak resident memory, without the buffer of the speed measurement; a page of K and V counts once it
                  was used, since pages of finished texts stay cached while there is space
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median

from benchmarks.adapters.protocol import peak_rss
from benchmarks.quality import COLOURS, canvas, save, table
from tokenwright import LLM
from tokenwright.bench import shapes
from tokenwright.bench.limits import processor
from tokenwright.bench.measures import MEASURES
from tokenwright.bench.model_speed import Benchmark, Figure

WEIGHTS: Mapping[str, str] = {"bf16": "native", "int8": "int8", "int4": "int4"}


@dataclass(frozen=True)
class Run:
    """The measurements of one process."""

    shape: str
    weights: str
    kernels: str
    weight_bytes: int
    peak_bytes: int
    figures: dict[str, Figure]


def measured(shape: str, weights: str, root: Path) -> Run:
    with LLM(shapes.ready(shape, root), weights=WEIGHTS[weights], device="cpu") as llm:
        benchmark = Benchmark(llm)
        figures = {one.name: one for one in benchmark.figures()}
        return Run(shape, weights, llm.kernels, llm.weight_bytes, peak_rss() - benchmark.buffer_bytes, figures)


def alone(shape: str, weights: str, root: Path) -> Run:
    """Run `measured` in a fresh process, so that its memory is the model's alone."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(measured, shape, weights, root).result()


def row(runs: Sequence[Run]) -> tuple[str, ...]:
    """A table row: medians of the rounds of one model in one format."""
    cells = []
    for name in MEASURES:
        its = [run.figures[name] for run in runs]
        cells.append(f"{median(one.value for one in its):,.1f} ({median(one.share for one in its):.0%})")
    peak = max(run.peak_bytes for run in runs)
    return runs[0].shape, runs[0].weights, *cells, f"{runs[0].weight_bytes / 1e6:,.0f}", f"{peak / 1e6:,.0f}"


def grouped(runs: Sequence[Run]) -> list[list[Run]]:
    """The runs grouped by model and format."""
    found: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        found.setdefault((run.shape, run.weights), []).append(run)
    return list(found.values())


def report(runs: Sequence[Run]) -> str:
    named = {"8": "8 streams", "16": "16 streams", "first": "first token"}
    units = (f"{named.get(name, name)}, {measure.unit}" for name, measure in MEASURES.items())
    head = ("model", "weights", *units, "weights, MB", "peak, MB")
    return "In brackets the share of the limit.\n\n" + table(head, map(row, grouped(runs)))


def picture(runs: Sequence[Run], title: str, path: Path) -> None:
    """Draw the shares of decode and prefill."""
    names, groups = ("decode", "prefill"), grouped(runs)
    figure, places = canvas(figsize=(9.5, 1.2 + 0.3 * len(groups)), ncols=len(names))
    labels = [f"{its[0].shape} {its[0].weights}" for its in groups]
    for axes, name, colour in zip(places, names, COLOURS, strict=False):
        axes.barh(labels, [median(run.figures[name].share for run in its) for its in groups], color=colour)
        axes.invert_yaxis()
        axes.set(title=name, xlabel="share of the limit", xlim=(0, 1))
    figure.suptitle(title)
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(shapes.SHAPES), default=list(shapes.SHAPES))
    parser.add_argument("--weights", nargs="+", choices=list(WEIGHTS), default=list(WEIGHTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--root", type=Path, default=shapes.default_root())
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("a round or more")
    before = os.getloadavg()[0]
    runs = []
    for turn in range(arguments.rounds):
        for shape in arguments.shapes:
            for weights in arguments.weights:
                runs.append(alone(shape, weights, arguments.root))
                print(f"round {turn + 1}: {' '.join(row(runs[-1:]))}", file=sys.stderr, flush=True)
    title = f"{processor()}, {runs[0].kernels} kernels, {arguments.rounds} rounds"
    print(f"{title}, load {before:.2f} before\n\n{report(runs)}", end="")
    arguments.out.mkdir(parents=True, exist_ok=True)
    record = {"about": title, "load": before, "runs": [asdict(run) for run in runs]}
    (arguments.out / "models.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    picture(runs, title, arguments.out / "models.svg")


if __name__ == "__main__":
    main()
