"""Tools through the server where the model may choose: behind a special token, and beside a schema of the answer."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engines import HANGS_S
from tests.serve.talking import SCHEMA, Talker, make_talker, talking, valid

MISTRAL = """\
{%- for m in messages %}{{ m.role }}: {{ m.content }}{% if m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}{% endfor %}]{% endif %}
{% endfor %}{{ tools or "" }}"""
LLAMA = """\
{%- for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}
{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}{% endfor %}
{% endfor %}{{ tools or "" }}"""
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
ANSWER = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}},
    "required": ["sure"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER}}


def talker_of(folder: Path, template: str) -> Path:
    """The talker with another template, and the mark of Mistral's calls as a special token."""
    made = make_talker(folder, template=template)
    tokenizer = made / "tokenizer.json"
    tokenizer.write_text(
        tokenizer.read_text(encoding="utf-8").replace("<|im_start|>", "[TOOL_CALLS]"), encoding="utf-8"
    )
    return made


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Talker]:
    with talking(talker_of(tmp_path_factory.mktemp("mistral"), MISTRAL)) as talker:
        yield talker


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Talker]:
    with talking(talker_of(tmp_path_factory.mktemp("llama"), LLAMA)) as talker:
        yield talker


def ask(talker: Talker, begins: str, **more: Any) -> dict[str, Any]:
    """A choice whose first token is this one, if the grammar lets it be: it is far more likely than all others."""
    control = talker.llm.tokenizer.control.ids
    token = control[begins] if begins in control else talker.llm.tokenizer.encode(begins, add_special=False)[0]
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "tools": [TOOL], "max_tokens": 1800}
    body |= {"temperature": 0, "parallel_tool_calls": False, "logit_bias": {str(token): 100}} | more
    answer = httpx.post(f"{talker.url}/v1/chat/completions", json=body, timeout=HANGS_S)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["choices"][0]
    return found


def check_call(choice: dict[str, Any]) -> None:
    [call] = choice["message"]["tool_calls"]
    assert (call["function"]["name"], choice["finish_reason"]) == ("weather", "tool_calls")
    assert valid(json.loads(call["function"]["arguments"]))
    assert choice["message"]["content"] is None


def test_a_call_behind_a_special_token_follows_its_schema(mistral: Talker) -> None:
    check_call(ask(mistral, "[TOOL_CALLS]"))
    free = ask(mistral, "a", max_tokens=4)
    assert (free["message"]["content"], free["finish_reason"]) == ("aaaa", "length")


@pytest.mark.parametrize(("model", "begins"), [("talker", "<"), ("mistral", "[TOOL_CALLS]"), ("llama", "n")])
def test_the_answer_is_a_call_or_follows_the_schema(request: pytest.FixtureRequest, model: str, begins: str) -> None:
    talker: Talker = request.getfixturevalue(model)
    check_call(ask(talker, begins, response_format=FORMAT))
    said = ask(talker, "s" if model == "llama" else "{", response_format=FORMAT)
    assert said["finish_reason"] == "stop"
    assert "tool_calls" not in said["message"]
    assert json.loads(said["message"]["content"]).keys() == {"sure"}
    check_call(ask(talker, "{", response_format=FORMAT, tool_choice="required"))


def test_thoughts_come_before_what_follows_the_schema(talker: Talker) -> None:
    """The template opens them; a budget closes them, because the model is a random one."""
    thinking = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_budget": 6}
    for more in ({}, {"tools": None}):
        said = ask(talker, "{", response_format=FORMAT, **thinking, **more)
        assert json.loads(said["message"]["content"]).keys() == {"sure"}
        assert said["message"]["reasoning_content"] == "{" * 6
    check_call(ask(talker, "n", tool_choice="required", **thinking) | {"finish_reason": "tool_calls"})
