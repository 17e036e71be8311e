"""The cost of tracing: decode without a trace, with the counters only, and with one traced row of attention, whose
logits are held for the sampler's panel or are not.

    python -m benchmarks.kernels.look [MODEL] [--weights native] [--pairs 30] [--tokens 64] [--out build/benchmarks]

MODEL is a folder, a name, or a shape of `tokenwright bench` such as qwen05. Each round generates the same text four
ways over the same weights, in an order that rotates from round to round; a ratio compares two texts of one round. The
output gives the median ratio and its 95 % interval (by order statistics). Run nothing else meanwhile.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median

from tokenwright import LLM, SamplingParams
from tokenwright.arrays import Floats
from tokenwright.bench import shapes
from tokenwright.explorer.player import AHEAD
from tokenwright.trace.recorder import HeldLogits

PROMPT = 64  # tokens
OFF, COUNTED, WATCHED, HELD = "off", "counted", "one row watched", "and logits held"


class Unheld(HeldLogits):
    """Holds no logits."""

    def add(self, step: int, logits: Floats, *, alone: bool) -> None:
        pass


def plain(llm: LLM, params: SamplingParams, ids: list[int]) -> float:
    """Seconds per token after the first."""
    [completion] = llm.generate([ids], params)
    return per_token(completion.usage.token_s)


def watched(llm: LLM, params: SamplingParams, ids: list[int], *, held: bool) -> float:
    """The same as the page plays it, each step with its frame and an attention row of the last layer."""
    with llm.run(ids, params, layer=llm.config.layers - 1) as run:
        if not held:
            run._watch.held = Unheld()  # every run of the library holds them
        while not run.ended:
            run.step(ahead=AHEAD)
        return per_token(run.completion.usage.token_s)


def per_token(times: tuple[float, ...]) -> float:
    steps = [after - before for before, after in pairwise(times)]
    return median(steps)


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """The median and its 95 % interval: the ranks n/2 -+ 0.98 sqrt(n), whatever the distribution."""
    ordered, window = sorted(ratios), 0.98 * len(ratios) ** 0.5
    low, high = round(len(ordered) / 2 - window) - 1, round(len(ordered) / 2 + window)
    return median(ordered), ordered[max(0, low)], ordered[min(len(ordered) - 1, high)]


def measure(model: str, weights: str, pairs: int, tokens: int) -> dict[str, list[float]]:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    folder = str(shapes.ready(model, shapes.default_root())) if model in shapes.SHAPES else model
    # Ahead of a repeating text several tokens come in one step, of which a traced run makes one at a time.
    with (
        LLM(folder, weights=weights, speculate="off") as quiet,
        LLM(quiet.loaded.again(trace=True), speculate="off") as traced,
    ):
        ids = [5 + i % 90 for i in range(PROMPT)]
        ways: list[tuple[str, Callable[[], float]]] = [
            (OFF, lambda: plain(quiet, params, ids)),
            (COUNTED, lambda: plain(traced, params, ids)),
            (WATCHED, lambda: watched(traced, params, ids, held=False)),
            (HELD, lambda: watched(traced, params, ids, held=True)),
        ]
        for _, way in ways:
            way()  # a warm-up: the first calls do not count
        seconds: dict[str, list[float]] = {name: [] for name, _ in ways}
        for turn in range(pairs):
            for name, way in ways[turn % len(ways) :] + ways[: turn % len(ways)]:
                seconds[name].append(way())
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="stories")
    parser.add_argument("--weights", default="native")
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    arguments = parser.parse_args()
    seconds = measure(arguments.model, arguments.weights, arguments.pairs, arguments.tokens)
    ratios = {
        name: [ours / off for ours, off in zip(seconds[name], seconds[OFF], strict=True)]
        for name in (COUNTED, WATCHED, HELD)
    }
    name = Path(arguments.model).name
    print(
        f"{name}, weights {arguments.weights}, {platform.machine()}, {arguments.pairs} rounds of {arguments.tokens} "
        f"tokens after {PROMPT}"
    )
    print(f"{OFF:>16}  {median(seconds[OFF]) * 1000:8.3f} ms a step")
    found = {}
    for way, values in ratios.items():
        middle, low, high = found[way] = interval(values)
        print(f"{way:>16}  {median(seconds[way]) * 1000:8.3f} ms a step, {middle:.4f} times ({low:.4f} to {high:.4f})")
    arguments.out.mkdir(parents=True, exist_ok=True)
    record = {"model": name, "seconds": seconds, "ratios": found}
    (arguments.out / f"look-{name}.json").write_text(json.dumps(record) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
