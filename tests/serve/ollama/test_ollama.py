"""Ollama's API, as the official client drives it."""

import asyncio
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import httpx
import numpy as np
import ollama
import pytest

from tests.engines import until
from tests.serve.talking import SCHEMA, Talker, valid
from tokenwright.serve.http import exchange
from tokenwright.serve.ollama import routes as adapter
from tokenwright.serve.ollama.bodies import Chat

HELLO = [{"role": "user", "content": "Hello, how are you?"}]
GREEDY = {"temperature": 0.0, "num_predict": 8}
TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": SCHEMA}}


@pytest.fixture
def client(talker: Talker) -> Iterator[ollama.Client]:
    with ollama.Client(host=talker.url) as client:
        yield client


def test_an_answer_is_what_the_model_says(talker: Talker, client: ollama.Client) -> None:
    answer = client.chat("tiny", HELLO, options=GREEDY)
    assert answer.message.content == talker.greedy(HELLO)
    assert (answer.message.role, answer.model, answer.done, answer.done_reason) == ("assistant", "tiny", True, "length")
    assert (answer.prompt_eval_count, answer.eval_count) == (talker.tokens(HELLO), 8)
    assert answer.created_at is not None
    assert abs(datetime.now(UTC) - datetime.fromisoformat(answer.created_at)).total_seconds() < 3600
    spent = (answer.prompt_eval_duration or 0) + (answer.eval_duration or 0)
    assert 0 < spent <= (answer.total_duration or 0) < 3600e9


def test_a_stream_has_the_same_text(talker: Talker, client: ollama.Client) -> None:
    *parts, last = client.chat("tiny:latest", HELLO, options=GREEDY, stream=True)
    assert "".join(part.message.content or "" for part in parts) == talker.greedy(HELLO)
    assert not any(part.done or part.eval_count for part in parts)
    assert (last.done, last.done_reason, last.eval_count, last.message.content) == (True, "length", 8, "")


def test_the_lines_of_a_raw_stream(talker: Talker) -> None:
    body = {"model": "tiny", "messages": HELLO, "options": GREEDY}  # a stream, unless it says otherwise
    with httpx.stream("POST", f"{talker.url}/api/chat", json=body) as response:
        assert response.headers["content-type"] == "application/x-ndjson"
        chunks = list(response.iter_raw())
    assert all(chunk.endswith(b"\n") for chunk in chunks)
    lines = [json.loads(line) for line in b"".join(chunks).splitlines()]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    long = body | {"messages": [{"role": "user", "content": "Hello, how are you? " * 20}], "stream": False}
    first, again = (httpx.post(f"{talker.url}/api/chat", json=long).json() for _ in range(2))
    assert first["prompt_eval_cached_count"] < again["prompt_eval_cached_count"] <= again["prompt_eval_count"]


def test_a_body_needs_no_content_type(talker: Talker) -> None:
    body = json.dumps({"model": "tiny", "messages": HELLO, "options": GREEDY, "stream": False})
    for kind in ("application/x-www-form-urlencoded", "text/plain"):  # as curl -d and LiteLLM send it
        answer = httpx.post(f"{talker.url}/api/chat", content=body, headers={"content-type": kind})
        assert answer.json()["message"]["content"] == talker.greedy(HELLO)


def test_generate_uses_the_template_unless_it_is_raw(talker: Talker, client: ollama.Client) -> None:
    system = {"role": "system", "content": "Be brief"}
    templated = client.generate("tiny", "Hello, how are you?", system="Be brief", options=GREEDY)
    assert templated.response == talker.greedy([system, *HELLO])
    [whole] = talker.llm.generate(["Hello, how"], talker.llm.sampling(temperature=0.0, max_tokens=8))
    raw = client.generate("tiny", "Hello, how", raw=True, options=GREEDY)
    assert raw.response == whole.text
    *parts, last = client.generate("tiny", "Hello, how", raw=True, options=GREEDY, stream=True)
    assert "".join(part.response or "" for part in parts) == whole.text
    assert last.done_reason == "length"


def test_an_empty_request_only_loads_the_model(client: ollama.Client) -> None:
    assert client.generate("tiny").done_reason == "load"
    for path in ("generate", "chat"):
        said = httpx.post(f"{client._client.base_url}/api/{path}", json={"model": "tiny", "keep_alive": 0}).json()
        assert said["done_reason"] == "unload"
    answer = client.chat("tiny")
    assert (answer.done, answer.done_reason, answer.message.content) == (True, "load", "")


def test_options_act_on_the_text(talker: Talker, client: ollama.Client) -> None:
    def said(**options: Any) -> str:
        return client.chat("tiny", HELLO, options=GREEDY | options).message.content or ""

    def sampled(**params: Any) -> str:
        ids = talker.llm.template.render(HELLO).ids
        [one] = talker.llm.generate([ids], talker.llm.sampling(**{"max_tokens": 8} | params))
        return one.text

    drawn = {"temperature": 2.0, "seed": 7}
    assert said(**drawn) == sampled(**drawn) != said()
    assert said(**drawn, top_k=-1, top_p=0.5, min_p=0.0, typical_p=1.0) == sampled(**drawn, top_p=0.5)
    assert said(**drawn, top_k=3) == sampled(**drawn, top_k=3)
    repeated = {"temperature": 0.0, "repetition_penalty": 1.5}
    assert said(num_predict=64, repeat_penalty=1.5) == sampled(max_tokens=64, **repeated, repetition_window=64)
    assert said(num_predict=64, repeat_penalty=1.5, repeat_last_n=-1) == sampled(max_tokens=64, **repeated)
    assert said(num_predict=64, repeat_penalty=1.5, repeat_last_n=0) == sampled(max_tokens=64, temperature=0.0)
    text = said(num_predict=16)
    stop = next(text[at] for at in range(4, len(text)) if text[at] not in text[:at] and text[at] != "\ufffd")
    stopped = client.chat("tiny", HELLO, options=GREEDY | {"num_predict": 16, "stop": [stop]})
    assert (stopped.message.content, stopped.done_reason) == (text.partition(stop)[0], "stop")


@pytest.mark.parametrize(
    ("options", "penalty", "window"),
    [
        ({}, None, None),
        ({"repeat_penalty": 1.5}, 1.5, 64),  # Ollama's own window
        ({"repeat_penalty": 1.5, "repeat_last_n": 8}, 1.5, 8),
        ({"repeat_penalty": 1.5, "repeat_last_n": -1}, 1.5, 0),  # ours: 0 is the whole text
        ({"repeat_penalty": 1.5, "repeat_last_n": 0}, 1.0, None),
        ({"repeat_last_n": 8}, None, 8),
    ],
)
def test_the_window_of_the_repetition_penalty(options: dict[str, Any], penalty: float, window: int) -> None:
    overrides = adapter.overrides_of(Chat.model_validate({"model": "tiny", "options": options}))
    assert (overrides.get("repetition_penalty"), overrides.get("repetition_window")) == (penalty, window)


def test_num_ctx_limits_prompt_and_answer_together(talker: Talker, client: ollama.Client) -> None:
    prompt = talker.tokens(HELLO)
    answer = client.chat("tiny", HELLO, options={"temperature": 0.0, "num_ctx": prompt + 5, "num_predict": -1})
    assert (answer.eval_count, answer.done_reason) == (5, "length")
    with pytest.raises(ollama.ResponseError, match=f"the prompt has {prompt} tokens, and the request allows 4"):
        client.chat("tiny", HELLO, options={"num_ctx": 4})


def test_an_answer_follows_a_schema(client: ollama.Client) -> None:
    options = {"num_predict": 600}
    assert valid(json.loads(client.chat("tiny", HELLO, format=SCHEMA, options=options).message.content or ""))
    anything = client.chat("tiny", HELLO, format="json", options={"num_predict": 40, "temperature": 0.0})
    assert (anything.message.content or "").lstrip().startswith("{")


def test_a_conversation_with_tools_reaches_the_template_whole(talker: Talker, client: ollama.Client) -> None:
    called = {"function": {"name": "weather", "arguments": {"hot": True, "where": "in"}}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": "Well", "thinking": "Hm.", "tool_calls": [called, called]},
        {"role": "tool", "content": "warm", "tool_name": "weather"},
        {"role": "tool", "content": "cold", "tool_name": "weather"},
    ]
    calls = [called | {"type": "function", "id": f"call_1_{n}"} for n in range(2)]
    told = [
        *HELLO,
        {"role": "assistant", "content": "Well", "reasoning_content": "Hm.", "tool_calls": calls},
        *({"role": "tool", "content": text, "name": "weather", "tool_call_id": "x"} for text in ("warm", "cold")),
    ]
    body = {"model": "tiny", "messages": messages, "tools": [TOOL], "options": GREEDY, "stream": False}
    answer = httpx.post(f"{talker.url}/api/chat", json=body).json()  # the client leaves out some of the schema
    assert answer["prompt_eval_count"] == talker.tokens(told, tools=[TOOL])
    without = client.chat("tiny", messages, options=GREEDY)  # no grammar of tools constrains the answer
    assert without.message.content == talker.greedy(told)
    alone = client.chat("tiny", [*HELLO, {"role": "tool", "content": "warm", "tool_name": "weather"}], options=GREEDY)
    assert alone.message.content == talker.greedy([*HELLO, told[-2]]), "a result whose call is not there"


@pytest.mark.parametrize("streamed", [False, True])
def test_a_tool_call_is_sent_whole(talker: Talker, streamed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ollama's API cannot ask for a call, so the model is made to write one."""
    wanted = exchange.types.GenerationRequest
    monkeypatch.setattr(exchange.types, "GenerationRequest", lambda **fields: wanted(**fields, tool_choice="required"))
    with ollama.Client(host=talker.url) as client:
        asked = client.chat("tiny", HELLO, tools=[TOOL], options={"num_predict": 600, "seed": 1}, stream=streamed)
        parts = list(asked) if streamed else [asked]
    calls = [call for part in parts for call in part.message.tool_calls or ()]
    assert calls
    for call in calls:
        assert call.function.name == "weather"
        arguments = {name: call.function.arguments[name] for name in ("hot", "where")}
        assert valid(arguments)  # the client leaves out that there may be no other


def test_thoughts_are_apart(talker: Talker, client: ollama.Client) -> None:
    thoughts = talker.greedy(HELLO, variables={"enable_thinking": True})
    answer = client.chat("tiny", HELLO, think=True, options=GREEDY)
    assert ((answer.message.thinking or "").strip(), answer.message.content) == (thoughts.strip(), "")
    parts = list(client.generate("tiny", HELLO[0]["content"], think="high", options=GREEDY, stream=True))
    assert "".join(part.thinking or "" for part in parts) == answer.message.thinking
    assert client.chat("tiny", HELLO, think=False, options=GREEDY).message.content == talker.greedy(HELLO)


def test_log_probabilities(talker: Talker, client: ollama.Client) -> None:
    answer = client.chat("tiny", HELLO, logprobs=True, top_logprobs=3, options=GREEDY)
    params = talker.llm.sampling(temperature=0.0, max_tokens=8, logprobs=3)
    [whole] = talker.llm.generate([talker.llm.template.render(HELLO).ids], params)
    assert answer.logprobs is not None
    assert [one.logprob for one in answer.logprobs] == list(whole.logprobs)
    assert all(len(one.top_logprobs or ()) == 3 for one in answer.logprobs)
    parts = client.chat("tiny", HELLO, logprobs=True, options=GREEDY, stream=True)
    assert [one.logprob for part in parts for one in part.logprobs or ()] == list(whole.logprobs)


def test_the_list_and_the_card(talker: Talker, client: ollama.Client) -> None:
    [model] = client.list().models
    assert (model.model, model.size) == ("tiny", talker.llm.weight_bytes)
    card = client.show("tiny")
    assert card.capabilities == ["completion", "tools", "thinking"]
    assert card.modelinfo is not None
    family = card.modelinfo["general.architecture"]
    assert card.modelinfo[f"{family}.context_length"] == talker.llm.context == 2048
    assert card.modelinfo["general.parameter_count"] == talker.llm.graph.parameters
    assert card.template == talker.llm.tokenizer.chat_template
    version = httpx.get(f"{talker.url}/api/version").json()["version"]
    assert [int(part) for part in version.split(".")] >= [0, 6, 4], "clients refuse an older Ollama"
    older: dict[str, Any] = {"name": "tiny:latest", "verbose": False}
    unset = {"system": "", "template": "", "verbose": False, "options": None}  # as Go's client writes them
    for given in (older, {"model": "tiny", "name": "", **unset}, {"model": "", "name": "tiny", **unset}):
        assert httpx.post(f"{talker.url}/api/show", json=given).json()["capabilities"] == card.capabilities
    for given in ({}, {"model": "tiny", "name": "tiny"}):
        assert httpx.post(f"{talker.url}/api/show", json=given).status_code == 400


def test_embeddings_are_those_of_openais_api(talker: Talker, client: ollama.Client) -> None:
    texts = ["Once upon a time", "The cat"]
    body = {"model": "tiny", "input": texts}
    theirs = httpx.post(f"{talker.url}/v1/embeddings", json=body).raise_for_status().json()
    vectors = [one["embedding"] for one in theirs["data"]]
    both = client.embed("tiny:latest", texts, keep_alive="5m")
    assert [list(one) for one in both.embeddings] == vectors
    assert (both.model, both.prompt_eval_count) == ("tiny:latest", theirs["usage"]["prompt_tokens"])
    assert both.total_duration is not None and both.total_duration > 0
    assert [list(one) for one in client.embed("tiny", texts[1]).embeddings] == vectors[1:]
    assert list(client.embeddings("tiny", texts[0]).embedding) == vectors[0]
    for nothing in ([], ""):
        empty = client.embed("tiny", nothing)
        assert (list(empty.embeddings), empty.model) == ([], "tiny"), "as of Ollama, which only loads the model"
    assert list(client.embeddings("tiny", "").embedding) == []
    with pytest.raises(ollama.ResponseError, match="does not exist here"):
        client.embed("llama", [])
    [short] = client.embed("tiny", texts[1], dimensions=4).embeddings
    assert np.allclose(short, np.array(vectors[1][:4]) / np.linalg.norm(vectors[1][:4]), atol=1e-6)

    async def main() -> Any:
        async with ollama.AsyncClient(host=talker.url) as asynchronous:
            return await asynchronous.embed("tiny", texts)

    assert [list(one) for one in asyncio.run(main()).embeddings] == vectors
    until(talker.idle)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"dimensions": 9999}, "fewer than 9999"),
        ({"input": "a" * 20_000, "truncate": False}, "tokens"),
        ({"model": "llama"}, "'llama' does not exist here"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_embed_refuses(talker: Talker, body: dict[str, Any], named: str) -> None:
    answer = httpx.post(f"{talker.url}/api/embed", json={"model": "tiny", "input": "x"} | body)
    assert answer.status_code in (400, 404)
    assert named in answer.json()["error"]


def test_what_is_loaded(talker: Talker, client: ollama.Client) -> None:
    [model] = client.ps().models
    assert (model.model, model.size, model.size_vram) == ("tiny", talker.llm.weight_bytes, 0)
    assert model.context_length == talker.llm.context
    assert model.expires_at is not None and model.expires_at.year == 9999
    assert model.digest == client.list().models[0].digest


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"options": {"temprature": 1}}, "options.temprature: this API has no such field"),
        ({"options": {"temperature": True}}, "options.temperature"),
        ({"options": {"top_p": 1.5}}, "top_p"),
        ({"options": {"seed": -2}}, "options.seed"),
        ({"options": {"num_predict": -3}}, "options.num_predict"),
        ({"tools": [{"type": "web_search"}]}, "tools: all are hosted tools"),
        ({"format": "yaml"}, "format"),
        ({"top_logprobs": 3}, "top_logprobs"),
        (
            {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]},
            "pictures, which this model cannot read",
        ),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"stream": 1}, "stream"),
        ({"template": "x"}, "template"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_done_is_refused_by_name(talker: Talker, body: dict[str, Any], named: str) -> None:
    answer = httpx.post(f"{talker.url}/api/chat", json={"model": "tiny", "messages": HELLO} | body)
    assert answer.status_code == 400
    assert answer.json().keys() == {"error"}
    assert named in answer.json()["error"]


def test_what_generate_refuses(talker: Talker) -> None:
    for body, named in (
        ({"suffix": "x"}, "has no tokens to fill a gap"),
        ({"context": [1, 2]}, "context is not supported"),
        ({"template": "x"}, "template is not supported"),
        ({"width": 64}, "width is not supported"),
        ({"raw": True, "system": "x"}, "system"),
        ({"raw": True, "think": True}, "think"),
    ):
        answer = httpx.post(f"{talker.url}/api/generate", json={"model": "tiny", "prompt": "x"} | body)
        assert answer.status_code == 400
        assert named in answer.json()["error"]


@pytest.mark.parametrize("alive", [-1, 0.5, 3600, "5m", "-1m", "+1h2m3.5s", ".5h", "100ms", "1µs"])
def test_a_model_stays_for_as_long_as_it_is_asked_to(talker: Talker, alive: str | float) -> None:
    body = {"model": "tiny", "keep_alive": alive}
    assert httpx.post(f"{talker.url}/api/generate", json=body).json()["done_reason"] == "load"


def test_a_name_is_served_with_and_without_the_tag(talker: Talker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(talker.service, "names", ("llama:latest", "tiny"))
    for name in ("llama", "llama:latest", "tiny", "tiny:latest"):
        for path, more in (("chat", {"messages": HELLO, "options": GREEDY}), ("embed", {"input": "a"}), ("show", {})):
            answer = httpx.post(f"{talker.url}/api/{path}", json={"model": name, **more})
            assert answer.status_code == 200, answer.text
    assert httpx.post(f"{talker.url}/api/show", json={"model": "tiny:8b"}).status_code == 404


def test_errors_are_the_clients_own(talker: Talker, client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="'llama' does not exist here") as missing:
        client.chat("llama", HELLO)
    assert missing.value.status_code == 404
    with pytest.raises(ollama.ResponseError) as unknown:
        client.pull("tiny")
    assert unknown.value.status_code == 404
    assert httpx.get(f"{talker.url}/api/chat").json().keys() == {"error"}
