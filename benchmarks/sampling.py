"""The cost of sampling a token: top-p and typical-p without a sort, and a whole draw, against torch's full sort.

    python benchmarks/sampling.py [--vocabulary 151936] [--pairs 30] [--out build/benchmarks]

Rows of logits are peaked (a few ids have the mass), like a language model's (Zipf), normal and flat. Each round runs
both ways in alternating order; a ratio is our time over the sort's in one round. The output gives the median ratio and
its 95 % interval (by order statistics). Both must keep the same ids. One thread; run nothing else meanwhile.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from tokenwright import SamplingParams
from tokenwright.decode.logits_processors import tempered, top_p, typical_p
from tokenwright.decode.sampler import choose, probabilities

P = 0.95
CALLS = 5  # a round takes the fastest of these

Way = Callable[[torch.Tensor], torch.Tensor]


def sorted_top_p(logits: torch.Tensor) -> torch.Tensor:
    """Top-p by definition, with torch's stable sort, so that the lower id comes first."""
    ordered, ids = logits.sort(descending=True, stable=True)
    kept = int((ordered.softmax(-1).cumsum(-1) < P).sum()) + 1
    return logits.index_fill(0, ids[kept:], -math.inf)


def sorted_typical_p(logits: torch.Tensor) -> torch.Tensor:
    logp = logits.log_softmax(-1)
    distance = (-logp + (logp.exp() * logp).sum()).abs()
    ordered, ids = distance.sort()
    last = int((logp.exp()[ids].cumsum(-1) < P).sum())
    return logits.masked_fill(distance > ordered[min(last, len(ordered) - 1)], -math.inf)


def drawn_by_sort(logits: torch.Tensor) -> torch.Tensor:
    return torch.multinomial(sorted_top_p(tempered(logits, 0.7)).softmax(-1), 1)


def drawn(logits: torch.Tensor) -> torch.Tensor:
    params = SamplingParams(temperature=0.7, top_p=P, seed=1)
    return torch.tensor(choose(logits, probabilities(logits, params), params.seed, 1))


WAYS: dict[str, tuple[Way, Way, bool]] = {  # ours, by sort, whether both return the same row
    "top_p": (lambda row: top_p(row, P), sorted_top_p, True),
    "typical_p": (lambda row: typical_p(row, P), sorted_typical_p, True),
    "a whole draw with top_p": (drawn, drawn_by_sort, False),
}


def rows(size: int) -> dict[str, torch.Tensor]:
    """Rows [size] after temperature; a Zipf law with the exponent 1.5 leaves some hundred ids at top-p 0.95."""
    generator = torch.Generator().manual_seed(7)
    noise = torch.randn(size, generator=generator, dtype=torch.float64)
    ranks = torch.randperm(size, generator=generator).double() + 1
    peaked = 2 * noise
    peaked[size // 3] += 25
    kinds = {"peaked": peaked, "zipf": -1.5 * ranks.log() + 0.3 * noise, "normal": 2.5 * noise, "flat": 0.01 * noise}
    return {name: tempered(row, 1.0) for name, row in kinds.items()}


def seconds(way: Way, row: torch.Tensor) -> float:
    times = []
    for _ in range(CALLS):
        began = time.perf_counter()
        way(row)
        times.append(time.perf_counter() - began)
    return min(times)


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """The median and its 95 % interval: the ranks n/2 -+ 0.98 sqrt(n), whatever the distribution."""
    ordered, window = sorted(ratios), 0.98 * len(ratios) ** 0.5
    low, high = round(len(ordered) / 2 - window) - 1, round(len(ordered) / 2 + window)
    return median(ordered), ordered[max(0, low)], ordered[min(len(ordered) - 1, high)]


def measure(name: str, row: torch.Tensor, pairs: int) -> tuple[list[float], list[float]]:
    """Seconds of ours and of the sort, one pair per round. Exits if they keep different ids."""
    ours, by_sort, alike = WAYS[name]
    if alike and not torch.equal(ours(row), by_sort(row)):
        raise SystemExit(f"{name} keeps other ids than the sort does")
    found: tuple[list[float], list[float]] = ([], [])
    for turn in range(pairs):
        for place in (0, 1) if turn % 2 else (1, 0):
            found[place].append(seconds(WAYS[name][place], row))  # type: ignore[arg-type]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{arguments.vocabulary:,} ids, p = {P}, {platform.machine()}, {arguments.pairs} rounds")
    record = []
    for kind, row in rows(arguments.vocabulary).items():
        kept = int(top_p(row, P).isfinite().sum())
        print(f"{kind}: {kept:,} ids kept by top-p")
        for name in WAYS:
            ours, by_sort = measure(name, row, arguments.pairs)
            ratios = [mine / theirs for mine, theirs in zip(ours, by_sort, strict=True)]
            middle, low, high = interval(ratios)
            print(
                f"{name:>26}  {median(ours) * 1000:7.3f} ms, by sort {median(by_sort) * 1000:7.3f} ms: "
                f"{middle:.3f} times ({low:.3f} to {high:.3f})"
            )
            ratio = {"median": middle, "low": low, "high": high}
            record.append({"row": kind, "ids": kept, "what": name, "ours": ours, "sort": by_sort, "ratio": ratio})
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "sampling.json").write_text(json.dumps(record) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
