"""What strangers may cost: bytes around a body, and all bodies; errors of a body; long replies; unread ones."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import httpx2
import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from tests.engines import reached
from tests.profiles import examples
from tests.serve.live import HANGS, Live, live, make_chat_model, settled
from tokenwright.serve.app import Served
from tokenwright.serve.http import exchange, reply_text
from tokenwright.serve.http.api import _object
from tokenwright.serve.http.reply_text import dumps, dumps_in_parts
from tokenwright.serve.ollama.bodies import Chat
from tokenwright.serve.ollama.routes import chat_messages
from tokenwright.serve.openai import logprobs
from tokenwright.serve.openai import routes as openai
from tokenwright.serve.openai.bodies import CompletionBody
from tokenwright.serve.transport import connection
from tokenwright.serve.transport.connection import Connection
from tokenwright.serve.transport.guard import MOST_HELD, Guard, Policy
from tokenwright.serve.transport.sockets import listen

JSON = "content-type: application/json\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = make_chat_model(tmp_path_factory.mktemp("limits") / "model")
    with live(folder, pages=256, served=Served(["tiny", "other-name"])) as running:
        yield running
        settled(running)


def wire(server: Live) -> socket.socket:
    return socket.create_connection(server.address.split(":"), HANGS)


@pytest.mark.parametrize(
    "begun",
    [
        "GET /",
        "GET / HTTP/1.1\r\nx: ",
        "GET / HTTP/1.1\r\nx",
        f"POST /tokenize HTTP/1.1\r\nhost: HERE\r\n{JSON}transfer-encoding: chunked\r\n\r\n2\r\n{{}}\r\n0\r\nx: ",
        "POST /tokenize HTTP/1.1\r\nhost: HERE\r\ntransfer-encoding: chunked\r\n\r\n2;",
        "GET /ready HTTP/1.1\r\nhost: HERE\r\n\r\nGET /ready HTTP/1.1\r\nx: ",
    ],
    ids=["path", "header", "name of a header", "trailer", "chunk extension", "second request"],
)
def test_nothing_but_a_body_may_be_long(server: Live, begun: str) -> None:
    sent, part = 0, b"a" * 2**16
    with wire(server) as client:
        client.sendall(begun.replace("HERE", server.address).encode())
        with suppress(ConnectionError):
            while sent < 2**26:
                client.sendall(part)
                sent += len(part)
    assert sent < 2**25, "the server takes more than the system's buffers hold"


def test_a_body_in_the_smallest_chunks_is_read(server: Live) -> None:
    body = json.dumps({"prompt": "a" * 20_000}).encode()
    head = f"POST /tokenize HTTP/1.1\r\nhost: {server.address}\r\n{JSON}transfer-encoding: chunked\r\n\r\n"
    with wire(server) as client:
        client.sendall(head.encode() + b"".join(b"1\r\n%c\r\n" % one for one in body) + b"0\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("reads", [False, True])
def test_a_client_that_reads_nothing_is_closed(monkeypatch: pytest.MonkeyPatch, reads: bool) -> None:
    monkeypatch.setattr(connection, "STALL_S", 0.2)
    size = 2**24  # more than the system's buffers take

    async def main() -> bool:
        closed = asyncio.Event()

        async def app(_: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"a" * size, "more_body": True})
            await send({"type": "http.response.body"})  # waits for the reader
            while (await receive())["type"] != "http.disconnect":
                pass
            closed.set()

        listener = listen("127.0.0.1", (0,))
        at = listener.getsockname()
        server = uvicorn.Server(uvicorn.Config(app, http=Connection, lifespan="off", log_level="critical"))
        serving = asyncio.create_task(server.serve([listener]))
        reader, writer = await asyncio.open_connection(*at, limit=2**16)
        writer.write(f"GET / HTTP/1.1\r\nhost: {at[0]}\r\n\r\n".encode())
        for _ in range(20 if reads else 2_000):
            if closed.is_set():
                break
            if reads:
                await reader.readexactly(2**19)  # in so large parts that the system asks for more
            await asyncio.sleep(0.03)
        found = closed.is_set()
        writer.transport.abort()
        server.should_exit = True
        await serving
        return found

    assert asyncio.run(asyncio.wait_for(main(), HANGS)) is not reads


def test_clients_that_read_slowly_leave_so_much_unread_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ones that are slow for longest are closed; one that reads gets all of its reply meanwhile."""
    size, clients, most = 2**24, 8, 3 * 2**24
    monkeypatch.setattr(connection, "MOST_UNREAD", most)
    totals: list[int] = []

    async def main() -> tuple[list[bool], int]:
        gone = [asyncio.Event() for _ in range(clients + 1)]

        async def app(scope: Any, receive: Any, send: Any) -> None:
            number = int(scope["path"][1:])
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": bytes(size), "more_body": True})
            totals.append(sum(one.unread for one in server.server_state.connections))
            while (await receive())["type"] != "http.disconnect":
                pass
            gone[number].set()

        listener = listen("127.0.0.1", (0,))
        at = listener.getsockname()
        server = uvicorn.Server(uvicorn.Config(app, http=Connection, lifespan="off", log_level="critical"))
        serving = asyncio.create_task(server.serve([listener]))
        writers = []
        for number in range(clients):
            _, writer = await asyncio.open_connection(*at, limit=2**10)
            writer.write(f"GET /{number} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            writers.append(writer)
            await reached(lambda number=number: len(totals) > number)
        reader, writer = await asyncio.open_connection(*at, limit=2**20)
        writer.write(f"GET /{clients} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        await reader.readuntil(b"\r\n\r\n")
        read = 0
        while read < size:
            read += len(await reader.read(2**20))
        await asyncio.sleep(0.05)
        closed = [event.is_set() for event in gone[:clients]]
        for one in (*writers, writer):
            one.transport.abort()
        server.should_exit = True
        await serving
        return closed, read

    closed, read = asyncio.run(asyncio.wait_for(main(), HANGS))
    assert read >= size
    assert max(totals) <= most + size, "the newest one's reply is there too"
    assert closed == sorted(closed, reverse=True), "the oldest are closed first"
    assert 2 <= closed.count(False) < clients


def bodies(kind: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for one in kind.__subclasses__():
        if one.__module__.startswith("tokenwright."):
            yield one
        yield from bodies(one)


def parts(schema: Any, seen: set[int]) -> Iterator[dict[str, Any]]:
    """All schemas in one of pydantic's."""
    if id(schema) in seen:
        return
    seen.add(id(schema))
    if isinstance(schema, dict):
        if isinstance(schema.get("type"), str):
            yield schema
        for one in schema.values():
            yield from parts(one, seen)
    elif isinstance(schema, list | tuple):
        for one in schema:
            yield from parts(one, seen)


KINDS = sorted(set(bodies(BaseModel)), key=lambda one: f"{one.__module__}.{one.__name__}")


def test_no_list_of_a_body_makes_an_error_of_each_entry() -> None:
    checked = 0
    for schema in (one.__pydantic_core_schema__ for one in KINDS):
        for part in parts(schema, set()):
            if part["type"] == "list" and part.get("items_schema", {"type": "any"})["type"] != "any":
                assert part.get("fail_fast"), part
                checked += 1
            if part["type"] == "dict":
                before = [one for one in parts(schema, set()) if one.get("schema") is part]
                assert [one["type"] for one in before] == ["function-before"], part
                checked += 1
    assert checked > 40


@pytest.mark.parametrize(
    "more",
    [
        {"prompt": [None] * 10**5},
        {"prompt": [[None] * 10**5] * 2},
        {"prompt": "a", "logit_bias": {f"x{n}": None for n in range(10**5)}},
        {"prompt": "a", "stop_token_ids": [-1] * 10**5},
    ],
    ids=["prompt", "prompts", "logit_bias", "stop_token_ids"],
)
def test_a_body_of_wrong_entries_makes_few_errors(more: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as raised:
        CompletionBody.model_validate({"model": "tiny"} | more)
    assert raised.value.error_count() < 20


def test_the_bodies_of_all_requests_together_have_a_limit() -> None:
    async def main() -> None:
        go_on, statuses = asyncio.Event(), list[int]()

        async def app(_: Any, receive: Any, send: Any) -> None:
            assert len((await receive())["body"]) == 1000
            await go_on.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})

        def answer(_: str, problem: Any, __: str) -> Any:
            async def refuse(_: Any, __: Any, send: Any) -> None:
                await send({"type": "http.response.start", "status": problem.status, "headers": []})

            return refuse

        async def receive() -> Any:
            return {"type": "http.request", "body": b"a" * 1000}

        async def send(message: Any) -> None:
            statuses.append(message["status"])

        guard = Guard(app, Policy.of(None, body=1000), answer)
        scope = {"type": "http", "method": "POST", "path": "/x", "headers": [(b"host", b"x")]}
        tasks = [asyncio.create_task(guard(dict(scope), receive, send)) for _ in range(MOST_HELD + 9)]
        for _ in range(5):
            await asyncio.sleep(0)
        assert 1 <= statuses.count(429) <= 9
        assert guard.bodies.used <= (MOST_HELD + 1) * 1000
        go_on.set()
        await asyncio.gather(*tasks)
        assert (guard.bodies.used, statuses.count(200) + statuses.count(429)) == (0, len(tasks))

    asyncio.run(main())


def call(identity: str, name: str) -> dict[str, Any]:
    return {"id": identity, "function": {"name": name}}


def test_results_of_tools_find_their_calls_without_a_search() -> None:
    many = 4000
    calls = [call("x", "a" if n < many else "z") for n in range(2 * many)]
    turns = [{"role": "assistant", "tool_calls": calls[at : at + 200]} for at in range(0, len(calls), 200)]
    body = Chat.model_validate({"model": "tiny", "messages": turns + [{"role": "tool", "tool_name": "z"}] * many})
    began = time.thread_time()
    found = chat_messages(body)
    assert time.thread_time() - began < 0.5
    assert found[-1]["name"] == "z"


def test_results_of_tools_answer_the_first_call_that_fits() -> None:
    draws = random.Random(1)
    for _ in range(200):
        own = [(f"i{draws.randrange(3)}", f"n{draws.randrange(3)}") for _ in range(6)]
        said = draws.sample(own, 6)
        results = [(draws.choice((one, None)), draws.choice((name, None))) for one, name in said]
        messages: list[dict[str, Any]] = [{"role": "assistant", "tool_calls": [call(*one) for one in own]}]
        left, right = list(own), list[tuple[str, str]]()
        for identity, name in results:
            fits = [one for one in left if identity in (None, one[0]) and name in (None, one[1])]
            if not fits:
                break
            left.remove(fits[0])
            right.append(fits[0])
            messages.append({"role": "tool", "tool_call_id": identity, "tool_name": name})
        found = chat_messages(Chat.model_validate({"model": "tiny", "messages": messages}))
        assert [(one["tool_call_id"], one["name"]) for one in found[1:]] == right


def joined(chunks: list[Any]) -> tuple[str, list[Any]]:
    """The text of a stream, which comes in one chunk a step or several, and its log-probabilities."""
    [choices] = zip(*chunks, strict=True)
    tokens = [list(row) for one in choices if one["logprobs"] for row in zip(*one["logprobs"].values(), strict=True)]
    return "".join(one["text"] for one in choices), tokens


JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@examples(100)
@given(JSONS)
def test_a_reply_in_parts_is_the_same_text(value: Any) -> None:
    assert dumps_in_parts(value) == dumps(value)


ECHO = {"prompt": "ab", "max_tokens": 4, "temperature": 0, "logprobs": 2, "echo": True}
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", ECHO),
    ("/v1/completions", ECHO | {"stream": True}),
    ("/v1/embeddings", {"input": ["ab", "c"]}),
    ("/tokenize", {"content": "ab", "with_pieces": True}),
    ("/detokenize", {"tokens": [40, 41, 42]}),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "temperature": 0, "logprobs": True},
    ),
    ("/completion", {"prompt": "ab", "n_predict": 4, "temperature": 0, "n_probs": 2}),
    ("/completion", {"prompt": ["ab", "c"], "n_predict": 4, "temperature": 0, "n_probs": 2}),
    (
        "/v1/responses",
        {
            "input": "a",
            "max_output_tokens": 16,
            "temperature": 0,
            "top_logprobs": 2,
            "include": ["message.output_text.logprobs"],
            "store": False,
        },
    ),
    (
        "/api/generate",
        {"prompt": "a", "options": {"num_predict": 4, "temperature": 0}, "logprobs": True, "stream": False},
    ),
]

KEYED: dict[str, Callable[[Any], Any]] = {  # what is the same for each request
    "/completion": lambda one: [each["completion_probabilities"] for each in (one if isinstance(one, list) else [one])],
    "/v1/responses": lambda one: one["output"][0]["content"],
    "/api/generate": lambda one: one["logprobs"],
    "/tokenize": lambda one: one["tokens"],
    "/detokenize": lambda one: one["content"],
}


@pytest.mark.parametrize(("path", "body"), ASKED)
def test_a_long_reply_says_the_same(
    server: Live, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    def asked() -> tuple[set[str], set[str], Any]:
        named, wrote = set[str](), set[str]()
        monkeypatch.setattr(logprobs.Tokens, "text", lambda self, token: by(named, text, self, token))
        monkeypatch.setattr(reply_text, "_encode", lambda value: by(wrote, encode, value))
        answer = httpx2.post(server.url + path, json=body | {"model": "tiny"}, timeout=HANGS)
        assert answer.status_code == 200, answer.text
        lines = answer.text.split("\n") if body.get("stream") else [answer.text]
        found = [json.loads(line.removeprefix("data: ")) for line in lines if line and not line.endswith("[DONE]")]
        said = [KEYED.get(path, lambda one: one.get("choices") or one["data"])(one) for one in found]
        return named, wrote, joined(said) if body.get("stream") else said

    text, encode = logprobs.Tokens.text, reply_text._encode

    def by(threads: set[str], write: Callable[..., str], *given: Any) -> str:
        threads.add(threading.current_thread().name)
        return write(*given)

    short = asked()
    for module in (reply_text, openai, exchange):
        monkeypatch.setattr(module, "LONG", 0)
    long = asked()
    assert long[2] == short[2]
    assert short[0] <= {"server"} and short[1] == {"server"}
    assert bool(long[0]) is bool(short[0]) and long[1] - {"server"}
    if body.get("stream"):  # a thread writes the echo; the tokens that come after it are few
        assert long[0] - {"server"}
    else:
        assert "server" not in long[0]


@pytest.mark.parametrize(("prompt", "tokens"), [("a", 1000), (["a"] * 100, 10)], ids=["one prompt", "many"])
def test_more_logprobs_than_memory_holds_are_refused(server: Live, prompt: Any, tokens: int) -> None:
    body = {"model": "tiny", "prompt": prompt, "n": 100, "temperature": 1.0, "max_tokens": tokens, "logprobs": 20}
    answer = httpx2.post(f"{server.url}/v1/completions", json=body, timeout=HANGS)
    assert answer.status_code == 400
    assert "2,100,000 log-probabilities, and 1,048,576 are allowed" in answer.json()["error"]["message"]


class Counted(str):
    """A text that counts how often one of its kind is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_the_key_that_an_object_has_twice_is_found_without_comparing_each_with_each() -> None:
    """4 MB of short names, the last of them twice, kept a thread busy for hours."""
    pairs = [(Counted(f"k{at}"), 1) for at in (*range(1000), 999)]
    with pytest.raises(ValueError, match="the key 'k999' twice"):
        _object(pairs)
    assert Counted.compared < 10 * len(pairs)
