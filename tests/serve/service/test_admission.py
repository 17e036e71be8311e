"""Crowds: how many are taken and let in per turn of the event loop, and what is answered meanwhile."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import httpx2
import pytest

from tests.engines import held
from tests.serve.live import HANGS, Live, live, make_chat_model, settled
from tokenwright.llm.chat.output_parser import new_hex
from tokenwright.serve.app import Served
from tokenwright.serve.service import generation, model_host
from tokenwright.serve.service.generation import Generation
from tokenwright.serve.transport.guard import AT_ONCE, Throttle
from tokenwright.serve.transport.sockets import TAKEN_AT_ONCE, listen, repeated

ASKED = {"model": "tiny", "prompt": "ab", "max_tokens": 2, "temperature": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = make_chat_model(tmp_path_factory.mktemp("crowd") / "model")
    with live(folder, pages=256, served=Served(["tiny", "other-name"])) as running:
        yield running
        settled(running)


def test_a_few_enter_in_each_turn_in_their_order() -> None:
    async def main() -> None:
        door, entered, many = Throttle(), list[int](), 5 * AT_ONCE

        async def one(number: int) -> None:
            await door.enter()
            entered.append(number)

        await door.enter()
        tasks = [asyncio.create_task(one(number)) for number in range(many)]
        turns = 0
        gone = tasks[AT_ONCE + 1]
        while len(entered) < many - 1:
            before = len(entered)
            await asyncio.sleep(0)
            turns += 1
            assert len(entered) - before <= AT_ONCE
            if turns == 1:
                gone.cancel()
            assert turns < 10 * many, "they never enter"
        assert entered == [number for number in range(many) if number != AT_ONCE + 1]
        await asyncio.gather(*tasks, return_exceptions=True)
        for _ in range(3):
            await asyncio.sleep(0)
        await asyncio.wait_for(door.enter(), HANGS)

    asyncio.run(main())


def test_a_crowd_is_taken_in_few_turns() -> None:
    uvloop = pytest.importorskip("uvloop")
    crowd = 4 * TAKEN_AT_ONCE
    listener = listen("127.0.0.1", (0,))
    clients = [socket.create_connection(listener.getsockname(), HANGS) for _ in range(crowd)]

    class Counted(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            taken.append(transport)

    taken: list[Any] = []

    async def main() -> int:
        loop = asyncio.get_running_loop()
        sockets = repeated([listener])
        servers = [await loop.create_server(Counted, sock=one) for one in sockets]
        for turn in count():
            if len(taken) == crowd or turn > crowd:
                break
            await asyncio.sleep(0)
        for server in servers:
            server.close()
        for one in (*taken, *sockets):
            one.close()
        return turn

    assert uvloop.run(main()) <= crowd // 2
    for client in clients:
        client.close()


def test_each_part_of_an_answer_is_sent_at_once() -> None:
    """Else the second part waits until the client's system has confirmed the first, which takes it 40 ms."""

    async def main() -> int:
        accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def told(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = writer.get_extra_info("socket")
            accepted.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        async with await asyncio.start_server(told, sock=listen("127.0.0.1", (0,))) as server:
            with socket.create_connection(server.sockets[0].getsockname(), HANGS):
                return await accepted

    assert asyncio.run(main())


def test_a_prompt_that_cannot_fit_does_not_wait(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    httpx2.post(f"{server.url}/v1/completions", json=ASKED, timeout=HANGS).raise_for_status()
    monkeypatch.setattr(server.service.admission, "used", 10**6)  # nobody is admitted
    for prompt in ("a b " * 200_000, [5] * 3000):
        answer = httpx2.post(f"{server.url}/v1/completions", json={"model": "tiny", "prompt": prompt}, timeout=HANGS)
        assert answer.status_code == 400


@pytest.mark.parametrize(
    ("body", "threads"), [({}, 0), ({"prompt": "ab " * 300}, 1), ({"stop": ["x"]}, 1)], ids=["short", "long", "stop"]
)
def test_a_short_prompt_is_prepared_at_once(
    server: Live, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any], threads: int
) -> None:
    assert httpx2.post(f"{server.url}/v1/completions", json=ASKED, timeout=HANGS).status_code == 200  # opens the model
    preparation = server.service.preparation
    asked, in_thread = [], preparation.in_thread
    monkeypatch.setattr(preparation, "in_thread", lambda function: (asked.append(1), in_thread(function))[1])
    wanted = ASKED | body
    assert httpx2.post(f"{server.url}/v1/completions", json=wanted, timeout=HANGS).status_code == 200
    assert len(asked) == threads


def test_a_whole_text_does_not_wake_its_reader_at_each_step(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    taken, take = [], Generation._read_deliveries
    monkeypatch.setattr(Generation, "_read_deliveries", lambda self: (taken.append(1), take(self))[1])
    monkeypatch.setattr(generation, "BATCH", 16)
    wanted = ASKED | {"max_tokens": 64, "ignore_eos": True}
    whole = httpx2.post(f"{server.url}/v1/completions", json=wanted, timeout=HANGS).json()
    assert whole["usage"]["completion_tokens"] == 64
    assert len(taken) <= 64 // 16 + 2
    streamed = httpx2.post(f"{server.url}/v1/completions", json=wanted | {"stream": True}, timeout=HANGS).text
    chunks = [json.loads(line[6:]) for line in streamed.split("\n\n") if line and not line.endswith("[DONE]")]
    assert "".join(one["choices"][0]["text"] for one in chunks) == whole["choices"][0]["text"]


def test_health_answers_during_a_long_step(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_host, "FRESH_S", 0.0)
    monkeypatch.setattr(model_host, "PROBE_S", 1.0)
    assert httpx2.post(f"{server.url}/v1/completions", json=ASKED, timeout=HANGS).status_code == 200
    with held(server.llm):
        server.service._health.token_at = time.monotonic()
        assert httpx2.get(f"{server.url}/health", timeout=HANGS).status_code == 200
        server.service._health.token_at = time.monotonic() - 1.0
        assert httpx2.get(f"{server.url}/health", timeout=HANGS).status_code == 503, "it makes no token at all"
    assert httpx2.get(f"{server.url}/health", timeout=HANGS).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/generate", {"prompt": "a"}),
        ("/v1/models/other-nmae", None),
    ],
)
def test_a_model_that_is_not_here_has_a_near_name(server: Live, path: str, body: dict[str, Any] | None) -> None:
    body = None if body is None else body | {"model": "Other-nmae"}
    answer = httpx2.request("GET" if body is None else "POST", server.url + path, json=body, timeout=HANGS)
    assert answer.status_code == 404
    assert "did you mean other-name? this server has tiny, other-name" in answer.text


def test_ids_are_different_and_cost_no_system_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "_urandom", None)  # which `secrets` asks
    found = {new_hex(12) for _ in range(10_000)}
    assert len(found) == 10_000
    assert all(re.fullmatch(r"[0-9a-f]{24}", one) for one in found)
