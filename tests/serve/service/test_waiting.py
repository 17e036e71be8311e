"""Requests that wait: those beyond the queue's end are refused unread, and clients that go away leave it."""

import asyncio
import gc
import re
import socket
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import Request

from tests.engines import HANGS_S, held, reached, until
from tests.serve.talking import Talker, make_talker, talking
from tokenwright.errors import RequestError
from tokenwright.serve.app import APIS, Served
from tokenwright.serve.explorer.routes import in_parts
from tokenwright.serve.http.api import ClientGone
from tokenwright.serve.http.exchange import unless_gone
from tokenwright.serve.service import model_host
from tokenwright.serve.service.preprocess import Preparation, Preprocessor
from tokenwright.serve.service.service import AHEAD, Service, ServiceLimits
from tokenwright.serve.service.types import GenerationRequest, NotReady

ASKED = {"model": "tiny", "prompt": "Once upon", "max_tokens": 2, "temperature": 0}
QUEUED = sorted(path for api in APIS for path in api.prompts)
ORIGIN = "https://chat.example"


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Talker]:
    """A server whose engine stands still and whose queue, of one request, is full; then all are served."""
    served = Served(["tiny"], ServiceLimits(queue=1))
    with talking(make_talker(tmp_path_factory.mktemp("busy")), served=served, origins=frozenset([ORIGIN])) as talker:
        talker.service.admission.capacity = 1
        httpx.post(f"{talker.url}/v1/completions", json=ASKED, timeout=HANGS_S).raise_for_status()
        talker.service.admission.capacity = 1  # the first request has set it for the engine
        answers: list[int] = []
        threads = []
        with held(talker.llm):
            for waiting in (0, 1):
                threads.append(threading.Thread(target=lambda: answers.append(complete(talker))))
                threads[-1].start()
                until(lambda: talker.service.admission.used and talker.service.admission.waiting == waiting)  # noqa: B023
            yield talker
        for thread in threads:
            thread.join(HANGS_S)
        assert answers == [200, 200]
        talker.service.admission.capacity = AHEAD


def complete(talker: Talker) -> int:
    return httpx.post(f"{talker.url}/v1/completions", json=ASKED, timeout=HANGS_S).status_code


def head(talker: Talker, path: str, more: str = "") -> bytes:
    """The answer to a request whose body never comes."""
    model_host, port = talker.url.removeprefix("http://").split(":")
    with socket.create_connection((model_host, int(port)), HANGS_S) as wire:
        wire.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\n{more}Content-Length: 1000\r\n\r\n".encode())
        wire.settimeout(HANGS_S)
        return wire.recv(2**14)


@pytest.mark.parametrize("path", QUEUED)
def test_beyond_a_full_queue_no_body_is_read(busy: Talker, path: str) -> None:
    before = busy.service.admission.refused
    answer = head(busy, path)
    assert answer.startswith(b"HTTP/1.1 429")
    assert b"\r\nretry-after: " in answer
    assert b"x-request-id: " in answer
    assert b"1 request waits already" in answer
    assert busy.service.admission.refused == before + 1


def test_a_page_of_another_origin_can_read_that_the_queue_is_full(busy: Talker) -> None:
    answer = head(busy, QUEUED[0], f"Origin: {ORIGIN}\r\n")
    assert answer.startswith(b"HTTP/1.1 429")
    assert f"access-control-allow-origin: {ORIGIN}".encode() in answer


def test_what_needs_no_place_is_answered_meanwhile(busy: Talker) -> None:
    with httpx.Client(base_url=busy.url, timeout=HANGS_S) as http:
        assert http.post("/tokenize", json={"prompt": "a"}).status_code == 200
        counted = http.post("/v1/messages/count_tokens", json={"model": "tiny", "messages": [MESSAGE]})
        assert counted.status_code == 200
        assert http.get(QUEUED[-1]).status_code == 405
        again = http.post("/v1/completions", json=ASKED)  # the connection can be used again
        assert (again.status_code, http.get("/v1/models").status_code) == (429, 200)
        assert again.json()["error"]["type"] == "rate_limit_error"
        late = http.post("/v1/completions", json=ASKED | {"timeout_s": 0.05})
        assert late.status_code == 429, "the queue is still full"
        assert http.get("/ready").status_code == 200
        metrics = http.get("/metrics").text
        assert "tokenwright_requests_waiting 1.0" in metrics
        assert re.search(r'tokenwright_rejections_total\{reason="busy"\} [1-9]', metrics)


MESSAGE = {"role": "user", "content": "Hello"}


class Knot:
    """What only a collection finds."""

    def __init__(self) -> None:
        self.own = self


@pytest.mark.parametrize(("waiting", "overdue"), [(False, 10**9), (True, 10**9), (True, 3)])
def test_garbage_is_collected_in_full_while_nobody_waits(
    monkeypatch: pytest.MonkeyPatch, waiting: bool, overdue: int
) -> None:
    monkeypatch.setattr(model_host, "COLLECT_S", 0.0)
    monkeypatch.setattr(model_host, "OVERDUE", overdue)

    async def main() -> tuple[bool, bool]:
        before = gc.get_threshold()
        collector = asyncio.create_task(model_host.collect_when_idle(lambda: not waiting))
        await asyncio.sleep(0)
        old = [Knot()]
        gc.collect(1)
        gc.collect(1)
        known = weakref.ref(old.pop())
        full = gc.get_stats()[2]["collections"]
        young = [[] for _ in range(10**6)]  # Python would collect in full meanwhile
        kept = gc.get_stats()[2]["collections"] == full
        for _ in range(10):
            await asyncio.sleep(0)
        del young
        collector.cancel()
        with pytest.raises(asyncio.CancelledError):
            await collector
        assert gc.get_threshold() == before
        return kept, known() is None

    assert run(main()) == (True, not waiting or overdue == 3)


def test_holes_of_the_heap_are_given_back_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_host, "COLLECT_S", 0.0)

    def private() -> int:
        return int(re.findall(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))[0])

    async def main() -> tuple[int, int]:
        blocks = [b"x" * 100_000 for _ in range(1000)]
        del blocks[:-1]  # glibc keeps what lies below the last one
        before = private()
        collector = asyncio.create_task(model_host.collect_when_idle(lambda: True))
        for _ in range(10):
            await asyncio.sleep(0)
        collector.cancel()
        return before, private()

    before, after = run(main())
    assert before - after > 50_000


def request_of(messages: "asyncio.Queue[dict[str, Any]]") -> Request:
    return Request({"type": "http", "headers": []}, messages.get)


def run(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(main, HANGS_S))


GONE = {"type": "http.disconnect"}


def test_work_is_cancelled_if_the_client_goes_away() -> None:
    async def main() -> bool:
        messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        ended = asyncio.Event()

        async def work() -> None:
            messages.put_nowait(GONE)
            try:
                await asyncio.sleep(HANGS_S)
            finally:
                ended.set()

        with pytest.raises(ClientGone):
            await unless_gone(request_of(messages), work())
        await asyncio.sleep(0)  # the caller goes on as if nothing had happened
        task = asyncio.current_task()
        assert task is not None and not task.cancelling()
        return ended.is_set()

    assert run(main())


@pytest.mark.parametrize("turns", range(4))
def test_a_client_that_goes_away_at_the_end_harms_nobody(turns: int) -> None:
    async def main() -> str:
        messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

        async def work() -> str:
            await asyncio.sleep(0)  # the watcher waits for messages now
            messages.put_nowait(GONE)
            for _ in range(turns):
                await asyncio.sleep(0)
            return "whole"

        try:
            found = await unless_gone(request_of(messages), work())
        except ClientGone:
            found = "gone"
        for _ in range(4):
            await asyncio.sleep(0)
        return found

    assert run(main()) == ("whole" if turns < 2 else "gone")


def test_a_request_that_the_server_cancels_is_not_taken_for_a_client_that_has_gone() -> None:
    async def main() -> None:
        messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        before = asyncio.all_tasks()
        task = asyncio.create_task(unless_gone(request_of(messages), asyncio.sleep(HANGS_S)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == before, "nobody waits for its messages any more"

    run(main())


def test_errors_of_the_work_go_on() -> None:
    async def work() -> None:
        raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        run(unless_gone(request_of(asyncio.Queue()), work()))


TEXT = {"role": "user", "content": "held"}
READING = {
    "/tokenize": {"prompt": "held"},
    "/detokenize": {"ids": [1]},
    "/v1/messages/count_tokens": {"model": "tiny", "messages": [TEXT]},
    "/chat/prompt": {"messages": [TEXT]},
}


@pytest.fixture
def reading(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Talker]:
    """A server on which one text is being read for as long as the test takes, and another one waits."""
    go, inside = threading.Event(), threading.Event()
    prompt = Preprocessor.prompt

    def held_up(self: Preprocessor, wanted: GenerationRequest, **more: Any) -> Any:
        if wanted.prompt == "held":
            inside.set()
            assert go.wait(HANGS_S)
        return prompt(self, wanted, **more)

    monkeypatch.setattr(Preprocessor, "prompt", held_up)
    served = Served(["tiny"], ServiceLimits(queue=1))
    with talking(make_talker(tmp_path_factory.mktemp("reading")), served=served) as talker:
        answers: list[int] = []

        def ask() -> None:
            answers.append(httpx.post(f"{talker.url}/tokenize", json={"prompt": "held"}, timeout=HANGS_S).status_code)

        threads = [threading.Thread(target=ask) for _ in range(2)]
        threads[0].start()
        assert inside.wait(HANGS_S)
        threads[1].start()
        until(lambda: talker.service.preparation.reading.waiting == 1)
        yield talker
        go.set()
        for thread in threads:
            thread.join(HANGS_S)
        assert answers == [200, 200]
        assert (talker.service.preparation.reading.used, talker.service.preparation.reading.waiting) == (0, 0)


def test_texts_that_are_only_read_wait_in_a_bounded_queue(reading: Talker) -> None:
    with httpx.Client(base_url=reading.url, timeout=HANGS_S) as http:
        for path, body in READING.items():
            answer = http.post(path, json=body)
            assert answer.status_code == 429, path
            assert int(answer.headers["retry-after"]) >= 1
            assert "1 request waits already" in answer.text
        assert http.post("/v1/completions", json=ASKED).status_code == 200, "a thread is left for prompts"
        assert http.get("/health").status_code == 200


def test_a_thread_that_reads_for_a_client_that_has_gone_counts() -> None:
    """Clients who come and go at once do not take every thread."""
    go = threading.Event()

    async def main() -> tuple[int, int]:
        service = Service(None, ["tiny"], ServiceLimits(queue=1))  # type: ignore[arg-type]  # it needs no model for this
        work = asyncio.ensure_future(service.read("", lambda: go.wait(HANGS_S)))
        await reached(lambda: service.preparation.reading.used)
        await asyncio.sleep(0)  # it is in a thread
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        held = service.preparation.reading.used
        go.set()
        await reached(lambda: not service.preparation.reading.used)
        service.close()
        return held, service.preparation.reading.used

    assert asyncio.run(main()) == (1, 0)


def read_by_a_service(work: Callable[[], object]) -> Coroutine[Any, Any, object]:
    return Preparation(2, 8, 1).read("", work, None)


def made_in_parts(work: Callable[[], object]) -> Coroutine[Any, Any, object]:
    return in_parts(work() for _ in "a")


@pytest.mark.parametrize("read", [read_by_a_service, made_in_parts])
def test_work_that_fails_once_its_client_has_gone_is_no_forgotten_task(read: Callable[..., Any]) -> None:
    """asyncio wrote a traceback into the log for each."""
    begun, go, said = threading.Event(), threading.Event(), list[Any]()

    def work() -> object:
        begun.set()
        assert go.wait(HANGS_S)
        raise RequestError("it fails")

    async def leave() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))
        task = asyncio.create_task(read(work))
        await asyncio.to_thread(begun.wait, HANGS_S)
        task.cancel()
        await asyncio.sleep(0.01)
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.get_running_loop().shutdown_default_executor()
        del task
        gc.collect()

    asyncio.run(leave())
    assert said == []


def test_a_stopped_service_prepares_no_model(talker: Talker) -> None:
    """Its threads may have ended by then, as those of a model that leaves while /health looks at it."""
    service = Service(talker.service.host, ["tiny"])
    service.stop()
    service.close()
    with pytest.raises(NotReady):
        asyncio.run(service.opened(unlimited=True))
