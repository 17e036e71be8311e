"""The same GGUF files in llama.cpp and in Tokenwright: speed, in turn in one run, and the tokens that both choose.

    python -m benchmarks.peers.gguf_peers --python PEER_VENV/bin/python FILE.gguf ... [--rounds 5] [--threads 2]
    python -m benchmarks.peers.gguf_peers --python PEER_VENV/bin/python FILE.gguf ... --turns 30 [--length 16000]

PEER_VENV has llama-cpp-python (`peers_setup.py llama.cpp` makes one; `adapters/to_gguf.py` writes random models in
llama.cpp's own types). Both engines keep a file loaded, each in a process of its own, and have a turn in each round
while the other waits. A measure is that of `peers.py`: decode of 64 tokens after a prompt of 512, prefill of 512. The
output gives the medians, and the ratio of both turns of a round: median, lowest and highest.

Then both read the same random texts. A position qualifies if llama.cpp's most probable token is at least MARGIN nats
before the next one. The output gives the share of positions that qualify, and that of them at which our most
probable token is llama.cpp's. Run nothing else meanwhile; `--rounds 0` compares only the tokens.

--turns: instead of all that, a conversation over the servers of both, which ends at --length tokens. Each turn asks for
one token after all earlier words and as many new ones, so that what llama.cpp holds is the beginning of the next
prompt: a hybrid's state cannot be cut. The last turn is then asked with other words at its end. The output has the time
to the first token, and the tokens that we have computed beyond the new ones, beside the tokens between kept states.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.peers.peer_servers import PeerServer, llama_cpp
from benchmarks.peers.peers import OURS, Contender, Process
from benchmarks.serving.http_client import Address, ask
from benchmarks.serving.served import Server
from benchmarks.serving.traffic import NAME, WORDS
from tokenwright.bench.limits import processor
from tokenwright.bench.measures import MEASURES, Measure, prompts
from tokenwright.checkpoints.gguf.header import read_gguf

HERE = Path(__file__).parent
MARGIN = 0.1  # nats
LENGTH = 256  # tokens of a text that both read
NAMES = ("decode", "prefill")
SHORT = [word for word in WORDS if word != "mat"]  # each a token of the tokenizer in `bench/shapes.py`
REST_S = 0.5  # between two turns: the other engine's threads may still spin


@dataclass(frozen=True)
class Reader(Contender):
    """An engine that reads GGUF files as they are, with the Python of its environment."""

    python: str = sys.executable

    def command(self, root: Path) -> list[str]:  # noqa: ARG002  (an adapter is beside this file)
        return [self.python, str(HERE / "adapters" / f"run_{self.engine.replace('.', '_')}.py")]


def turn(process: Process, name: str, measure: Measure, vocab_size: int, round_: int) -> float:
    """The figure of one measure."""
    time.sleep(REST_S)
    answer = process.ask("run", prompts=prompts(measure, vocab_size, name, round_), tokens=measure.tokens)
    return measure.figure(answer["seconds"])


def speeds(processes: Mapping[str, Process], vocab_size: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """For each measure and engine the figures of the rounds; the first to have its turn changes from round to round."""
    for process in processes.values():
        turn(process, "warm-up", MEASURES["decode"], vocab_size, 0)
    found: dict[str, dict[str, list[float]]] = {name: {one: [] for one in processes} for name in NAMES}
    for round_ in range(rounds):
        order = list(processes)[:: 1 if round_ % 2 else -1]
        for name in NAMES:
            for one in order:
                found[name][one].append(turn(processes[one], name, MEASURES[name], vocab_size, round_))
    return found


def agreement(processes: Mapping[str, Process], vocab_size: int, texts: int) -> tuple[int, int, int]:
    """The number of positions, of qualifying ones, and of qualifying ones at which both choose the same token."""
    rng = random.Random(0)
    read = [[rng.randrange(5, vocab_size) for _ in range(LENGTH)] for _ in range(texts)]
    ours, theirs = (processes[one].ask("picks", prompts=read) for one in processes)
    total = qualified = same = 0
    for mine, picks, margins in zip(ours["ids"], theirs["ids"], theirs["margins"], strict=True):
        total += len(picks)
        obliges = [margin >= MARGIN for margin in margins]
        qualified += sum(obliges)
        same += sum(a == b for a, b, one in zip(mine, picks, obliges, strict=True) if one)
    return total, qualified, same


def compare(file: Path, python: str, rounds: int, threads: int, texts: int, logs: Path) -> None:
    engines = [Reader(OURS, "gguf", 0), Reader("llama.cpp", "gguf", 0, python)]
    vocab_size = read_gguf(file).tensors["token_embd.weight"].shape[0]
    length = max(measure.prompt + measure.tokens for measure in MEASURES.values())
    made = [Process(one, file, threads, logs / f"{file.stem}-{one.engine}.log") for one in engines]
    processes = {one.engine: process for one, process in zip(engines, made, strict=True)}
    with made[0], made[1]:
        for process in made:
            process.ask("load", model=str(file), format="gguf", threads=threads, streams=1, length=length)
        print(f"\n{file.name}, {file.stat().st_size / 1e6:,.0f} MB")
        for name, found in speeds(processes, vocab_size, rounds).items() if rounds else ():
            ours, theirs = found.values()
            ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
            print(
                f"{name:>8}: {median(ours):8,.1f} tok/s, llama.cpp {median(theirs):8,.1f}; "
                f"{median(ratios):.2f} times ({min(ratios):.2f} to {max(ratios):.2f})",
                flush=True,
            )
        total, qualified, same = agreement(processes, vocab_size, texts)
        print(
            f"{'tokens':>8}: {qualified:,} of {total:,} positions qualify ({qualified / total:.1%}); the same token at "
            f"{same:,} ({same / max(1, qualified):.1%})",
            flush=True,
        )


@dataclass(frozen=True)
class Asked:
    """A server's reply to a prompt. cached: tokens of the prompt that it had; 0 where it does not tell."""

    seconds: float
    tokens: int
    cached: int


def first_token(address: Address, prompt: str) -> Asked:
    """Ask for one token of a stream."""
    more = {"max_tokens": 1, "temperature": 0.0, "stream": True, "stream_options": {"include_usage": True}}
    reply = asyncio.run(ask(address, "/v1/completions", {"model": NAME, "prompt": prompt, **more}))
    if reply.status != 200 or not reply.times:
        raise SystemExit(f"the server answered {reply.status}: {reply.body[-300:]!r}")
    usage: dict[str, Any] = next((event["usage"] for event in reply.events() if event.get("usage")), {})
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Asked(reply.times[0], usage.get("prompt_tokens", 0), cached)


def state_interval(file: Path) -> int:
    """The tokens between two states that stay cached; 0 for a model without states."""
    said = subprocess.run(
        [sys.executable, "-m", "tokenwright", "plan", file, "--json"], check=True, capture_output=True
    ).stdout
    states = json.loads(said)["states"]
    return states["every"] if states else 0


def converse(file: Path, python: str, turns: int, length: int, logs: Path) -> None:
    """Hold the conversation with both servers in turn, and print a line for each turn."""
    draws, words = random.Random(0), list[str]()
    log, every = logs / f"{file.stem}-server.log", state_interval(file)
    context, pages = length + length // 8, length // 8  # tokens; pages of 16 tokens
    with (
        Server(file, {"pages": pages}, {"served_model_name": [NAME]}) as ours,
        PeerServer(
            "llama.cpp", lambda port: llama_cpp(Path(python).parent, file.absolute(), NAME, port, context), log
        ) as theirs,
    ):
        print(f"\n{file.name}, {turns} turns to {length:,} tokens; a state stays after every {every:,}", flush=True)
        known = 0
        for turn in range(1, turns + 2):
            if turn <= turns:
                words += draws.choices(SHORT, k=turn * length // turns - len(words))
            else:
                words[-length // turns :] = draws.choices(SHORT, k=length // turns)
            prompt = " ".join(words)
            addresses = [ours.address, theirs.address]
            found = {one: first_token(one, prompt) for one in addresses[:: 1 if turn % 2 else -1]}
            mine, other = (found[one] for one in addresses)
            fresh = mine.tokens - known if turn <= turns else length // turns
            beyond = mine.tokens - mine.cached - fresh
            print(
                f"{f'turn {turn}' if turn <= turns else 'again':>8}: {mine.tokens:6,} tokens, {fresh:,} new, "
                f"{beyond:,} more computed; {mine.seconds:7.2f} s, llama.cpp {other.seconds:7.2f}; "
                f"{other.seconds / mine.seconds:.2f} times",
                flush=True,
            )
            known = mine.tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--python", required=True, help="the Python of llama.cpp's environment")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--turns", type=int, default=0, help="of a conversation; 0: none")
    parser.add_argument("--length", type=int, default=16000, help="tokens at the end of the conversation")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    arguments = parser.parse_args()
    cpus = sorted(os.sched_getaffinity(0))
    if not 1 <= arguments.threads <= len(cpus) or arguments.rounds < 0 or arguments.texts < 1:
        parser.error(
            f"no fewer rounds than 0, a text or more, and 1 to {len(cpus)} threads, since so many CPUs are here"
        )
    arguments.out.mkdir(parents=True, exist_ok=True)
    os.sched_setaffinity(0, cpus[: arguments.threads])  # the engines inherit it
    print(
        f"{processor()}, {arguments.threads} threads, {arguments.rounds} rounds, load {os.getloadavg()[0]:.2f} before"
    )
    for file in arguments.files:
        if arguments.turns:
            converse(file, arguments.python, arguments.turns, arguments.length, arguments.out)
        else:
            compare(file, arguments.python, arguments.rounds, arguments.threads, arguments.texts, arguments.out)


if __name__ == "__main__":
    main()
