"""The official client of OpenAI against a server on a socket, as a user would: every endpoint, every way to ask."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tests.models.fixtures import make_checkpoint
from tests.serve.live import Live, keep_pace, live, make_chat_model
from tests.text.kinds import byte_fallback
from tokenwright.serve.http import exchange

HELLO: Any = [{"role": "user", "content": "Hello"}]


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Oslo", "Rome"]
    days: Literal[1, 2, 3] = Field(description="How many days.")


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather.",
        "parameters": Weather.model_json_schema(),
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    model = make_chat_model(tmp_path_factory.mktemp("chat") / "model")
    with live(model, pages=512) as running:
        yield running


@pytest.fixture
def client(server: Live) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def ask(client: OpenAI, **more: Any) -> Any:
    wanted = {"model": "tiny", "messages": HELLO, "max_tokens": 8, "seed": 3} | more
    return client.chat.completions.create(**wanted)


def test_a_chat_is_what_the_engine_says(server: Live, client: OpenAI) -> None:
    answer = ask(client, temperature=0.7)
    expected = server.llm.chat(HELLO, server.llm.sampling(max_tokens=8, seed=3, temperature=0.7))
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.model == "tiny"
    assert answer.usage.prompt_tokens == expected.usage.prompt_tokens
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == expected.usage.prompt_tokens + 8


def test_a_stream_says_the_same_and_ends_with_the_usage(client: OpenAI) -> None:
    whole = ask(client)
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons[-1] == "length" and set(reasons[:-1]) == {None}
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 8
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_several_texts_of_one_chat_are_apart(client: OpenAI) -> None:
    whole = ask(client, n=3, temperature=1.5)
    texts = {choice.index: choice.message.content for choice in whole.choices}
    assert len(set(texts.values())) > 1
    streamed = dict.fromkeys(texts, "")
    for chunk in ask(client, n=3, temperature=1.5, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


def test_log_probabilities(server: Live, client: OpenAI) -> None:
    choice = ask(client, logprobs=True, top_logprobs=2, temperature=0).choices[0]
    expected = server.llm.chat(HELLO, server.llm.sampling(max_tokens=8, temperature=0, logprobs=2))
    said = choice.logprobs.content
    assert [one.logprob for one in said] == pytest.approx(expected.logprobs)
    assert [len(one.top_logprobs) for one in said] == [2] * 8
    data = b"".join(bytes(one.bytes) for one in said)
    assert data.decode("utf-8", "replace") == choice.message.content
    chunks = ask(client, logprobs=True, top_logprobs=2, temperature=0, stream=True)
    tokens = [token for chunk in chunks if (its := chunk.choices[0].logprobs) for token in its.content]
    assert tokens == said


def test_a_stop_string_ends_the_text(client: OpenAI) -> None:
    text = ask(client, max_tokens=24).choices[0].message.content
    stop = text[4:6]
    answer = ask(client, max_tokens=24, stop=[stop])
    assert answer.choices[0].message.content == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_completions_of_texts_and_of_ids(server: Live, client: OpenAI) -> None:
    ids = server.llm.tokenizer.encode("the sand")
    answer = client.completions.create(model="alias", prompt=["the sand", "in a"], max_tokens=5, temperature=0, n=1)
    [expected] = server.llm.generate(["the sand"], server.llm.sampling(max_tokens=5, temperature=0))
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].text == expected.text
    assert (
        client.completions.create(model="tiny", prompt=ids, max_tokens=5, temperature=0).choices[0].text
        == expected.text
    )
    chunks = client.completions.create(
        model="tiny", prompt=["the sand", "in a"], max_tokens=5, temperature=0, stream=True
    )
    streamed = {0: "", 1: ""}
    for chunk in chunks:
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == {choice.index: choice.text for choice in answer.choices}


def test_echo_and_the_log_probabilities_of_a_prompt(server: Live, client: OpenAI) -> None:
    """As programs that score texts ask."""
    answer = client.completions.create(model="tiny", prompt="the sand on", max_tokens=0, echo=True, logprobs=1)
    choice = answer.choices[0]
    assert choice.text == "the sand on"
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(server.llm.score("the sand on"))
    starts = choice.logprobs.text_offset
    assert [choice.text[a:b] for a, b in zip(starts, [*starts[1:], None], strict=True)] == choice.logprobs.tokens
    more = client.completions.create(
        model="tiny", prompt="the sand on", max_tokens=3, echo=True, logprobs=1, temperature=0
    )
    streamed = client.completions.create(
        model="tiny", prompt="the sand on", max_tokens=3, echo=True, logprobs=1, temperature=0, stream=True
    )
    chunks = [chunk.choices[0] for chunk in streamed]
    assert "".join(chunk.text for chunk in chunks) == more.choices[0].text
    assert [p for c in chunks if c.logprobs for p in c.logprobs.token_logprobs] == more.choices[
        0
    ].logprobs.token_logprobs
    assert [p for c in chunks if c.logprobs for p in c.logprobs.text_offset] == more.choices[0].logprobs.text_offset


def spaced_model(folder: Path) -> Path:
    """A model whose tokens carry their spaces, as SentencePiece's do; rarer characters are written in bytes."""
    made, _ = make_checkpoint(folder, "qwen2")
    size = json.loads((made / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    names = ["?", *(f"<unused{at}>" for at in range(1, size))]
    names[10:14] = ["▁It", "▁is", "<0xC3>", "<0xA9>"]
    library = Tokenizer(WordLevel({name: at for at, name in enumerate(names)}, unk_token="?"))
    library.decoder = byte_fallback()
    library.save(str(made / "tokenizer.json"))
    return made


def test_offsets_are_places_in_the_text(tmp_path: Path) -> None:
    """The first token alone loses its space, and a character that several tokens write is counted once."""
    ids = [10, 11, 12, 13, 11]
    wanted: Any = {"prompt": ids, "logit_bias": {"11": 100}, "max_tokens": 2, "temperature": 0, "logprobs": 0}
    with live(spaced_model(tmp_path)) as spaced, OpenAI(base_url=f"{spaced.url}/v1", api_key="none") as client:

        def complete(**more: Any) -> tuple[str, list[int]]:
            choice = client.completions.create(model="tiny", **wanted, **more).choices[0]
            stream = client.completions.create(model="tiny", stream=True, **wanted, **more)
            streamed = [chunk.choices[0] for chunk in stream]
            offsets = [at for chunk in streamed if chunk.logprobs for at in chunk.logprobs.text_offset]
            assert ("".join(chunk.text for chunk in streamed), offsets) == (choice.text, choice.logprobs.text_offset)
            return choice.text, offsets

        assert complete() == (" is is", [0, 3])
        assert complete(echo=True) == ("It isé is is is", [0, 2, 5, 5, 6, 9, 12])
        cut = {"truncate_prompt_tokens": 2}
        assert complete(echo=True, extra_body=cut) == ("\ufffd is is is", [0, 1, 4, 7])


def test_the_echo_of_a_prompt_that_was_cut_is_what_the_model_has_read(server: Live, client: OpenAI) -> None:
    ids = server.llm.tokenizer.encode("the sand on")[-2:]
    wanted: Any = {"prompt": "the sand on", "max_tokens": 0, "echo": True, "logprobs": 0}
    choice = client.completions.create(model="tiny", **wanted, extra_body={"truncate_prompt_tokens": 2}).choices[0]
    assert choice.text == server.llm.tokenizer.decode(ids) == "".join(choice.logprobs.tokens)


@pytest.mark.parametrize("logprobs", [0, 1, 2])
def test_the_token_of_the_text_is_among_the_likeliest(client: OpenAI, logprobs: int) -> None:
    """As in OpenAI's API, which has one token more than was asked for where the text has an unlikely one."""
    wanted: Any = {"prompt": "the sand on", "max_tokens": 8, "echo": True, "logprobs": logprobs, "temperature": 2}
    for seed in range(3):
        found = client.completions.create(model="tiny", seed=seed, **wanted).choices[0].logprobs
        assert found.top_logprobs[0] is None and len(found.top_logprobs) == len(found.tokens)
        for token, logprob, tops in list(zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True))[1:]:
            assert tops[token] == logprob
            assert max(logprobs, 1) <= len(tops) <= logprobs + 1


def test_the_best_of_several(server: Live, client: OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt="in a", max_tokens=4, best_of=4, n=2, temperature=1.5, seed=5
    )
    params = server.llm.sampling(max_tokens=4, best_of=4, n=2, temperature=1.5, seed=5)
    [expected] = server.llm.generate(["in a"], params)
    assert [choice.text for choice in answer.choices] == [one.text for one in expected.choices]
    with pytest.raises(openai.BadRequestError, match="best_of cannot be streamed"):
        client.completions.create(model="tiny", prompt="a", best_of=2, temperature=1.0, stream=True)


def test_the_answer_is_parsed_into_a_model(client: OpenAI) -> None:
    answer = client.chat.completions.parse(model="tiny", messages=HELLO, response_format=Weather, max_tokens=200)
    assert isinstance(answer.choices[0].message.parsed, Weather)
    assert answer.choices[0].finish_reason == "stop"


def test_any_json_object(client: OpenAI) -> None:
    text = ask(client, response_format={"type": "json_object"}, max_tokens=300, seed=1, logit_bias=None).choices[0]
    assert text.message.content.lstrip().startswith("{")
    if text.finish_reason == "stop":
        assert isinstance(json.loads(text.message.content), dict)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_tool_is_called_with_arguments_of_its_schema(
    server: Live, client: OpenAI, monkeypatch: pytest.MonkeyPatch, choice: Any
) -> None:
    keep_pace(server, monkeypatch)
    tools = [WEATHER] if choice == "required" else [CLOCK, WEATHER]
    wanted = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 900}
    whole = ask(client, **wanted).choices[0]
    [call] = whole.message.tool_calls
    assert (call.type, call.function.name, whole.finish_reason) == ("function", "weather", "tool_calls")
    assert whole.message.content is None
    Weather.model_validate_json(call.function.arguments)
    parts = [part for chunk in ask(client, **wanted, stream=True) for part in chunk.choices[0].delta.tool_calls or ()]
    assert [part.function.name for part in parts if part.id] == ["weather"]
    assert len(parts) > 2, "arguments come as they are written"
    assert "".join(part.function.arguments for part in parts) == call.function.arguments


def test_a_result_goes_back_into_the_conversation(server: Live, client: OpenAI) -> None:
    def called(arguments: Any) -> list[Any]:
        call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        result = {"role": "tool", "tool_call_id": "call_1", "content": "rain <|im_end|>"}
        return [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}, result]

    answer = ask(client, messages=called('{"city":"Oslo","days":1}'), tools=[WEATHER])
    sent = server.llm.template.render(called({"city": "Oslo", "days": 1}), tools=[WEATHER])
    assert answer.usage.prompt_tokens == len(sent.ids)
    assert '{"name": "weather", "arguments": {"city": "Oslo", "days": 1}}' in sent.text
    assert sent.ids.count(server.llm.tokenizer.control.ids["<|im_end|>"]) == 4, "that of the result is text"
    text = server.llm.template.render(called("[1"), tools=[WEATHER])
    assert ask(client, messages=called("[1"), tools=[WEATHER]).usage.prompt_tokens == len(text.ids)
    *_, call, result = called("{}")
    assert ask(client, messages=[*HELLO, result, call]), "its call may be cut off"
    assert ask(client, messages=[*HELLO, call, result | {"name": "weather"}])


def test_raw_answers_have_the_id_that_the_client_gave(client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="tiny",
        messages=HELLO,
        max_tokens=2,
        extra_headers={"X-Request-Id": "mine-1"},
        extra_body={"return_timings": True, "ignore_eos": True},
    )
    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.headers["server-timing"].startswith("queue;dur=")
    timings = raw.parse().model_extra["timings"]
    assert timings["completion_tokens"] == 2 and timings["prefill_ms"] > 0


def test_the_async_client_and_many_at_once(server: Live) -> None:
    async def each(client: AsyncOpenAI, seed: int) -> str:
        asked: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 6, "seed": seed, "temperature": 1.5}
        if seed % 2:
            return (await client.chat.completions.create(**asked)).choices[0].message.content or ""
        stream = await client.chat.completions.create(**asked, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60) as client:
            return await asyncio.gather(*(each(client, seed) for seed in range(24)))

    params = [server.llm.sampling(max_tokens=6, seed=seed, temperature=1.5) for seed in range(24)]
    ids = server.llm.render(HELLO).ids
    assert asyncio.run(all_of_them()) == [one.text for one in server.llm.generate([ids] * 24, params)]


def test_embeddings_are_mean_hidden_states_of_unit_length(
    server: Live, client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client asks for base64 of its own accord."""
    expected = server.llm.embed(["the sand", "in a"])
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    answer = client.embeddings.create(model="tiny", input=["the sand", "in a"])
    assert np.allclose([one.embedding for one in answer.data], expected, atol=1e-6)
    assert answer.usage.prompt_tokens == sum(len(server.llm.tokenizer.encode(text)) for text in ("the sand", "in a"))
    ids = server.llm.tokenizer.encode("in a")
    plain = client.embeddings.create(model="tiny", input=ids, encoding_format="float")
    assert np.allclose(plain.data[0].embedding, expected[1], atol=1e-6)
    short = client.embeddings.create(model="tiny", input=ids, dimensions=8, encoding_format="float")
    first = expected[1][:8]
    assert np.allclose(short.data[0].embedding, first / np.linalg.norm(first), atol=1e-6)
    with pytest.raises(openai.BadRequestError, match=f"a vector of this model has {len(expected[1])}, fewer than 9999"):
        client.embeddings.create(model="tiny", input="a", dimensions=9999)
    asked: list[bool] = []
    made = exchange.types.GenerationRequest
    monkeypatch.setattr(
        exchange.types, "GenerationRequest", lambda **fields: asked.append(fields["add_special"]) or made(**fields)
    )
    more = {"normalize": False, "add_special_tokens": False}
    as_pooled = client.embeddings.create(model="tiny", input=ids, encoding_format="float", extra_body=more)
    assert np.allclose(as_pooled.data[0].embedding, server.llm.embed(ids, pooling="mean")[0])
    assert abs(np.linalg.norm(as_pooled.data[0].embedding) - 1) > 0.01
    assert asked == [False]


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "alias"]
    assert client.models.retrieve("alias").id == "alias"
    with pytest.raises(
        openai.NotFoundError, match="'other' does not exist here; this server has tiny, alias"
    ) as refused:
        client.models.retrieve("other")
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")


def test_a_deadline_ends_the_text(client: OpenAI) -> None:
    answer = ask(client, max_tokens=1900, extra_body={"ignore_eos": True, "timeout_s": 0.05})
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens < 1900


def test_prompts_beyond_the_context_are_refused_with_the_numbers(server: Live, client: OpenAI) -> None:
    said = r"\d+ tokens, \d+ more than fit; this model's maximum context length is 2048 tokens"  # clients look for it
    with pytest.raises(openai.BadRequestError, match=said) as refused:
        ask(client, messages=[{"role": "user", "content": "é" * 2100}])
    assert refused.value.code == "context_length_exceeded"
    whole = server.llm.template.render([{"role": "user", "content": "é" * 2100}]).ids
    assert (refused.value.body["n_prompt_tokens"], refused.value.body["n_ctx"]) == (len(whole), 2048)
    answer = ask(client, messages=[{"role": "user", "content": "é" * 2100}], extra_body={"truncate_prompt_tokens": 100})
    assert answer.usage.prompt_tokens == 100
    assert answer.usage.prompt_tokens_details.truncated_tokens == len(whole) - 100
    assert "truncated_tokens" not in ask(client).usage.prompt_tokens_details.model_extra
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="tiny", prompt="é" * 2100)
    assert refused.value.param == "prompt"
    for call in (client.embeddings.create, client.responses.create):
        with pytest.raises(openai.BadRequestError) as refused:
            call(model="tiny", input="é" * 2100)
        assert refused.value.param == "input"
    cut = client.embeddings.create(model="tiny", input=["é" * 2100], extra_body={"truncate_prompt_tokens": 100})
    text = len(server.llm.tokenizer.encode("é" * 2100))
    assert (cut.usage.prompt_tokens, cut.usage.prompt_tokens_details) == (100, {"truncated_tokens": text - 100})
