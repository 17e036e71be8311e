"""This machine's limits: bytes read from memory and from the processor's cache, and multiplications, per second.

    python -m benchmarks.limits [--seconds 1.0] [--out build/benchmarks]

Each with all threads (OMP_NUM_THREADS) and with one, the best of the calls in --seconds. The native kernels measure
with their own instructions; without native kernels torch does, and the output names the kind. Other benchmarks measure
the limits again beside the figures that they bound; these figures describe the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.quality import COLOURS, canvas, save, table
from tokenwright.bench.limits import MachineLimits, Rate, measure_limits, processor


def rates(limits: MachineLimits) -> dict[str, dict[str, Rate]]:
    """The rates by unit, and by operation."""
    read = {"memory": limits.memory}
    if limits.cache is not None:
        read[f"cache, {limits.cache_bytes / 2**20:.0f} MiB"] = limits.cache
    return {"GB/s read": read, "G multiplications/s": dict(limits.multiplications)}


def report(limits: MachineLimits) -> str:
    head = ("", f"{limits.threads} threads", "1 thread")
    rows = [
        (f"{name}, {unit}", f"{rate.all_threads / 1e9:,.1f}", f"{rate.one_thread / 1e9:,.1f}")
        for unit, each in rates(limits).items()
        for name, rate in each.items()
    ]
    return table(head, rows)


def picture(limits: MachineLimits, title: str, path: Path) -> None:
    """Draw bars of both kinds of limits, all threads above one thread."""
    figure, places = canvas(figsize=(9.5, 2.8), ncols=2)
    for axes, (unit, each) in zip(places, rates(limits).items(), strict=True):
        for index, label in enumerate((f"{limits.threads} threads", "1 thread")):
            values = [(rate.all_threads, rate.one_thread)[index] / 1e9 for rate in each.values()]
            where = [at + 0.4 * index for at in range(len(each))]
            axes.barh(where, values, 0.38, color=COLOURS[index], label=label)
        axes.set_yticks([at + 0.2 for at in range(len(each))], list(each))
        axes.invert_yaxis()
        axes.set_xlabel(unit)
    places[0].legend()
    figure.suptitle(title)
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    arguments = parser.parse_args()
    before = os.getloadavg()[0]
    limits = measure_limits(
        arguments.seconds, lambda done, total: print(f"limits: {done} of {total}", file=sys.stderr, flush=True)
    )
    title = f"{processor()}, {limits.kind}"
    print(f"{title}, load {before:.2f} before\n\n{report(limits)}", end="")
    arguments.out.mkdir(parents=True, exist_ok=True)
    record = {"processor": processor(), "load": before, **asdict(limits)}
    (arguments.out / "limits.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    picture(limits, title, arguments.out / "limits.svg")


if __name__ == "__main__":
    main()
