"""Drafts over HTTP: what a client predicts comes to the engine, and replies, timings and metrics count what it did."""

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.serve.live import HANGS, Live, live, settled
from tokenwright.serve.app import Served
from tokenwright.serve.openai.bodies import ChatBody
from tokenwright.serve.openai.generation_request import predicted
from tokenwright.serve.service.preprocess import Preprocessor
from tokenwright.serve.service.types import GenerationRequest

STORY = "The cat sat on the mat. The dog sat on the log. "


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live("stories", served=Served(["tiny"], timings=True)) as running:
        yield running
        settled(running)


def completed(server: Live, **more: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": STORY * 4, "max_tokens": 40, "temperature": 0, "ignore_eos": True} | more
    answer = httpx2.post(f"{server.url}/v1/completions", json=body, timeout=HANGS)
    assert answer.status_code == 200, answer.text
    reply: dict[str, Any] = answer.json()
    return reply


def test_a_reply_says_how_many_drafts_were_kept(server: Live) -> None:
    reply = completed(server)
    details, timings = reply["usage"]["completion_tokens_details"], reply["timings"]
    assert details["accepted_prediction_tokens"] == timings["accepted_tokens"] > 0
    assert details["rejected_prediction_tokens"] == timings["drafted_tokens"] - timings["accepted_tokens"]
    metrics = server.service.metrics.text().decode()
    assert f"tokenwright_draft_tokens_total {timings['drafted_tokens']:.1f}" in metrics
    assert f"tokenwright_accepted_tokens_total {timings['accepted_tokens']:.1f}" in metrics


def test_a_request_may_leave_drafts_out(server: Live) -> None:
    with_drafts, without = completed(server), completed(server, speculate=False)
    assert without["timings"]["drafted_tokens"] == 0 < with_drafts["timings"]["drafted_tokens"]
    assert with_drafts["choices"][0]["text"] == without["choices"][0]["text"]


def test_several_texts_are_counted_together(server: Live) -> None:
    one = completed(server, temperature=0.2, seed=5)["timings"]
    two = completed(server, temperature=0.2, seed=5, n=2)["timings"]
    assert two["drafted_tokens"] > one["drafted_tokens"]
    assert two["completion_tokens"] == 80


@pytest.mark.parametrize(
    "content", ["x = 1", [{"type": "text", "text": "x"}, {"type": "text", "text": "= 1"}]], ids=str
)
def test_a_prediction_is_read_from_a_body(content: Any) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "prediction": {"type": "content", "content": content}}
    assert predicted(ChatBody.model_validate(body)) == ("x = 1" if isinstance(content, str) else "x\n= 1")
    assert predicted(ChatBody.model_validate(body | {"prediction": None})) == ""


def test_a_prediction_comes_to_the_engine_as_tokens(server: Live) -> None:
    llm = server.service.host.llm
    prepared = Preprocessor(llm).prepare(GenerationRequest(prompt="Once", prediction=STORY))
    assert llm.tokenizer.decode(prepared.request.prediction).strip() == STORY.strip()
    assert Preprocessor(llm).prepare(GenerationRequest(prompt="Once")).request.prediction == ()
