"""Numbers that are none, or too large: in every numeric field of every route, in free objects, paths and queries.

Each gets an answer that is no fault of the server, and after them every route that only tells answers as before.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.engines import until
from tests.serve.live import HANGS, Live, live, make_chat_model, settled
from tests.serve.many import Many, many
from tokenwright.serve.app import Served

NUMBERS = [
    *("NaN", "Infinity", "-Infinity", "1e400", "-1e400", "1e-400", "-0.0", "1e308", "5e-324"),
    *("1" + "0" * 400, "-1" + "0" * 400, "9" * 5_000, "0." + "9" * 20_000, str(2**63), str(-(2**63) - 1), str(2**64)),
]
IN_A_QUERY = ["NaN", "inf", "1e400", "-1", "9" * 400, "9" * 5_000, "1_0", "0x10", "\u0665", ""]
HELLO = [{"role": "user", "content": "a"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
SANE: dict[str, dict[str, Any]] = {  # what a path needs
    "messages": {"messages": HELLO},
    "prompt": {"prompt": "a"},
    "input": {"input": "a"},
    "content": {"content": "a"},
}
# Objects that are the client's own, with a number inside.
FREE = [
    ("/v1/chat/completions", {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": 0}}}),
    ("/v1/chat/completions", {"tools": [{"type": "function", "function": {"name": "f", "parameters": 0}}]}),
    ("/v1/chat/completions", {"chat_template_kwargs": 0}),
    ("/v1/chat/completions", {"logit_bias": 0}),
    ("/v1/messages", {"tools": [{"name": "f", "input_schema": 0}]}),
    ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "s", "schema": 0}}}),
    ("/api/chat", {"format": 0}),
    ("/api/chat", {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 0}}]}]}),
]
INSIDE = ('{"type": "number", "maximum": %s}', '{"enum": [%s]}', '{"minLength": %s}', '{"a": %s}', '{"1": %s}', "%s")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder: Path = make_chat_model(tmp_path_factory.mktemp("numbers") / "model")
    with live(folder, pages=256, served=Served(["tiny"])) as running:
        yield running
        CLIENT.close()
        settled(running)


def numeric(schema: dict[str, Any], document: dict[str, Any], seen: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The paths of a schema's numeric fields; an entry of a list has the name 0."""
    if (name := schema.get("$ref", "").rpartition("/")[2]) and name not in seen:
        yield from numeric(document["components"]["schemas"][name], document, (*seen, name))
    if schema.get("type") in ("integer", "number"):
        yield ()
    for one in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from numeric(one, document, seen)
    for field, one in schema.get("properties", {}).items():
        yield from ((field, *rest) for rest in numeric(one, document, seen))
    if isinstance(schema.get("items"), dict):
        yield from (("0", *rest) for rest in numeric(schema["items"], document, seen))


def with_number(body: dict[str, Any], path: tuple[str, ...]) -> Any:
    """A body with a mark in the place of a number at a path."""
    if not path:
        return "MARK"
    first, rest = path[0], path[1:]
    if first == "0":
        return [with_number({}, rest)]
    inner = body.get(first)
    return body | {first: with_number(inner if isinstance(inner, dict) else {}, rest)}


def bodies_of(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The paths of routes, and bodies with a mark in the place of a number."""
    for path, operations in document["paths"].items():
        if "requestBody" not in operations.get("post", {}):
            continue
        schema = operations["post"]["requestBody"]["content"]["application/json"]["schema"]
        fields = set(numeric(schema, document))
        body = {"model": "tiny", "max_tokens": 2}
        for name, sane in SANE.items():
            body |= sane if any(at[0] == name for at in [(key,) for key in keys_of(schema, document)]) else {}
        for at in sorted({*fields, ("keep_alive",), ("timeout_s",), ("nothing",)}):
            yield path, json.dumps(with_number(body, at))


def keys_of(schema: dict[str, Any], document: dict[str, Any]) -> set[str]:
    name = schema.get("$ref", "").rpartition("/")[2]
    return set((document["components"]["schemas"][name] if name else schema).get("properties", {}))


def post(url: str, path: str, body: str) -> None:
    began = time.monotonic()
    reply = CLIENT.post(f"{url}{path}", content=body, headers={"content-type": "application/json"})
    shown = f"{path} {body[:300]}: {reply.status_code} {reply.text[:300]}"
    late = reply.status_code == 503 and "deadline" in reply.text  # of the request's own
    assert reply.status_code < 500 or late, shown
    assert time.monotonic() - began < HANGS / 2, shown
    if "json" in reply.headers["content-type"] and "ndjson" not in reply.headers["content-type"]:
        json.loads(reply.text, parse_constant=lambda name: pytest.fail(f"{shown} has {name}"))


CLIENT = httpx2.Client(timeout=HANGS)


def tells(url: str) -> None:
    for path in ("/health", "/ready", "/metrics", "/api/ps", "/api/tags", "/v1/models", "/status"):
        assert CLIENT.get(f"{url}{path}").status_code == 200, path


def test_every_numeric_field_of_every_route(server: Live) -> None:
    numbers, asked = cycle(NUMBERS), 0
    for path, body in bodies_of(server.app.openapi()):
        for _ in range(2):  # 16 numbers in turn: each meets each route
            post(server.url, path, body.replace('"MARK"', next(numbers)))
            asked += 1
    assert asked > 330
    tells(server.url)


@pytest.mark.parametrize(("path", "body"), FREE, ids=[f"{path} {next(iter(body))}" for path, body in FREE])
def test_numbers_in_objects_of_the_client(server: Live, path: str, body: dict[str, Any]) -> None:
    whole = json.dumps({"model": "tiny", "max_tokens": 2, "messages": HELLO, "input": "a", "stream": False} | body)
    first = next(at for at, one in enumerate(FREE) if one[1] is body)
    for at, number in enumerate(NUMBERS):  # over all objects, each number meets each place
        for inside in (INSIDE[(at + first) % 6], INSIDE[(at + first + 3) % 6]):
            post(server.url, path, whole.replace(": 0}", f": {inside % number}}}"))
    tells(server.url)


def test_numbers_in_paths_and_queries(server: Live) -> None:
    asked = 0
    for path, operations in server.app.openapi()["paths"].items():
        for method in set(operations) & {"get", "delete"}:
            names = [one["name"] for one in operations[method].get("parameters", ()) if one["in"] == "query"]
            for number in IN_A_QUERY:
                at = path
                for one in operations[method].get("parameters", ()):
                    at = at.replace(f"{{{one['name']}}}", number or "0") if one["in"] == "path" else at
                query = dict.fromkeys([*names, "limit", "after", "after_id"], number)
                reply = CLIENT.request(method, f"{server.url}{at}", params=query)
                assert reply.status_code < 500, f"{at} {query}: {reply.text[:300]}"
                asked += 1
    assert asked > 100
    tells(server.url)


def test_a_server_of_several_models(tmp_path: Path) -> None:
    """Its switch reads bodies before a model does, and some of its routes belong to no model."""
    folder = make_chat_model(tmp_path / "model")
    with many({"tiny": folder}) as server:
        running: Many = server
        until(lambda: running.states()["tiny"] == "ready")
        numbers, fields = cycle(NUMBERS), cycle(("keep_alive", "model", "options"))
        for path in ("/api/generate", "/api/chat", "/v1/completions", "/api/copy", "/api/pull", "/api/show"):
            for number, field in zip(islice(numbers, 7), fields, strict=False):
                post(server.url, path, f'{{"prompt": "a", "messages": [], "{field}": {number}}}')
        tells(server.url)
