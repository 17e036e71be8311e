"""Load and faults: `tokenwright serve` under clients that die, crowds, hostile clients, SIGTERM, and for a long time.

    python -m benchmarks.serving.reliability [kills pool queue hostile stop soak] [--scale 1.0] [--out FILE]
    python -m benchmarks.serving.reliability soak --requests 50000 --minutes 30

    kills     1,000 clients go away at a random point, streaming and not
    pool      512 mixed requests at once through a pool of 1.2 longest requests; each text as undisturbed
    queue     10,000 requests wait; 429 beyond them; all that were accepted finish
    hostile   slow readers, slow-loris, 27 MB bodies, 1,280 at once, schema bombs; /health beside them
    stop      SIGTERM while requests run and wait
    soak      mixed requests without a pause, by default 10,000 or 5 minutes, whichever ends earlier

Each part starts a server in a process of its own with a small random model, at --scale of its size, and prints a table:
invariants, which "holds" or is "BROKEN"; targets, which "holds" or is "short" where the machine was too slow. The exit
status is 1 if an invariant is broken, whatever the targets say.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.serving import traffic
from benchmarks.serving.hostile import hostile
from benchmarks.serving.reliability_parts import about, kills, pool, queue, soak, stop
from benchmarks.serving.served import Server
from benchmarks.serving.verdicts import HEAD, Report
from tokenwright.llm.prompts.report import PROMPT_MEMORY

Run = Callable[[Server, Report, float], Awaitable[None]]


@dataclass(frozen=True)
class Part:
    """A part, and the server that it needs. queue: the cap of waiting requests, at a scale of 1."""

    run: Run
    llm: Mapping[str, Any]
    queue: int = 1024
    prompt_memory: int = PROMPT_MEMORY

    def settings(self, scale: float) -> dict[str, Any]:
        most = max(16, round(self.queue * scale)) if self.queue > 1024 else self.queue
        return {"max_queue": most, "drain_timeout": 600.0, "prompt_memory": self.prompt_memory}


PARTS: Mapping[str, Part] = {
    "kills": Part(kills, {"pages": 256}),
    "pool": Part(pool, {"pages": 36}),
    "queue": Part(queue, {"pages": 256, "max_sequences": 8}, 10_000),
    "hostile": Part(hostile, {"pages": 2048}),
    "stop": Part(stop, {"pages": 256, "max_sequences": 16}),
}
PROMPTS = 2**20  # bytes, full within minutes: by default a soak would fill its memory of prompts for an hour


def run(name: str, part: Part, model: Path, scale: float) -> Report:
    """Run a part against a server of its own."""
    report = Report(name)
    with Server(model, part.llm, part.settings(scale)) as server:
        asyncio.run(part.run(server, report, scale))  # type: ignore[arg-type]
    return report


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"out of {', '.join(PARTS)}, soak; default: all")
    parser.add_argument("--scale", type=float, default=1.0, help="of the sizes: 0.05 is a short look")
    parser.add_argument("--requests", type=int, default=10_000, help="of the soak at most")
    parser.add_argument("--minutes", type=float, default=5.0, help="of the soak at most")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks/reliability.json"))
    arguments = parser.parse_args()
    arguments.parts = arguments.parts or [*PARTS, "soak"]
    if unknown := set(arguments.parts) - {*PARTS, "soak"}:
        parser.error(f"{', '.join(sorted(unknown))}: the parts are {', '.join(PARTS)}, soak")
    if not 0 < arguments.scale <= 2 or arguments.requests < 16 or arguments.minutes <= 0:
        parser.error("--scale from 0 to 2, 16 --requests or more, --minutes above 0")
    return arguments


def main() -> int:
    arguments = parse()
    size, seconds = (arguments.scale * value for value in (arguments.requests, 60 * arguments.minutes))

    async def soaking(server: Server, report: Report, _: float) -> None:
        await soak(server, report, round(size), seconds)

    parts = {**PARTS, "soak": Part(soaking, {"pages": 256}, prompt_memory=PROMPTS)}
    reports = []
    with TemporaryDirectory() as folder:
        model = traffic.write_model(Path(folder) / "model")
        print(f"scale {arguments.scale:g}; {about()}\n{HEAD}", flush=True)
        for name in arguments.parts:
            reports.append(run(name, parts[name], model, arguments.scale))
            print(reports[-1].table(), flush=True)
    print(f"at the end: {about()}")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    record = {"about": about(), "scale": arguments.scale, "findings": [one for r in reports for one in r.record()]}
    arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    broken = [finding for report in reports for finding in report.broken]
    for finding in broken:
        print(f"BROKEN: {finding.part}: {finding.what}: {finding.figure}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
