"""The older form of tools in OpenAI's chats, and messages whose calls and results leave ids out."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.serve.talking import SCHEMA, Talker, valid
from tokenwright.serve.openai.bodies import ChatBody
from tokenwright.serve.openai.generation_request import messages_of

HELLO: Any = [{"role": "user", "content": "Hello"}]
WEATHER: Any = {"name": "weather", "description": "Of a place.", "parameters": SCHEMA}
CLOCK: Any = {"name": "clock", "parameters": SCHEMA}
CALL: Any = {"name": "weather", "arguments": '{"hot": true, "where": "in"}'}


@pytest.fixture(scope="module")
def client(talker: Talker) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{talker.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def ask(client: OpenAI, messages: Any = HELLO, **more: Any) -> Any:
    wanted = {"model": "tiny", "max_tokens": 200, "temperature": 0} | more
    return client.chat.completions.create(messages=messages, **wanted)


@pytest.mark.parametrize("name", ["weather", "clock"])
def test_a_function_that_is_named_is_called_whole_and_streamed(client: OpenAI, name: str) -> None:
    wanted: Any = {"functions": [WEATHER, CLOCK], "function_call": {"name": name}}
    whole = ask(client, **wanted).choices[0]
    assert (whole.finish_reason, whole.message.content, whole.message.tool_calls) == ("function_call", None, None)
    assert whole.message.function_call.name == name and valid(json.loads(whole.message.function_call.arguments))
    chunks = [chunk.choices[0] for chunk in ask(client, **wanted, stream=True)]
    parts = [chunk.delta.function_call for chunk in chunks if chunk.delta.function_call]
    assert [part.name for part in parts if part.name] == [name]
    assert "".join(part.arguments for part in parts) == whole.message.function_call.arguments
    assert len(parts) > 2, "arguments come as they are written"
    assert chunks[-1].finish_reason == "function_call" and not any(chunk.delta.tool_calls for chunk in chunks)


def test_functions_are_the_tools_of_the_prompt(talker: Talker, client: OpenAI) -> None:
    tools = [{"type": "function", "function": WEATHER}]
    bare, told = talker.tokens(HELLO), talker.tokens(HELLO, tools=tools)
    assert bare < told
    for more in ({}, {"function_call": "auto"}, {"function_call": None}):
        assert ask(client, functions=[WEATHER], max_tokens=1, **more).usage.prompt_tokens == told
    never = ask(client, functions=[WEATHER], function_call="none", max_tokens=60).choices[0]
    assert never.message.function_call is None and never.finish_reason in ("stop", "length")
    with pytest.raises(openai.BadRequestError, match="leave one of them out") as refused:
        ask(client, functions=[WEATHER], tools=tools)
    assert refused.value.param == "functions"


def conversation(call: dict[str, Any], result: dict[str, Any]) -> Any:
    return [*HELLO, {"role": "assistant", "content": None, **call}, result]


def test_older_messages_and_those_without_ids_are_the_same_conversation(talker: Talker, client: OpenAI) -> None:
    made: Any = {"type": "function", "function": CALL}
    written = conversation(
        {"tool_calls": [{"id": "call_1_0", **made}]}, {"role": "tool", "tool_call_id": "call_1_0", "content": "rain"}
    )
    written[1] = {"role": "assistant", "content": "", "tool_calls": [
        {"id": "call_1_0", "type": "function", "function": CALL | {"arguments": json.loads(CALL["arguments"])}}
    ]}  # fmt: skip
    written[2] |= {"name": "weather"}
    wanted = talker.greedy(written)
    for call, result in (
        ({"function_call": CALL}, {"role": "function", "name": "weather", "content": "rain"}),
        ({"tool_calls": [made]}, {"role": "tool", "content": "rain"}),
        ({"tool_calls": [{"id": "", **made}]}, {"role": "tool", "tool_call_id": "", "content": "rain"}),
        ({"tool_calls": [{"id": None, **made}]}, {"role": "tool", "content": [{"type": "text", "text": "rain"}]}),
    ):
        answer = ask(client, conversation(call, result), max_tokens=8)
        assert answer.choices[0].message.content == wanted, (call, result)
    assert ask(client, [*HELLO, {"role": "function", "name": "weather", "content": None}], max_tokens=2)
    unasked = conversation({"content": "Hi"}, {"role": "tool", "content": "rain"})
    assert ask(client, unasked, max_tokens=2), "its call was cut off the history"


def test_results_without_ids_answer_the_calls_in_order_and_functions_by_name() -> None:
    each: Any = [{"type": "function", "function": {"name": name}} for name in ("weather", "clock", "weather")]
    results: Any = [{"role": "function", "name": "clock", "content": "0"}]
    results += [{"role": "tool", "content": text} for text in "12"]
    body = ChatBody.model_validate({"messages": [*HELLO, {"role": "assistant", "tool_calls": each}, *results]})
    found = [(one["tool_call_id"], one["name"], one["content"]) for one in messages_of(body.messages)[2:]]
    assert found == [("call_1_1", "clock", "0"), ("call_1_0", "weather", "1"), ("call_1_2", "weather", "2")]


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_greedy_texts_are_equal(talker: Talker, client: OpenAI, streamed: bool) -> None:
    wanted = talker.greedy(HELLO)
    answer = ask(client, n=3, max_tokens=8, stream=streamed)
    texts = dict.fromkeys(range(3), "")
    for one in answer if streamed else [answer]:
        for choice in one.choices:
            texts[choice.index] += (choice.delta if streamed else choice.message).content or ""
    assert texts == dict.fromkeys(range(3), wanted)
    best = client.completions.create(model="tiny", prompt="Hello", best_of=2, n=2, temperature=0, max_tokens=4)
    assert len({choice.text for choice in best.choices}) == 1


def test_a_tool_that_is_there_twice_is_one_and_two_of_a_name_are_refused(talker: Talker, client: OpenAI) -> None:
    nested, flat = {"type": "function", "function": WEATHER}, {"type": "function", **WEATHER}
    told = talker.tokens(HELLO, tools=[nested])
    for tools in ([flat], [nested, flat], [flat, nested, flat], [WEATHER]):
        assert ask(client, tools=tools, max_tokens=1).usage.prompt_tokens == told, tools
    with pytest.raises(openai.BadRequestError, match="two functions of the same name, 'weather'"):
        ask(client, tools=[flat, nested | {"function": CLOCK | {"name": "weather"}}])
    with pytest.raises(openai.BadRequestError, match=r"tools\.0\.name: it does not match"):
        ask(client, tools=[flat | {"name": "a b"}])
    custom = {"type": "custom", "name": "note", "format": {"type": "text"}}
    [call] = ask(client, tools=[custom], tool_choice="required", max_tokens=600).choices[0].message.tool_calls[:1]
    assert (call.type, call.custom.name) == ("custom", "note")
