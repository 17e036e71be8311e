"""What the router in front of replicas costs: a server of replicas beside a server without, over HTTP, in turn.

    python benchmarks/ingress.py [--model stories] [--replicas 1] [--streams 1 8 16] [--tokens 128] [--pairs 30]

Both servers stream the same texts to the same client, greedily, with drafts off. A delay is that of the middle client
of a pair: of the first token from the request, and of each later one from the token before. The output gives the
difference of both pair by pair (medians with the interval of `pairs.py`, and the 99th percentile over pairs), the
ratio of tokens per second, and the CPU time of the process that has the sockets for each token.

One replica has all cores, as the server without replicas, so the difference is the way through the router. With several
replicas each has a part of the cores, and the ratio of tokens per second says whether that pays.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

from http_client import ask
from pairs import interval
from reliability_parts import about
from served import Server, family, quantile
from serving import OPTIONS, bodies, path_of
from traffic import NAME


@dataclass
class Measured:
    """A server's figures, one for each pair; times in seconds."""

    rate: list[float] = field(default_factory=list)  # tokens per second
    first: list[float] = field(default_factory=list)
    token: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)  # between two events of a stream, of all pairs
    cpu: list[float] = field(default_factory=list)  # of the process with the sockets, for each token
    whole: list[float] = field(default_factory=list)  # CPU time of all its processes, for each token


def cpu_seconds(process: int) -> float:
    """The CPU time of a process so far."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(server: Server, each: Sequence[dict[str, Any]], into: Measured) -> None:
    """Ask for all texts at once."""
    processes = family(server.process.pid)
    before, began = [cpu_seconds(one) for one in processes], time.perf_counter()
    replies = await asyncio.gather(*(ask(server.address, "/v1/completions", one) for one in each))
    seconds = time.perf_counter() - began
    cpu = [cpu_seconds(one) - was for one, was in zip(processes, before, strict=True)]
    tokens = sum(one["max_tokens"] for one in each)
    for reply in replies:
        if reply.status != 200 or not reply.body.endswith(b"data: [DONE]\n\n"):
            raise SystemExit(f"the server answered {reply.status}: {reply.body[-300:]!r}")
        into.gaps += [after - at for at, after in zip(reply.times, reply.times[1:], strict=False)]
    into.rate.append(tokens / seconds)
    into.cpu.append(cpu[0] / tokens)
    into.whole.append(sum(cpu) / tokens)
    into.first.append(median(reply.times[0] for reply in replies))
    most = each[0]["max_tokens"] - 1
    into.token.append(median((reply.times[-1] - reply.times[0]) / most for reply in replies))


def compared(streams: int, direct: Measured, routed: Measured) -> str:
    """A row of the table."""
    cells = [f"{streams}"]
    for one, other in ((direct.first, routed.first), (direct.token, routed.token)):
        more = [1e3 * (after - before) for before, after in zip(one, other, strict=True)]
        cells += [f"{1e3 * median(one):.2f}", "{:+.2f} ({:+.2f} to {:+.2f})".format(*interval(more))]
        cells += [f"{quantile(more, 0.99):+.2f}"]
    cells += [f"{1e3 * quantile(one.gaps, 0.5):.2f}, {1e3 * quantile(one.gaps, 0.99):.2f}" for one in (direct, routed)]
    ratio = interval([after / before for before, after in zip(direct.rate, routed.rate, strict=True)])
    cells += ["{:.3f} ({:.3f} to {:.3f})".format(*ratio)]
    cells += [f"{1e6 * mean(one.cpu):.0f} of {1e6 * mean(one.whole):.0f}" for one in (direct, routed)]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what the router in front of replicas costs.")
    parser.add_argument("--model", choices=list(OPTIONS), default="stories")
    parser.add_argument("--root", type=Path, default=Path("build/models"), help="of the models with random weights")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--tokens", type=int, default=128, help="of each text")
    parser.add_argument("--pairs", type=int, default=30)
    options = parser.parse_args()
    model = path_of(options.model, options.root)
    command = [sys.executable, "-m", "tokenwright", "serve", model, "--port", "0", "--served-model-name", NAME]
    command += ["--speculate", "off"]
    with ExitStack() as stack:
        both = [
            stack.enter_context(Server(model, {}, {}, command=[*command, *more]))
            for more in ([], ["--replicas", f"{options.replicas}"])
        ]
        what = f"{options.replicas} replicas, {options.tokens} tokens, {options.pairs} pairs"
        print(
            f"{options.model}, {what}; {about()}\n\n"
            "| streams | TTFT, ms | more | p99 | a token, ms | more | p99 | gaps p50, p99, ms | routed "
            "| tokens/s, ratio | CPU us a token | routed |\n|--:|" + "--:|" * 11
        )
        for streams in options.streams:
            found = Measured(), Measured()
            for turn in range(-1, options.pairs):  # the first warms up
                asked = bodies(streams, options.tokens, turn)
                for at in (0, 1) if turn % 2 else (1, 0):
                    asyncio.run(measure(both[at], asked, found[at] if turn >= 0 else Measured()))
            print(compared(streams, *found), flush=True)


if __name__ == "__main__":
    main()
