"""What published APIs and other servers give that clients depend on, whole and streamed."""

import json
from typing import Any

import httpx
import pytest

from tests.engines import HANGS_S
from tests.serve.talking import SCHEMA, Talker

USER: dict[str, Any] = {"role": "user", "content": "Hello"}
CHAT, MESSAGES, RESPONSES, OLLAMA = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"
FUNCTION = {"name": "weather", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
OUTPUT = {"type": "function_call_output", "call_id": "gone", "output": "18"}
SHOUTED = {"type": "OBJECT", "properties": {"where": {"type": "STRING"}}}


def ask(talker: Talker, path: str, **body: Any) -> httpx.Response:
    least: dict[str, Any] = {"input": "Hello", "max_output_tokens": 2} if path == RESPONSES else {"messages": [USER]}
    least |= {"options": {"num_predict": 2, "temperature": 0}} if path == OLLAMA else {"temperature": 0}
    least |= {"max_tokens": 2} if path in (CHAT, MESSAGES) else {}
    answer = httpx.post(talker.url + path, json={"model": "tiny"} | least | body, timeout=HANGS_S)
    assert answer.status_code == 200, answer.text
    return answer


def prompt_tokens(talker: Talker, path: str, **body: Any) -> int:
    usage = ask(talker, path, **body).json()["usage"]
    return sum(usage.get(name, 0) for name in ("prompt_tokens", "input_tokens", "cache_read_input_tokens"))


def events(answer: httpx.Response) -> list[Any]:
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]


@pytest.mark.parametrize(
    ("path", "history"),
    [
        (CHAT, {"messages": [{"role": "tool", "tool_call_id": "gone", "content": "18"}, USER]}),
        (CHAT, {"messages": [{"role": "tool", "content": "18"}, USER]}),
        (RESPONSES, {"input": [OUTPUT, USER]}),
        (
            MESSAGES,
            {"messages": [USER | {"content": [{"type": "tool_result", "tool_use_id": "gone", "content": "18"}]}]},
        ),
    ],
    ids=str,
)
def test_a_result_whose_call_was_cut_off_the_history_ends_no_session(
    talker: Talker, path: str, history: dict[str, Any]
) -> None:
    blank = json.loads(json.dumps(history).replace('"18"', '""'))
    assert prompt_tokens(talker, path, **history) > prompt_tokens(talker, path, **blank), "the model reads it"


def test_a_result_answers_the_first_open_call_that_has_no_id(talker: Talker) -> None:
    calls = [{"type": "function", "function": {"name": name, "arguments": "{}"}} for name in ("longer_name", "b")]
    results = [{"role": "tool", "tool_call_id": one, "content": "18"} for one in ("x", "y")]
    body = {"messages": [USER, {"role": "assistant", "tool_calls": calls}, *results]}
    names = [{"name": "longer_name"}, {"name": "b"}]  # the template writes the names of messages
    named = [one | {"tool_call_id": f"c{n}"} | names[n] for n, one in enumerate(results)]
    known = [one | {"id": f"c{n}"} for n, one in enumerate(calls)]
    told = {"messages": [USER, {"role": "assistant", "tool_calls": known}, *named]}
    prompts = [httpx.post(f"{talker.url}/apply-template", json=one).json()["prompt"] for one in (body, told)]
    assert prompts[0] == prompts[1] and "tool longer_name" in prompts[0]


@pytest.mark.parametrize(
    ("path", "history"),
    [
        (CHAT, [{"type": "thinking", "thinking": [{"type": "text", "text": "so"}]}, {"type": "text", "text": "a"}]),
        (RESPONSES, [{"type": "reasoning", "summary": [], "content": [{"type": "text", "text": "so"}]}]),
    ],
)
def test_reasoning_of_other_servers_is_read(talker: Talker, path: str, history: list[Any]) -> None:
    if path == CHAT:
        body = {"messages": [USER, {"role": "assistant", "content": history}, USER]}
    else:
        body = {"input": [USER, *history, {"role": "assistant", "content": "a"}, USER]}
    without = json.loads(json.dumps(body).replace('"so"', '""'))
    assert prompt_tokens(talker, path, **body) > prompt_tokens(talker, path, **without)


@pytest.mark.parametrize("kind", ["adaptive", "enabled"])
def test_omitted_thinking_keeps_its_block_and_its_signature(talker: Talker, kind: str) -> None:
    body = {"thinking": {"type": kind, "display": "omitted"}, "max_tokens": 8}
    shown = ask(talker, MESSAGES, **body | {"thinking": {"type": kind}}).json()
    omitted = ask(talker, MESSAGES, **body).json()
    block = shown["content"][0]
    assert block["thinking"] and omitted["content"][0] == block | {"thinking": ""}
    told = events(ask(talker, MESSAGES, stream=True, **body))
    kinds = [(one.get("content_block") or one.get("delta") or {}).get("type") for one in told if one.get("index") == 0]
    assert kinds == ["thinking", "signature_delta", None]
    assert omitted["usage"]["output_tokens_details"]["thinking_tokens"] > 0


@pytest.mark.parametrize("on", [True, False])
def test_a_templates_variables_mean_the_same_in_every_api(talker: Talker, on: bool) -> None:
    more = {"chat_template_kwargs": {"enable_thinking": on}}
    counted = httpx.post(f"{talker.url}/tokenize", json={"messages": [USER], **more}).json()["count"]
    assert {prompt_tokens(talker, path, **more) for path in (CHAT, MESSAGES, RESPONSES)} == {counted}


def test_times_of_responses_are_whole_seconds(talker: Talker) -> None:
    streamed = [one["response"] for one in events(ask(talker, RESPONSES, stream=True)) if "response" in one]
    found = [ask(talker, RESPONSES, max_output_tokens=9, max_tool_calls=3).json(), *streamed]
    assert {type(one[name]) for one in found for name in ("created_at", "completed_at")} <= {int, type(None)}
    assert found[0]["max_tool_calls"] == 3


def test_a_stored_response_is_not_passed_off_as_a_stream(talker: Talker) -> None:
    url = f"{talker.url}{RESPONSES}/{ask(talker, RESPONSES).json()['id']}"
    assert [httpx.get(url, params={"stream": one}).status_code for one in ("true", "false")] == [400, 200]


def test_tools_may_come_in_the_course_of_a_conversation(talker: Talker) -> None:
    tool = {"type": "function", **FUNCTION}
    added = [{"type": "additional_tools", "role": "developer", "tools": [tool]}, USER]
    assert prompt_tokens(talker, RESPONSES, input=added) == prompt_tokens(talker, RESPONSES, input=[USER], tools=[tool])
    for kind in ("configuration_update", "program", "program_output"):
        answer = ask(talker, RESPONSES, input=[USER, {"type": kind, "id": "x"}, USER])
        assert answer.headers["x-tokenwright-ignored"] == f"input.{kind}"


@pytest.mark.parametrize("path", [RESPONSES, f"{RESPONSES}/compact"])
def test_a_conversation_that_does_not_fit_is_said_of_the_input(talker: Talker, path: str) -> None:
    body = {"model": "tiny", "input": "Hello " * 4000, "max_output_tokens": 2}
    answer = httpx.post(talker.url + path, json=body, timeout=HANGS_S)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")


def test_tools_that_come_with_the_input_are_as_few_as_others(talker: Talker) -> None:
    tools = [{"type": "function", "name": "weather", "description": str(at)} for at in range(2049)]
    item = {"type": "additional_tools", "role": "developer", "tools": tools}
    body = {"model": "tiny", "input": [item, item, USER]}
    answer = httpx.post(f"{talker.url}{RESPONSES}/input_tokens", json=body, timeout=HANGS_S)
    told = "input: it adds more than 4,096 tools; leave some out"
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, told)


def test_pieces_that_are_no_whole_characters_are_bytes(talker: Talker) -> None:
    said = httpx.post(f"{talker.url}/tokenize", json={"content": "a\U0001f9a4", "with_pieces": True}).json()["tokens"]
    pieces = [one["piece"] for one in said]
    assert b"".join(bytes(one) if isinstance(one, list) else one.encode() for one in pieces).decode() == "a\U0001f9a4"
    assert any(isinstance(one, list) for one in pieces)


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES, OLLAMA])
def test_types_of_schemas_may_be_in_capitals(talker: Talker, path: str) -> None:
    function = {"name": "weather", "parameters": SHOUTED}
    if path in (CHAT, OLLAMA):
        ask(talker, path, tools=[{"type": "function", "function": function}])
    elif path == MESSAGES:
        ask(talker, path, tools=[{"name": "weather", "input_schema": SHOUTED}])
    else:
        ask(talker, path, tools=[{"type": "function", **function}])


def test_an_embedding_cuts_what_does_not_fit_where_asked(talker: Talker) -> None:
    body = {"model": "tiny", "input": "Hello " * 4000, "truncate_prompt_tokens": -1}
    answer = httpx.post(f"{talker.url}/v1/embeddings", json=body, timeout=HANGS_S)
    assert answer.json()["usage"]["prompt_tokens"] == talker.llm.context
