"""Calls of every family: their form is found from the template, and they are read, cut, written and held to schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.profiles import examples
from tests.serve.chat.tool_families import FAMILIES, PLAIN, SAYS_ONLY, Family
from tests.text.kinds import byte_level, byte_token, of_tokens
from tokenwright.decode.grammars.grammar import Grammars
from tokenwright.errors import RequestError
from tokenwright.llm.chat.chat_processor import ModelTools
from tokenwright.llm.chat.tool_forms.form import ToolForm
from tokenwright.llm.chat.tool_forms.known_forms import FORMS
from tokenwright.llm.chat.tool_forms.probing import TemplateTools, as_template_reads, declared, probed
from tokenwright.llm.chat.tool_forms.reading import FormReader
from tokenwright.llm.chat.tool_forms.tagged_calls import TaggedCall
from tokenwright.serve.service.types import Delta, Tool
from tokenwright.text.template_process import compiled, written

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "kind": {"enum": ["in", "out"]},
        "count": {"type": "integer"},
        "share": {"type": "number"},
        "sure": {"type": "boolean"},
        "none": {"type": "null"},
        "list": {"type": "array", "items": {"type": "string"}},
        "deep": {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "string"}}},
    },
    "additionalProperties": False,
}
TOOLS = [Tool("get_weather", "The weather.", SCHEMA), Tool("clock")]
USER = {"role": "user", "content": "Hello"}
FULL = {
    "text": "Oslo \"now\"", "kind": "in", "count": 3, "share": 0.5, "sure": True, "none": None, "list": ["a", "b"],
    "deep": {"a": False, "b": "c"},
}  # fmt: skip
CALLS: list[list[tuple[str, dict[str, Any]]]] = [
    [("clock", {})],
    [("get_weather", FULL)],
    [("get_weather", {"text": "a\nb", "count": -1}), ("clock", {})],
    [("get_weather", {"list": ["a</parameter>", 'b"\n</arg_value>'], "deep": {"b": "</tool_call>"}, "sure": True})],
    [("get_weather", {"sure": False}), ("get_weather", {"kind": "out", "list": []}), ("clock", {})],
]
by_name = pytest.mark.parametrize("family", FAMILIES, ids=lambda one: one.name)


def render(family: Family, messages: Sequence[Mapping[str, Any]], tools: Any) -> str:
    try:
        values = {"messages": messages, "tools": tools, "add_generation_prompt": False}
        return written(_compiled(family.template), values, 100_000)
    except Exception as error:
        raise RequestError(str(error)) from None


@cache
def _compiled(template: str) -> Any:
    return compiled(template)


@cache
def facts_of(family: Family) -> TemplateTools:
    return probed(lambda messages, tools: render(family, messages, tools), family.template)


def printed(family: Family, calls: Sequence[tuple[str, Mapping[str, Any]]], said: str = "") -> str:
    """What the template prints for an answer with these calls."""
    listed = [
        {"id": f"call_{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for n, (name, arguments) in enumerate(calls)
    ]
    facts = facts_of(family)
    answer = {"role": "assistant", "content": said, "tool_calls": listed}
    messages = as_template_reads([USER, answer], facts, TOOLS)
    text = render(family, messages, [declared(tool) for tool in TOOLS] if facts.declares else None)
    return text.rpartition("<|assistant|>\n")[2].removesuffix("<|end|>")


def read(family: Family, pieces: Sequence[str], *, cut: bool = False) -> Delta:
    return read_form(facts_of(family).form, TOOLS, pieces, cut=cut)


def read_form(form: ToolForm, tools: Sequence[Tool], pieces: Sequence[str], *, cut: bool = False) -> Delta:
    reader, answer = FormReader(form, tools), Delta(0)
    for piece in pieces:
        delta = Delta(0)
        reader.push(piece, 1, delta)
        answer.add(delta)
    delta = Delta(0)
    reader.finish(delta, cut)
    answer.add(delta)
    return answer


def found_in(answer: Delta) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in answer.tool_calls]


def usable(family: Family) -> list[list[tuple[str, dict[str, Any]]]]:
    return [calls for calls in CALLS if len(calls) == 1 or not family.single]


@by_name
def test_the_form_is_found_from_what_the_template_prints(family: Family) -> None:
    facts = facts_of(family)
    assert (facts.form.name, facts.writes, facts.declares) == (family.form, True, bool(family.tools))
    assert facts.text_arguments == ("'' + c.function.arguments" in family.calls)


def test_there_are_thirty_families() -> None:
    assert len({family.name for family in FAMILIES}) >= 30


def test_a_template_without_a_form_gets_the_generic_one() -> None:
    facts = facts_of(PLAIN)
    assert (facts.form.name, facts.own) == ("hermes", False)
    call = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": {}}}
    result = {"role": "tool", "tool_call_id": "1", "name": "clock", "content": "twelve"}
    asked = [USER, {"role": "assistant", "content": "Wait.", "tool_calls": [call, call]}, result, result]
    messages = as_template_reads(asked, facts, TOOLS)
    assert [one["role"] for one in messages] == ["system", "user", "assistant", "user"]
    assert '"get_weather"' in messages[0]["content"] and "<tool_call>" in messages[0]["content"]
    assert found_in(read(PLAIN, [messages[2]["content"]])) == [("clock", {}), ("clock", {})]
    assert messages[3]["content"].count("twelve") == 2
    assert as_template_reads([USER], facts, []) == [USER]


def test_a_template_that_prints_no_calls_is_taken_at_its_word() -> None:
    facts = facts_of(SAYS_ONLY)
    assert (facts.form.name, facts.declares, facts.writes) == ("phi", True, False)


@by_name
def test_what_a_template_prints_is_read_back_whole_and_in_pieces(family: Family) -> None:
    for calls in usable(family):
        text = printed(family, calls)
        whole = read(family, [text])
        assert (found_in(whole), whole.text.strip()) == (calls, "")
        one_by_one = read(family, list(text))
        assert (found_in(one_by_one), one_by_one.text.strip()) == (calls, "")
        assert len({call.id for call in whole.tool_calls}) == len(calls)


@by_name
def test_no_markup_leaks_wherever_a_text_is_cut(family: Family) -> None:
    """Cut by its length, an answer has the text before its calls, and calls that are parts of the whole ones."""
    form = facts_of(family).form
    said = "Let me look." if form.open else ""
    calls = usable(family)[-1]
    text = said + ("\n" if said else "") + form.written(calls)
    whole = read(family, [text])
    for length in range(len(text)):
        for pieces in ([text[:length]], list(text[:length])):
            part = read(family, pieces, cut=True)
            assert said.startswith(part.text.strip()), text[:length]
            for one, other in zip(part.tool_calls, whole.tool_calls, strict=False):
                assert one.name == other.name
                assert other.arguments.startswith(one.arguments), text[:length]


@by_name
def test_text_stands_before_calls_and_may_follow_them(family: Family) -> None:
    form = facts_of(family).form
    if not form.open:
        return
    text = f"I look.\n{form.written(CALLS[0])}"
    answer = read(family, list(text))
    assert (answer.text, found_in(answer)) == ("I look.", CALLS[0])
    unknown = form.written([("nothing", {})])
    for pieces in ([unknown], list(unknown)):
        assert (read(family, pieces).text.strip(), read(family, pieces).tool_calls) == (unknown.strip(), [])


_marks = sorted({mark for form in FORMS for one in form.literals if len(mark := one.strip()) > 2})
_TAGGED = [form for form in FORMS if isinstance(form.call, TaggedCall)]
_shut = re.compile("|".join(rf"{re.escape(form.call.value_shut)}\s*<" for form in _TAGGED))  # no text has it
_pieces = st.one_of(st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=8), st.sampled_from(_marks))
_quotes = re.compile("|".join(re.escape(form.call.quote) for form in FORMS if getattr(form.call, "quote", "")))
_texts = st.lists(_pieces, max_size=3).map("".join).filter(lambda text: not _quotes.search(text))
_values: dict[str, st.SearchStrategy[Any]] = {
    "text": _texts.filter(lambda text: text.strip() == text and not _shut.search(text)),
    "kind": st.sampled_from(["in", "out"]),
    "count": st.integers(),
    "share": st.floats(allow_nan=False, allow_infinity=False),
    "sure": st.booleans(),
    "none": st.none(),
    "list": st.lists(_texts, max_size=3),
    "deep": st.fixed_dictionaries({}, optional={"a": st.booleans(), "b": _texts}),
}
_calls = st.lists(
    st.one_of(st.just(("clock", {})), st.tuples(st.just("get_weather"), st.fixed_dictionaries({}, optional=_values))),
    min_size=1,
    max_size=3,
)


_cuts = st.lists(st.integers(0, 400), max_size=6)


@by_name
@examples(25, derandomize=True, suppress_health_check=list(HealthCheck))
@given(calls=_calls, cuts=_cuts)
def test_random_calls_round_trip(family: Family, calls: list[tuple[str, dict[str, Any]]], cuts: list[int]) -> None:
    check_round_trip(family, calls, cuts)


@by_name
@pytest.mark.sweep
@examples(400, suppress_health_check=list(HealthCheck))
@given(calls=_calls, cuts=_cuts)
def test_many_random_calls_round_trip(family: Family, calls: list[tuple[str, dict[str, Any]]], cuts: list[int]) -> None:
    check_round_trip(family, calls, cuts)


def check_round_trip(family: Family, calls: list[tuple[str, dict[str, Any]]], cuts: Sequence[int]) -> None:
    """What a template prints and what a form writes are read as these calls, with marks of all forms in their texts."""
    calls = calls[:1] if family.single else calls
    for text in (printed(family, calls), facts_of(family).form.written(calls)):
        places = sorted({min(cut, len(text)) for cut in cuts})
        pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
        assert found_in(read(family, pieces)) == calls


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    """Grammars over single bytes, and an end token."""
    tokenizer, _ = of_tokens([byte_token(bytes([byte])) for byte in range(256)], byte_level())
    made = Grammars(lambda token, first: tokenizer.token_bytes(token) if token < 256 else None, 257, [256])
    yield made
    made.close()


def accepts(grammars: Grammars, grammar: Any, text: str) -> bool:
    state = grammars.compile(grammar)
    for byte in text.encode():
        if not int(state.mask()[byte // 32]) >> byte % 32 & 1:
            return False
        state.advance(byte)
    return bool(int(state.mask()[8]) & 1)


@pytest.mark.parametrize("form", _TAGGED, ids=lambda form: form.name)
@pytest.mark.parametrize("schema", ["listed", "open"])
def test_a_closing_mark_inside_a_value_is_text(grammars: Grammars, form: Any, schema: str) -> None:
    """For the grammar, and for the reader of any pieces: what follows the mark tells whether it closes."""
    shut, listed = form.call.value_shut, {"properties": {"a": {"type": "string"}, "b": {"type": "string"}}}
    tool = Tool("write", "", {"type": "object", **(listed if schema == "listed" else {})})
    grammar = form.grammar([tool], "auto", True)
    for value in (f"see {shut} there", f"a{shut}b", f"x\n{shut}\n(y) {shut}- z", f"{shut} a"):
        calls = [("write", {"a": value, "b": "c"})]
        text = form.written(calls)
        assert accepts(grammars, grammar, text), text
        for length in (1, 3, len(text)):
            answer = read_form(form, [tool], [text[at : at + length] for at in range(0, len(text), length)])
            assert (answer.text, found_in(answer)) == ("", calls)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_grammar_allows_calls_that_follow_their_schemas_alone(grammars: Grammars, form: Any) -> None:
    right = form.written([("get_weather", {"text": "a\nb", "kind": "in", "count": -1, "sure": True, "list": ["x"]})])
    wrong = [form.written([("get_weather", one)]) for one in ({"kind": "up"}, {"count": 0.5}, {"other": 1})]
    wrong.append(form.written([("other", {})]))
    for choice in ("auto", "required"):
        grammar = form.grammar(TOOLS, choice, True)
        assert accepts(grammars, grammar, right)
        if form.many or form.open:
            assert accepts(grammars, grammar, form.written([("clock", {}), ("get_weather", {"kind": "out"})]))
        assert [accepts(grammars, grammar, text) for text in wrong] == [False] * len(wrong)
    free, bound = (form.grammar(TOOLS, choice, True) for choice in ("auto", "required"))
    for text in ("", "Hello, is it late?", "a < b <tool", "Hello {"):
        assert accepts(grammars, free, text) and not accepts(grammars, bound, text)
    assert not form.mark or not accepts(grammars, free, f"{form.mark}no")


def nested(kind: str, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = (
            {"type": "array", "items": schema} if kind == "array" else {"type": "object", "properties": {"a": schema}}
        )
    return {"type": "object", "properties": {"x": schema}}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_grammar_grows_no_faster_than_its_schemas(grammars: Grammars, form: Any) -> None:
    """Deep ones, which a rule that stands in another twice would double at each level, and wide ones."""
    wide = {"type": "object", "properties": {f"p{at}": {"type": "boolean"} for at in range(64)}}
    for kind in ("array", "object"):
        short, long = (
            len(form.grammar([Tool("f", "", nested(kind, depth))], "required", True).text) for depth in (8, 16)
        )
        assert long <= 2 * short + 200, kind
    grammar = form.grammar([Tool("f", "", wide)], "required", True)
    assert accepts(grammars, grammar, form.written([("f", {"p3": True, "p60": False})]))
    for damaged in ({"properties": 5}, {"properties": {"b": {}}, "required": [{}]}):
        with suppress(RequestError):  # of a form that reads them
            form.grammar([Tool("f", "", {"type": "object", **damaged})], "required", True)


@by_name
def test_an_answer_that_must_not_call_has_no_mark_of_a_call(grammars: Grammars, family: Family) -> None:
    form = facts_of(family).form
    grammar = ModelTools(facts_of(family), {}, ()).silence()
    assert (grammar is None) == (not form.mark)
    if grammar is not None:
        assert accepts(grammars, grammar, f"{form.mark[:-1]} \n")
        assert not accepts(grammars, grammar, f"So: {form.written(CALLS[0])}")
    if form.tag and not form.mark:
        assert ModelTools(facts_of(family), {form.tag: 3}, ()).silence() is not None, "its tag is left out"
