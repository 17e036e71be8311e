"""What becomes of messages that a chat template does not know: it would refuse them, or leave them out in silence."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.engines import HANGS_S
from tests.serve.talking import Talker, make_talker, talking
from tokenwright.llm.chat.chat_processor import ChatProcessor
from tokenwright.llm.chat.tool_forms.known_forms import HERMES

SILENT = """\
{%- for m in messages %}
{%- if m.role in ("system", "user", "assistant") %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}
{%- endfor %}"""  # leaves out all other roles
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
USER = {"role": "user", "content": "Hello"}


@pytest.fixture(scope="module")
def silent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Talker]:
    with talking(make_talker(tmp_path_factory.mktemp("silent"), template=SILENT)) as talker:
        yield talker


@pytest.fixture(scope="module")
def knowing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Talker]:
    template = SILENT.replace('"system"', '"system", "developer"')
    with talking(make_talker(tmp_path_factory.mktemp("knowing"), template=template)) as talker:
        yield talker


def ids(talker: Talker, *messages: dict[str, Any]) -> list[int]:
    answer = httpx.post(f"{talker.url}/tokenize", json={"messages": messages})
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["tokens"]
    return found


def test_a_developer_is_the_system_where_the_template_knows_none(silent: Talker, knowing: Talker) -> None:
    told = {"content": "Be brief."}
    developer, system = ({"role": role} | told for role in ("developer", "system"))
    assert ids(silent, developer, USER) == ids(silent, system, USER) != ids(silent, USER)
    assert ids(knowing, developer, USER) != ids(knowing, system, USER)
    body = {"model": "tiny", "input": [developer, USER], "max_output_tokens": 1}
    usage = httpx.post(f"{silent.url}/v1/responses", json=body).json()["usage"]
    assert usage["input_tokens"] == len(ids(silent, system, USER))


def test_calls_that_the_template_would_leave_out_are_written_for_it(silent: Talker) -> None:
    message = {"role": "assistant", "content": "a", "tool_calls": [CALL]}
    written = HERMES.written([("f", {})])
    text = {"role": "assistant", "content": f"a\n{written}"}
    assert ids(silent, USER, message, USER) == ids(silent, USER, text, USER)


def test_what_is_cut_off_a_conversation_is_not_rendered_again_and_again(
    silent: Talker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20,000 turns, the oldest of them with calls that their contents say nothing of."""
    rendered: list[int] = []
    render = ChatProcessor.rendered

    def counted(self: ChatProcessor, wanted: Any, **more: Any) -> Any:
        rendered.append(len(wanted.messages))
        return render(self, wanted, **more)

    monkeypatch.setattr(ChatProcessor, "rendered", counted)
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"a": "' + "b" * 500 + '"}'}
    turns = [
        {"role": "user", "content": ""},
        call,
        {"type": "function_call_output", "call_id": "a", "output": ""},
    ] * 300
    turns += [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 9_500 + [USER]
    body = {"model": "tiny", "input": turns, "truncation": "auto", "max_output_tokens": 1}
    answer = httpx.post(f"{silent.url}/v1/responses", json=body, timeout=HANGS_S)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["input_tokens"] <= silent.llm.context
    assert sum(rendered) < 3 * silent.llm.context, rendered
