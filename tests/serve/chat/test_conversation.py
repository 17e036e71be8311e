"""Messages as templates know them: ids, arguments, volatile lines; answers that go on; conversations that are cut."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engines import HANGS_S
from tests.serve.chat.tool_families import OTHERS
from tests.serve.talking import Talker, make_talker, talking
from tokenwright import LLM
from tokenwright.errors import RequestError
from tokenwright.llm.chat.template_messages import (
    TemplateMessages,
    TemplateOrder,
    nine_letters,
    without_oldest,
    without_volatile,
)
from tokenwright.serve.anthropic.bodies import Messages
from tokenwright.serve.anthropic.routes import CLEARED, edited
from tokenwright.serve.http.api import About

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
CHAT, MESSAGE, OLLAMA = "/v1/chat/completions", "/v1/messages", "/api/chat"
BEGUN = {"role": "assistant", "content": "I am"}
NINE = "{% if call.id | length != 9 %}{% endif %}{{ tool_calls }}"


def called(arguments: Any, identity: str = "call_123456") -> list[dict[str, Any]]:
    function = {"name": "f", "arguments": arguments}
    call = {"id": identity, "type": "function", "function": function}
    result = {"role": "tool", "tool_call_id": identity, "name": "f", "content": "x"}
    return [*HELLO, {"role": "assistant", "content": "", "tool_calls": [call]}, result]


def test_ids_have_nine_letters_where_a_template_demands_it() -> None:
    _, call, result = TemplateMessages(NINE).known(called({}))
    identity = call["tool_calls"][0]["id"]
    assert identity == result["tool_call_id"] == nine_letters("call_123456")
    assert len(identity) == 9 and identity.isalnum() and identity.isascii()
    assert nine_letters("abcdefgh1") == "abcdefgh1"
    assert len({nine_letters(f"call_{n}") for n in range(1000)}) == 1000
    assert TemplateMessages("tool_calls").known(called({})) == called({})


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("tool_calls {{ arguments }}", "[1"),
        ("tool_calls {% for k, v in call.function.arguments.items() %}", {"arguments": "[1"}),
        ("tool_calls {% for k, v in tool_call.arguments|items %}", {"arguments": "[1"}),
    ],
)
def test_arguments_that_are_no_object_are_handed_on(source: str, wanted: Any) -> None:
    [_, call, _] = TemplateMessages(source).known(called("[1"))
    assert call["tool_calls"][0]["function"]["arguments"] == wanted


def test_volatile_lines_are_those_of_the_table_alone() -> None:
    line = "x-anthropic-billing-header: cch=1;"
    assert without_volatile(f"{line}\nHelp.\n{line}") == "Help."
    assert without_volatile(f"Help. {line}") == f"Help. {line}"
    assert without_volatile(f"{line[1:]}\nHelp.") == f"{line[1:]}\nHelp."
    [system, user] = TemplateMessages("").known(
        [{"role": "developer", "content": line}, {"role": "user", "content": line}]
    )
    assert (system, user["content"]) == ({"role": "system", "content": ""}, line)


def printed(refuses: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """A template that takes one system message, first of all, or none; users and assistants may have to alternate."""
    roles = [one["role"] for one in messages]
    others = [role for role in roles if role != "system"]
    if (
        ("system" in refuses and "system" in roles)
        or ("later" in refuses and "system" in roles[1:])
        or ("in a row" in refuses and any(one == other for one, other in pairwise(others)))
    ):
        raise RequestError("the template refuses these messages")
    kept = [one for at, one in enumerate(messages) if not at or one["role"] != "system" or refuses != "drops"]
    return "|".join(f"{one['role']}:{one['content']}" for one in kept)


@pytest.mark.parametrize(
    ("refuses", "wanted"),
    [
        ("nothing", ["system:a", "system:b", "user:c", "user:d", "assistant:e", "system:f", "user:g"]),
        ("later", ["system:a\n\nb", "user:c", "user:d", "assistant:e", "user:f", "user:g"]),
        ("drops", ["system:a\n\nb", "user:c", "user:d", "assistant:e", "user:f", "user:g"]),
        ("later, in a row", ["system:a\n\nb", "user:c\n\nd", "assistant:e", "user:f\n\ng"]),
        ("in a row", ["system:a", "system:b", "user:c\n\nd", "assistant:e", "system:f", "user:g"]),
        ("system", ["user:a", "user:b", "user:c", "user:d", "assistant:e", "user:f", "user:g"]),
        ("system, in a row", ["user:a\n\nb\n\nc\n\nd", "assistant:e", "user:f\n\ng"]),
        ("system, later, in a row, user", None),
    ],
)
def test_messages_are_in_an_order_that_the_template_takes(refuses: str, wanted: list[str] | None) -> None:
    """Codex sends instructions and a developer's message, Claude Code and opencode reminders later on."""

    def render(messages: Sequence[Mapping[str, Any]]) -> str:
        if "user" in refuses.split(", "):
            raise RequestError("the template fails")
        return printed(refuses, messages)

    roles = ["system", "system", "user", "user", "assistant", "system", "user"]
    messages = [{"role": role, "content": text} for role, text in zip(roles, "abcdefg", strict=True)]
    found = TemplateOrder(render).arranged(messages)
    assert (found == messages) is (wanted is None or refuses == "nothing")
    if wanted is not None:
        assert [f"{one['role']}:{one['content']}" for one in found] == wanted
        assert render(found) == "|".join(wanted)


# As Mistral's: users and assistants take turns, where calls and their results do not count. STRICT wants words of each.
TURNS = """\
{%- set count = namespace(n=0) -%}{%- for m in messages -%}
{%- if m.role == 'user' or m.role == 'system' or (m.role == 'assistant' and not m.tool_calls) -%}
{%- if (m.role == 'user') != (count.n % 2 == 0) -%}{{ raise_exception('take turns') }}{%- endif -%}
{%- set count.n = count.n + 1 -%}{%- endif -%}
{%- if m.role == 'user' -%}[INST]{{ m.content }}[/INST]
{%- elif m.tool_calls -%}[TOOL_CALLS][{%- for c in m.tool_calls -%}
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}
{%- if c.id | length != 9 -%}{{ raise_exception('nine') }}{%- endif -%}{%- endfor -%}]</s>
{%- elif m.role == 'tool' -%}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]
{%- else -%}STRICT {{ m.content }}</s>{%- endif -%}{%- endfor -%}"""
STRICT = "{%- if not m.content -%}{{ raise_exception('empty') }}{%- endif -%}"
# As Gemma's, whose template knows no tools: calls are text, and results the user's.
PAIRS = """\
{%- for m in messages -%}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('take turns') }}
{%- endif -%}<turn>{{ m.role }}:{{ m.content | trim }}{%- endfor -%}"""
CALLED = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}
AGENT = [
    {"role": "user", "content": "ask"},
    {"role": "assistant", "content": "I look."},
    {"role": "assistant", "content": "", "tool_calls": [CALLED]},
    {"role": "tool", "tool_call_id": "call_1", "name": "look", "content": "blue"},
    {"role": "system", "content": "remember"},
    {"role": "user", "content": "more"},
]


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        (TURNS.replace("STRICT", ""), "[/TOOL_RESULTS]</s>[INST]remember\n\nmore[/INST]"),
        (TURNS.replace("STRICT", STRICT), "[/TOOL_RESULTS]Done.</s>[INST]remember\n\nmore[/INST]"),
        (
            TURNS.replace("{{ raise_exception('take turns') }}", ""),
            "[/TOOL_RESULTS]STRICT remember</s>[INST]more[/INST]",
        ),
        (PAIRS, "\n</tool_response>\n\nremember\n\nmore"),
    ],
)
def test_the_user_goes_on_after_a_result(tmp_path: Path, template: str, wanted: str) -> None:
    """Agents remind the model, or their users interrupt it, before it has said a word about a result."""
    with LLM(make_talker(tmp_path, template=template), pages=64) as llm:
        for messages in (AGENT, [*AGENT[:1], *AGENT[2:4], *AGENT[5:]]):
            text = llm.render(messages).text
            plain = wanted.replace("STRICT remember</s>", "").replace("remember\n\n", "")
            assert text.endswith(wanted if "remember" in str(messages) else plain), text
            assert "blue" in text and "sky" in text
        ids = tuple(llm.tokenizer.encode("kept", add_special=False))
        later = [*AGENT[:1], *AGENT[2:], {"role": "assistant", "content": "kept"}, {"role": "user", "content": "so"}]
        assert str(ids)[1:-1] in str(llm.render(later, answers={5: ids}).ids)


ONE_SYSTEM = """\
{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('only first') }}{% endif %}\
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def test_answers_keep_their_ids_where_messages_before_them_are_joined(tmp_path: Path) -> None:
    with LLM(make_talker(tmp_path, template=ONE_SYSTEM), pages=64) as llm:
        ids = (*llm.tokenizer.encode("a", add_special=False), *llm.tokenizer.encode("b", add_special=False))
        told = [*HELLO, {"role": "assistant", "content": "ab"}, *HELLO]
        rules = [{"role": "system", "content": "Be kind."}, {"role": "developer", "content": "Be brief."}]
        found = llm.render([*rules, *told], answers={3: ids})
        joined = llm.render([{"role": "system", "content": "Be kind.\n\nBe brief."}, *told], answers={2: ids})
        assert found == joined
        assert str(ids)[1:-1] in str(found.ids)
        with pytest.raises(RequestError, match="message 2, which is no message of the assistant"):
            llm.render([*rules, *told], answers={2: ids})


def test_the_oldest_messages_leave_first() -> None:
    texts = [("system", "s" * 10), ("user", "a" * 100), ("assistant", "b" * 100), ("user", "c" * 100), ("user", "d")]
    messages = [{"role": role, "content": text} for role, text in texts]
    assert without_oldest(messages, 0.1) == [messages[0], *messages[3:]], "an answer without its question leaves too"
    assert without_oldest(messages, 0.9) == [messages[0], messages[-1]]
    assert without_oldest([messages[0], messages[-1]], 0.5) == []


def text_of(talker: Talker, path: str, body: dict[str, Any], **more: Any) -> str:
    sane = {"options": {"num_predict": 8, "temperature": 0}} if path == OLLAMA else {"max_tokens": 8, "temperature": 0}
    answer = httpx.post(
        talker.url + path, json={"model": "tiny", "stream": False} | sane | body | more, timeout=HANGS_S
    )
    assert answer.status_code == 200, answer.text
    found = answer.json()
    if path == OLLAMA:
        return str(found["message"]["content"])
    return str(found["content"][0]["text"] if path == MESSAGE else found["choices"][0]["message"]["content"])


def after(talker: Talker, begun: str) -> str:
    ids = [*talker.llm.template.render(HELLO).ids, *talker.llm.tokenizer.encode(begun, add_special=False)]
    [whole] = talker.llm.generate([ids], talker.llm.sampling(temperature=0.0, max_tokens=8))
    return whole.text


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (CHAT, {}),
        (CHAT, {"continue_final_message": True, "add_generation_prompt": False}),
        (CHAT, {"messages": [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "I am"}]}]}),
        (MESSAGE, {}),
        (OLLAMA, {}),
    ],
)
def test_an_answer_goes_on_from_the_last_message(talker: Talker, path: str, more: dict[str, Any]) -> None:
    assert text_of(talker, path, {"messages": [*HELLO, BEGUN]} | more) == after(talker, "I am")


@pytest.mark.parametrize("asked", [{"continue_final_message": False}, {"add_generation_prompt": True}])
def test_a_new_message_begins_where_that_is_asked_for(talker: Talker, asked: dict[str, Any]) -> None:
    messages = [*HELLO, BEGUN]
    assert text_of(talker, CHAT, {"messages": messages} | asked) == talker.greedy(messages)


def test_a_message_that_goes_on_has_thought_already(talker: Talker) -> None:
    begun = BEGUN | {"reasoning_content": "Hm."}
    assert text_of(talker, CHAT, {"messages": [*HELLO, begun]}) == after(talker, "<think>\nHm.\n</think>\n\nI am")
    blocks = [{"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "I am"}]
    body = {"messages": [*HELLO, BEGUN | {"content": blocks}]}
    assert text_of(talker, MESSAGE, body) == after(talker, "<think>\nHm.\n</think>\n\nI am")
    prompt = httpx.post(
        f"{talker.url}/apply-template", json={"messages": [*HELLO, BEGUN], "reasoning_effort": "high"}
    ).json()["prompt"]
    assert prompt.endswith("<think>\n\n</think>\n\nI am")


def test_a_prompt_may_end_before_the_answer_begins(talker: Talker) -> None:
    body = {"messages": HELLO, "add_generation_prompt": False}
    prompt = httpx.post(f"{talker.url}/apply-template", json=body).json()["prompt"]
    assert prompt == talker.llm.template.render(HELLO, False).text
    ids = httpx.post(f"{talker.url}/tokenize", json=body).json()["tokens"]
    assert ids == list(talker.llm.template.render(HELLO, False).ids)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True, "add_generation_prompt": True, "messages": [*HELLO, BEGUN]}, "leave one out"),
    ],
)
def test_what_cannot_go_on_is_refused(talker: Talker, more: dict[str, Any], named: str) -> None:
    answer = httpx.post(talker.url + CHAT, json={"messages": HELLO} | more)
    assert answer.status_code == 400
    assert named in answer.json()["error"]["message"]


LONG = [
    {"role": "system", "content": "Be brief."},
    *({"role": ("user", "assistant")[n % 2], "content": f"{n} " + "a" * 200} for n in range(40)),
    {"role": "user", "content": "And now?"},
]


@pytest.mark.parametrize(
    ("path", "cut", "uncut"),
    [
        (OLLAMA, {}, {"truncate": False}),
        (OLLAMA, {"options": {"num_ctx": 600, "num_predict": 2}}, {"options": {"num_ctx": 600}, "truncate": False}),
        ("/v1/responses", {"truncation": "auto"}, {"truncation": "disabled"}),
    ],
)
def test_a_conversation_that_is_too_long_loses_its_oldest_messages(
    talker: Talker, path: str, cut: dict[str, Any], uncut: dict[str, Any]
) -> None:
    given = {"input" if "responses" in path else "messages": LONG, "model": "tiny"} | (
        {"max_output_tokens": 4} if "responses" in path else {"stream": False}
    )
    answer = httpx.post(talker.url + path, json=given | cut, timeout=HANGS_S)
    assert answer.status_code == 200, answer.text
    tokens = answer.json()["prompt_eval_count"] if path == OLLAMA else answer.json()["usage"]["input_tokens"]
    context = cut.get("options", {}).get("num_ctx", talker.llm.context)
    assert context // 3 < tokens < context
    assert httpx.post(talker.url + path, json=given | uncut, timeout=HANGS_S).status_code == 400


def edits(*given: dict[str, Any]) -> list[dict[str, Any]]:
    """A conversation of three calls after these edits."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Go"}]
    for n in range(3):
        thought = {"type": "thinking", "thinking": f"thought {n}", "signature": ""}
        call = {"type": "tool_use", "id": f"c{n}", "name": ("a", "b", "a")[n], "input": {"n": n}}
        result = {"type": "tool_result", "tool_use_id": f"c{n}", "content": f"result {n}"}
        messages += [{"role": "assistant", "content": [thought, call]}, {"role": "user", "content": [result]}]
    from tokenwright.serve.anthropic.routes import conversation

    body = Messages.model_validate(
        {"messages": messages, "max_tokens": 1, "context_management": {"edits": list(given)}}
    )
    return edited(body, conversation(body), About(""))


def thoughts(messages: list[dict[str, Any]]) -> list[str]:
    return [one["reasoning_content"][-1] for one in messages if "reasoning_content" in one]


def results(messages: list[dict[str, Any]]) -> list[str]:
    return [one["content"] for one in messages if one["role"] == "tool"]


CLEAR, USES = {"type": "clear_thinking_20251015"}, {"type": "clear_tool_uses_20250919"}


@pytest.mark.parametrize(
    ("edit", "left"),
    [
        (CLEAR, ["2"]),
        (CLEAR | {"keep": "all"}, ["0", "1", "2"]),
        (CLEAR | {"keep": {"type": "thinking_turns", "value": 2}}, ["1", "2"]),
        (USES, ["0", "1", "2"]),
    ],
    ids=str,
)
def test_old_thoughts_are_cleared(edit: dict[str, Any], left: list[str]) -> None:
    assert thoughts(edits(edit)) == left


def kept(number: int, **more: Any) -> dict[str, Any]:
    return USES | {"keep": {"type": "tool_uses", "value": number}} | more


WHOLE = ["result 0", "result 1", "result 2"]


@pytest.mark.parametrize(
    ("edit", "left"),
    [
        (USES, WHOLE),
        (kept(1), [CLEARED, CLEARED, "result 2"]),
        (kept(0, exclude_tools=["a"]), ["result 0", CLEARED, "result 2"]),
        (kept(0, trigger={"type": "tool_uses", "value": 3}), WHOLE),
        (kept(0, trigger={"type": "tool_uses", "value": 2}), [CLEARED] * 3),
        (kept(0, trigger={"type": "input_tokens", "value": 1000}), WHOLE),
        (kept(0, trigger={"type": "input_tokens", "value": 10}), [CLEARED] * 3),
        (CLEAR, WHOLE),
    ],
    ids=str,
)
def test_old_results_are_cleared(edit: dict[str, Any], left: list[str]) -> None:
    assert results(edits(edit)) == left


@pytest.mark.parametrize(("clear", "left"), [(False, [0, 1, 2]), (True, [2]), (["b"], [0, 2])], ids=str)
def test_what_tools_were_called_with_is_cleared_if_asked(clear: Any, left: list[int]) -> None:
    messages = edits(kept(1, clear_tool_inputs=clear))
    inputs = [call["function"]["arguments"] for one in messages for call in one.get("tool_calls", ())]
    assert [one["n"] for one in inputs if one] == left


def test_fields_that_the_template_reads_are_handed_on_and_others_named(tmp_path: Path) -> None:
    """Over HTTP as in Python: parts, fields of messages and of tools, and the text of arguments, as they were sent."""
    tools = "{% for t in tools or [] %}{{ t.function.name }} -> {{ t.function['return'] }}{% endfor %}"
    template = tools + OTHERS["text or parts"].replace("<|end|>", "{{ m.mood }}<|end|>")
    with talking(make_talker(tmp_path, template=template)) as talker:
        parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
        tool = {"type": "function", "function": {"name": "f", "return": "string", "colour": "red"}}
        messages = [{"role": "user", "content": parts, "mood": "glad", "novel": 1}]
        body = {"messages": messages, "tools": [tool], "max_tokens": 1}
        prompt = httpx.post(f"{talker.url}/apply-template", json=body, timeout=HANGS_S).json()["prompt"]
        assert "onetwoglad<|end|>" in prompt and "f -> string" in prompt
        answer = httpx.post(talker.url + CHAT, json=body, timeout=HANGS_S)
        assert answer.headers["X-Tokenwright-Ignored"] == "messages.novel, tools.function.colour"


def test_null_beside_calls_is_no_empty_text(tmp_path: Path) -> None:
    """A template may tell them apart; none of the APIs has sent an empty text."""
    template = (
        "{% for m in messages %}{{ m.role }}{% if m.content is string %}<{{ m.content }}>{% endif %}"
        "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{% endfor %}"
    )
    function = {"name": "f", "arguments": "{}"}
    calls = [{"id": "a", "type": "function", "function": function}]
    with talking(make_talker(tmp_path, template=template)) as talker:

        def post(path: str, **body: Any) -> dict[str, Any]:
            return dict(httpx.post(talker.url + path, json=body, timeout=HANGS_S).json())

        said = {"role": "assistant", "tool_calls": calls}
        for one, wanted in ((said | {"content": ""}, "<>"), (said | {"content": None}, ""), (said, "")):
            prompt = post("/apply-template", messages=[*HELLO, one])["prompt"]
            assert prompt.startswith(f"user<Hello>assistant{wanted}{{")
        tokens = len(post("/tokenize", messages=[*HELLO, said, *HELLO])["tokens"])
        block = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
        used = [*HELLO, {"role": "assistant", "content": [block]}, *HELLO]
        assert post(f"{MESSAGE}/count_tokens", messages=used)["input_tokens"] == tokens
        items = [*HELLO, {"type": "function_call", "call_id": "a", **function}, *HELLO]
        assert post("/v1/responses/input_tokens", input=items)["input_tokens"] == tokens
