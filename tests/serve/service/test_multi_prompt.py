"""Replies of several texts: however many a request has, it takes one place in the queue, and waits for its reader."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.engines import reached, slowed
from tests.serve.live import HANGS, Live, keep_pace, live, make_chat_model, settled
from tokenwright.serve.app import Served
from tokenwright.serve.service import generation, multi_prompt
from tokenwright.serve.service.multi_prompt import PromptGroup, gather
from tokenwright.serve.service.service import AHEAD, ServiceLimits
from tokenwright.serve.service.types import GenerationRequest, NotReady

PARTS = 64  # more than have a place in the engine and in the queue


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = make_chat_model(tmp_path_factory.mktemp("parts") / "model")
    with live(folder, pages=256, max_sequences=1, served=Served(["tiny"], ServiceLimits(queue=2))) as running:
        assert 1 + AHEAD + 2 < PARTS
        yield running
        settled(running)


@pytest.mark.parametrize("stream", [False, True])
def test_one_request_does_not_fill_the_queue_by_itself(server: Live, stream: bool) -> None:
    body = {"model": "tiny", "prompt": ["a"] * PARTS, "max_tokens": 1, "ignore_eos": True, "stream": stream}
    answer = httpx2.post(f"{server.url}/v1/completions", json=body, timeout=HANGS)
    assert answer.status_code == 200, answer.text
    assert answer.text.count('"finish_reason":"length"') == PARTS


def test_all_texts_of_a_request_are_embedded(server: Live) -> None:
    texts = [f"text {number}" for number in range(PARTS)]
    answer = httpx2.post(f"{server.url}/v1/embeddings", json={"model": "tiny", "input": texts}, timeout=HANGS)
    assert answer.status_code == 200, answer.text
    alone = httpx2.post(f"{server.url}/v1/embeddings", json={"model": "tiny", "input": texts[-1]}, timeout=HANGS)
    assert answer.json()["data"][-1]["embedding"] == pytest.approx(alone.json()["data"][0]["embedding"], abs=1e-5)


def test_a_reader_that_leaves_several_texts_comes_to_an_end(server: Live) -> None:
    overrides = {"max_tokens": 1900, "ignore_eos": True}

    async def leave() -> int:
        both = PromptGroup(
            server.service.start, [GenerationRequest(prompt=text, overrides=overrides, streamed=True) for text in "ab"]
        )
        await both.start()
        texts = aiter(both)
        await anext(texts)
        both.cancel()
        async for _ in texts:
            pass
        await reached(lambda: not server.service.running)
        return sum(one.counts().completion for one in both.generations)

    with slowed(server.llm):
        assert asyncio.run_coroutine_threadsafe(leave(), server.loop).result(HANGS) < 2 * 1900


def test_the_parts_of_a_request_that_was_taken_are_taken_while_the_server_drains(server: Live) -> None:
    async def ask() -> list[int]:
        each = [GenerationRequest(prompt="a", overrides={"max_tokens": 1, "ignore_eos": True}) for _ in range(PARTS)]
        asked = asyncio.create_task(gather(lambda wanted: _tokens(server, wanted), each))
        await reached(lambda: server.service.running)
        server.service.draining = True
        try:
            with pytest.raises(NotReady):
                await server.service.start(each[0])
            return await asked
        finally:
            server.service.draining = False

    assert asyncio.run_coroutine_threadsafe(ask(), server.loop).result(HANGS) == [1] * PARTS


async def _tokens(server: Live, wanted: GenerationRequest) -> int:
    generation = await server.service.start(wanted)
    await generation.answers()
    return generation.counts().completion


def test_a_slow_reader_of_several_texts_pauses_them(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "MOST_UNREAD", 8)
    monkeypatch.setattr(multi_prompt, "MOST_UNREAD", 8)
    keep_pace(server, monkeypatch)
    overrides = {"max_tokens": 400, "ignore_eos": True, "temperature": 0.0}

    async def read() -> int:
        both = PromptGroup(
            server.service.start, [GenerationRequest(prompt=text, overrides=overrides, streamed=True) for text in "ab"]
        )
        await both.start()
        texts = aiter(both)
        await anext(texts)
        handles = [one.handle for one in both.generations]
        await reached(lambda: all(handle.sequence.group.pause_at is not None or handle.ended for handle in handles))
        assert not any(handle.ended for handle in handles), "they go on although nobody reads"
        async for _ in texts:
            pass
        return sum(one.counts().completion for one in both.generations)

    assert asyncio.run_coroutine_threadsafe(read(), server.loop).result(HANGS) == 800


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Its pages are too few for both texts of BOTH."""
    folder = make_chat_model(tmp_path_factory.mktemp("tight") / "model")
    with live(folder, pages=32, max_sequences=2, served=Served(["tiny"], timings=True)) as running:
        yield running
        settled(running)


BOTH = {"model": "tiny", "prompt": ["a" * 40, "b" * 60], "max_tokens": 300, "ignore_eos": True}


def cached(usage: dict[str, Any]) -> int:
    found: int = usage["prompt_tokens_details"]["cached_tokens"]
    return found


def test_pages_that_a_preempted_text_finds_again_are_no_cached_prompt(tight: Live) -> None:
    both = BOTH | {"prompt": ["c" * 40, "d" * 60]}  # no other test has these in the prefix cache
    first = httpx2.post(f"{tight.url}/v1/completions", json=both, timeout=HANGS).json()
    assert "tokenwright_preemptions_total 0" not in tight.service.metrics.text().decode()
    assert cached(first["usage"]) == 0
    again = httpx2.post(f"{tight.url}/v1/completions", json=both, timeout=HANGS).json()
    assert 0 < cached(again["usage"]) < again["usage"]["prompt_tokens"]


def test_the_timings_of_several_texts_are_those_of_the_whole_reply(tight: Live) -> None:
    sent = time.perf_counter()
    answer = httpx2.post(f"{tight.url}/v1/completions", json=BOTH, timeout=HANGS)
    took_ms = 1000 * (time.perf_counter() - sent)
    timings, usage = answer.json()["timings"], answer.json()["usage"]
    assert timings["preemptions"] >= 1
    assert timings["cached_tokens"] == cached(usage)
    assert (timings["prompt_tokens"], timings["completion_tokens"]) == (usage["prompt_tokens"], 600)
    assert 0 < timings["queue_ms"] + timings["prefill_ms"] + timings["decode_ms"] <= took_ms
    assert answer.headers["server-timing"].startswith("queue;dur=")


def test_embeddings_say_where_the_time_went(tight: Live) -> None:
    both = {"input": ["a" * 40, "b" * 60]}
    for path, body in (("v1/embeddings", both), ("api/embed", both), ("api/embeddings", {"prompt": "a" * 100})):
        answer = httpx2.post(f"{tight.url}/{path}", json={"model": "tiny"} | body, timeout=HANGS)
        assert answer.json()["timings"]["prompt_tokens"] == 100
        assert answer.headers["server-timing"].startswith("queue;dur=")
