"""Load and faults at a small size: pages, texts and replies, at any speed. Two server processes, as one is ended."""

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.serving import reliability_parts as parts
from benchmarks.serving import traffic
from benchmarks.serving.hostile import ATTACKS, hostile
from benchmarks.serving.http_client import Reply
from benchmarks.serving.served import Server
from benchmarks.serving.verdicts import Report
from tokenwright import LLM, RequestError
from tokenwright.serve.service.preprocess import Preprocessor
from tokenwright.serve.service.types import GenerationRequest
from tokenwright.text.tokenizer import Tokenizer

SCALE = 0.02
PAGES = 36


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return traffic.write_model(tmp_path_factory.mktemp("load") / "model")


def started(model: Path) -> Server:
    return Server(model, {"pages": PAGES, "max_sequences": 8}, {"max_queue": 40, "drain_timeout": 600.0})


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with started(model) as running:
        yield running
        assert running.rest_s() is not None


def names(report: Report) -> set[str]:
    return {finding.what for finding in report.findings}


PARTS = [parts.kills, parts.pool, hostile, pytest.param(parts.queue, marks=pytest.mark.sweep)]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_invariants_hold(server: Server, part: object) -> None:
    report = Report("part")
    asyncio.run(part(server, report, SCALE))  # type: ignore[operator]
    assert not report.broken
    assert {"free + cached pages = initial, none running"} < names(report)
    news = [line for line in server.said[1:] if "prompt tokens reused" not in line]
    assert news == [], "clients that go away, and bad requests, are no news for the log"
    if part is hostile:
        assert set(ATTACKS) < names(report)


@pytest.mark.sweep
def test_a_soak_keeps_every_text(server: Server) -> None:
    report = Report("soak")
    asyncio.run(parts.soak(server, report, 48, 60.0, 16))
    assert not report.broken


def test_wrong_texts_and_lost_replies_are_seen() -> None:
    right = ((("a", "stop"),), (("b", "length"),))
    for found in ((right[0], (("c", "length"),)), (right[0], ValueError("lost"))):
        report = Report("part")
        parts.same_texts(report, found, right)
        assert len(report.broken) == 1
    cut = Reply(200, {}, b'data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n', (0.1,))
    with pytest.raises(ValueError, match="without its end"):
        traffic.told(cut, True)
    with pytest.raises(ValueError, match="status 503"):
        traffic.told(Reply(503, {}, b"{}", ()), False)


def test_a_long_text_lets_other_threads_run(model: Path) -> None:
    """A tokenizer that holds the GIL would keep the event loop from answering."""
    tokenizer, text = Tokenizer.load(model), "a b c " * 60_000
    assert tokenizer.encode(text) == tokenizer.encode("a b c ") * 60_000
    ended, turns = threading.Event(), 0

    def encode() -> None:
        tokenizer.encode(text)
        ended.set()

    thread = threading.Thread(target=encode)
    thread.start()
    while not ended.is_set():
        time.sleep(0.001)
        turns += 1
    thread.join()
    assert turns > 10, "this thread has had no turn"


@pytest.mark.parametrize("messages", [False, True])
def test_a_text_that_cannot_fit_is_refused_unread(model: Path, monkeypatch: pytest.MonkeyPatch, messages: bool) -> None:
    def read(*_: object, **__: object) -> None:
        raise AssertionError("it was read")

    text = "a b " * 2**20
    wanted = (
        GenerationRequest(messages=[{"role": "user", "content": text}]) if messages else GenerationRequest(prompt=text)
    )
    with LLM(model, pages=4) as llm:
        preparer = Preprocessor(llm)
        monkeypatch.setattr(Tokenizer, "encode", read)
        monkeypatch.setattr(Tokenizer, "encode_parts", read)
        with pytest.raises(RequestError, match="4,194,304 characters, so at least"):
            preparer.prepare(wanted)


def test_sigterm_loses_no_accepted_reply(model: Path) -> None:
    report = Report("stop")
    with started(model) as ended:
        asyncio.run(parts.stop(ended, report, 4 * SCALE))
    assert not report.broken
