"""Mixed requests of one seed, and what a reply to one says, streamed or not.

Requests differ in API (completions, chat), length, sampling, stop strings, number of texts and shared beginnings. A
text depends only on its request, so `told` of a reply must be the same however busy the server is.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.kernels import random_model
from benchmarks.serving.http_client import Address, Reply, ask

NAME = "tiny"  # of the model
CONTEXT = 2048
MODEL = random_model.CONFIG | {"max_position_embeddings": CONTEXT}
TEMPLATE = """\
{%- for m in messages %}<s>{{ m.role }}
{{ m.content }}
{% endfor %}{% if add_generation_prompt %}<s>assistant
{% endif %}"""
WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "nine", "red", "birds", "near", "old", "stones")
SHARED = " ".join(WORDS[at % len(WORDS)] for at in range(40))  # how half of the prompts begin


def write_model(folder: Path) -> Path:
    """Write a small random model that chats, with a context of CONTEXT tokens; a token of it is a byte."""
    random_model.write_model(folder, MODEL)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


@dataclass(frozen=True)
class Wanted:
    """A request, and how its reply is asked for."""

    path: str
    body: Mapping[str, Any]
    stream: bool = False

    def whole(self) -> Wanted:
        """The same, not streamed."""
        return replace(self, stream=False)

    def sent(self) -> dict[str, Any]:
        """The body to send."""
        return {**self.body, "stream": True} if self.stream else dict(self.body)


Told = tuple[tuple[str, str], ...]  # of each text: what it says and why it ended


def fixed(tokens: int, stream: bool = False, prompt: str = "One day") -> Wanted:
    """A greedy request of `tokens` tokens."""
    body = {"model": NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    return Wanted("/v1/completions", body, stream)


def mixed(count: int, seed: int, longest: int) -> list[Wanted]:
    """Requests of prompts and texts that together have at most `longest` tokens; every 16th has nearly as many."""
    draws = random.Random(seed)
    return [_one(draws, longest, long=at % 16 == 7) for at in range(count)]


def _one(draws: random.Random, longest: int, long: bool) -> Wanted:
    shared = SHARED[: longest // 4] + " " if draws.random() < 0.5 else ""
    words = longest if long else draws.randrange(1, max(2, longest // 24))
    prompt = (shared + " ".join(draws.choices(WORDS, k=words)))[: longest // 2 - 32]
    body: dict[str, Any] = {"model": NAME, "max_tokens": longest // 2 if long else draws.randrange(1, 33)}
    body["seed"] = draws.randrange(2**31)
    body["temperature"] = draws.choice([0.0, 0.7, 1.3])
    body["ignore_eos"] = long or draws.random() < 0.5
    body["return_timings"] = True
    kind = draws.randrange(6)
    if kind == 0:
        body["stop"] = [draws.choice("aeiou"), " th"]
    elif kind == 1 and not long:
        body |= {"n": 2, "temperature": 0.9}
    elif kind == 2:
        body |= {"top_p": 0.8, "frequency_penalty": 0.5}
    if draws.random() < 0.5:
        return Wanted("/v1/completions", body | {"prompt": prompt}, draws.random() < 0.5)
    body["messages"] = [{"role": "user", "content": prompt}]
    return Wanted("/v1/chat/completions", body, draws.random() < 0.5)


def told(reply: Reply, stream: bool) -> Told:
    """The texts of a reply. Raises ValueError for one that is not a whole 200."""
    if reply.status != 200:
        raise ValueError(f"status {reply.status}: {reply.body[:300]!r}")
    if stream and not reply.body.endswith(b"data: [DONE]\n\n"):
        raise ValueError(f"a stream without its end: {reply.body[-300:]!r}")
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    for event in reply.events() if stream else [reply.json()]:
        if "error" in event:
            raise ValueError(str(event["error"]))
        for choice in event["choices"]:
            said = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
            at = choice["index"]
            texts[at] = texts.get(at, "") + (said.get("content") or "")
            ends[at] = choice["finish_reason"] or ends.get(at, "")
    if not texts or "" in ends.values():
        raise ValueError("a text without its end")
    return tuple((texts[at], ends[at]) for at in sorted(texts))


async def answer(address: Address, wanted: Wanted) -> Told:
    """Ask for a text. Raises ValueError or ConnectionError where it does not come whole."""
    return told(await ask(address, wanted.path, wanted.sent()), wanted.stream)
