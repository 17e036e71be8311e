"""Anthropic's Messages API, as the official client drives it."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import httpx
import pytest
from pydantic import BaseModel

from tests.serve.talking import SCHEMA, Talker, valid

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello, how are you?"}]
GREEDY = {"temperature": 0.0}
TOOL = {"name": "weather", "description": "The weather.", "input_schema": SCHEMA}
DECLARED = [{"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": SCHEMA}}]
CALL = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"hot": True, "where": "in"}}
THOUGHT = {"type": "thinking", "thinking": "Hm.", "signature": ""}


@pytest.fixture
def client(talker: Talker) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=talker.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def ask(client: anthropic.Anthropic) -> Any:
    def asked(messages: list[dict[str, Any]] = HELLO, max_tokens: int = 8, **more: Any) -> Any:
        extra = GREEDY | more.pop("extra_body", {})
        return client.messages.create(model="tiny", messages=messages, max_tokens=max_tokens, extra_body=extra, **more)

    return asked


def test_a_message_is_what_the_model_says(talker: Talker, ask: Any) -> None:
    message = ask()
    [block] = message.content
    assert (message.type, message.role, message.model, block.type) == ("message", "assistant", "tiny", "text")
    assert block.text == talker.greedy(HELLO)
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == talker.tokens(HELLO)
    assert usage.output_tokens == 8
    again = ask()
    assert again.usage.cache_read_input_tokens > 0
    assert again.usage.input_tokens + again.usage.cache_read_input_tokens == talker.tokens(HELLO)
    assert again.content == message.content


def test_models_are_listed_page_by_page(
    talker: Talker, client: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("tiny", "second", "third")
    monkeypatch.setattr(talker.service, "names", names)
    assert tuple(one.id for one in client.models.list(limit=1)) == names, (
        "the client asks for each further page by after_id"
    )
    last = client.models.list(limit=1, before_id=names[-1])
    assert ([one.id for one in last.data], last.has_more) == ([names[-2]], True)
    card = client.models.retrieve(names[0])
    assert (card.id, card.type, card.display_name) == (names[0], "model", names[0])
    assert card.max_input_tokens == talker.llm.context and card.created_at.tzinfo is not None
    for wrong in ({"limit": 0}, {"limit": 10**9}, {"after_id": "none"}, {"after_id": names[0], "before_id": names[0]}):
        with pytest.raises(anthropic.BadRequestError, match=next(iter(wrong))):
            client.models.list(**wrong)
    with pytest.raises(anthropic.NotFoundError, match="does not exist here"):
        client.models.retrieve("none")


def test_a_stream_has_the_same_text_in_the_order_of_the_api(talker: Talker, client: anthropic.Anthropic) -> None:
    with client.messages.stream(model="tiny", messages=HELLO, max_tokens=12, extra_body=GREEDY) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    assert message.content[0].text == talker.greedy(HELLO, 12)
    own = [kind for kind in kinds if kind != "text"]  # "text" is the client's own event
    assert own[:2] == ["message_start", "content_block_start"]
    assert own[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(own[2:-3]) == {"content_block_delta"}
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 12)


def test_raw_answers_and_raw_streams(talker: Talker, client: anthropic.Anthropic) -> None:
    raw = client.messages.with_raw_response.create(model="tiny", messages=HELLO, max_tokens=4, extra_body=GREEDY)
    assert raw.headers["request-id"] == raw.headers["x-request-id"]
    assert raw.parse().content[0].text == talker.greedy(HELLO, 4)
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 12, "stream": True, **GREEDY}
    with httpx.stream("POST", f"{talker.url}/v1/messages", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        chunks = list(response.iter_raw())
    events = b"".join(chunks).decode().split("\n\n")
    assert events.pop() == ""
    for event in events:
        name, data = event.split("\n", 1)
        assert json.loads(data.removeprefix("data: "))["type"] == name.removeprefix("event: ")
    assert all(chunk.decode() for chunk in chunks)  # no chunk cuts a character


def test_a_conversation_reaches_the_template_whole(talker: Talker, client: anthropic.Anthropic, ask: Any) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "One", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                THOUGHT,
                {"type": "text", "text": "Two"},
                CALL,
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "warm"},
                {"type": "text", "text": "Three"},
                {"type": "text", "text": "Four"},
            ],
        },
        {"role": "assistant", "content": [CALL | {"id": "toolu_2"}]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "toolu_2", "is_error": True, "content": "no"}],
        },
    ]
    called = {"function": {"name": "weather", "arguments": {"hot": True, "where": "in"}}, "type": "function"}
    told = [
        {"role": "system", "content": "Be\nbrief"},
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Two", "reasoning_content": "Hm.", "tool_calls": [called | {"id": "toolu_1"}]},
        {"role": "tool", "tool_call_id": "toolu_1", "name": "weather", "content": "warm"},
        {"role": "user", "content": "Three\nFour"},
        {"role": "assistant", "content": "", "tool_calls": [called | {"id": "toolu_2"}]},
        {"role": "tool", "tool_call_id": "toolu_2", "name": "weather", "content": "Error: no"},
    ]
    system = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief"}]
    message = ask(messages, system=system, tools=[TOOL], tool_choice={"type": "none"})
    assert message.content[0].text == talker.greedy(told, grammar=talker.silence)
    counted = client.messages.count_tokens(model="tiny", messages=messages, system=system, tools=[TOOL])
    assert counted.input_tokens == talker.tokens(told, tools=DECLARED)
    own = [{name: value for name, value in one.items() if name != "name"} for one in told]
    for message in own:
        for each in message.get("tool_calls", ()):
            each["function"] = each["function"] | {"arguments": json.dumps(each["function"]["arguments"])}
    body = {"model": "tiny", "messages": own, "tools": DECLARED}
    openai = httpx.post(f"{talker.url}/tokenize", json=body).json()
    assert openai["count"] == counted.input_tokens, "a result has the name of its call, in OpenAI's API as well"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_tool_is_called_with_valid_input(client: anthropic.Anthropic, choice: Any, streamed: bool) -> None:
    asked = {
        "model": "tiny",
        "messages": HELLO,
        "max_tokens": 600,
        "tools": [TOOL],
        "tool_choice": choice | {"disable_parallel_tool_use": True},
    }
    if streamed:
        with client.messages.stream(**asked) as stream:
            message = stream.get_final_message()
    else:
        message = client.messages.create(**asked)
    [block] = message.content
    assert (block.type, block.name, message.stop_reason) == ("tool_use", "weather", "tool_use")
    assert valid(block.input)


def test_the_tool_runner_goes_on_without_a_thread(client: anthropic.Anthropic) -> None:
    """It asks for one, is told in the API's own words that the server has none, and sends the whole conversation."""
    called: list[dict[str, Any]] = []

    @anthropic.beta_tool
    def weather(hot: bool, where: Literal["in", "out"]) -> str:
        """The weather.

        Args:
            hot: Whether it is hot.
            where: Where it is so.
        """
        called.append({"hot": hot, "where": where})
        return "warm"

    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    asked: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 600, "tool_choice": choice}
    runner = client.beta.messages.tool_runner(tools=[weather], max_iterations=2, **asked)
    assert [message.stop_reason for message in runner] == ["tool_use", "tool_use"]
    assert called and all(map(valid, called))
    with pytest.raises(anthropic.BadRequestError, match="thread is not supported"):
        client.beta.messages.create(thread={"type": "create"}, **asked)


def test_a_stop_sequence_is_named_and_left_out(talker: Talker, ask: Any) -> None:
    text = talker.greedy(HELLO, 16)
    stop = next(text[at] for at in range(4, len(text)) if text[at] not in text[:at] and text[at] != "\ufffd")
    message = ask(max_tokens=16, stop_sequences=["never written", stop])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert message.content[0].text == text.partition(stop)[0]


def test_thoughts_are_a_block_of_their_own(talker: Talker, client: anthropic.Anthropic, ask: Any) -> None:
    thoughts = talker.greedy(HELLO, variables={"enable_thinking": True})
    [block] = ask(thinking={"type": "adaptive"}).content
    assert (block.type, block.thinking.strip()) == ("thinking", thoughts.strip())
    asked = {"model": "tiny", "messages": HELLO, "max_tokens": 8, "extra_body": GREEDY}
    with client.messages.stream(**asked, thinking={"type": "adaptive"}) as stream:
        [streamed] = stream.get_final_message().content
    assert streamed.thinking == block.thinking
    [omitted] = ask(thinking={"type": "adaptive", "display": "omitted"}).content
    assert omitted == block.model_copy(update={"thinking": ""})
    assert ask(thinking={"type": "disabled"}).content[0].text == talker.greedy(HELLO)


class Weather(BaseModel):
    hot: bool
    where: Literal["in", "out"]


def test_an_answer_follows_a_schema(client: anthropic.Anthropic, ask: Any) -> None:
    message = ask(max_tokens=600, output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    assert valid(json.loads(message.content[0].text))
    parsed = client.messages.parse(model="tiny", max_tokens=600, messages=HELLO, output_format=Weather)
    assert parsed.parsed_output.where in ("in", "out")


def test_no_tokens_fill_the_cache(ask: Any) -> None:
    message = ask([{"role": "user", "content": "a prompt of its own, of more than one page " * 3}], max_tokens=0)
    assert (message.content, message.stop_reason, message.usage.output_tokens) == ([], "max_tokens", 0)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"container": "c"}, "container is not supported"),
        ({"thinking": {"type": "enabled", "budget_tokens": -2}}, "thinking.budget_tokens"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools: all are hosted tools"),
        ({"tools": [{"type": "custm", "name": "a"}]}, "did you mean custom?"),
        ({"tools": [{"name": "a"}]}, "tools.0.input_schema"),
        ({"temperature": 1.5}, "temperature"),
        ({"top_k": -2}, "top_k"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences.0"),
        ({"temprature": 1}, "temprature: this API has no such field"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0"),
        ({"messages": [*HELLO, {"role": "assistant", "content": [CALL]}]}, "messages.1: "),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "x"}, "tools": [TOOL]}, "tool_choice"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_done_is_refused_by_name(talker: Talker, body: dict[str, Any], named: str) -> None:
    asked = {"model": "tiny", "messages": HELLO, "max_tokens": 4} | body
    answer = httpx.post(f"{talker.url}/v1/messages", json=asked)
    assert answer.status_code == 400
    told = answer.json()
    assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
    assert named in told["error"]["message"]
    assert told["request_id"] == answer.headers["x-request-id"]


def test_the_client_finds_the_id_of_every_reply(client: anthropic.Anthropic, talker: Talker) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": HELLO}
    long: Any = [{"role": "user", "content": "x " * 1500}]
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: [0-9]{4} tokens"):
        client.messages.create(model="tiny", messages=long, max_tokens=8)
    for ask, kind in (
        (lambda: client.messages.create(max_tokens=-2, **asked), "invalid_request_error"),
        (lambda: client.messages.count_tokens(system=1, **asked), "invalid_request_error"),
        (lambda: client.models.retrieve("claude"), "not_found_error"),
        (lambda: client.get("/v1/files", cast_to=object), "not_found_error"),
    ):
        with pytest.raises(anthropic.APIStatusError) as told:
            ask()
        assert told.value.body["error"]["type"] == kind
        assert told.value.request_id == told.value.body["request_id"] == told.value.response.headers["x-request-id"]
    assert client.messages.count_tokens(**asked)._request_id
    assert client.models.list()._request_id
    header = {"anthropic-version": "2023-06-01"}
    assert "type" not in httpx.post(f"{talker.url}/v1/chat/completions", json={}, headers=header).json()
