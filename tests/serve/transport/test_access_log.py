"""The access log: one line of JSON for each request, without its text and without a key."""

import json
import logging
import socket
from collections.abc import Iterator

import httpx
import pytest

from tests.engines import slowed, until
from tests.serve.talking import Talker, make_talker, talking
from tokenwright.serve.transport import access_log

KEY = "a-key-that-is-a-secret"
SECRET = "Zanzibar"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": SECRET}], "max_tokens": 4, "ignore_eos": True}


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture
def lines() -> Iterator[list[str]]:
    handler, before = Lines(), (access_log.access.level, access_log.access.propagate)
    access_log.log_access(handler)
    yield handler.lines
    access_log.access.removeHandler(handler)
    access_log.access.setLevel(before[0])
    access_log.access.propagate = before[1]


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Talker]:
    with talking(make_talker(tmp_path_factory.mktemp("locked")), keys=[KEY]) as talker:
        yield talker


@pytest.mark.parametrize("streamed", [False, True])
def test_a_line_says_who_asked_what_and_how_long_it_took(locked: Talker, lines: list[str], streamed: bool) -> None:
    headers = {"authorization": f"Bearer {KEY}", "x-request-id": "mine-7"}
    answer = httpx.post(f"{locked.url}/v1/chat/completions", json=CHAT | {"stream": streamed}, headers=headers)
    assert (answer.status_code, answer.headers["x-request-id"]) == (200, "mine-7")
    until(lambda: lines)
    [line] = lines
    found = json.loads(line)
    assert (found["request_id"], found["method"], found["path"]) == ("mine-7", "POST", "/v1/chat/completions")
    assert (found["status"], found["bytes"], found["completion_tokens"]) == (200, len(answer.content), 4)
    assert found["prompt_tokens"] == locked.tokens(CHAT["messages"])
    assert 0 <= found["queue_s"] + found["prefill_s"] + found["decode_s"] <= found["ms"] / 1000 + 0.001
    assert found["key"].startswith("key-") and found["client"] == "127.0.0.1"
    assert KEY not in line and SECRET not in line


@pytest.mark.parametrize("streamed", [False, True])
def test_the_line_of_a_client_that_has_gone_has_the_tokens(locked: Talker, lines: list[str], streamed: bool) -> None:
    body = {"model": "tiny", "prompt": ["a", "b"], "max_tokens": 1900, "ignore_eos": True, "stream": streamed}
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {locked.url[7:]}\r\nAuthorization: Bearer {KEY}\r\n"
    content = json.dumps(body)
    head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    host, port = locked.url[7:].split(":")
    with slowed(locked.llm):
        with socket.create_connection((host, int(port))) as client:
            client.sendall((head + content).encode())
            until(lambda: len(locked.service._running) == 2)
            if streamed:
                client.recv(1)
        until(lambda: lines)
    found = json.loads(lines[0])
    assert (found["status"], found["prompt_tokens"]) == (200 if streamed else 499, 2)
    assert 0 <= found["completion_tokens"] < 2 * 1900
    until(locked.idle)


def test_what_is_refused_is_logged_under_an_id_of_its_own(locked: Talker, lines: list[str]) -> None:
    forged = f"a\\n{'b' * 200}"  # no id that a log should hold
    for headers in ({"authorization": "Bearer wrong-key-123"}, {"authorization": f"Bearer {KEY}"}):
        answer = httpx.post(f"{locked.url}/v1/completions", json={}, headers=headers | {"x-request-id": forged})
        until(lambda: lines)
        found = json.loads(lines.pop())
        assert (found["status"], found["key"] is None) == (answer.status_code, answer.status_code == 401)
        assert found["request_id"] == answer.headers["x-request-id"] != forged
        assert "prompt_tokens" not in found and "wrong-key" not in str(found)
