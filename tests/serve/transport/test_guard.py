"""Which requests come in: bodies without a key, pages of other origins, and what browsers may do with a reply."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx2
import pytest

from tests.engines import until
from tests.serve.live import HANGS, Live, live, make_chat_model
from tokenwright.serve.app import Served
from tokenwright.serve.transport import guard
from tokenwright.serve.transport.guard import MOST_HELD, OPEN, Policy

KEY, FRIEND = "key-of-the-house", "https://chat.example"
MOST = 4096  # bytes of a body


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder: Path = make_chat_model(tmp_path_factory.mktemp("guard") / "model")

    def policy(address: str) -> Policy:
        return Policy.of([address], [KEY], origins=frozenset([FRIEND]), body=MOST)

    with live(folder, pages=256, served=Served(["tiny"]), policy=policy) as running:
        yield running


def send(server: Live, path: str, head: str, body: bytes = b"") -> socket.socket:
    client = socket.create_connection(server.address.split(":"), HANGS)
    client.sendall(f"POST {path} HTTP/1.1\r\nhost: {server.address}\r\n{head}\r\n\r\n".encode() + body)
    return client


def tokenize(server: Live, **headers: str) -> httpx2.Response:
    asked = {"authorization": f"Bearer {KEY}"} | headers
    return httpx2.post(f"{server.url}/tokenize", json={"prompt": "abc" * 100}, headers=asked)


@pytest.mark.parametrize("path", sorted(OPEN))
@pytest.mark.parametrize("chunked", [False, True])
def test_bodies_without_a_key_cost_a_key_nothing(server: Live, path: str, chunked: bool) -> None:
    """As many as all requests may hold, each with all but its last byte, kept open while a client with a key asks."""
    with ExitStack() as kept:
        for _ in range(MOST_HELD):
            head = "transfer-encoding: chunked" if chunked else f"content-length: {MOST}"
            part = b"%x\r\n" % MOST if chunked else b""
            client = kept.enter_context(send(server, path, head, part + b"a" * (MOST - 1)))
            with suppress(ConnectionError):  # the server may have closed a connection whose body it does not read
                assert client.recv(12) in (b"HTTP/1.1 200", b"HTTP/1.1 405"), "it answers before the body has come"
        assert tokenize(server).status_code == 200
    app = server.app.middleware_stack
    while not isinstance(app, guard.Guard):
        app = app.app if hasattr(app, "app") else app._app
    until(lambda: app.bodies.used == 0)  # the body of the client with a key may be let go after its reply


def test_a_body_for_an_open_route_is_answered_and_its_connection_ends(server: Live) -> None:
    with send(server, "/ping", "content-length: 2", b"{}") as client, client.makefile("rb") as answer:
        said = answer.read()  # to its end
    assert said.startswith(b"HTTP/1.1 200") and json.loads(said.rpartition(b"\r\n")[2])["status"] == "ok"
    with httpx2.Client() as client:
        for _ in range(2):
            assert "connection" not in client.post(f"{server.url}/ping").headers


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, 403),  # an image of a foreign page
        ({"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors"}, 403),  # another port of this machine
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, 200),  # a link
        ({"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}, 200),
        ({"sec-fetch-site": "none", "sec-fetch-mode": "navigate"}, 200),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "cors", "origin": FRIEND}, 200),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "cors", "origin": "https://evil.example"}, 403),
    ],
)
def test_a_foreign_page_calls_nothing(server: Live, headers: dict[str, str], status: int) -> None:
    asked = {"authorization": f"Bearer {KEY}"} | headers
    assert httpx2.get(f"{server.url}/v1/models", headers=asked).status_code == status


def test_an_allowed_page_of_a_public_address_may_call_this_machine(server: Live) -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-private-network": "true"}
    for origin, status, said in ((FRIEND, 204, "true"), ("https://evil.example", 403, None)):
        reply = httpx2.options(f"{server.url}/v1/chat/completions", headers=asked | {"origin": origin})
        assert (reply.status_code, reply.headers.get("access-control-allow-private-network")) == (status, said)


def test_browsers_are_told_what_a_reply_may_do(server: Live) -> None:
    for path in ("/health", "/v1/models", "/nothing"):  # refused or not
        headers = httpx2.get(f"{server.url}{path}").headers
        assert headers["x-content-type-options"] == "nosniff"
        rules = dict(one.split(" ", 1) for one in headers["content-security-policy"].split("; "))
        assert rules["default-src"] == "'self'" and rules["object-src"] == rules["base-uri"] == "'none'"
        assert rules["frame-ancestors"].split()[0] == "'self'" and FRIEND in rules["frame-ancestors"]
        assert "*" not in rules["frame-ancestors"].split(), "no page from elsewhere shows ours in a frame"
