"""Requests as bytes: offers of other protocols, HTTP/1.0, bodies that are cut, and names that are no text."""

import json
import logging
import re
import socket
from typing import Any

import httpx
import pytest

from tests.engines import HANGS_S, until
from tests.serve.talking import Talker

HELLO = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hello", "max_tokens": 2},
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 2},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 2},
    "/v1/responses/input_tokens": {"input": "Hello"},
    "/v1/conversations": {"items": []},
    "/completion": {"prompt": "Hello", "n_predict": 2},
    "/embedding": {"content": "Hello"},
    "/v1/embeddings": {"input": "Hello"},
    "/v1/chat/completions/input_tokens": {"messages": HELLO},
    "/v1/messages": {"messages": HELLO, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/api/chat": {"messages": HELLO, "options": {"num_predict": 2}, "stream": False},
    "/api/generate": {"prompt": "Hello", "options": {"num_predict": 2}, "stream": False},
    "/api/embed": {"input": "Hello"},
    "/api/embeddings": {"prompt": "Hello"},
    "/api/show": {},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [1]},
    "/apply-template": {"messages": HELLO},
}
OTHERS = {  # the tiny model has nothing for them
    "/v1/responses/compact": {"input": "Hello", "max_output_tokens": 2},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v1/reranking": {"query": "a", "documents": ["b"]},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/infill": {"input_prefix": "a", "input_suffix": "b", "n_predict": 2},
}
STREAMED = (
    "/v1/completions",
    "/completion",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/api/chat",
    "/api/generate",
)
ASKED = [(path, False) for path in BODIES] + [(path, True) for path in STREAMED]
H2C = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAAAAMAAAAAAAQBAAAAAA\r\n"


def body_of(path: str, streamed: bool) -> bytes:
    more = {"stream": True} if streamed else {}
    return json.dumps({"model": "tiny"} | BODIES[path] | more).encode()


def head_of(path: str, body: bytes, headers: str, version: str = "1.1") -> bytes:
    framing = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return f"POST {path} HTTP/{version}\r\n{headers}{framing}\r\n".encode()


def open_to(talker: Talker) -> socket.socket:
    host, port = talker.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), HANGS_S)


def whole(connection: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    found = b""
    while part := connection.recv(2**16):
        found += part
    return found


def test_these_are_all_routes(talker: Talker) -> None:
    paths = httpx.get(f"{talker.url}/openapi.json").json()["paths"]
    published = {path for path, methods in paths.items() if "post" in methods and path.startswith(("/v1", "/api"))}
    assert {path for path in published if "{" not in path} <= {*BODIES, *OTHERS}


@pytest.mark.parametrize(
    ("path", "streamed", "parts"), [*((*one, 2) for one in ASKED), *((*ASKED[0], n) for n in (1, 40))]
)
def test_an_offer_of_another_protocol_is_ignored(talker: Talker, path: str, streamed: bool, parts: int) -> None:
    """As Java's HttpClient and `curl --http2` make it, once whole and once in parts."""
    body = body_of(path, streamed)
    asked = head_of(path, body, f"Host: x\r\n{H2C}") + body
    again = head_of(path, body, "Host: x\r\nConnection: close\r\n") + body
    step = -(-len(asked) // parts)
    with open_to(talker) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(0, len(asked), step):
            connection.sendall(asked[at : at + step])
        first = connection.recv(12)
        connection.sendall(again)
        found = first + whole(connection)
    assert found.count(b"HTTP/1.1 200 OK") == 2, found[:500]
    assert b"HTTP/1.1 101" not in found


@pytest.mark.parametrize("path", OTHERS)
def test_an_offer_behind_which_a_refusal_comes(talker: Talker, path: str) -> None:
    body = json.dumps(OTHERS[path]).encode()
    asked = (
        head_of(path, body, f"Host: x\r\n{H2C}") + body + head_of(path, body, "Host: x\r\nConnection: close\r\n") + body
    )
    with open_to(talker) as connection:
        connection.sendall(asked)
        found = whole(connection)
    assert found.count(b"HTTP/1.1 ") == 2
    assert b"is not JSON" not in found, "the body was read"


def test_a_chunked_body_behind_an_offer_is_read(talker: Talker) -> None:
    body = body_of("/v1/completions", False)
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:9], body[9:])) + b"0\r\n\r\n"
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{H2C}Content-Type: application/json\r\n".encode()
    get = b"GET /ready HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nConnection: Upgrade, close\r\n\r\n"
    with open_to(talker) as connection:
        connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + get)
        found = whole(connection)
    assert found.count(b"HTTP/1.1 200 OK") == 2, found[:500]


@pytest.mark.parametrize(("path", "streamed", "host"), [*((*one, "") for one in ASKED), (*ASKED[0], "Host: x\r\n")])
def test_http_1_0_gets_no_chunks_and_needs_no_host(talker: Talker, path: str, streamed: bool, host: str) -> None:
    body = body_of(path, streamed)
    with open_to(talker) as connection:
        connection.sendall(head_of(path, body, host, "1.0") + body)
        head, _, answer = whole(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    assert b"chunked" not in head.lower()
    if streamed:
        assert re.match(rb'event: |data: |\{"model"', answer)
        assert answer.endswith(b"\n") and not answer.endswith(b"0\r\n\r\n")
    else:
        json.loads(answer)


def test_http_1_1_needs_a_host(talker: Talker) -> None:
    with open_to(talker) as connection:
        connection.sendall(b"GET /ready HTTP/1.1\r\nConnection: close\r\n\r\n")
        assert b" 403 " in whole(connection).splitlines()[0]


def metrics(talker: Talker) -> dict[str, float]:
    lines = httpx.get(f"{talker.url}/metrics").text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


@pytest.mark.parametrize("path", BODIES)
def test_a_client_that_leaves_before_its_body_has_come_is_no_request(
    talker: Talker, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What has come is a body by itself, and is not run."""
    body = body_of(path, False)
    before = metrics(talker)
    with caplog.at_level(logging.INFO, "tokenwright.access"), open_to(talker) as connection:
        connection.sendall(head_of(path, body + b" " * 50, "Host: x\r\n") + body)
        connection.shutdown(socket.SHUT_RDWR)
        until(lambda: [one for one in caplog.messages if json.loads(one)["path"] == path])
    [line] = [json.loads(one) for one in caplog.messages if json.loads(one)["path"] == path]
    assert (line["status"], line["bytes"]) == (499, 0)
    until(talker.idle)
    after = metrics(talker)
    names = [name for name in after if name.startswith(("tokenwright_requests_total", "tokenwright_rejections_total"))]
    assert {name: after[name] for name in names} == {name: before.get(name, 0.0) for name in names}


@pytest.mark.parametrize("path", BODIES)
def test_half_a_surrogate_pair_as_a_name_is_refused(talker: Talker, path: str) -> None:
    text = body_of(path, False).decode()
    opened = [at for at, character in enumerate(text) if character == "{"]
    for at in opened:
        bad = f'{text[: at + 1]}"\\ud800": 1{", " if text[at + 1] != "}" else ""}{text[at + 1 :]}'
        answer = httpx.post(talker.url + path, content=bad, headers={"content-type": "application/json"})
        assert answer.status_code == 400, answer.text
        assert "surrogate" in answer.text


def test_the_metrics_of_the_process_and_of_the_model(talker: Talker) -> None:
    found = metrics(talker)
    assert not [name for name in found if "_created" in name]
    assert found["process_resident_memory_bytes"] > 2**20
    assert [value for name, value in found.items() if name.startswith("tokenwright_build_info{")] == [1.0]
    [model] = [name for name in found if name.startswith("tokenwright_model_info{")]
    assert 'served="tiny"' in model
    assert 0 <= found["tokenwright_kv_usage_ratio"] <= 1
    pages = found["tokenwright_pages"]
    cache = f'tokenwright_cache_config_info{{block_size="16",num_gpu_blocks="{pages:.0f}",served="tiny"}}'
    assert found[cache] == 1
