"""/tokenize and /detokenize: the tokens of a request, before it is made."""

from typing import Any

import httpx
import pytest

from tests.serve.talking import SCHEMA, Talker, talking

HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}


def tokens(talker: Talker, **body: Any) -> list[int]:
    answer = httpx.post(f"{talker.url}/tokenize", json=body)
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["tokens"]
    assert answer.json()["count"] == len(found)
    return found


@pytest.mark.parametrize("more", [{}, {"tools": [TOOL]}, {"chat_template_kwargs": {"enable_thinking": True}}], ids=str)
def test_a_conversation_has_the_tokens_that_its_answer_counts(talker: Talker, more: dict[str, Any]) -> None:
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 1, **more}
    usage = httpx.post(f"{talker.url}/v1/chat/completions", json=body).json()["usage"]
    assert len(tokens(talker, messages=HELLO, **more)) == usage["prompt_tokens"]
    assert not more or usage["prompt_tokens"] != len(tokens(talker, messages=HELLO))


def test_special_tokens_can_be_left_out() -> None:
    with talking("stories", name="stories") as stories:
        bos = stories.llm.tokenizer.bos_id
        whole, bare = (tokens(stories, prompt="Once", add_special_tokens=one) for one in (True, False))
        assert whole == [bos, *bare] == tokens(stories, prompt="Once")
        back = httpx.post(f"{stories.url}/detokenize", json={"tokens": bare}).json()
        assert back == {"prompt": "Once", "content": "Once"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a", "messages": HELLO}, "prompt"),
        ({"prompt": "a", "tools": [TOOL]}, "tools"),
        ({"messages": HELLO, "add_special_tokens": True}, "add_special_tokens"),
        ({"messages": HELLO, "continue_final_message": True}, "messages"),
        ({"messages": HELLO, "chat_template": "x"}, "chat_template"),
        ({"content": "a", "prompt": "a"}, "prompt"),
    ],
)
def test_what_cannot_be_done_is_refused_in_the_shape_of_openais_api(
    talker: Talker, body: dict[str, Any], param: str
) -> None:
    answer = httpx.post(f"{talker.url}/tokenize", json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


@pytest.mark.parametrize(
    "path",
    [
        *("/health", "/ping", "/ready", "/version", "/metrics", "/v1/models", "/v1/models/tiny"),
        *("/api/tags", "/api/version", "/api/ps"),
    ],
)
def test_head_is_answered_as_get_without_its_body(talker: Talker, path: str) -> None:
    whole, head = httpx.get(talker.url + path), httpx.head(talker.url + path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == whole.headers["content-type"]
    assert httpx.head(f"{talker.url}/v1/models/nothing").status_code == 404
    assert httpx.head(f"{talker.url}/v1/completions").status_code == 405
