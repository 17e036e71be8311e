"""Thoughts and tool calls in texts of every form, cut at every place; and grammars that hold calls to their schemas."""

import sys
from itertools import pairwise
from typing import Any

import pytest

from tests.text.kinds import byte_level, byte_token, of_tokens
from tokenwright.decode.grammars.grammar import Grammars
from tokenwright.decode.grammars.grammar_kinds import schema_rule
from tokenwright.engine import Grammar
from tokenwright.errors import EngineError, RequestError
from tokenwright.llm.chat.chat_options import read_arguments
from tokenwright.llm.chat.output_parser import PlainReader, SortingReader, ThinkTags, stand_ins
from tokenwright.llm.chat.tool_forms.form import ToolForm
from tokenwright.llm.chat.tool_forms.known_forms import HERMES, LLAMA, MISTRAL
from tokenwright.llm.chat.tool_forms.reading import FormReader
from tokenwright.serve.http.exchange import arguments_of
from tokenwright.serve.openai.custom_tools import INPUT, input_of
from tokenwright.serve.service.types import Delta, Tool, ToolCall

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [Tool("weather", "The weather.", CITY), Tool("clock")]
ODD = '{"a":"}\\"{]","b":[{"c":"\\\\"}]}'  # braces and quotes inside strings

OSLO = '{"city": "Oslo"}'
BOTH = f'[TOOL_CALLS][{{"name": "weather", "arguments": {OSLO}}}, {{"name": "clock", "arguments": {{}}, "id": "x"}}]'


def hermes(name: str, arguments: str) -> str:
    """A call in the form of Hermes and Qwen."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def read(
    text: str,
    cuts: tuple[int, ...],
    tags: ThinkTags | None,
    form: ToolForm | None,
    opened: bool = False,
    cut: bool = False,
) -> Delta:
    """What a reader makes of a text that comes in pieces. cut: its length ends it."""
    calls = None if form is None else FormReader(form, TOOLS, opened)
    reader, answer = SortingReader(tags, calls, {}), Delta(0)
    for start, stop in pairwise((0, *cuts, len(text))):
        delta = Delta(0)
        reader.push(text[start:stop], 7, delta)
        answer.add(delta)
    delta = Delta(0)
    reader.finish(delta, cut)
    answer.add(delta)
    assert reader.called == bool(answer.tool_calls)
    return answer


def everywhere(
    text: str, tags: ThinkTags | None, form: ToolForm | None, opened: bool = False, cut: bool = False
) -> Delta:
    """The same answer wherever the text is parted."""
    whole = read(text, (), tags, form, opened, cut)
    ids = [call.id for call in whole.tool_calls]
    assert len(set(ids)) == len(ids)
    every = [(cut,) for cut in range(1, len(text))]
    for cuts in [*every, tuple(range(1, len(text)))]:
        part = read(text, cuts, tags, form, opened, cut)
        assert (part.text, part.reasoning) == (whole.text, whole.reasoning), cuts
        assert [(c.name, c.arguments) for c in part.tool_calls] == [(c.name, c.arguments) for c in whole.tool_calls], (
            cuts
        )
    return whole


@pytest.mark.parametrize(
    ("text", "said", "thought"),
    [
        ("<think>\nA cat. \n</think>\n\nYes, a cat.", "Yes, a cat.", "A cat."),
        ("  <think>a</think>b", "b", "a"),
        ("No <think>a</think>", "No <think>a</think>", ""),
        ("<thin", "<thin", ""),
        ("<think>never ends </thin", "", "never ends </thin"),
        ("<think>\n\n</think>\n\nb", "b", ""),
        ("", "", ""),
        ("  a", "  a", ""),
    ],
)
def test_thoughts_are_kept_apart(text: str, said: str, thought: str) -> None:
    answer = everywhere(text, ThinkTags(), None)
    assert (answer.text, answer.reasoning) == (said, thought)


def test_a_prompt_may_end_inside_the_thoughts() -> None:
    answer = everywhere("A cat.\n</think>\nYes.", ThinkTags(opened=True), None)
    assert (answer.text, answer.reasoning) == ("Yes.", "A cat.")


def test_tokens_of_thoughts_are_counted_and_special_ones_are_seen() -> None:
    reader, delta = SortingReader(ThinkTags(), None, {1: "<think>", 2: "</think>"}), Delta(0)
    for token, text in ((1, ""), (7, "a"), (7, "b"), (2, ""), (7, "c")):
        reader.push(text, token, delta)
    assert (delta.reasoning, delta.text, reader.reasoning_tokens) == ("ab", "c", 3)
    plain = PlainReader()
    plain.push("x", 1, delta)
    assert delta.text == "cx"


@pytest.mark.parametrize(
    ("form", "text", "said", "calls"),
    [
        (HERMES, hermes("weather", OSLO), "", [OSLO]),
        (HERMES, f"a\n{hermes('weather', OSLO)}\n", "a", [OSLO]),
        (HERMES, f'Look: <tool_call>{{"name":"clock","arguments":{ODD}}}</tool_call>', "Look:", [ODD]),
        (HERMES, '<tool_call>\n{"arguments": {"a": 1}, "name": "clock"}\n</tool_call>', "", ['{"a": 1}']),
        (HERMES, f'{hermes("clock", "{}")}\n{hermes("clock", ODD)} ', "", ["{}", ODD]),
        (HERMES, f"{hermes('clock', '{}')}\n\nThe clock says ten. \n", "The clock says ten. \n", ["{}"]),
        (HERMES, f"Let me look.\n{hermes('clock', '{}')} It is <ten>.", "Let me look.\nIt is <ten>.", ["{}"]),
        (HERMES, "a <tool_cal b", "a <tool_cal b", []),
        (HERMES, "<tool_call>nothing", "<tool_call>nothing", []),
        (HERMES, hermes("unknown", "{}")[:40], hermes("unknown", "{}")[:40], []),
        (HERMES, '<tool_call>{"name": "clock", "arguments": {"a": 1', "", ['{"a": 1']),
        (LLAMA, '{"name": "weather", "parameters": {"city": "Rome"}}', "", ['{"city": "Rome"}']),
        (LLAMA, '<|python_tag|>{"name": "clock", "parameters": {}}', "", ["{}"]),
        (LLAMA, "It is late. {", "It is late. {", []),
        (LLAMA, '{"no": "call"}', '{"no": "call"}', []),
        (MISTRAL, '[TOOL_CALLS] [{"name": "clock", "arguments": {"a": [1]}}]', "", ['{"a": [1]}']),
        (MISTRAL, BOTH, "", [OSLO, "{}"]),
        (MISTRAL, f"{BOTH} It is late.", "It is late.", [OSLO, "{}"]),
        (LLAMA, '{"name": "clock", "parameters": {}}\nIt is late.', "It is late.", ["{}"]),
    ],
)  # fmt: skip
def test_calls_are_found_wherever_the_text_is_cut(form: ToolForm, text: str, said: str, calls: list[str]) -> None:
    answer = everywhere(text, None, form)
    assert answer.text == said
    assert [call.arguments for call in answer.tool_calls] == calls
    assert all(len(call.id) == form.id_length for call in answer.tool_calls)


@pytest.mark.parametrize("spelled", ['[TOOL_CALLS][{"name": "\\q", "arguments": {"a": 1}}]', BOTH, "</think>"])
def test_a_mark_that_is_a_special_token_is_none_where_it_is_spelled_out(spelled: str) -> None:
    """The grammar leaves the spelled form free, so what follows it may be no call at all."""
    marks = {1: "[TOOL_CALLS]", 2: "<think>", 3: "</think>"}
    calls = '[{"name": "clock", "arguments": {}}]'
    pieces = [("", 2), (f"a {spelled}", 7), ("", 3), (f"b {spelled}", 7), ("", 3), ("", 1), (calls, 7), (" c", 7)]
    reader, answer = (
        SortingReader(ThinkTags(), FormReader(MISTRAL.with_stand_ins(stand_ins(marks)), TOOLS), marks),
        Delta(0),
    )
    for text, token in pieces:
        delta = Delta(0)
        reader.push(text, token, delta)
        answer.add(delta)
    assert (answer.reasoning, answer.text) == (f"a {spelled}", f"b {spelled}</think>\nc")
    assert [(call.name, call.arguments) for call in answer.tool_calls] == [("clock", "{}")]


def test_a_name_that_is_no_json_is_no_call() -> None:
    text = '<tool_call>{"name": "\\q", "arguments": {}}</tool_call>'
    answer = everywhere(text, None, HERMES)
    assert (answer.text, answer.tool_calls) == (text, [])


def test_a_call_may_follow_the_thoughts_and_the_mark_may_stand_in_the_prompt() -> None:
    text = '<think>Which?</think>\n<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    answer = everywhere(text, ThinkTags(), HERMES)
    assert (answer.reasoning, answer.text, [call.name for call in answer.tool_calls]) == ("Which?", "", ["clock"])
    opened = everywhere('[{"name": "clock", "arguments": {}}]', None, MISTRAL, opened=True)
    assert [call.name for call in opened.tool_calls] == ["clock"]


@pytest.fixture(scope="module")
def grammars() -> Any:
    """Grammars over single bytes, an end token, and the special tokens of SPECIAL."""
    tokens = [byte_token(bytes([byte])) for byte in range(256)]
    tokenizer, ids = of_tokens(tokens, byte_level())
    made = Grammars(lambda token, first: tokenizer.token_bytes(token) if token < 256 else None, 260, [256])
    assert ids == list(range(256))
    yield made
    made.close()


def accepts(grammars: Grammars, grammar: Grammar, text: str) -> bool:
    """Whether the grammar allows the text, and lets it end."""
    state = grammars.compile(grammar)
    for token in (token for char in text for token in ([SPECIAL[char]] if char in SPECIAL else char.encode())):
        if not state.mask()[token // 32] >> (token % 32) & 1:
            return False
        state.advance(token)
    return bool(state.mask()[256 // 32] >> (256 % 32) & 1)


def test_one_call_where_only_one_is_wanted(grammars: Grammars) -> None:
    one = hermes("clock", "{}")
    for choice in ("auto", "required"):
        grammar = HERMES.grammar(TOOLS, choice, False)
        assert accepts(grammars, grammar, one)
        assert not accepts(grammars, grammar, f"{one}\n{one}")
    many = MISTRAL.grammar(TOOLS, "required", False)
    assert not accepts(
        grammars, many, '[TOOL_CALLS][{"name": "clock", "arguments": {}}, {"name": "clock", "arguments": {}}]'
    )


MARK, END, TAG = "\ue000", "\ue001", "\ue002"  # stand for special tokens in the texts here
SPECIAL = {MARK: 257, END: 258, TAG: 259}


@pytest.mark.parametrize(
    ("form", "choice", "good", "bad"),
    [
        (
            MISTRAL, "auto",
            ["Hello [TOOL_CALLS][", f"So: {MARK}[{{\"name\": \"weather\", \"arguments\": {OSLO}}}]",
             f"{MARK}{BOTH[12:]}".replace(', "id": "x"', "")],
            [MARK, f"{MARK}[]", f"{MARK}{MARK}", f'{MARK}[{{"name": "weather", "arguments": {{"city": 1}}}}]', END],
        ),
        (MISTRAL, "required", [f'{MARK}[{{"name": "clock", "arguments": {{}}}}]'], ["", MARK, "a"]),
        (
            HERMES, "auto",
            ["Hello <tool_call>", f'So: {MARK}\n{{"name": "clock", "arguments": {{}}}}\n{END} and so on'],
            [f"{MARK}no", f'{MARK}\n{{"name": "clock", "arguments": {{}}}}\n</tool_call>', END],
        ),
        (
            LLAMA, "auto",
            ["Hello", *(f'{tag}{{"name": "clock", "parameters": {{}}}}' for tag in ("", TAG))],
            [TAG, f"{TAG}Hello"],
        ),
    ],
)  # fmt: skip
def test_calls_behind_a_special_token_are_held_to_their_schemas(
    grammars: Grammars, form: ToolForm, choice: str, good: list[str], bad: list[str]
) -> None:
    names = {form.mark: SPECIAL[MARK], form.close.strip(): SPECIAL[END], "<|python_tag|>": SPECIAL[TAG]}
    special = {name: token for name, token in names.items() if name and any(name in text for text in form.literals)}
    grammar = form.grammar(TOOLS, choice, True, special)
    assert [accepts(grammars, grammar, text) for text in good] == [True] * len(good)
    assert [accepts(grammars, grammar, text) for text in bad] == [False] * len(bad)


FORM = schema_rule(Grammar("json_schema", '{"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}'))


@pytest.mark.parametrize(
    ("form", "special", "calls"),
    [
        (HERMES, False, [hermes("weather", OSLO), f"{hermes('clock', '{}')}\n{hermes('clock', '{}')}"]),
        (LLAMA, False, ['{"name": "clock", "parameters": {}}']),
        (MISTRAL, False, ['[TOOL_CALLS][{"name": "clock", "arguments": {}}]']),
        (MISTRAL, True, [f'{MARK}[{{"name": "clock", "arguments": {{}}}}]']),
    ],
)
def test_an_answer_is_calls_or_follows_the_schema(
    grammars: Grammars, form: ToolForm, special: bool, calls: list[str]
) -> None:
    grammar = form.grammar(TOOLS, "auto", True, {form.mark: SPECIAL[MARK]} if special else {}, FORM)
    assert all(accepts(grammars, grammar, text) for text in ['{"a": 1}', *calls])
    bad = ["", "Hello", '{"a": 2}', f'{{"a": 1}}{calls[0]}', f"Hello {calls[0]}", hermes("weather", '{"city": 1}')]
    assert not any(accepts(grammars, grammar, text) for text in bad)
    required = form.grammar(TOOLS, "required", True, {}, FORM)
    assert not accepts(grammars, required, '{"a": 1}')


def test_schemas_that_cannot_be_followed_are_refused(grammars: Grammars) -> None:
    with pytest.raises(RequestError, match="x-guidance"):
        HERMES.grammar([Tool("a", "", {"x-guidance": {}})], "auto", True)
    broken = HERMES.grammar([Tool("a", "", {"type": "nothing"})], "required", True)
    with pytest.raises((RequestError, EngineError)):
        grammars.compile(broken)


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ('{"a": 1e999, "b": -1e999}', {"a": sys.float_info.max, "b": -sys.float_info.max}),
        ('{"a": NaN}', {}),
        ('{"a": ' + "[" * 100_000 + "}", {}),
        ("[1]", {}),
        ('{"a": 1', {}),
        ('{"a": 12, "b', {"a": 12}),
        ('{"a": true, "b": "x", "c": "y', {"a": True, "b": "x"}),
        ('{"a": {"b": [1, {"c": "}"}, 2', {"a": {"b": [1, {"c": "}"}]}}),
        ('{"a": "x\\"', {}),
        ('{"a": fals', {}),
        ("", {}),
    ],
)
def test_arguments_that_json_cannot_hold_or_that_are_cut_off(arguments: str, found: object) -> None:
    """A schema allows any number and any depth; what a reply holds must be JSON all the same."""
    assert arguments_of(ToolCall("call-0", "weather", arguments)) == found


def test_half_a_surrogate_pair_that_a_model_writes_becomes_a_character() -> None:
    """Its escape may stand in JSON, but no reply and no prompt can have what it says."""
    written = r"""{"a": "\ud83d\ude00 \ud83d \udE00 \\ud83d \\\ud83d"}"""
    meant = {"a": "\N{GRINNING FACE} \ufffd \ufffd \\ud83d \\\ufffd"}
    assert arguments_of(ToolCall("call-0", "weather", written)) == read_arguments(written) == meant
    assert arguments_of(ToolCall("call-0", "weather", written[:-1])) == meant, "a call that was cut off"
    assert input_of(written.replace('"a"', f'"{INPUT}"', 1)) == meant["a"]
