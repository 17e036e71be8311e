"""Reasoning, switched on and off as each API does it: the prompt is the same."""

from typing import Any

import httpx
import pytest

from tests.serve.talking import Talker

MESSAGES = [{"role": "user", "content": "Hello"}]


def ask(talker: Talker, **more: Any) -> httpx.Response:
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 1, **more}
    return httpx.post(f"{talker.url}/v1/chat/completions", json=body)


def prompt(talker: Talker, **more: Any) -> int:
    answer = ask(talker, **more)
    assert answer.status_code == 200, answer.text
    found: int = answer.json()["usage"]["prompt_tokens"]
    return found


@pytest.mark.parametrize(("effort", "on"), [("none", False), ("minimal", True), ("max", True)])
def test_the_effort_switches_reasoning(talker: Talker, effort: str, on: bool) -> None:
    same = prompt(talker, chat_template_kwargs={"enable_thinking": on})
    assert (
        prompt(talker, reasoning_effort=effort)
        == same
        != prompt(talker, chat_template_kwargs={"enable_thinking": not on})
    )
    both = prompt(talker, reasoning_effort=effort, chat_template_kwargs={"enable_thinking": not on})
    assert both != same, "the template's own variable wins"


def test_reasoning_is_left_out_where_that_is_asked_for(talker: Talker) -> None:
    asked = {"enable_thinking": True, "temperature": 0, "max_tokens": 6}
    assert ask(talker, **asked).json()["choices"][0]["message"]["reasoning_content"]
    whole = ask(talker, **asked, reasoning={"exclude": True}).json()
    assert "reasoning_content" not in whole["choices"][0]["message"]
    assert whole["usage"]["completion_tokens"] == 6
    for more in ({"separate_reasoning": False}, {"reasoning_format": "none"}):
        message = ask(talker, **asked, **more).json()["choices"][0]["message"]
        assert "reasoning_content" not in message and message["content"]
    lines = ask(talker, **asked, include_reasoning=False, stream=True).text
    assert "reasoning_content" not in lines and '"finish_reason":"length"' in lines
