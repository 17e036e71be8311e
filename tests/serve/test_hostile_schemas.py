"""Schemas and patterns that take long to read: the server answers each, and answers others meanwhile.

The server is a process of its own, so that one that hangs with the interpreter's lock does not hang its test.
"""

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import httpx2
import pytest

from tests.processes import running
from tests.serve.talking import make_talker

HANGS_S = 60.0  # what is mended takes seconds at most
MESSAGES = [{"role": "user", "content": "a"}]
DOUBLING = "^(a+)+$"
LETTERS = "a" * 40 + "!"

FOLLOWED: dict[str, Any] = {"enum": [LETTERS], "pattern": DOUBLING}
NAMED: dict[str, Any] = {"type": "object", "properties": {LETTERS: {}}, "patternProperties": {DOUBLING: {}}}


def form(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def function(schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


def of_chat(schema: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2, "response_format": form(schema)}


def of_tools(schema: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2, "tools": [function(schema)]}


def of_anthropic(schema: Any) -> tuple[str, dict[str, Any]]:
    tool = {"name": "f", "input_schema": {"type": "object", "properties": {"a": schema}}}
    return "/v1/messages", {"model": "m", "max_tokens": 2, "messages": MESSAGES, "tools": [tool]}


FORMS: dict[str, Callable[[Any], tuple[str, dict[str, Any]]]] = {
    "chat": of_chat,
    "tools": of_tools,
    "anthropic tools": of_anthropic,
    "anthropic": lambda schema: (
        "/v1/messages",
        {
            "model": "m",
            "max_tokens": 2,
            "messages": MESSAGES,
            "output_config": {"format": {"type": "json_schema", "schema": schema}},
        },
    ),
    "responses": lambda schema: (
        "/v1/responses",
        {
            "input": "a",
            "max_output_tokens": 2,
            "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}},
        },
    ),
    "completions": lambda schema: (
        "/v1/completions",
        {"prompt": "a", "max_tokens": 2, "response_format": form(schema)},
    ),
    "guided": lambda schema: ("/v1/completions", {"prompt": "a", "max_tokens": 2, "guided_json": schema}),
    "ollama": lambda schema: ("/api/chat", {"model": "m", "messages": MESSAGES, "format": schema, "stream": False}),
    "llama.cpp": lambda schema: ("/completion", {"prompt": "a", "n_predict": 2, "json_schema": schema}),
}
PAIR = {
    "$defs": {n: {"type": "object", "properties": {f"{n}{i}": {"type": "string"} for i in range(300)}} for n in "ab"}
}


def deep(levels: int) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        made = {"type": "object", "properties": {"a": made}}
    return made


SLOW: dict[str, Any] = {
    "oneOf 20 patterns": {"oneOf": [{"type": "string", "pattern": f"^(a|b)*a(a|b){{{n}}}{n}$"} for n in range(20)]},
    "oneOf 100 enums": {"oneOf": [{"enum": [f"value {n} {i}" for i in range(30)]} for n in range(100)]},
    "oneOf 100 references": PAIR | {"oneOf": [{"$ref": f"#/$defs/{'ab'[n % 2]}", "title": str(n)} for n in range(100)]},
    "excluded patterns": {"allOf": [{"not": {"pattern": f"(a|b)*a(a|b){{{n}}}$"}} for n in range(1, 40)]},
    "look-ahead": {"pattern": "^" + "".join(f"(?=.*a{{{n}}}b)" for n in range(1, 30)) + ".*$"},
    "letters of either case": {"pattern": "(?i:[\\0-\U0010ffff])" * 2000, "oneOf": [{"pattern": "("}]},
    "200 levels": deep(200),
    "400 levels": deep(400),
    "a great number": {"type": "integer", "multipleOf": 10**400, "minimum": 10**400},
    "multiples of nothing": {"type": "number", "multipleOf": 0},
    "a float beyond all": {"type": "number", "maximum": 1e308, "exclusiveMinimum": 1e308},
    "references that go round": {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
    },
    "a root that is its own part": {"allOf": [{"$ref": "#"}], "oneOf": [{"$ref": "#"}, {"not": {"$ref": "#"}}]},
}


class Server:
    """A server of a small model as a process; `slowest` is the longest time that /health took until `ask` returned."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.slowest = 0.0

    def ask(self, path: str, body: dict[str, Any]) -> httpx2.Response:
        """The answer to a request, while another connection asks for /health. Fails after HANGS_S."""
        over, self.slowest = threading.Event(), 0.0
        watching = threading.Thread(target=self._watch, args=(over,))
        watching.start()
        try:
            return httpx2.post(self.url + path, json=body, timeout=HANGS_S)
        finally:
            over.set()
            watching.join()

    def _watch(self, over: threading.Event) -> None:
        with httpx2.Client(base_url=self.url, timeout=HANGS_S) as client:
            while not over.wait(0.02):
                asked = time.perf_counter()
                try:
                    client.get("/health")
                finally:
                    self.slowest = max(self.slowest, time.perf_counter() - asked)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = make_talker(tmp_path_factory.mktemp("hostile schemas"))
    command = [sys.executable, "-m", "tokenwright", "serve", str(folder), "--port", "0", "--served-model-name", "m"]
    with running(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        url = next(found[0] for line in process.stderr if (found := re.search(r"http://127.0.0.1:\d+", line)))
        threading.Thread(target=process.stderr.read, daemon=True).start()
        sane = {"model": "m", "prompt": "a", "max_tokens": 2, "guided_choice": ["yes"]}  # starts a grammar worker
        assert httpx2.post(f"{url}/v1/completions", json=sane, timeout=HANGS_S).status_code == 200
        yield Server(url)


@pytest.mark.parametrize(("api", "schema"), [*zip(FORMS, cycle([FOLLOWED, NAMED]), strict=False)], ids=FORMS)
def test_a_pattern_is_never_run(server: Server, api: str, schema: dict[str, Any]) -> None:
    """228 bytes, which Python's `re` needs 2 ** 40 steps for, while it holds the interpreter's lock."""
    assert server.ask(*FORMS[api](schema)).status_code == 200
    assert server.slowest < HANGS_S / 6


@pytest.mark.parametrize(("name", "api"), [*zip(SLOW, cycle(["chat", "tools"]), strict=False)])
def test_a_schema_takes_no_time_of_others(server: Server, name: str, api: str) -> None:
    assert server.ask(*FORMS[api](SLOW[name])).status_code in (200, 400)
    assert server.slowest < HANGS_S / 6


def test_a_request_has_one_budget_for_all_its_tools(server: Server) -> None:
    """60 tools whose schemas each take all of a worker's time, twice: another client's chat does not wait for them."""
    slow = {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 999983}}}
    tools = [{"type": "function", "function": {"name": f"f{n}", "parameters": slow}} for n in range(60)]
    body = {"messages": MESSAGES, "max_tokens": 2, "tools": tools}
    alone = took(lambda: server.ask("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2}))
    both = [threading.Thread(target=server.ask, args=("/v1/chat/completions", body)) for _ in range(2)]
    for one in both:
        one.start()
    beside = took(lambda: server.ask("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2}))
    waited = took(lambda: [one.join() for one in both])
    assert beside + waited < 20 * 0.8, "less than a third of what 60 budgets are"
    assert beside < max(waited, 20 * alone), "and a chat without tools waits for none of it"


def took(ask: Callable[[], object]) -> float:
    asked = time.perf_counter()
    ask()
    return time.perf_counter() - asked
