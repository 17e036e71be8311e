"""The server under what may happen to it: keys, limits, clients that go away, a full queue, a dead engine, the end."""

import asyncio
import gc
import json
import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvicorn

from tests.engines import held, reached, slowed, until
from tests.serve.live import HANGS, Live, keep_pace, live, make_chat_model, routes, settled
from tokenwright import LLM, RequestError
from tokenwright.errors import CheckpointError
from tokenwright.serve.app import Served, make_app
from tokenwright.serve.service import generation
from tokenwright.serve.service.admission import Admission, Quota
from tokenwright.serve.service.model_host import ModelHost, uncollected
from tokenwright.serve.service.service import ServiceLimits
from tokenwright.serve.service.types import Busy, Deadline, GenerationRequest, Late, Unread
from tokenwright.serve.transport import connection
from tokenwright.serve.transport.guard import ApiKeys, Policy, read_keys
from tokenwright.serve.transport.server import Server
from tokenwright.serve.transport.sockets import listen

KEY, OTHER = "sk-first-key-of-tests", "sk-other-key-of-tests"
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
LONG = CHAT | {"max_tokens": 1900, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("server") / "model")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Live]:
    with live(model, pages=512) as running:
        yield running


@pytest.fixture(scope="module")
def locked(model: Path) -> Iterator[Live]:
    """A server with two keys."""
    policy = lambda address: Policy.of([address], [KEY, OTHER], origins=frozenset({"https://chat.example"}))  # noqa: E731
    with live(model, policy=policy, pages=64) as running:
        yield running


def post(server: Live, body: Any, path: str = "/v1/chat/completions", **more: Any) -> httpx2.Response:
    return httpx2.post(f"{server.url}{path}", json=body, timeout=HANGS, **more)


PREFLIGHT = {"access-control-request-method": "POST"}  # of no page that the settings allow
NO_BASE64 = {"authorization": "Basic päss".encode()}
WRONG = (
    *({}, PREFLIGHT, {"authorization": "Bearer wrong-key"}, {"x-api-key": KEY[:-1]}, {"authorization": KEY}),
    *({"authorization": f"Bearer {KEY}x"}, {"x-api-key": KEY.upper()}, {"x-api-key": "a" * 10_000}, NO_BASE64),
)


def test_every_route_but_health_demands_a_key(locked: Live) -> None:
    every = [route for route in routes(locked.app) if route[0] != "WEBSOCKET"]
    known = {"/v1/chat/completions", "/v1/models", "/metrics", "/openapi.json", "/runs", "/tokenize"}
    assert known <= {path for _, path in every}
    tried = [(method, path, headers) for method, path in every for headers in WRONG]
    tried += [("OPTIONS", path, headers) for _, path in every for headers in ({}, PREFLIGHT)]
    with httpx2.Client() as client:
        for method, path, headers in tried:
            answer = client.request(method, locked.url + path, headers=headers)
            open_to_all = path in ("/health", "/v1/health", "/ping", "/ready", "/version")
            assert (answer.status_code == 401) is not open_to_all, (method, path, headers)
            assert open_to_all or answer.headers["www-authenticate"].startswith("Bearer")


@pytest.mark.parametrize("key", [KEY, OTHER])
def test_a_key_opens_the_server(locked: Live, key: str) -> None:
    basic = httpx2.BasicAuth("anybody", key)
    for more in ({"headers": {"authorization": f"Bearer {key}"}}, {"headers": {"x-api-key": key}}, {"auth": basic}):
        assert httpx2.get(f"{locked.url}/v1/models", **more).status_code == 200


def test_the_socket_demands_a_key(locked: Live) -> None:
    from websockets.exceptions import InvalidStatus
    from websockets.sync.client import connect

    with pytest.raises(InvalidStatus) as refused:
        connect(f"ws://{locked.address}/runs/x/stream")
    assert refused.value.response.status_code == 403


def test_pages_are_not_shared_between_keys(locked: Live) -> None:
    """What one key has made the server compute must not be seen in the times of another."""
    prompt = CHAT | {"messages": [{"role": "user", "content": "secret " * 12}], "max_tokens": 1}

    def cached(key: str) -> int:
        answer = post(locked, prompt, headers={"authorization": f"Bearer {key}"})
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [cached(KEY) > 0, cached(KEY) > 0, cached(OTHER) > 0, cached(OTHER) > 0] == [False, True, False, True]


def test_other_origins_are_let_in_by_name_alone(locked: Live) -> None:
    origin = {"origin": "https://chat.example"}
    wanted = "authorization, content-type, anthropic-version"
    asked = origin | {"access-control-request-method": "POST", "access-control-request-headers": wanted}
    preflight = httpx2.options(f"{locked.url}/v1/chat/completions", headers=asked)
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-origin"] == "https://chat.example"
    assert preflight.headers["access-control-allow-headers"] == wanted
    answer = httpx2.get(f"{locked.url}/v1/models", headers=origin | {"x-api-key": KEY})
    assert answer.headers["access-control-allow-origin"] == "https://chat.example"
    foreign = {"origin": "https://evil.example", "x-api-key": KEY}
    refused = httpx2.get(f"{locked.url}/v1/models", headers=foreign)
    assert (refused.status_code, "access-control-allow-origin" in refused.headers) == (403, False)


@pytest.mark.parametrize(
    ("more", "status"),
    [({"x-api-key": "wrong-key"}, 401), ({"x-api-key": KEY, "host": "evil.example"}, 403), ({"x": "a" * 40_000}, 431)],
)
def test_a_page_of_another_origin_can_read_why_it_is_refused(locked: Live, more: dict[str, str], status: int) -> None:
    answer = httpx2.get(f"{locked.url}/v1/models", headers={"origin": "https://chat.example"} | more)
    assert answer.status_code == status
    assert answer.headers["access-control-allow-origin"] == "https://chat.example"
    exposed = answer.headers["access-control-expose-headers"].lower().split(", ")
    assert {"retry-after", "x-request-id", "server-timing"} <= set(exposed)
    assert "error" in answer.json()


def test_keys_are_checked_when_they_are_read(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# ours\n\n{KEY}\n  {OTHER}  \n", encoding="utf-8")
    assert read_keys(file) == [KEY, OTHER]
    file.write_text("# none\n", encoding="utf-8")
    with pytest.raises(RequestError, match="has no keys"):
        read_keys(file)
    for bad in ("short", "with a space in it", "schlüssel-zum-server"):
        with pytest.raises(RequestError, match="at least 8 visible ASCII"):
            ApiKeys([bad])


AGAIN = "POST /tokenize HTTP/1.1\r\nhost: HERE\r\ncontent-type: application/json\r\ncontent-length: 200000\r\n\r\n"


@pytest.mark.parametrize("behind", ["GET /ready HTTP/1.1\r\nhost: HERE\r\n\r\n", AGAIN + 190_000 * " ", "POST /"])
def test_a_closed_connection_is_noticed_behind_another_request(server: Live, behind: str) -> None:
    """uvicorn reads no more from a connection whose next request has come, so it would not see its end either."""
    tasks = server.server.server_state.tasks
    with held(server.llm):
        with socket.create_connection(server.address.split(":")) as client:
            body = json.dumps(LONG).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {server.address}\r\ncontent-type: application/json"
            client.sendall(f"{head}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
            until(lambda: server.service.running)
            with suppress(ConnectionError):
                client.sendall(behind.replace("HERE", server.address).encode())
        until(lambda: not tasks)
        assert not tasks, "a request is being answered for nobody"
    settled(server)


def test_a_slow_reader_pauses_its_request(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine must not run on for a client that reads nothing."""
    monkeypatch.setattr(generation, "MOST_UNREAD", 8)

    async def read() -> int:
        wanted = GenerationRequest(prompt="ab", overrides={"max_tokens": 400, "ignore_eos": True, "temperature": 0.0})
        slow = await server.service.start(wanted)
        handle = slow.handle
        await reached(lambda: handle.sequence.group.pause_at is not None)
        await asyncio.sleep(0.05)
        written = len(handle.sequence.written)
        await asyncio.sleep(0.05)
        assert len(handle.sequence.written) == written < 400, "it does not go on"
        [answer] = await slow.answers()
        assert answer.finish == "length"
        return slow.counts().completion

    loop = server.loop
    assert asyncio.run_coroutine_threadsafe(read(), loop).result(HANGS) == 400


@pytest.mark.parametrize("first_ended", [False, True])
def test_a_slow_reader_pauses_all_texts_and_is_given_up(
    server: Live, monkeypatch: pytest.MonkeyPatch, first_ended: bool
) -> None:
    """Its place in the engine is free then, and the stream says why it has ended."""
    monkeypatch.setattr(generation, "MOST_UNREAD", 8)
    monkeypatch.setattr(server.service, "limits", ServiceLimits(reader_s=0.3))
    keep_pace(server, monkeypatch)
    overrides = {"max_tokens": 400, "ignore_eos": True, "n": 3, "seed": 1, "temperature": 1.0}

    async def read() -> None:
        slow = await server.service.start(GenerationRequest(prompt="ab", overrides=overrides, streamed=True))
        handle = slow.handle
        await reached(lambda: not first_ended or len(handle.live) >= 3)
        if first_ended:
            handle._loop.post(lambda engine: engine.abort(handle.sequence.id))
        await reached(lambda: slow._pause.on)
        await asyncio.sleep(0.1)  # a step may have been under way
        assert not server.llm.engine.busy
        await reached(lambda: not server.service.running)
        assert (len(handle.live), server.service.admission.used) == (0, 0)
        with pytest.raises(Unread, match="too slowly"):
            async for _ in slow:
                pass

    asyncio.run_coroutine_threadsafe(read(), server.loop).result(HANGS)


def test_the_time_that_a_reader_has_is_that_of_all_its_pauses(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "MOST_UNREAD", 8)
    monkeypatch.setattr(server.service, "limits", ServiceLimits(reader_s=HANGS))
    keep_pace(server, monkeypatch)
    overrides = {"max_tokens": 100, "ignore_eos": True, "temperature": 0.0}

    async def read() -> float:
        slow = await server.service.start(GenerationRequest(prompt="ab", overrides=overrides, streamed=True))
        for _ in range(2):
            await reached(lambda: slow._pause.on)
            await asyncio.sleep(0.05)
            await anext(slow)
        async for _ in slow:
            pass
        assert slow._pause._timer is None
        assert slow._pause._left_s is not None
        return slow._pause._left_s

    left = asyncio.run_coroutine_threadsafe(read(), server.loop).result(HANGS)
    assert HANGS - 30 < left <= HANGS - 0.1


def test_a_fault_of_the_engine_reaches_health_and_every_client(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Server, "on_tick", uvicorn.Server.on_tick)  # its own would end the server within 0.1 s
    with live(model, pages=256) as server, slowed(server.llm):
        assert httpx2.get(f"{server.url}/health").json()["status"] == "ok"
        answers: list[httpx2.Response] = []
        threads = [
            threading.Thread(target=lambda s=s: answers.append(post(server, LONG | {"stream": s})))
            for s in (False, True)
        ]
        for thread in threads:
            thread.start()
        until(lambda: server.service.running >= 2)
        server.llm.llm_engine.loop.post(lambda _: 1 / 0)  # type: ignore[arg-type,return-value]
        for thread in threads:
            thread.join(HANGS)
        by_status = {answer.status_code: answer for answer in answers}
        assert by_status.keys() == {500, 200}
        assert by_status[500].json()["error"]["type"] == "server_error"
        last = by_status[200].text.strip().rsplit("data: ", 1)[1]
        assert json.loads(last)["error"]["type"] == "server_error", "a stream ends with the error"
        health = httpx2.get(f"{server.url}/health")
        assert (health.status_code, health.json()["status"]) == (503, "failed")
        assert post(server, CHAT).status_code == 500
        assert server.service.running == 0


def test_a_drain_lets_requests_finish_and_refuses_new_ones(model: Path) -> None:
    with live(model, pages=256) as server:
        answers: list[httpx2.Response] = []
        thread = threading.Thread(target=lambda: answers.append(post(server, LONG | {"max_tokens": 300})))
        with httpx2.Client() as client:
            assert client.get(f"{server.url}/ready").status_code == 200
            with held(server.llm):
                thread.start()
                until(lambda: server.service.running >= 1)
                server.server.handle_exit(signal.SIGTERM, None)
                assert server.service.draining
            thread.join(HANGS)
        assert answers[0].status_code == 200
        assert answers[0].json()["usage"]["completion_tokens"] == 300
        assert server.said == ["1 request may finish; a second Ctrl-C ends what is left"]


@pytest.mark.parametrize(
    ("path", "asked"),
    [("/v1/chat/completions", CHAT), ("/v1/completions", {"model": "tiny", "prompt": ["a", "b"]})],
)
def test_what_is_not_done_in_time_is_ended(
    model: Path, caplog: pytest.LogCaptureFixture, path: str, asked: dict[str, Any]
) -> None:
    """With an error in the stream, whose text has no end, and without a traceback in the log."""
    streamed: list[str] = []
    body = asked | {"max_tokens": 1900, "ignore_eos": True, "stream": True}
    with live(model, pages=256) as server, slowed(server.llm):
        server.server._drain_s = 0.01
        ask = lambda: streamed.append(post(server, body, path).text)  # noqa: E731
        thread = threading.Thread(target=ask)
        thread.start()
        until(lambda: server.service.running >= 1)
        server.server.handle_exit(signal.SIGTERM, None)
        server.thread.join(HANGS)
        thread.join(HANGS)
    last = json.loads(streamed[0].strip().rsplit("data: ", 1)[1])
    assert "the server is shutting down" in last["error"]["message"]
    assert '"finish_reason":"' not in streamed[0], "a client would take half a text as whole"
    assert not [record for record in caplog.records if record.exc_info]


def ask_in_vain(server: Live) -> None:
    with suppress(httpx2.HTTPError):  # the connection may be closed
        assert post(server, LONG).status_code >= 500


def test_a_server_whose_model_cannot_be_read_ends_with_the_reason() -> None:
    def load(report: object) -> LLM:
        raise CheckpointError("the folder is empty; give another")

    app = make_app(ModelHost("none", load), ["127.0.0.1"], None)
    with pytest.raises(CheckpointError, match="the folder is empty; give another"):
        Server(app, 5.0, print).keep(listen("127.0.0.1", (0,)))


def test_the_second_signal_ends_at_once(model: Path) -> None:
    with live(model, pages=256) as server:
        thread = threading.Thread(target=ask_in_vain, args=(server,))
        with held(server.llm):
            thread.start()
            until(lambda: server.service.running >= 1)
            server.server.handle_exit(signal.SIGTERM, None)
            server.server.handle_exit(signal.SIGTERM, None)
            server.thread.join(HANGS)
            assert not server.thread.is_alive()
        thread.join(HANGS)


def test_admission_is_fair_between_keys_and_keeps_priorities() -> None:
    async def run() -> list[str]:
        admission, order = Admission(1, 16), []
        first = await admission.enter("a", 1, 0)

        async def one(key: str, priority: int, name: str) -> None:
            place = await admission.enter(key, 1, priority)
            order.append(name)
            place.leave()

        names = [("a", 0, "a1"), ("a", 0, "a2"), ("a", -1, "a0"), ("b", 0, "b1"), ("b", 0, "b2"), ("c", 5, "c1")]
        tasks = [asyncio.create_task(one(*name)) for name in names]
        await asyncio.sleep(0)
        assert admission.waiting == 6
        first.leave()
        await asyncio.gather(*tasks)
        assert (admission.used, admission.waiting) == (0, 0)
        return order

    order = asyncio.run(run())
    assert [name for name in order if name[0] == "a"] == ["a0", "a1", "a2"]
    assert {name[0] for name in order[:3]} == {"a", "b", "c"}, "no key waits for another one's queue"


def test_one_key_cannot_fill_the_queue_of_another(model: Path) -> None:
    """A key that has filled the queue is refused, another one may fill its share, and all that wait are served."""
    policy = lambda address: Policy.of([address], [KEY, OTHER])  # noqa: E731
    answers: list[int] = []
    threads: list[threading.Thread] = []
    with live(model, policy=policy, served=Served(["tiny"], ServiceLimits(queue=4)), pages=256) as server:
        admission = server.service.admission

        def ask(key: str) -> int:
            return post(server, CHAT | {"max_tokens": 2}, headers={"x-api-key": key}).status_code

        def ask_beside(key: str, number: int) -> None:
            """Ask until so many requests wait or run, of all keys."""
            while len(threads) < number:
                threads.append(threading.Thread(target=lambda: answers.append(ask(key))))
                threads[-1].start()
                until(lambda: answers or admission.used + admission.waiting >= len(threads))

        assert ask(KEY) == 200
        admission.capacity = 1  # the first request has set it for the engine
        with held(server.llm):
            ask_beside(KEY, 1 + 4)
            assert ask(KEY) == 429
            ask_beside(OTHER, 1 + 4 + 2)
            assert (ask(OTHER), ask(KEY)) == (429, 429)
        for thread in threads:
            thread.join(HANGS)
    assert answers == [200] * 7


def test_bodies_of_one_key_leave_room_for_those_of_another() -> None:
    held_bytes = Quota(100, 2)
    held_bytes.add("a", 100)
    assert (held_bytes.fits("a"), held_bytes.fits("b", 50), held_bytes.fits("b", 51)) == (False, True, False)
    held_bytes.remove("a", 100)
    assert held_bytes.fits("b", 100)
    assert (held_bytes.used, held_bytes._by_key) == (0, {})


def test_a_request_that_leaves_the_queue_frees_its_place() -> None:
    async def run() -> None:
        admission = Admission(2, 3)
        held_places = [await admission.enter("a", 2, 0)]
        with pytest.raises(Late):
            async with Deadline(0.01).limit():
                await admission.enter("b", 1, 0)
        gone = [asyncio.create_task(admission.enter("b", 1, 0)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(Busy):
            await admission.enter("c", 1, 0)
        for task in gone:
            task.cancel()
        await asyncio.gather(*gone, return_exceptions=True)
        assert admission.waiting == 0
        waits = asyncio.create_task(admission.enter("c", 2, 0))
        await asyncio.sleep(0)
        held_places[0].leave()
        held_places[0].leave()
        place = await waits
        assert admission.used == 2
        place.leave()
        assert (admission.used, admission._keys) == (0, {})

    asyncio.run(run())


def test_collections_leave_the_loaded_model_alone() -> None:
    """Else each visits the objects of all libraries, and no step goes on meanwhile."""
    before, made = gc.get_freeze_count(), [[] for _ in range(1001)]
    try:
        assert uncollected(lambda _: made)(lambda *_: None) is made  # type: ignore[arg-type,return-value]
        assert gc.get_freeze_count() > before + 1000
        assert not any(one is made for one in gc.get_objects()), "it was left to collections"
    finally:
        gc.unfreeze()


def answered(client: socket.socket) -> bytes:
    """An answer of one object."""
    found = b""
    while not found.endswith(b"}") and (part := client.recv(2**16)):
        found += part
    return found


def test_headers_that_do_not_arrive_close_the_connection(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """The timers that must not fire (of the first connection) are older than those that do."""
    monkeypatch.setattr(connection, "HEADERS_S", 1.0)
    body = json.dumps({"prompt": "ab"}).encode()
    begun = f"POST /tokenize HTTP/1.1\r\nhost: {server.address}\r\n".encode()
    headers = b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    each = [socket.create_connection(server.address.split(":"), HANGS) for _ in range(4)]
    complete, kept, slow, silent = each
    complete.sendall(begun + headers)
    kept.sendall(begun + headers + body)
    assert answered(kept).startswith(b"HTTP/1.1 200")
    kept.sendall(begun)
    slow.sendall(begun)
    assert [one.recv(1) for one in (silent, slow, kept)] == [b"", b"", b""]
    complete.sendall(body)
    assert answered(complete).startswith(b"HTTP/1.1 200")
    for one in each:
        one.close()


def test_the_dashboard_shows_every_metric_and_no_other(server: Live) -> None:
    assert post(server, CHAT | {"max_tokens": 2}).status_code == 200
    assert post(server, CHAT | {"max_tokens": -2}).status_code == 400
    text = httpx2.get(f"{server.url}/metrics", timeout=HANGS).text
    exported = {line.partition("{")[0].partition(" ")[0] for line in text.splitlines() if not line.startswith("#")}
    own = {name for name in exported if name.startswith("tokenwright_")}  # others are of any process
    wanted = {name for name in own if not name.endswith(("_sum", "_count"))}
    dashboard = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text(encoding="utf-8"))
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert set(re.findall(r"tokenwright_\w+", " ".join(asked))) == wanted
