"""Custom tools, whose input is text, in chats and responses, whole and streamed, and what is sent back of them."""

import json
import re
from typing import Any

import httpx
import pytest

from tests.engines import HANGS_S
from tests.serve.talking import SCHEMA, Talker
from tokenwright.serve.openai.custom_tools import CustomCalls, custom_tool, input_of
from tokenwright.serve.openai.message_bodies import CustomFormat
from tokenwright.serve.service.types import ToolCallDelta

HELLO = [{"role": "user", "content": "Hello"}]
CHAT, RESPOND = "/v1/chat/completions", "/v1/responses"
REGEX = {"type": "grammar", "syntax": "regex", "definition": '[ab]{3}"\\n'}
LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}


def tool(path: str, form: dict[str, Any]) -> dict[str, Any]:
    if path == RESPOND:
        return {"type": "custom", "name": "patch", "description": "Patch", "format": form}
    nested = {"type": "grammar", "grammar": {"syntax": form["syntax"], "definition": form["definition"]}}
    return {"type": "custom", "custom": {"name": "patch", "format": nested}}


def asked(talker: Talker, path: str, body: dict[str, Any]) -> httpx.Response:
    sane = {"input": "Hello", "max_output_tokens": 200} if path == RESPOND else {"messages": HELLO, "max_tokens": 200}
    answer = httpx.post(talker.url + path, json={"model": "tiny", "temperature": 0} | sane | body, timeout=HANGS_S)
    assert answer.status_code == 200, answer.text
    return answer


def events(answer: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def call_of(answer: httpx.Response, path: str, streamed: bool) -> tuple[str, str, str]:
    """The id, the name and the input of the one call of an answer."""
    if path == RESPOND:
        [item] = (events(answer)[-1]["response"] if streamed else answer.json())["output"]
        assert (item["type"], item["status"]) == ("custom_tool_call", "completed")
        if streamed:
            named = [one for one in events(answer) if "custom_tool_call_input" in one["type"]]
            assert [one["type"].rpartition(".")[2] for one in named] == ["delta", "done"]
            assert named[0]["delta"] == named[1]["input"] == item["input"]
        return item["call_id"], item["name"], item["input"]
    choices = [one["choices"][0] for one in (events(answer) if streamed else [answer.json()])]
    assert choices[-1]["finish_reason"] == "tool_calls"
    messages = [choice["delta" if streamed else "message"] for choice in choices]
    [call] = [call for one in messages for call in one.get("tool_calls") or ()]
    assert call["type"] == "custom"
    assert call.get("index", 0) == 0
    return call["id"], call["custom"]["name"], call["custom"]["input"]


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", [CHAT, RESPOND])
def test_a_custom_tool_is_called_with_text_that_follows_its_expression(
    talker: Talker, path: str, streamed: bool
) -> None:
    body = {"tools": [tool(path, REGEX)], "tool_choice": "required", "parallel_tool_calls": False, "stream": streamed}
    answer = asked(talker, path, body)
    identity, name, given = call_of(answer, path, streamed)
    assert (name, "x-tokenwright-ignored" in answer.headers) == ("patch", False)
    assert re.fullmatch(REGEX["definition"], given)
    if path == RESPOND:
        call: Any = {"type": "custom_tool_call", "call_id": identity, "name": name, "input": given}
        history: Any = [*HELLO, call, {"type": "custom_tool_call_output", "call_id": identity, "output": "done"}]
        tokens = asked(talker, "/v1/responses/input_tokens", {"input": history}).json()["input_tokens"]
    else:
        call = {"id": identity, "type": "custom", "custom": {"name": name, "input": given}}
        result = {"role": "tool", "tool_call_id": identity, "content": "done"}
        history = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
        tokens = asked(talker, CHAT, {"messages": history, "max_tokens": 1}).json()["usage"]["prompt_tokens"]
    told = {"id": identity, "type": "function", "function": {"name": name, "arguments": {"input": given}}}
    rendered = [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": [told]},
        {"role": "tool", "tool_call_id": identity, "name": name, "content": "done"},
    ]
    assert tokens == talker.tokens(rendered)


@pytest.mark.parametrize(
    ("path", "named"), [(CHAT, "tools.custom.format.grammar"), (RESPOND, "tools.format.definition")]
)
def test_a_lark_grammar_is_told_and_named(talker: Talker, path: str, named: str) -> None:
    answer = asked(talker, path, {"tools": [tool(path, LARK)], "stream": True})
    assert answer.headers["x-tokenwright-ignored"] == named
    form = CustomFormat.model_validate(LARK)
    made = custom_tool("patch", "Patch", form)
    assert made.description == 'Patch\n\nThe input follows this lark grammar:\nstart: "x"'
    assert made.parameters["properties"] == {"input": {"type": "string"}}


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_functions_of_a_namespace_are_called_by_it(talker: Talker, streamed: bool) -> None:
    inner = {"type": "function", "name": "weather", "parameters": SCHEMA}
    space = {"type": "namespace", "name": "skies", "description": "Of the sky", "tools": [inner]}
    answer = asked(talker, RESPOND, {"tools": [space], "tool_choice": "required", "stream": streamed})
    item = (events(answer)[-1]["response"] if streamed else answer.json())["output"][0]
    assert (item["type"], item["name"], item["namespace"]) == ("function_call", "weather", "skies")


@pytest.mark.parametrize(
    ("space", "named"),
    [
        ({"type": "namespace", "name": "a", "tools": [{"type": "function"}]}, "tools.0.tools.0.name"),
        ({"type": "namespace", "name": "a", "tools": [{"name": "x"}]}, "tools.0.tools.0.type"),
    ],
)
def test_what_is_missing_in_a_namespace_is_named(talker: Talker, space: dict[str, Any], named: str) -> None:
    answer = httpx.post(talker.url + RESPOND, json={"input": "Hello", "tools": [space]})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(named)


def test_the_fragments_of_a_custom_call_are_held_until_it_is_whole() -> None:
    calls = CustomCalls({"patch"})
    first = ToolCallDelta(0, "a", "patch", '{"input": "x')
    other, more = ToolCallDelta(1, "b", "f", "{"), ToolCallDelta(1, arguments="}")
    assert list(calls.take([first])) == []
    assert list(calls.take([ToolCallDelta(0, arguments='\\n"}'), other, more])) == [
        (ToolCallDelta(0, "a", "patch", "x\n"), True),
        (other, False),
        (more, False),
    ]
    assert list(calls.rest()) == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\n"}', "a\n"),
        ('{"input": "a\\nb', "a\nb"),
        ('{"input": "a"', "a"),
        ('{"input": "a\\', "a"),
        ('{"input": "a \\ud83d\\ude0', "a "),
        ('{"inp', ""),
        ("", ""),
    ],
)
def test_the_input_of_a_call_has_no_markup_wherever_it_is_cut(arguments: str, text: str) -> None:
    assert input_of(arguments) == text
