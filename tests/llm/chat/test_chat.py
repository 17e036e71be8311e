"""Conversations in Python: tools, reasoning and forms of answers, read by the parser of the server."""

import asyncio
import json
import re
from collections.abc import Iterator
from functools import cache
from itertools import chain, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest
from pydantic import BaseModel
from transformers import PreTrainedTokenizerFast

from tests.engines import assert_at_rest
from tests.models.fixtures import make_checkpoint
from tests.serve.chat.tool_families import FAMILIES, OTHERS, PLAIN, SAYS_ONLY
from tests.serve.talking import TEMPLATE, make_talker
from tests.text.kinds import wrap
from tests.text.templates import TEMPLATES, byte_level
from tokenwright import LLM, Grammar, RequestError
from tokenwright.decode.grammars.grammar_trials import Budget
from tokenwright.engine import FinishReason
from tokenwright.llm.chat.answer_reader import AnswerReader
from tokenwright.llm.chat.chat_options import AskedOptions, ChatRequest, distinct
from tokenwright.llm.chat.chat_processor import ChatProcessor
from tokenwright.llm.chat.output_parser import Delta
from tokenwright.llm.outputs import Piece, ToolCall
from tokenwright.serve.service.preprocess import Preprocessor
from tokenwright.serve.service.types import GenerationRequest, Tool
from tokenwright.text import ChatTemplate

ASKED = [{"role": "user", "content": "Hello"}]


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def parts(*texts: str, **more: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text, **more} for text in texts]


def called(arguments: Any, identity: str = "call_1") -> list[dict[str, Any]]:
    function = {"name": "weather", "arguments": arguments}
    return [{"id": identity, "type": "function", "function": function}]


PLACES = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": PLACES}}


class Animal(BaseModel):
    kind: Literal["cat", "dog"]
    legs: Literal[4]


def weather(city: Literal["Oslo", "Rome"], days: bool = True) -> str:
    """Of a city."""
    return f"{city} {days}"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder, _ = make_checkpoint(tmp_path_factory.mktemp("chat") / "tiny", "llama3")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with LLM(folder, pages=256) as model:
        yield model
        assert_at_rest(model)


@pytest.mark.parametrize("choice", ["required", "weather", WEATHER, {"type": "any"}])
def test_a_tool_is_called_and_its_result_is_read(llm: LLM, choice: Any) -> None:
    done = llm.chat(ASKED, tools=[WEATHER], tool_choice=choice, max_tokens=100, seed=3, parallel_tool_calls=False)
    [call] = done.tool_calls
    assert call.name == "weather"
    assert call.values["city"] in ("Oslo", "Rome")
    assert done.content == ""
    assert "<tool_call>" in done.text
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    prompt = llm.render([*ASKED, done.message, result], tools=[WEATHER]).text
    assert prompt.count(json.dumps(call.values)) == 1
    assert "rain" in prompt
    assert llm.render([*ASKED, {"role": "assistant", "tool_calls": [call]}, result], tools=[WEATHER]).text == prompt


def test_a_function_is_a_tool(llm: LLM) -> None:
    [call] = llm.chat(ASKED, tools=[weather], tool_choice="required", max_tokens=100, seed=5).tool_calls[:1]
    assert weather(**call.values).split()[0] in ("Oslo", "Rome")
    prompt = llm.render(ASKED, tools=[weather]).text
    assert '"required": ["city"]' in prompt
    assert '"days": {"type": "boolean"}' in prompt


def test_calls_are_taken_as_transformers_and_openai_write_them(llm: LLM) -> None:
    function = {"name": "weather", "arguments": {"city": "Oslo"}}
    theirs = {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
    text = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    ours = {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "function", "function": text}]}
    result = {"role": "tool", "content": "rain"}
    one, other = (llm.render([*ASKED, talk, result], tools=[WEATHER]).text for talk in (theirs, ours))
    assert one == other
    assert one.count('{"city": "Oslo"}') == 1
    with pytest.raises(RequestError, match=r'must have "role" and "content"'):
        llm.chat([{"role": "assistant"}])


def test_reasoning_stands_apart(llm: LLM) -> None:
    given: dict[str, Any] = {"enable_thinking": True, "thinking_budget": 5, "max_tokens": 40, "seed": 1}
    done = llm.chat(ASKED, **given)
    assert done.reasoning
    assert done.content
    assert "</think>" not in done.content + done.reasoning
    stream = llm.chat_stream(ASKED, **given)
    pieces = list(stream)
    assert "".join(piece.reasoning for piece in pieces) == done.reasoning
    assert "".join(piece.content for piece in pieces) == done.content
    assert stream.completion.reasoning == done.reasoning
    assert llm.chat(ASKED, max_tokens=5, seed=1).reasoning == ""
    same = llm.render(ASKED, chat_template_kwargs={"enable_thinking": True}).ids
    assert llm.render(ASKED, enable_thinking=True).ids == same != llm.render(ASKED, enable_thinking=False).ids


def test_the_same_in_an_event_loop(llm: LLM) -> None:
    given: dict[str, Any] = {"enable_thinking": True, "thinking_budget": 5, "max_tokens": 20, "seed": 1}

    async def both() -> tuple[str, str]:
        pieces = [piece async for piece in llm.achat_stream(ASKED, **given)]
        done = await llm.achat(ASKED, **given)
        return "".join(piece.reasoning for piece in pieces), done.reasoning

    assert asyncio.run(both()) == (llm.chat(ASKED, **given).reasoning,) * 2


@pytest.mark.parametrize(
    "form",
    [
        Animal,
        {"type": "json_schema", "json_schema": {"name": "animal", "schema": Animal.model_json_schema()}},
        Animal.model_json_schema(),
        Grammar.json_schema(Animal),
    ],
)
def test_an_answer_has_a_form(llm: LLM, form: Any) -> None:
    done = llm.chat(ASKED, response_format=form, max_tokens=100, seed=2)
    read = Animal.model_validate_json(done.content)
    assert done.parsed == (read if form is Animal else json.loads(done.content))
    assert llm.chat(ASKED, response_format=form, max_tokens=1, seed=2).parsed is None, "it was cut"


def test_each_of_several_texts_is_read(llm: LLM) -> None:
    done = llm.chat(ASKED, tools=[WEATHER], tool_choice="required", n=2, max_tokens=100, seed=3)
    assert [len(one.tool_calls) > 0 for one in done.choices] == [True, True]


RAIN = said("tool", "rain", tool_call_id="call_1", name="weather")
SHAPES: dict[str, list[dict[str, Any]]] = {
    "plain": [said("system", "s"), said("user", "one"), said("assistant", "two"), said("user", "three")],
    "parts": [said("user", parts("one", "two"))],
    "bare parts": [said("user", ["one", "two"]), said("assistant", ["three"]), *ASKED],
    "parts of all": [said("system", parts("s1", "s2")), *ASKED, said("assistant", parts("a1", "a2")), *ASKED],
    "languages": [said("user", parts("Hi", source_lang_code="cs", target_lang_code="en"))],
    "reasoning": [*ASKED, said("assistant", "two", reasoning="hm"), *ASKED],
    "call": [*ASKED, said("assistant", "", tool_calls=called({"city": "Oslo"})), RAIN],
    "call of nine": [
        *ASKED,
        said("assistant", "", tool_calls=called({"city": "Oslo"}, "a12345678")),
        RAIN | {"tool_call_id": "a12345678"},
    ],
    "call in text": [*ASKED, said("assistant", "", tool_calls=called('{"city":"Oslo"}')), RAIN],
    "call beside null": [*ASKED, said("assistant", None, tool_calls=called({"city": "Oslo"})), RAIN],
    "text beside a call": [*ASKED, said("assistant", "two", tool_calls=called({"city": "Oslo"})), RAIN],
    "two results": [
        *ASKED,
        said("assistant", None, tool_calls=called({"city": "Oslo"}) + called({"city": "Rome"}, "call_2")),
        RAIN,
        said("tool", "sun", tool_call_id="call_2", name="weather"),
    ],
    "names": [said("user", "one", name="Ann"), said("assistant", "two", mood="glad"), said("user", "three")],
    "result in parts": [
        *ASKED, said("assistant", "", tool_calls=called({"city": "Oslo"})), RAIN | {"content": parts("r1", "r2")}
    ],
    "plan": [*ASKED, {"role": "assistant", "tool_plan": "look", "tool_calls": called({"city": "Oslo"})}, RAIN],
}  # fmt: skip
TYPED = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "Of Norway."}}},
        "return": {"type": "string"},
    },
}
UNREAD = {
    "languages": ("source_lang_code", "target_lang_code"), "reasoning": ("reasoning",), "plan": ("tool_plan",),
    "names": ("mood",), "text beside a call": ("content beside tool_calls",),
}  # fmt: skip


def texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield from texts_in(json.loads(value)) if value.startswith("{") else [value]
    elif isinstance(value, dict):
        named = (one for name, one in value.items() if name not in ("role", "type", "id", "tool_call_id"))
        yield from chain.from_iterable(map(texts_in, named))
    elif isinstance(value, list):
        yield from chain.from_iterable(map(texts_in, value))


@cache
def theirs() -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=byte_level(), bos_token="<s>", eos_token="</s>")


ALL = {
    **{name: source for name, (source, _) in TEMPLATES.items()},
    **{one.name: one.template for one in (*FAMILIES, PLAIN, SAYS_ONLY)},
    **OTHERS,
}


@pytest.mark.parametrize("name", ALL)
def test_what_a_template_can_read_reaches_it_as_it_was_sent(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """The prompt is transformers', but where that is a list as Python prints it, or none, or lacks what was sent."""
    source, same = ALL[name], 0
    tokenizer = wrap(byte_level(), bos="<s>", eos=("</s>",), chat_template=source)
    with ChatTemplate(tokenizer) as chat:
        facts = SimpleNamespace(tokenizer=tokenizer)
        loaded: Any = SimpleNamespace(facts=facts, template=chat, eos_ids=tokenizer.eos_ids)
        processor = ChatProcessor(loaded)
        for (shape, messages), tools in product(SHAPES.items(), ((), (TYPED,)) if "tools" in source else ((),)):
            try:
                given: dict[str, Any] = {"tools": list(tools) or None, "chat_template": source, "tokenize": False}
                expected = theirs().apply_chat_template(messages, add_generation_prompt=True, **given)
            except Exception as error:
                expected = f"none: {error}"
            try:
                rendered = processor.rendered(AskedOptions(tools=tools).request(messages))
            except RequestError:
                assert expected.startswith("none"), shape
                continue
            text = rendered.text
            if text == expected:
                assert list(rendered.ids) == theirs()(text, add_special_tokens=False).input_ids, shape
                same += 1
            else:
                lost = [one for one in texts_in(messages) if one not in text and one not in json.dumps(text)]
                told = any(field in caplog.text for field in UNREAD.get(shape, ()))
                assert not lost or told, (shape, lost)
                whole = re.search(r"\[['\"]one", expected) is None and all(
                    one in expected for one in texts_in([*messages, *tools])
                )
                named = "functions.weather:0" in text  # as Kimi demands
                escaped = named or (shape == "call in text" and '\\"city' in expected)
                assert expected.startswith("none") or "'type': 'text'" in expected or not whole or escaped, (
                    shape, expected, text,
                )  # fmt: skip
    assert same > 0


def test_a_template_has_its_own_form_of_calls(tmp_path: Path) -> None:
    with LLM(make_talker(tmp_path, template=OTHERS["a plan"]), pages=256) as llm:
        assert "-> " not in llm.render(SHAPES["plan"], tools=[WEATHER]).text
        done = llm.chat(ASKED, tools=[WEATHER], tool_choice="required", max_tokens=60, seed=3)
        assert done.text.startswith("<call>weather(") and done.tool_calls[0].values["city"] in ("Oslo", "Rome")


def test_a_form_that_is_not_read_is_left_to_the_model(tmp_path: Path) -> None:
    """Its marks may be special tokens, which no grammar of text and of other calls would let it write."""
    calls = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}<start_call>{{ c.function.name }}"
        "{% for k, v in c.function.arguments.items() %}({{ k }}:<escape>{{ v }}<escape>){% endfor %}"
        "{% endfor %}{% endfor %}"
    )
    with LLM(make_talker(tmp_path, template=calls + "{{ tools | tojson if tools }}"), pages=256) as llm:
        chat = llm.conversations
        for choice, free in (("auto", True), ("none", True), ("required", False)):
            wanted = ChatRequest(messages=ASKED, tools=[Tool("weather", "Of a city.", PLACES)], tool_choice=choice)
            assert (chat.grammar(wanted, "", chat.schemas(wanted, None, Budget())) is None) == free, choice


def test_the_server_renders_the_same(llm: LLM) -> None:
    tool = Tool("weather", "Of a city.", PLACES)
    ids = Preprocessor(llm).prompt(GenerationRequest(messages=ASKED, tools=(tool,), thinking=True)).ids
    assert tuple(ids) == llm.render(ASKED, tools=[WEATHER], enable_thinking=True).ids


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"tools": "weather"}, "tools must be a list"),
        ({"tools": [{"type": "function"}]}, "a tool is"),
        ({"tools": [WEATHER, WEATHER | {"function": {"name": "weather"}}]}, "same name, 'weather'"),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tools": [WEATHER], "tool_choice": "climate"}, "'climate', which is not among the tools"),
        ({"tool_choice": 3}, "tool_choice is auto, none"),
        ({"response_format": 3}, "response_format must be"),
        ({"response_format": Animal, "grammar": Grammar.regex("a")}, "leave one of them out"),
        ({"enable_thinking": "no"}, "enable_thinking must be True or False"),
        ({"chat_template_kwargs": 3}, "chat_template_kwargs must be an object"),
    ],
)
def test_options_that_cannot_be(llm: LLM, given: dict[str, Any], told: str) -> None:
    with pytest.raises(RequestError, match=told):
        llm.chat(ASKED, **given)


def test_of_tools_of_one_name_two_are_kept_for_the_error() -> None:
    each = [
        Tool("weather", str(at), PLACES) for at in range(99)
    ]  # to compare each with all takes minutes for thousands
    assert distinct([each[0], *each]) == each[:2]


def test_a_call_that_was_cut_has_no_values() -> None:
    with pytest.raises(ValueError, match="Expecting"):
        _ = ToolCall("a", "weather", '{"city": ').values


def test_a_completion_says_its_text_as_content(llm: LLM) -> None:
    [done] = llm.generate("the", max_tokens=4, seed=1)
    assert done.content == done.text
    assert (done.reasoning, done.tool_calls, done.parsed) == ("", (), None)


class Held:
    """A parser that shows the held-back text of a text that was not cut."""

    pushed = 0
    called = unfinished = False

    def push(self, text: str, token: int | None, to: Delta) -> None: ...

    def finish(self, to: Delta, cut: bool) -> None:
        to.text = "" if cut else "</th"


def test_each_text_of_a_stream_is_read_by_the_reason_of_its_own_end() -> None:
    reader = AnswerReader(cast(Any, Held))
    begun = [Piece("</th", 1, 0.0, 0.0, (), choice) for choice in (0, 1)]
    assert [piece.content for piece in reader.split(begun, {})] == ["", ""]
    found = reader.split([], {0: FinishReason.EOS, 1: FinishReason.LENGTH})
    assert [(piece.choice, piece.content) for piece in found] == [(0, "</th")], "the second was cut in its mark"
