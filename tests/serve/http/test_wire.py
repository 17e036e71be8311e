"""What a stream is on the wire: pings while nothing is written, whole characters, and its end, the client's too."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.engines import HANGS_S, held, slowed, until
from tests.serve.talking import LONG, Talker, aborted
from tokenwright.serve.http import exchange

HELLO: Any = [{"role": "user", "content": "Hello"}]
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hello", "max_tokens": 4},
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 4},
    "/v1/responses": {"input": HELLO, "max_output_tokens": 4},
    "/v1/messages": {"messages": HELLO, "max_tokens": 4},
}


@pytest.fixture
def slow(talker: Talker, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The engine makes no token until the event is set, and pings come often."""
    go = threading.Event()
    runner = talker.llm.engine.runner
    forward = runner.forward

    def held(step: Any) -> Any:
        assert go.wait(HANGS_S)
        return forward(step)

    monkeypatch.setattr(exchange, "PING_S", 0.05)
    monkeypatch.setattr(runner, "forward", held)
    yield go
    go.set()


@pytest.mark.parametrize("path", STREAMS)
def test_a_stream_that_says_nothing_is_pinged(talker: Talker, slow: threading.Event, path: str) -> None:
    body = STREAMS[path] | {"model": "tiny", "stream": True}
    with httpx.stream("POST", talker.url + path, json=body, timeout=HANGS_S) as answer:
        lines = answer.iter_lines()
        pings = 0
        for line in lines:
            pings += line == ": ping"
            if pings == 2:
                slow.set()
                break
        rest = list(lines)
    assert pings == 2 and any(line.startswith("data: {") for line in rest)


def test_pings_come_so_long_after_the_last_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    now, pings = 0.0, list[float]()
    streamed = exchange.Streamed(aiter_of(), lambda: None)

    async def wait(tasks: object, timeout: float) -> tuple[object, object]:
        nonlocal now
        streamed._sent_at = max(streamed._sent_at, 10.0)  # a chunk was sent
        now += timeout
        return now > 50, ()

    async def send(message: Any) -> None:
        pings.append(now)

    async def receive() -> Any:
        await asyncio.Event().wait()

    streamed._sent_at = 0.0
    monkeypatch.setattr(exchange, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(exchange, "asyncio", SimpleNamespace(wait=wait, create_task=asyncio.create_task))
    asyncio.run(streamed._watch(receive, send))
    assert pings == [25, 40]


async def aiter_of() -> AsyncIterator[bytes]:
    yield b""


def test_the_client_of_openai_passes_over_pings(talker: Talker, slow: threading.Event) -> None:
    with OpenAI(base_url=f"{talker.url}/v1", api_key="none", max_retries=0) as client:
        wanted: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 4, "temperature": 0}
        stream = client.chat.completions.create(**wanted, stream=True)
        threading.Timer(0.3, slow.set).start()
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert text == talker.greedy(HELLO, 4)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("more", [{}, {"stream_options": {"include_usage": True}}, {"return_timings": True}], ids=str)
def test_openais_streams_end_with_done(talker: Talker, path: str, more: dict[str, Any]) -> None:
    body = STREAMS[path] | {"model": "tiny", "stream": True, "ignore_eos": True}
    answer = httpx.post(talker.url + path, json=body | more)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-accel-buffering"] == "no"
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    found = [json.loads(event.removeprefix("data: ")) for event in events]
    assert [one["usage"]["completion_tokens"] for one in found if one.get("usage")] == [4] * ("stream_options" in more)
    assert sum("timings" in one for one in found) == ("return_timings" in more)


def test_no_part_of_a_stream_cuts_a_character(talker: Talker) -> None:
    """Each chunk of the transfer is whole text, whatever bytes the tokens have."""
    host, port = talker.url.removeprefix("http://").split(":")
    tokenizer = talker.llm.tokenizer
    ids = tokenizer.encode("é", add_special=False)
    assert len(ids) > 1, "this character has several tokens"
    bias = {str(token): 100 for token in ids}
    body = json.dumps(
        {"model": "tiny", "prompt": "é", "max_tokens": 64, "stream": True, "temperature": 1, "logit_bias": bias}
    )
    with socket.create_connection((host, int(port)), timeout=HANGS_S) as wire:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n"
        wire.sendall(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        with wire.makefile("rb") as read:
            while read.readline().strip():
                pass
            text = ""
            while size := int(read.readline(), 16):
                text += read.read(size).decode()  # raises UnicodeDecodeError for half of a character
                read.readline()
    assert "é" in text


@pytest.mark.parametrize(
    "path", ["//v1/chat/completions", "/v1//chat/completions", "/v1/chat/completions/", "//chat/completions"]
)
def test_a_slash_too_many_does_no_harm(talker: Talker, path: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
    asked = httpx.Request("POST", talker.url, json=body)
    asked.url = asked.url.copy_with(raw_path=path.encode())
    with httpx.Client(timeout=HANGS_S) as client:
        assert client.send(asked).json()["object"] == "chat.completion"
        assert client.get(f"{talker.url}/v1/models/").json()["object"] == "list"
        assert client.get(f"{talker.url}/v1/models//a//b/").json()["error"]["message"].startswith("the model '/a//b/'")
        assert client.get(f"{talker.url}/v1").json()["error"]["type"] == "not_found_error"


FORM = {"type": "json_schema", "schema": LONG}
ENDLESS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "response_format": FORM | {"json_schema": {"schema": LONG}}},
    "/v1/responses": {"input": HELLO, "text": {"format": FORM | {"name": "long"}}},
    "/v1/messages": {"messages": HELLO, "max_tokens": 1900, "output_config": {"format": FORM}},
    "/api/chat": {"messages": HELLO, "format": LONG},
}


@pytest.mark.parametrize("path", ENDLESS)
def test_a_client_that_stops_waiting_or_closes_its_stream_frees_its_place(talker: Talker, path: str) -> None:
    body = ENDLESS[path] | {"model": "tiny"}
    with held(talker.llm), pytest.raises(httpx.ReadTimeout):
        httpx.post(talker.url + path, json=body | {"stream": False}, timeout=0.3)
    until(talker.idle)
    with slowed(talker.llm):
        with httpx.stream("POST", talker.url + path, json=body | {"stream": True}, timeout=HANGS_S) as answer:
            next(answer.iter_raw())
            generation = talker.only()
        until(talker.idle)
    assert aborted(generation)
