"""What a token costs against its context, for each format of the KV cache, beside what reading that cache costs.

    python -m benchmarks.context [--shape qwen05] [--weights int8] [--kv native int8 int4] [--contexts 128 512 ..]
                                 [--tokens 24] [--rounds 3] [--root FOLDER] [--out build/benchmarks]

A text is read up to each context and written on, the likeliest token each time; a context's figure is the median of
its steps. The formats take turns, round by round. What a token of context costs is the slope of a straight line
through the medians (least squares), held against the cache's bytes for a token over the speed of reading, which is
measured beside the steps.
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
from itertools import pairwise
from pathlib import Path
from statistics import linear_regression, median

from benchmarks.models import WEIGHTS
from benchmarks.quality import COLOURS, canvas, save, table
from tokenwright import LLM, SamplingParams
from tokenwright.bench import shapes
from tokenwright.bench.limits import CPU, TURN, processor
from tokenwright.planner.bandwidth import Reader, beyond_caches

CONTEXTS = (128, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class Growth:
    """Seconds a step by context, of one format.

    slope: seconds that a token of context adds. least: seconds that reading it takes.
    """

    kv: str
    bytes_per_token: int
    steps: dict[int, float]
    slope: float
    least: float

    @property
    def ratio(self) -> float:
        return self.slope / self.least


def steps(llm: LLM, ids: list[int], tokens: int, salt: str) -> list[float]:
    """Seconds of each step but the first, which reads what is new of the prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    [done] = llm.generate([ids], params, salt=salt)
    return [after - before for before, after in pairwise(done.usage.token_s)]


def growth(kv: str, bytes_per_token: int, taken: Mapping[int, Sequence[float]], speeds: Sequence[float]) -> Growth:
    medians = {context: median(seconds) for context, seconds in taken.items()}
    slope = linear_regression(list(medians), list(medians.values())).slope
    return Growth(kv, bytes_per_token, medians, slope, bytes_per_token / median(speeds))


def measure(arguments: argparse.Namespace) -> list[Growth]:
    contexts = sorted(arguments.contexts)
    reader, speeds = Reader(beyond_caches(CPU), CPU), list[float]()
    taken: dict[str, dict[int, list[float]]] = {kv: {context: [] for context in contexts} for kv in arguments.kv}
    with ExitStack() as opened:
        llms = {}
        for kv in arguments.kv:
            pages = (contexts[-1] + arguments.tokens) // 16 + 2
            model = shapes.ready(arguments.shape, arguments.root)
            options = {"weights": WEIGHTS[arguments.weights], "device": "cpu", "pages": pages}
            llms[kv] = opened.enter_context(LLM(model, kv=kv, **options))
        vocabulary = next(iter(llms.values())).config.vocab_size
        for turn in range(arguments.rounds):
            rng = random.Random(turn)
            ids = [rng.randrange(5, vocabulary) for _ in range(contexts[-1])]
            for context in contexts:
                for kv, llm in llms.items():  # what was read for the shorter contexts is found again
                    taken[kv][context] += steps(llm, ids[:context], arguments.tokens, f"round {turn}")
                    speeds.append(reader.bytes_per_second(TURN))
                print(f"round {turn + 1}: {context} tokens", file=sys.stderr, flush=True)
        costs = {kv: round(llm.costs.chunk(1000, 1).kv_read / 1001) for kv, llm in llms.items()}
    return [growth(kv, costs[kv], taken[kv], speeds) for kv in arguments.kv]


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
    for one, colour in zip(found, COLOURS, strict=False):
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
    found = measure(arguments)
    title = f"{arguments.shape}, {arguments.weights} weights, {processor()}, {arguments.rounds} rounds"
    print(f"{title}, load {before:.2f} before\n\n{report(found)}", end="")
    arguments.out.mkdir(parents=True, exist_ok=True)
    record = {"about": title, "load": before, "growth": [asdict(one) for one in found]}
    (arguments.out / "context.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    picture(found, title, arguments.out / "context.svg")


if __name__ == "__main__":
    main()
