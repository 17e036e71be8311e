"""Before a model is loaded, when it makes no tokens, and while the server ends: what clients are told, and how fast."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.engines import HANGS_S, until
from tests.serve.talking import PAGES, Talker, make_talker, running, talking
from tokenwright import LLM
from tokenwright.serve.app import Served, make_app
from tokenwright.serve.service import model_host
from tokenwright.serve.service.model_host import ModelHost
from tokenwright.serve.service.preprocess import Preprocessor
from tokenwright.serve.service.service import ServiceLimits
from tokenwright.serve.service.types import Late
from tokenwright.serve.transport.guard import Policy

ASKED = {"model": "tiny", "prompt": "Once upon", "max_tokens": 2, "temperature": 0}
QUEUE = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_talker(tmp_path_factory.mktemp("readiness"))


class Crowd:
    """Clients that ask at once, each in a thread."""

    def __init__(self, url: str, number: int) -> None:
        self.answers: list[httpx.Response] = []
        self._threads = [threading.Thread(target=self._ask, args=(url,)) for _ in range(number)]
        for thread in self._threads:
            thread.start()

    def _ask(self, url: str) -> None:
        self.answers.append(httpx.post(f"{url}/v1/completions", json=ASKED, timeout=HANGS_S))

    def statuses(self) -> list[int]:
        for thread in self._threads:
            thread.join(HANGS_S)
        return sorted(answer.status_code for answer in self.answers)


@contextmanager
def loading(model: Any, go_on: threading.Event, deadline_s: float | None = None) -> Iterator[tuple[str, Any]]:
    """A server whose model is not loaded before `go_on` is set: its address, and its service."""

    def load(report: Any) -> LLM:
        assert go_on.wait(HANGS_S)
        return LLM(model, pages=PAGES, report=report)

    limits = ServiceLimits(queue=QUEUE, deadline_s=deadline_s)
    app = make_app(ModelHost("tiny", load), Policy.of(None), None, Served(["tiny"], limits))
    with running(app, app.state.service, loaded=False) as talker:
        try:
            yield talker.url, talker.service
        finally:
            go_on.set()
            until(talker.service.host.settled.is_set)


def test_requests_wait_for_the_model_in_a_bounded_queue(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Preprocessor] = []
    original = Preprocessor.__init__

    def counted(self: Preprocessor, *args: Any) -> None:
        made.append(self)
        original(self, *args)

    monkeypatch.setattr(Preprocessor, "__init__", counted)
    go_on = threading.Event()
    with loading(model, go_on) as (url, _):
        crowd = Crowd(url, 1 + QUEUE + 3)
        until(lambda: len(crowd.answers) == 3)
        assert {answer.status_code for answer in crowd.answers} == {429}
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in crowd.answers)
        health, ready = (httpx.get(f"{url}/{name}") for name in ("health", "ready"))
        assert (health.status_code, health.json()["status"], health.json()["progress"]) == (200, "loading", 0.0)
        assert (ready.status_code, ready.json()["status"]) == (503, "loading")
        go_on.set()
        assert crowd.statuses() == [200] * (1 + QUEUE) + [429] * 3
    assert len(made) == 1


def test_requests_that_wait_for_the_model_are_told_that_the_server_ends(model: Any) -> None:
    with loading(model, threading.Event()) as (url, asked):
        crowd = Crowd(url, 2)
        until(lambda: asked._opening.waiting.used == 2)
        asked.stop()
        assert crowd.statuses() == [503, 503]
        assert all("shutting down" in answer.text for answer in crowd.answers)


def test_the_deadline_holds_while_the_model_is_loaded(model: Any) -> None:
    hello = [{"role": "user", "content": "Hello"}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": ["a"] * 3, "timeout_s": 0.2},
        "/v1/chat/completions": {"messages": hello, "timeout_s": 0.2, "stream": True},
        "/v1/responses": {"input": "Hello"},
        "/v1/messages": {"messages": hello, "max_tokens": 4},
        "/api/chat": {"messages": hello},
    }
    with loading(model, threading.Event(), deadline_s=0.3) as (url, _):
        for path, body in bodies.items():
            answer = httpx.post(url + path, json=body | {"model": "tiny"}, timeout=HANGS_S)
            seconds = body.get("timeout_s", 0.3)
            assert answer.status_code == 503, path
            assert f"waited for {seconds} s, which is its deadline" in answer.text


@pytest.fixture
def talker(model: Any) -> Iterator[Talker]:
    with talking(model) as talker:
        yield talker


def test_health_fails_where_every_token_does(talker: Talker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that fails is no proof of a token."""
    monkeypatch.setattr(model_host, "FRESH_S", 0.0)
    with httpx.Client(base_url=talker.url, timeout=HANGS_S) as http:
        assert http.get("/health").status_code == 200
        runner = talker.llm.engine.runner
        forward = runner.forward

        def spoilt(step: Any) -> Any:
            output = forward(step)
            output.logits[:] = float("nan")
            return type(output)(output.rows, output.logits)

        monkeypatch.setattr(runner, "forward", spoilt)
        assert http.post("/v1/completions", json=ASKED).status_code == 500
        answer = http.get("/health")
        assert (answer.status_code, answer.json()["status"]) == (503, "failed")
        monkeypatch.setattr(runner, "forward", forward)
        assert http.get("/health").status_code == 200


def test_a_grammar_that_waits_beyond_the_deadline_says_it_and_lets_next_turns_go_on(
    talker: Talker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message said what was left of the deadline, and a turn that waited for the request waited on."""
    service, prepared = talker.service, threading.Event()

    async def late(_: object, wanted: Any) -> Any:
        service._next_turns.ended(prepared.set)
        assert service._next_turns._task is None, "a request that is being prepared comes first"
        raise Late(f"the request waited for {wanted.deadline_s:g} s, which is its deadline")

    monkeypatch.setattr(service.preparation, "prepared", late)
    answer = httpx.post(f"{talker.url}/v1/completions", json=ASKED | {"timeout_s": 7}, timeout=HANGS_S)
    assert answer.status_code == 503 and "waited for 7 s, which is its deadline" in answer.text
    assert prepared.wait(HANGS_S)


def test_a_request_that_is_being_prepared_when_the_server_ends_is_told(
    talker: Talker, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    original = Preprocessor.prepare

    def slow(self: Preprocessor, wanted: Any) -> Any:
        begun.set()
        assert go_on.wait(HANGS_S)
        return original(self, wanted)

    monkeypatch.setattr(Preprocessor, "quick", lambda *_: False)
    monkeypatch.setattr(Preprocessor, "prepare", slow)
    crowd = Crowd(talker.url, 1)
    assert begun.wait(HANGS_S)
    listener = talker.service._opening.opened.listener
    asyncio.run_coroutine_threadsafe(stopped(talker.service), listener._event_loop()).result(HANGS_S)
    go_on.set()
    assert crowd.statuses() == [503]
    assert "shutting down" in crowd.answers[0].text


async def stopped(asked: Any) -> None:
    asked.stop()
