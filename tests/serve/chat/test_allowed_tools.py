"""A choice among some of the tools: the prompt has all of them, and only the allowed ones can be called."""

import json
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from tests.engines import HANGS_S
from tests.serve.talking import SCHEMA, Talker, valid
from tokenwright.serve.service.types import GenerationRequest, Tool

HELLO: Any = [{"role": "user", "content": "Hello"}]
NAMES = ("clock", "weather", "mail")
MODES = ("required", "auto")


@pytest.fixture(scope="module")
def client(talker: Talker) -> Any:
    with OpenAI(base_url=f"{talker.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def chat(client: OpenAI, allowed: str, seed: int = 0, mode: str = "required", tokens: int = 400) -> Any:
    choice = {"mode": mode, "tools": [{"type": "function", "function": {"name": allowed}}]}
    wanted: Any = {
        "model": "tiny",
        "messages": HELLO,
        "tools": [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in NAMES],
        "tool_choice": {"type": "allowed_tools", "allowed_tools": choice},
        "parallel_tool_calls": False,
    }
    return client.chat.completions.create(**wanted, seed=seed, temperature=1.0, max_tokens=tokens)


def test_a_chat_calls_an_allowed_tool(talker: Talker, client: OpenAI) -> None:
    for seed in range(4):
        answer = chat(client, "mail", seed)
        [call] = answer.choices[0].message.tool_calls
        assert call.function.name == "mail" and valid(json.loads(call.function.arguments))
    tools = [{"name": name, "parameters": SCHEMA} for name in NAMES]
    declared = [{"type": "function", "function": tool} for tool in tools]
    assert answer.usage.prompt_tokens == talker.tokens(HELLO, tools=declared)


def test_a_response_calls_an_allowed_tool_and_says_what_was_asked(client: OpenAI) -> None:
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "clock"}]}
    tools = [{"type": "function", "name": name, "parameters": SCHEMA, "strict": True} for name in NAMES]
    wanted: Any = {"model": "tiny", "input": HELLO, "tools": tools, "tool_choice": choice, "max_output_tokens": 400}
    answer = client.responses.create(**wanted, parallel_tool_calls=False)
    [call] = answer.output
    assert (call.type, call.name) == ("function_call", "clock")
    assert answer.tool_choice.model_dump() == choice


@pytest.mark.parametrize("mode", MODES)
def test_the_grammar_has_the_allowed_tools_alone(talker: Talker, mode: str) -> None:
    tools = [Tool(name, "", SCHEMA) for name in NAMES]
    wanted = GenerationRequest(messages=HELLO, tools=tools, tool_choice=mode, allowed_tools=["mail"])
    prepared = talker.service._opening.opened.preparer.prepare(wanted)
    grammar = prepared.request.params.grammar.text
    assert "mail" in grammar and "weather" not in grammar and "clock" not in grammar
    assert all(name in prepared.text for name in NAMES)


@pytest.mark.parametrize("name", ["auto", "none", "required"])
def test_a_function_may_have_the_name_of_a_mode(talker: Talker, name: str) -> None:
    functions = [{"name": one, "parameters": SCHEMA} for one in ("mail", name)]
    tools = [{"type": "function", "function": one} for one in functions]
    body: dict[str, Any] = {"model": "tiny", "messages": HELLO}
    named = {"type": "function", "function": {"name": name}}
    chat = body | {"tools": tools, "tool_choice": named, "parallel_tool_calls": False, "max_tokens": 400}
    [call] = post(talker, "chat/completions", chat)["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == name
    tools = [{"type": "function", **one} for one in functions]
    more = {"tool_choice": {"type": "function", "name": name}, "parallel_tool_calls": False, "max_output_tokens": 400}
    [item] = post(talker, "responses", {"model": "tiny", "input": HELLO, "tools": tools, **more})["output"]
    assert item["name"] == name
    tools = [{"name": one["name"], "input_schema": SCHEMA} for one in functions]
    choice = {"type": "tool", "name": name, "disable_parallel_tool_use": True}
    [block] = post(talker, "messages", body | {"tools": tools, "tool_choice": choice, "max_tokens": 400})["content"]
    assert block["name"] == name


def post(talker: Talker, path: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(f"{talker.url}/v1/{path}", json=body, timeout=HANGS_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("mode", MODES)
def test_only_tools_that_are_there_can_be_allowed(client: OpenAI, mode: str) -> None:
    with pytest.raises(openai.BadRequestError, match="tool_choice names 'post', which is not among the tools") as told:
        chat(client, "post", mode=mode)
    assert told.value.param == "tool_choice"


def test_a_tool_that_is_named_must_be_there(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="not among the tools"):
        client.chat.completions.create(
            model="tiny", messages=HELLO, tool_choice={"type": "custom", "custom": {"name": "shell"}}
        )
