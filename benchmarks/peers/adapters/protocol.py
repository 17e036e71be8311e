"""An engine in a process of its own: requests as lines of JSON on stdin, answers on stdout. Standard library only.

    {"do": "load", "model": PATH, "format": NAME, "threads": 2, "streams": 16, "length": 640}   ->  {"load_s": 1.2}
    {"do": "run", "prompts": [[5, 17, ...], ...], "tokens": 64}   ->  {"ids": [[...], ...], "seconds": [[...], ...]}
    {"do": "picks", "prompts": [[5, 17, ...], ...]}               ->  {"ids": [[...], ...], "margins": [[...], ...]}
    {"do": "rss"}                                                 ->  {"rss_bytes": 123456789}

`run` generates exactly `tokens` tokens after each prompt, all prompts (of one length) in one batch, greedily and past
any end token; `seconds` are from the request to each token. So it measures prefill (one token), decode and many streams
alike. `picks` (of the engines that read GGUF files) gives, after each token of a text but the last, the most probable
token and by how many nats it is before the next one. The output of engines goes to stderr. After an answer {"error":
TEXT} the process ends.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass
class Written:
    """The tokens of a run so far: each stream's ids, and their seconds since `start`."""

    streams: int
    ids: list[list[int]] = field(default_factory=list)
    seconds: list[list[float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ids = [[] for _ in range(self.streams)]
        self.seconds = [[] for _ in range(self.streams)]
        self.start()

    def start(self) -> None:
        """Start the clock: the request is made now."""
        self._began = time.perf_counter()

    def add(self, stream: int, *ids: int) -> None:
        now = time.perf_counter() - self._began
        self.ids[stream].extend(int(one) for one in ids)
        self.seconds[stream].extend(now for _ in ids)

    def step(self, ids: list[int]) -> None:
        """Append one token to every stream."""
        for stream, one in enumerate(ids):
            self.add(stream, one)


@dataclass(frozen=True)
class Job:
    """The model and options to load. length: the most tokens of a stream, its prompt included."""

    model: Path
    format: str
    threads: int
    streams: int
    length: int


class Engine(Protocol):
    def run(self, prompts: list[list[int]], tokens: int) -> Written: ...


def serve(load: Callable[[Job], Engine]) -> None:
    """Answer requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries print to stdout; send that to stderr, and answers to the real stdout
    engine: Engine | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["do"] == "load":
                began = time.perf_counter()
                engine = load(job(request))
                answer: dict[str, Any] = {"load_s": time.perf_counter() - began}
            elif request["do"] == "run":
                assert engine is not None, "run before load"
                answer = run(engine, request["prompts"], request["tokens"])
            elif request["do"] == "picks":
                answer = picks(engine, request["prompts"])
            else:
                answer = {"rss_bytes": peak_rss()}
        except Exception as error:  # the answer reports it to the other process
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if "error" in answer:
            raise SystemExit(1)


def job(request: dict[str, Any]) -> Job:
    numbers = (int(request[name]) for name in ("threads", "streams", "length"))
    return Job(Path(request["model"]), request["format"], *numbers)


def run(engine: Engine, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    written = engine.run(prompts, tokens)
    short = [len(ids) for ids in written.ids if len(ids) != tokens]
    if short:
        raise RuntimeError(f"{tokens} tokens were asked of every stream, and some have {short}")
    return {"ids": written.ids, "seconds": written.seconds}


def picks(engine: Any, prompts: list[list[int]]) -> dict[str, Any]:
    """Ask an engine that has `picks(ids) -> [(id, margin), ...]`."""
    found = [engine.picks(ids) for ids in prompts]
    return {name: [[one[at] for one in text] for text in found] for at, name in enumerate(("ids", "margins"))}


def peak_rss() -> int:
    """The peak resident memory of this process in bytes."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    [line] = [line for line in status.splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024
