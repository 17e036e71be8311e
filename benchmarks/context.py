"""The cost of a token over its context, for each format of the KV cache, beside the cost of reading that cache.

    python -m benchmarks.context [--shape qwen05] [--weights int8] [--kv native int8 int4] [--contexts 128 512 ..]
                                 [--tokens 24] [--rounds 3] [--root FOLDER] [--out build/benchmarks]

For each context the model reads a text of that length and continues it greedily; the figure is the median of the
steps. The formats take turns at each context of a round. The cost of a token of context in a round is the slope of a
straight line through the medians (least squares); it is compared with the bytes of K and V per token over the speed of
reading, which is measured beside the steps of that round. The output gives the median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import cycle, pairwise
from pathlib import Path
from statistics import linear_regression, median

import torch

from benchmarks.models import WEIGHTS
from benchmarks.quality import COLOURS, canvas, save, table
from tokenwright import LLM, SamplingParams
from tokenwright.bench import shapes
from tokenwright.bench.bandwidth import BandwidthProbe, beyond_caches
from tokenwright.bench.limits import CPU, TURN, processor

CONTEXTS = (128, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class Growth:
    """The measurements of one KV format.

    steps: seconds of a step by context, the median of all rounds. slopes: seconds per token of context, by round.
    reading: seconds to read the K and V of one token, by round.
    """

    kv: str
    bytes_per_token: int
    steps: dict[int, float]
    slopes: list[float]
    reading: list[float]

    @property
    def slope(self) -> float:
        return median(self.slopes)

    @property
    def ratio(self) -> float:
        return median(slope / least for slope, least in zip(self.slopes, self.reading, strict=True))


def steps(llm: LLM, ids: list[int], tokens: int, salt: str) -> list[float]:
    """Seconds of each step but the first, which computes the uncached part of the prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    [done] = llm.generate([ids], params, salt=salt)
    return [after - before for before, after in pairwise(done.usage.token_s)]


def slope(taken: Mapping[int, Sequence[float]]) -> float:
    return linear_regression(list(taken), [median(seconds) for seconds in taken.values()]).slope


def growth(
    kv: str, nbytes: int, rounds: Sequence[Mapping[int, Sequence[float]]], speeds: Sequence[Sequence[float]]
) -> Growth:
    """rounds: seconds of the steps of each round, by context. speeds: bytes read per second in each round."""
    every = {context: median(second for one in rounds for second in one[context]) for context in rounds[0]}
    reading = [nbytes / median(speed) for speed in speeds]
    return Growth(kv, nbytes, every, [slope(one) for one in rounds], reading)


def measure(llm: LLM, formats: Sequence[str], contexts: Sequence[int], tokens: int, rounds: int) -> list[Growth]:
    """Measure every format in an engine over `llm.loaded`. contexts: in ascending order."""
    pages = (contexts[-1] + tokens) // llm.options.page_size + 2
    reader = BandwidthProbe(beyond_caches(CPU), CPU)
    taken: dict[str, list[dict[int, list[float]]]] = {kv: [] for kv in formats}
    speeds: list[list[float]] = []
    with ExitStack() as opened:
        llms = {kv: opened.enter_context(LLM(llm.loaded, kv=kv, pages=pages)) for kv in formats}
        for turn in range(rounds):
            rng = random.Random(turn)
            ids = [rng.randrange(5, llm.config.vocab_size) for _ in range(contexts[-1])]
            speeds.append([])
            for kv in formats:
                taken[kv].append({})
            for context in contexts:
                for kv, one in llms.items():  # the shorter contexts' pages are cached
                    taken[kv][turn][context] = steps(one, ids[:context], tokens, f"round {turn}")
                    speeds[turn].append(reader.bytes_per_second(TURN))
                print(f"round {turn + 1}: {context} tokens", file=sys.stderr, flush=True)
        costs = {kv: sum(spec.bytes_per_token for spec in one.specs) for kv, one in llms.items()}
    return [growth(kv, costs[kv], taken[kv], speeds) for kv in formats]


def report(found: Sequence[Growth]) -> str:
    contexts = list(found[0].steps)
    head = ("cache", *(f"{context:,}, ms" for context in contexts), "bytes a token", "slope, µs/1,000", "of reading")
    rows = (
        (
            one.kv,
            *(f"{one.steps[context] * 1e3:.2f}" for context in contexts),
            f"{one.bytes_per_token:,}",
            f"{one.slope * 1e9:,.0f}",
            f"{one.ratio:.2f}",
        )
        for one in found
    )
    return table(head, rows)


def picture(found: Sequence[Growth], title: str, path: Path) -> None:
    figure, axes = canvas(figsize=(7, 4))
    for one, colour in zip(found, cycle(COLOURS), strict=False):
        axes.plot(list(one.steps), [1e3 * seconds for seconds in one.steps.values()], "o-", color=colour, label=one.kv)
    axes.set(xlabel="tokens of context", ylabel="ms a token", ylim=(0, None), title=title)
    axes.legend()
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(shapes.SHAPES), default="qwen05")
    parser.add_argument("--weights", choices=list(WEIGHTS), default="int8")
    parser.add_argument("--kv", nargs="+", default=["native", "int8", "int4"])
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS))
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--root", type=Path, default=shapes.default_root())
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    arguments = parser.parse_args()
    if arguments.rounds < 1 or arguments.tokens < 2 or len(set(arguments.contexts)) < 2:
        parser.error("a round, two tokens and two contexts or more")
    before = os.getloadavg()[0]
    contexts = sorted(set(arguments.contexts))
    model = shapes.ready(arguments.shape, arguments.root)
    with LLM(model, weights=WEIGHTS[arguments.weights], device="cpu", pages=4) as llm:
        if contexts[0] < 1 or contexts[-1] + arguments.tokens > llm.context:
            parser.error(f"{arguments.shape} has room for {llm.context} tokens, those that are written among them")
        found = measure(llm, arguments.kv, contexts, arguments.tokens, arguments.rounds)
        title = f"{arguments.shape}, {arguments.weights} weights, {processor()}, {llm.kernels} kernels"
    title += f", {torch.get_num_threads()} threads, {arguments.rounds} rounds"
    print(f"{title}, load {before:.2f} before\n\n{report(found)}", end="")
    arguments.out.mkdir(parents=True, exist_ok=True)
    record = {"about": title, "load": before, "growth": [asdict(one) for one in found]}
    (arguments.out / "context.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    picture(found, title, arguments.out / "context.svg")


if __name__ == "__main__":
    main()
