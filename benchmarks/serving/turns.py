"""Next turns computed ahead: the time that they save their conversation, and take from other clients.

    python -m benchmarks.serving.turns first [--model qwen05] [--pairs 30] [--thoughts 64] [--answer 192] [--words 30]
    python -m benchmarks.serving.turns others [--model qwen05] [--pairs 6] [--seconds 60] [--clients 2]

Two servers of one model, `--warm off` and `--warm on`, in turn; the chat template drops the thoughts of earlier
answers. first: the milliseconds to the first token of a second turn whose message has --words words, once the server
that warms has come to rest, and the ratio of each pair. others: a conversation goes on with pauses of 0.5 s while other
clients come at random times and read 32 tokens each; the 99th percentile of a token's time, the first one's included,
and its ratio in each pair, in which both servers get the same requests at the same times, and over all pairs together
(its interval is of 2,000 resamplings of the pairs).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.kernels.pairs import interval
from benchmarks.serving.http_client import Address, ask
from benchmarks.serving.reliability_parts import about
from benchmarks.serving.served import Server, quantile
from benchmarks.serving.serving import OPTIONS, path_of, prompt_of
from benchmarks.serving.traffic import NAME, WORDS

TEMPLATE = """\
{%- for message in messages %}{{ '<|im_start|>' ~ message.role ~ '\\n' }}
{{- message.content.split('</think>')[-1].strip() }}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"""
CLOSING = "\n</think>\n\n"
PAUSE_S = 0.5
Talk = list[dict[str, Any]]


def thinking(model: str, root: Path) -> Path:
    """The model with a template that drops thoughts."""
    folder = root / f"{model}-thinks"
    folder.mkdir(parents=True, exist_ok=True)
    for path in Path(path_of(model, root)).resolve().iterdir():
        if path.name != "chat_template.jinja" and not (folder / path.name).exists():
            (folder / path.name).symlink_to(path)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


class Client:
    """Asks one server for conversations whose answers are words behind thoughts of a fixed length."""

    def __init__(self, server: Server, thoughts: int, answer: int) -> None:
        self.server, self.address = server, server.address
        ids: set[int] = set()
        for text in (" ".join(WORDS), CLOSING):
            ids.update(asyncio.run(self.post("/tokenize", {"prompt": text, "add_special_tokens": False}))["tokens"])
        self.body = {
            "model": NAME,
            "ignore_eos": True,
            "allowed_token_ids": sorted(ids),
            "chat_template_kwargs": {"enable_thinking": True},
            "thinking_budget": thoughts,
            "max_tokens": thoughts + answer,
        }

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        reply = await ask(self.address, path, body)
        if reply.status != 200:
            raise SystemExit(f"the server answered {reply.status}: {reply.body[-300:]!r}")
        return reply.json()

    async def turn(self, talk: Talk, seed: int) -> Talk:
        """The conversation with the model's answer."""
        done = await self.post("/v1/chat/completions", self.body | {"messages": talk, "seed": seed})
        return [*talk, {"role": "assistant", "content": done["choices"][0]["message"]["content"]}]

    async def first_token(self, talk: Talk, seed: int) -> tuple[float, int]:
        """Milliseconds to the first token, and the prompt tokens that were computed."""
        asked = self.body | {"messages": talk, "seed": seed, "max_tokens": 1}
        began = time.perf_counter()
        done = await self.post("/v1/chat/completions", asked)
        seconds, usage = time.perf_counter() - began, done["usage"]
        return 1000 * seconds, usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]

    def rest(self) -> None:
        """Wait until no next turn is computed any more."""
        before, now = -1.0, self.server.metrics()["warm_tokens_total"]
        while before != now:
            time.sleep(PAUSE_S)
            before, now = now, self.server.metrics()["warm_tokens_total"]


def said(draws: random.Random, words: int) -> dict[str, Any]:
    return {"role": "user", "content": f"{draws.random()} {prompt_of(draws, words)}"}


def first(both: list[Client], arguments: argparse.Namespace) -> dict[str, Any]:
    times: tuple[list[float], ...] = ([], [])
    computed: tuple[list[float], ...] = ([], [])
    for pair in range(-1, arguments.pairs):  # the first warms the processes up
        for at in (0, 1) if pair % 2 else (1, 0):
            draws = random.Random(pair)
            talk = asyncio.run(both[at].turn([said(draws, arguments.words)], pair + 1))
            both[at].rest()
            took, tokens = asyncio.run(both[at].first_token([*talk, said(draws, arguments.words)], pair + 1))
            if pair >= 0:
                times[at].append(took)
                computed[at].append(tokens)
    for name, one, its in zip(("off", "on"), times, computed, strict=True):
        shown = "{:.1f} ms ({:.1f} to {:.1f}) to the first token".format(*interval(one))
        print(f"--warm {name}: {shown}, {interval(its)[0]:g} prompt tokens computed")
    print("on / off: {:.3f} ({:.3f} to {:.3f})".format(*interval([on / off for off, on in zip(*times, strict=True)])))
    return {"times": times, "computed": computed}


async def visitor(address: Address, at_s: float, body: dict[str, Any]) -> list[float]:
    """The milliseconds of each token of a client that comes after a time."""
    await asyncio.sleep(at_s)
    times = [0.0, *(await ask(address, "/v1/completions", body)).times]
    return [1000 * (after - before) for before, after in pairwise(times)]


async def talked(client: Client, draws: random.Random, until: float) -> None:
    talk: Talk = []
    while time.perf_counter() < until:
        talk = [] if len(talk) > 8 else talk
        talk = await client.turn([*talk, said(draws, 30)], draws.randrange(1 << 30))
        await asyncio.sleep(PAUSE_S)


async def shared(client: Client, arguments: argparse.Namespace, seed: int) -> list[float]:
    """The milliseconds of each token of the other clients."""
    draws, seconds = random.Random(seed), arguments.seconds
    count = max(1, round(seconds * arguments.clients / 4))
    body = {"model": NAME, "max_tokens": 32, "ignore_eos": True, "stream": True, "temperature": 0.0}
    others = [(draws.uniform(0, seconds), body | {"prompt": prompt_of(draws, 8)}) for _ in range(count)]
    talk = asyncio.create_task(talked(client, draws, time.perf_counter() + seconds))
    found = await asyncio.gather(*(visitor(client.address, *one) for one in others))
    await talk
    return [one for each in found for one in each]


def p99(runs: Sequence[list[float]]) -> float:
    return quantile([one for each in runs for one in each], 0.99)


def of_all(both: list[list[list[float]]]) -> tuple[float, float, float]:
    """The ratio of the p99s of all pairs' tokens, with the 95 % interval that resampled pairs give."""
    draws, pairs = random.Random(0), list(zip(*both, strict=True))
    ratios = []
    for _ in range(2000):
        off, on = zip(*draws.choices(pairs, k=len(pairs)), strict=True)
        ratios.append(p99(on) / p99(off))
    return p99(both[1]) / p99(both[0]), quantile(ratios, 0.025), quantile(ratios, 0.975)


def others(both: list[Client], arguments: argparse.Namespace) -> dict[str, Any]:
    times: list[list[list[float]]] = [[], []]
    for pair in range(arguments.pairs):
        for at in (0, 1) if pair % 2 else (1, 0):
            times[at].append(asyncio.run(shared(both[at], arguments, pair)))
            both[at].rest()
    each = [[p99([run]) for run in runs] for runs in times]
    for name, one in zip(("off", "on"), each, strict=True):
        print("--warm {}: p99 of a token {:.1f} ms ({:.1f} to {:.1f})".format(name, *interval(one)))
    print("on / off: {:.3f} ({:.3f} to {:.3f})".format(*interval([on / off for off, on in zip(*each, strict=True)])))
    print("on / off of all tokens' p99: {:.3f} ({:.3f} to {:.3f})".format(*of_all(times)))
    return {"times": times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("first", "others"))
    parser.add_argument("--model", choices=["qwen05", "tiny"], default="qwen05")
    parser.add_argument("--root", type=Path, default=Path("build/models"), help="of the models with random weights")
    parser.add_argument("--pairs", type=int, default=None, help="default: 30, of others 6")
    parser.add_argument("--thoughts", type=int, default=64)
    parser.add_argument("--answer", type=int, default=192)
    parser.add_argument("--words", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=2, help="other clients in four seconds")
    arguments = parser.parse_args()
    arguments.pairs = arguments.pairs or {"first": 30, "others": 6}[arguments.what]
    os.environ.setdefault("TOKENWRIGHT_CACHE", str((arguments.root / "cache").absolute()))
    model = thinking(arguments.model, arguments.root)
    with ExitStack() as stack:
        servers = [
            stack.enter_context(Server(model, OPTIONS[arguments.model], {"warm": warm})) for warm in ("off", "on")
        ]
        both = [Client(server, arguments.thoughts, arguments.answer) for server in servers]
        print(f"{arguments.model}, {arguments.pairs} pairs; {about()}", flush=True)
        found = {"first": first, "others": others}[arguments.what](both, arguments)
    out = Path(f"build/benchmarks/turns-{arguments.what}-{arguments.model}.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"about": about(), "figures": found}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
