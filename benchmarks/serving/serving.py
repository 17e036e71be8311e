"""The cost of the server: its throughput beside the engine's own, and its speed under load beside other servers'.

    python -m benchmarks.serving.serving pairs [--model qwen05] [--pairs 12] [--streams 16] [--tokens 64]
    python -m benchmarks.serving.serving load [--model qwen05] [--peers llama.cpp vllm] [--clients 1 8 32] [--kinds ...]
    python -m benchmarks.serving.serving load [--model qwen05] [NAME=HOST:PORT ...]
    python -m benchmarks.serving.serving threads [--model qwen05] [--pairs 8] [--clients 1 8] [--threads 1 2]
    python -m benchmarks.serving.serving token OLD_PYTHON NEW_PYTHON [--model qwen05] [--pairs 30] [--tokens 64]

pairs: the same texts through `tokenwright serve` as concurrent streams, and through `LLM.generate` in a process of its
own, in turn, from the first request to the last token; the output gives the ratio of each pair (its median with the
interval of `pairs.py`), and the microseconds that a streamed token costs beyond the engine's. Both have as many threads
as `serve` gives the model.

load: requests per second, tokens per second, and the time to the first token of clients that ask again as soon as they
have been answered, for short and long prompts, with a beginning that all share and without. It starts Tokenwright, and
the servers of --peers beside it (peers_setup.py installs them), and asks each in turn in each case; or those whose
addresses are given: any server with OpenAI's /v1/completions, with its model under the name that --served says.

threads: two servers with these numbers of threads, in turn: the tokens per second of clients that stream short texts,
with the ratio of each pair, and the times of /health meanwhile.

token: one client's stream from the servers of two installations in turn, by their interpreters: the milliseconds of a
token, from the first event to the last, and how many events a text has. Steps that the event loop finds together, and
tokens of one step that were drafted, share an event, so gaps between events say nothing about two servers; tokens do.

Models of published shapes with random weights are written under --root; qwen05 runs with int8 weights.
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
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.kernels.pairs import interval
from benchmarks.peers.peer_servers import SERVERS, PeerServer
from benchmarks.serving.http_client import Address, Reply, ask
from benchmarks.serving.reliability_parts import about, in_turns
from benchmarks.serving.served import Health, Server, quantile
from benchmarks.serving.traffic import NAME, WORDS

OPTIONS: Mapping[str, dict[str, Any]] = {
    "qwen05": {"weights": "int8", "pages": 2048},
    "stories": {"pages": 1024},
    "tiny": {"pages": 2048},
}
KINDS = ("short", "long", "short-shared", "long-shared")


def prompt_of(draws: random.Random, words: int) -> str:
    return " ".join(draws.choices(WORDS, k=words))


def bodies(count: int, tokens: int, seed: int) -> list[dict[str, Any]]:
    """Greedy requests of different short prompts; no prompt of another seed begins like them."""
    draws = random.Random(seed)
    ask_for = {"model": NAME, "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, "stream": True}
    return [ask_for | {"prompt": f"{draws.random()} {prompt_of(draws, 8)}"} for _ in range(count)]


class Direct:
    """The engine in a process of its own, asked by lines of JSON."""

    def __init__(self, model: str, llm: Mapping[str, Any]) -> None:
        asked = json.dumps({"model": model, "llm": dict(llm)})
        command = [sys.executable, "-m", "benchmarks.serving.serving", "direct", asked]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def seconds(self, each: Sequence[Mapping[str, Any]]) -> float:
        """The time of all texts together."""
        assert self._process.stdin is not None and self._process.stdout is not None, "pipes were asked for"
        self._process.stdin.write(json.dumps([[one["prompt"], one["max_tokens"]] for one in each]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the engine ended with code {self._process.wait()}")
        return float(line)

    def __enter__(self) -> Direct:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()  # closing its stdin ends it


def direct(asked: Mapping[str, Any]) -> None:
    """The main function of `Direct`'s process."""
    from tokenwright import SamplingParams
    from tokenwright.cli.options.shared import loader

    with loader(asked["model"], **asked["llm"])(lambda *_: None) as llm:
        for line in sys.stdin:
            each = json.loads(line)
            params = [SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True) for _, tokens in each]
            began = time.perf_counter()
            done = llm.generate([prompt for prompt, _ in each], params)
            seconds = time.perf_counter() - began
            assert [len(one.token_ids) for one in done] == [tokens for _, tokens in each], "no text ends early"
            print(seconds, flush=True)


async def streamed(address: Address, each: Sequence[Mapping[str, Any]]) -> float:
    """The time of all texts together through the server, as concurrent streams."""
    began = time.perf_counter()
    replies = await asyncio.gather(*(ask(address, "/v1/completions", one) for one in each))
    seconds = time.perf_counter() - began
    for reply in replies:
        if reply.status != 200 or not reply.body.endswith(b"data: [DONE]\n\n"):
            raise SystemExit(f"the server answered {reply.status}: {reply.body[-300:]!r}")
    return seconds


def pairs(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure in turn; print the ratio and the microseconds of a streamed token."""
    model, llm = path_of(arguments.model, arguments.root), OPTIONS[arguments.model]
    through: list[float] = []
    own: list[float] = []
    with Server(model, llm, {}) as server, Direct(model, llm) as engine:
        for turn in range(-1, arguments.pairs):  # the first warms up
            asked = bodies(arguments.streams, arguments.tokens, turn)
            measures = [
                (through, lambda asked=asked: asyncio.run(streamed(server.address, asked))),
                (own, lambda asked=asked: engine.seconds(asked)),
            ]
            for found, measure in measures if turn % 2 else measures[::-1]:
                seconds = measure()
                if turn >= 0:
                    found.append(seconds)
    tokens = arguments.streams * arguments.tokens
    ratios = [b / a for a, b in zip(through, own, strict=True)]
    beyond = [1e6 * (a - b) / tokens for a, b in zip(through, own, strict=True)]
    what = f"{arguments.streams} streams of {arguments.tokens} tokens"
    print(f"{arguments.model}, {what}, {arguments.pairs} pairs; {about()}")
    for name, values, form in (
        ("through the server, tokens/s", [tokens / one for one in through], ",.1f"),
        ("the engine alone, tokens/s", [tokens / one for one in own], ",.1f"),
        ("server / engine", ratios, ".3f"),
        ("microseconds a streamed token, all", [1e6 * one / tokens for one in through], ",.1f"),
        ("microseconds beyond the engine's", beyond, ",.1f"),
    ):
        middle, low, high = interval(values)
        print(f"{name:>36}: {middle:{form}} ({low:{form}} to {high:{form}})")
    return {"through": through, "engine": own, "tokens": tokens}


@dataclass
class Cell:
    """The measurements of one case on one server."""

    seconds: float = 0.0
    requests: int = 0
    tokens: int = 0
    failures: list[str] = field(default_factory=list)
    first: list[float] = field(default_factory=list)  # seconds to the first token

    def add(self, reply: Reply | Exception) -> None:
        if isinstance(reply, Exception) or reply.status != 200 or not reply.times:
            self.failures.append(repr(reply)[:200])
            return
        events = reply.events()
        usage = [event["usage"] for event in events if event.get("usage")]
        self.requests += 1
        written = sum(bool(event["choices"][0]["text"]) for event in events if event.get("choices"))
        self.tokens += int(usage[-1]["completion_tokens"]) if usage else written
        self.first.append(reply.times[0])

    def row(self) -> str:
        rates = f"{self.requests / self.seconds:.2f} | {self.tokens / self.seconds:,.1f}"
        p50, p99 = (1000 * quantile(self.first, share) for share in (0.5, 0.99))
        return f"{rates} | {p50:,.0f} | {p99:,.0f} | {len(self.failures)}"


def load_bodies(kind: str, count: int, tokens: int, served: str, seed: int) -> list[dict[str, Any]]:
    """The requests of a case. A short prompt has 16 words, a long one 256; a shared beginning is 3/4 of it."""
    draws = random.Random(seed)
    words = 256 if kind.startswith("long") else 16
    same = prompt_of(random.Random(f"{kind}"), 3 * words // 4) if kind.endswith("shared") else ""
    more = {"model": served, "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, "stream": True}
    more["stream_options"] = {"include_usage": True}
    own = words // 4 if same else words
    prompts = [f"{same} {draws.random()} {prompt_of(draws, own)}".strip() for _ in range(count)]
    return [more | {"prompt": prompt} for prompt in prompts]


async def case(address: Address, each: Sequence[Mapping[str, Any]], clients: int) -> Cell:
    """Ask for all, with `clients` clients."""
    cell, began = Cell(), time.perf_counter()
    trials = [lambda one=one: ask(address, "/v1/completions", one) for one in each]
    for reply in await in_turns(trials, clients):
        cell.add(reply)
    cell.seconds = time.perf_counter() - began
    return cell


def load(arguments: argparse.Namespace) -> dict[str, Any]:
    """Ask each server in turn in each case; print a row for each."""
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        servers = dict(parsed(one) for one in arguments.servers)
        if not servers:
            model = path_of(arguments.model, arguments.root)
            options = {"served_model_name": [arguments.served]}
            servers["tokenwright"] = stack.enter_context(Server(model, OPTIONS[arguments.model], options)).address
        for peer in arguments.peers:
            beside = PeerServer.of_shape(peer, arguments.model, arguments.served, arguments.root)
            servers[peer] = stack.enter_context(beside).address
        print(f"{arguments.model}; {about()}")
        print("| prompts | clients | server | requests/s | tokens/s | TTFT p50, ms | p99, ms | failures |")
        print("|---|---:|---|---:|---:|---:|---:|---:|", flush=True)
        for kind in arguments.kinds:
            for clients in arguments.clients:
                count = max(6, arguments.each * clients)
                for name, address in servers.items():
                    seed = time.time_ns()  # a server that has run before knows no prompt
                    asked = load_bodies(kind, count + 1, arguments.tokens, arguments.served, seed)
                    asyncio.run(case(address, asked[:1], 1))  # a shared beginning is in the cache
                    cell = asyncio.run(case(address, asked[1:], clients))
                    print(f"| {kind} | {clients} | {name} | {cell.row()} |", flush=True)
                    found[f"{kind} {clients} {name}"] = vars(cell)
    return found


def threads(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the servers in turn; print tokens per second, their ratios, and the times of /health."""
    model, found = path_of(arguments.model, arguments.root), dict[str, Any]()
    with ExitStack() as stack:
        both = [stack.enter_context(Server(model, OPTIONS[arguments.model], {}, count)) for count in arguments.threads]
        print(f"{arguments.model}, {arguments.tokens} tokens, {arguments.pairs} pairs; {about()}")
        for clients in arguments.clients:
            rates: tuple[list[float], ...] = ([], [])
            health: tuple[list[float], ...] = ([], [])
            for turn in range(-1, arguments.pairs):  # the first warms up
                for at in (0, 1) if turn % 2 else (1, 0):
                    asked = bodies(clients, arguments.tokens, turn)
                    with Health(both[at]) as asking:
                        seconds = asyncio.run(streamed(both[at].address, asked))
                    if turn >= 0:
                        rates[at].append(clients * arguments.tokens / seconds)
                        health[at].extend(asking.seconds)
            ratios = [new / old for old, new in zip(*rates, strict=True)]
            for count, one, times in zip(arguments.threads, rates, health, strict=True):
                middle, low, high = interval(one)
                p50, p99 = (1000 * quantile(times, share) for share in (0.5, 0.99))
                what = f"{clients} clients, {count} threads"
                print(
                    f"{what}: {middle:,.1f} ({low:,.1f} to {high:,.1f}) tokens/s; /health {p50:.1f}, p99 {p99:.1f} ms"
                )
            print("{} clients, ratio: {:.3f} ({:.3f} to {:.3f})".format(clients, *interval(ratios)), flush=True)
            found[f"{clients}"] = {"rates": rates, "health": health}
    return found


async def token_times(address: Address, asked: Mapping[str, Any]) -> tuple[float, float]:
    """The milliseconds of a token after the first event, and the number of events."""
    reply = await ask(address, "/v1/completions", {**asked, "stream_options": {"include_usage": True}})
    events = reply.events() if reply.status == 200 else []
    if not events or not events[-1].get("usage"):
        raise SystemExit(f"the server answered {reply.status}: {reply.body[-300:]!r}")
    texts = sum(bool(event["choices"]) for event in events)
    tokens = events[-1]["usage"]["completion_tokens"]
    return 1000 * (reply.times[-1] - reply.times[0]) / (tokens - 1), texts


def token(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the servers of two installations in turn; print the times of a token, and the ratio."""
    model, found = path_of(arguments.model, arguments.root), dict[str, Any]()
    options = ["serve", model, "--port", "0", "--served-model-name", NAME]
    with ExitStack() as stack:
        both = [
            stack.enter_context(Server(model, {}, {}, command=[python, "-m", "tokenwright", *options]))
            for python in (arguments.old, arguments.new)
        ]
        times: tuple[list[float], ...] = ([], [])
        events: tuple[list[float], ...] = ([], [])
        for turn in range(-1, arguments.pairs):  # the first warms up
            for at in (0, 1) if turn % 2 else (1, 0):
                [asked] = bodies(1, arguments.tokens, turn)
                measured = asyncio.run(token_times(both[at].address, asked))
                if turn >= 0:
                    times[at].append(measured[0])
                    events[at].append(measured[1])
        print(f"{arguments.model}, {arguments.tokens} tokens, {arguments.pairs} pairs; {about()}")
        for name, one, its in zip(("old", "new"), times, events, strict=True):
            shown = "{:.3f} ({:.3f} to {:.3f}) ms a token".format(*interval(one))
            print(f"{name}: {shown}; {interval(its)[0]:g} events a text")
            found[name] = {"times": one, "events": its}
        ratios = [new / old for old, new in zip(*times, strict=True)]
        print("new / old: {:.3f} ({:.3f} to {:.3f})".format(*interval(ratios)))
    return found


def parsed(one: str) -> tuple[str, Address]:
    name, _, where = one.rpartition("=")
    host, _, port = where.rpartition(":")
    if not port.isdigit():
        raise SystemExit(f"{one!r} is no server; give NAME=HOST:PORT, such as vllm=127.0.0.1:8001")
    return name or where, (host or "127.0.0.1", int(port))


def path_of(model: str, root: Path) -> str:
    """The model that ships inside, or the folder of a published shape."""
    if model == "stories":
        return model
    from tokenwright.bench import shapes

    return str(shapes.ready(model, root))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    both = argparse.ArgumentParser(add_help=False)
    both.add_argument("--model", choices=list(OPTIONS), default="qwen05")
    both.add_argument("--root", type=Path, default=Path("build/models"), help="of the models with random weights")
    both.add_argument("--tokens", type=int, default=64, help="of each text")
    both.add_argument("--out", type=Path, default=None, help="default: build/benchmarks/serving-COMMAND-MODEL.json")
    of_pairs = commands.add_parser("pairs", parents=[both])
    of_pairs.add_argument("--pairs", type=int, default=12)
    of_pairs.add_argument("--streams", type=int, default=16)
    of_load = commands.add_parser("load", parents=[both])
    of_load.add_argument("servers", nargs="*", metavar="NAME=HOST:PORT")
    of_load.add_argument("--peers", nargs="+", choices=list(SERVERS), default=[], help="to start beside Tokenwright")
    of_load.add_argument("--served", default=NAME, help="the name under which they serve the model")
    of_load.add_argument("--clients", nargs="+", type=int, default=[1, 8, 32])
    of_load.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    of_load.add_argument("--each", type=int, default=3, help="requests of a client")
    of_threads = commands.add_parser("threads", parents=[both])
    of_threads.add_argument("--pairs", type=int, default=8)
    of_threads.add_argument("--clients", nargs="+", type=int, default=[1, 8])
    of_threads.add_argument("--threads", nargs=2, type=int, default=[1, 2])
    of_token = commands.add_parser("token", parents=[both])
    of_token.add_argument("old", metavar="OLD_PYTHON")
    of_token.add_argument("new", metavar="NEW_PYTHON")
    of_token.add_argument("--pairs", type=int, default=30)
    arguments = parser.parse_args()
    if min(arguments.tokens, *(vars(arguments).get(name, 1) for name in ("pairs", "streams", "each"))) < 1:
        parser.error("give numbers above 0")
    return arguments


def main() -> None:
    if sys.argv[1:2] == ["direct"]:
        direct(json.loads(sys.argv[2]))
        return
    arguments = parse()
    os.environ.setdefault("TOKENWRIGHT_CACHE", str((arguments.root / "cache").absolute()))
    found = {"pairs": pairs, "load": load, "threads": threads, "token": token}[arguments.command](arguments)
    out = arguments.out or Path(f"build/benchmarks/serving-{arguments.command}-{arguments.model}.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"about": about(), "figures": found}, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
