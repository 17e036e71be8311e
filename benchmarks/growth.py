"""How the totals of a race grow with the number of generated tokens: measured, counted, and by formula.

    python benchmarks/growth.py [MODEL] [--tokens 25 35 50 ...] [--rounds 5] [--prompt TEXT] [--out build/benchmarks]

Each round generates T tokens with and without the cache for every T, in an order that rotates from round to round; no
lane reuses K and V of another. A least-squares fit of the medians uses the formulas' terms:

    cached    a + b (N + T - 1) + c (sum of contexts)     the contexts of the rows: 1, 2, .. N + T - 1
    naive     a + b (sum of t) + c (sum of t^2)           t = N .. N + T - 1, the tokens of each step
    by steps  the naive one + d T                         the formulas count tokens; a step has a fixed cost too

Coefficients are not negative: a negative one becomes 0. Residuals are relative (each is divided by its total), so an
error of 3 % weighs the same at every T; R^2 is of the seconds. The output also gives the slopes of the totals over T on
logarithmic axes, and those of the tokens sent through the layers, which must equal the formula's exactly. Run nothing
else meanwhile: the output has the load average before and after.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from statistics import median

import numpy
import torch

from tokenwright import LLM, SamplingParams
from tokenwright.cli.race_report import COLOURS, forward_tokens

CACHED, NAIVE, STEPS = "cached", "naive", "naive by steps"
PROMPT = "Once upon a time there was a little girl named Lily who liked to play outside"


def terms(name: str, prompt: int, tokens: int) -> dict[str, float]:
    """The terms of the fit `name` for N and T."""
    rows, steps = prompt + tokens - 1, range(prompt, prompt + tokens)
    if name == CACHED:
        return {"once": 1, "N + T - 1": rows, "sum of contexts": rows * (rows + 1) / 2}
    naive: dict[str, float] = {"once": 1, "sum of t": sum(steps), "sum of t^2": sum(t * t for t in steps)}
    return naive if name == NAIVE else {**naive, "T": tokens}


@dataclass(frozen=True)
class Point:
    """One lane at one T. `seconds`: the total time of each round."""

    lane: str
    tokens: int
    seconds: list[float]
    forward_tokens: int  # counted
    formula: int
    flops: int  # derived from shapes


@dataclass(frozen=True)
class Fit:
    """Seconds per unit of each term; `shares` of the terms in the fitted total at the smallest and the largest T."""

    name: str
    lane: str
    prompt: int
    coefficients: dict[str, float]
    shares: dict[str, tuple[float, float]]
    r2: float
    worst: float  # the largest difference from a median, as a share of it

    def __call__(self, tokens: int) -> float:
        found = terms(self.name, self.prompt, tokens)
        return sum(self.coefficients[name] * value for name, value in found.items())


def measure(llm: LLM, ids: list[int], tokens: Sequence[int], rounds: int) -> list[Point]:
    """Measure every T in both lanes, `rounds` times."""
    jobs = [(lane, t) for t in tokens for lane in (CACHED, NAIVE)]
    seconds: dict[tuple[str, int], list[float]] = {job: [] for job in jobs}
    counted: dict[tuple[str, int], int] = {}
    texts: dict[int, set[tuple[int, ...]]] = {t: set() for t in tokens}
    for turn in range(-1, rounds):  # round -1 is a warm-up: torch's first calls do not count
        at = turn * 3 % len(jobs)
        for lane, t in jobs[at:] + jobs[:at] if turn >= 0 else jobs[:2]:
            params = SamplingParams(temperature=0.0, max_tokens=t, ignore_eos=True)
            [done] = llm.generate([ids], params, cache=lane == CACHED, salt=f"{turn} {t}")
            texts[t].add(done.token_ids)
            if turn >= 0:
                seconds[lane, t].append(done.usage.total_s)
                counted[lane, t] = done.usage.forward_tokens
    if any(len(written) > 1 for written in texts.values()):
        raise SystemExit("the lanes wrote different tokens; nothing here can be compared")
    return [
        Point(
            lane,
            t,
            seconds[lane, t],
            counted[lane, t],
            forward_tokens(len(ids), t, cache=lane == CACHED),
            llm.costs.run(len(ids), t, cache=lane == CACHED).flops,
        )
        for lane, t in sorted(jobs)
    ]


def least_squares(matrix: numpy.ndarray, values: numpy.ndarray) -> numpy.ndarray:
    """The non-negative least-squares coefficients: the best fit without negative ones over all subsets of columns."""
    best, least = numpy.zeros(matrix.shape[1]), float("inf")
    for count in range(1, matrix.shape[1] + 1):
        for columns in map(list, combinations(range(matrix.shape[1]), count)):
            found = numpy.linalg.lstsq(matrix[:, columns], values)[0]
            left = float(((matrix[:, columns] @ found - values) ** 2).sum())
            if (found >= 0).all() and left < least:
                best, least = numpy.zeros(matrix.shape[1]), left
                best[columns] = found
    return best


def fitted(name: str, points: list[Point], prompt: int) -> Fit:
    """Fit the terms of `name` to the medians of its lane, with relative residuals."""
    lane = CACHED if name == CACHED else NAIVE
    medians = {point.tokens: median(point.seconds) for point in points if point.lane == lane}
    totals = numpy.array(list(medians.values()))
    matrix = numpy.array([list(terms(name, prompt, t).values()) for t in medians])
    size = matrix.max(axis=0)
    found = least_squares(matrix / size / totals[:, None], numpy.ones(len(totals))) / size
    said = matrix @ found
    parts = matrix * found / said[:, None]
    names = terms(name, prompt, 1)
    return Fit(
        name,
        lane,
        prompt,
        coefficients=dict(zip(names, found.tolist(), strict=True)),
        shares={term: (float(parts[0, at]), float(parts[-1, at])) for at, term in enumerate(names)},
        r2=1 - float(((totals - said) ** 2).sum() / ((totals - totals.mean()) ** 2).sum()),
        worst=float(abs(said / totals - 1).max()),
    )


def slope(tokens: Sequence[int], values: Sequence[float]) -> float:
    """The exponent of growth: the slope of log(value) over log(T), by least squares."""
    return float(numpy.polyfit(numpy.log(tokens), numpy.log(values), 1)[0])


def slopes(points: list[Point]) -> dict[str, dict[str, float]]:
    """The exponents of each lane's seconds (medians), counted tokens, the formula's tokens and FLOP."""
    found = {}
    for lane in (CACHED, NAIVE):
        own = [point for point in points if point.lane == lane]
        columns: dict[str, list[float]] = {
            "seconds": [median(point.seconds) for point in own],
            "forward tokens, counted": [point.forward_tokens for point in own],
            "forward tokens, formula": [point.formula for point in own],
            "FLOP": [point.flops for point in own],
        }
        tokens = [point.tokens for point in own]
        found[lane] = {name: slope(tokens, values) for name, values in columns.items()}
    return found


def table(points: list[Point], fits: list[Fit], exponents: dict[str, dict[str, float]]) -> str:
    """The points, fits and exponents as a table."""
    lines = [f"{'':>8}{'T':>6}{'median s':>11}{'range':>20}{'forward tokens':>16}  formula{'GFLOP':>10}{'GFLOP/s':>9}"]
    for point in points:
        middle, flops = median(point.seconds), point.flops / 1e9
        window = f"{min(point.seconds):.4g} to {max(point.seconds):.4g}"
        sign = "=" if point.forward_tokens == point.formula else f"NOT {point.formula:,}"
        lines.append(
            f"{point.lane:>8}{point.tokens:>6}{middle:>11.4g}{window:>20}{point.forward_tokens:>16,}  {sign:<7}"
            f"{flops:>10.4g}{flops / middle:>9.3g}"
        )
    low, high = min(point.tokens for point in points), max(point.tokens for point in points)
    for fit in fits:
        lines += ["", f"{fit.name}: R^2 = {fit.r2:.5f}, a median is at most {fit.worst:.1%} off"]
        for name, each in fit.coefficients.items():
            small, large = fit.shares[name]
            lines.append(f"{name:>18}{each * 1e6:>12.4g} us each{small:>9.1%} at T = {low}{large:>9.1%} at T = {high}")
    lines += ["", f"growth as T^x, T = {low} to {high}"]
    for name in exponents[CACHED]:
        lines.append(f"{name:>24}{exponents[CACHED][name]:>9.4f} cached{exponents[NAIVE][name]:>9.4f} naive")
    return "\n".join(lines)


def picture(points: list[Point], fits: list[Fit], prompt: int, title: str, path: Path) -> None:
    """Draw seconds with the fitted curves, and the tokens sent through the layers with the formula's, over T."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    for name in ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"):
        pyplot.rcParams[name] = "#7d8590"  # readable on light and on dark
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 4.2), layout="constrained")
    ends = (min(point.tokens for point in points), max(point.tokens for point in points))
    line = [round(t) for t in numpy.geomspace(*ends, 60)]
    for point in points:
        colour = COLOURS[point.lane]
        left.plot([point.tokens] * len(point.seconds), point.seconds, "o", color=colour, alpha=0.3, markersize=4)
        right.plot(point.tokens, point.forward_tokens, "o", color=colour, markersize=5)
    for fit in fits:
        style = "--" if fit.name == NAIVE else "-"
        label = f"{fit.name}, R² {fit.r2:.4f}"
        left.plot(line, [fit(t) for t in line], style, color=COLOURS[fit.lane], label=label)
    for lane, words in ((CACHED, "cached: N + T - 1"), (NAIVE, "naive: sum of t")):
        counts = [forward_tokens(prompt, t, cache=lane == CACHED) for t in line]
        right.plot(line, counts, color=COLOURS[lane], label=words)
    left.set(title="seconds in all: measured, and fitted", ylabel="s")
    right.set(title="forward tokens: counted, and by formula")
    for axes in (left, right):
        axes.set(xscale="log", yscale="log", xlabel="T, tokens written")
        axes.set_xticks(sorted({point.tokens for point in points}), minor=False)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.suptitle(title)
    figure.savefig(path, transparent=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="stories")
    parser.add_argument("--tokens", type=int, nargs="+", default=[25, 35, 50, 70, 100, 140, 200, 280, 400])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    arguments = parser.parse_args()
    tokens = sorted(set(arguments.tokens))
    if len(tokens) < 5 or tokens[0] < 1 or arguments.rounds < 1:
        parser.error("a fit of four terms takes five T or more, each at least 1, and a round")
    before = os.getloadavg()[0]
    with LLM(arguments.model) as llm:
        ids = llm.tokenizer.encode(arguments.prompt)
        if not ids or len(ids) + tokens[-1] > llm.context:
            parser.error(f"a prompt of {len(ids)} tokens and T = {tokens[-1]} do not go into {llm.context} tokens")
        points = measure(llm, ids, tokens, arguments.rounds)
        about = f"{Path(arguments.model).name}, {llm.dtype} on {llm.device}"
    machine = f"{platform.machine()}, {torch.get_num_threads()} threads"
    load = (before, os.getloadavg()[0])
    fits, exponents = [fitted(name, points, len(ids)) for name in (CACHED, NAIVE, STEPS)], slopes(points)
    print(
        f"{about}, {machine}, N = {len(ids)}, {arguments.rounds} rounds, load {load[0]:.2f} before, {load[1]:.2f} after"
    )
    print(table(points, fits, exponents))
    arguments.out.mkdir(parents=True, exist_ok=True)
    record = {
        "about": about,
        "machine": machine,
        "load": load,
        "prompt_tokens": len(ids),
        "points": [asdict(point) for point in points],
        "fits": [asdict(fit) for fit in fits],
        "exponents": exponents,
        "exact": all(point.forward_tokens == point.formula for point in points),
    }
    (arguments.out / "growth.json").write_text(json.dumps(record) + "\n", encoding="utf-8")
    picture(points, fits, len(ids), f"{about}, a prompt of {len(ids)} tokens", arguments.out / "growth.svg")


if __name__ == "__main__":
    main()
