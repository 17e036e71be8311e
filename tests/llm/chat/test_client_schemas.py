"""A client's schema whose alternatives, written out, are more than a grammar may have."""

import tracemalloc
from collections.abc import Mapping
from typing import Any

import pytest

from tokenwright.decode.grammars.grammar_trials import Budget
from tokenwright.engine import Grammar
from tokenwright.errors import RequestError
from tokenwright.llm.chat.chat_options import Tool
from tokenwright.llm.chat.chat_processor import ClientSchemas
from tokenwright.llm.chat.tool_forms import lark
from tokenwright.llm.chat.tool_forms.form import ToolForm
from tokenwright.llm.chat.tool_forms.known_forms import LFM, QWEN_CODER
from tokenwright.sampling_params import MOST_GRAMMAR

GIVEN = '{"type": "object"}'


class Growing:
    """Rewrites every schema as one that is too long."""

    def enforceable(self, schema: str, budget: Budget) -> tuple[str, list[str]]:
        return " " * MOST_GRAMMAR + schema, []


def test_a_schema_that_grows_too_long_is_left_out() -> None:
    schemas = ClientSchemas(Growing, Budget(), (), Grammar("json_schema", GIVEN, client=True))
    assert schemas.left_out == ["schema"]
    assert schemas.answer is not None and schemas.answer.text == GIVEN


def test_a_strict_one_is_refused_by_its_name() -> None:
    with pytest.raises(RequestError, match="response_format is strict, and its schema cannot be enforced"):
        ClientSchemas(Growing, Budget(), (), Grammar("json_schema", GIVEN, client=True, strict="response_format"))


def test_references_that_lead_to_one_schema_many_times_are_followed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    followed: list[str] = []
    real = lark._referred

    def referred(whole: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
        followed.append(name)
        return real(whole, name)

    monkeypatch.setattr(lark, "_referred", referred)
    again = {"anyOf": [{"$ref": "#/$defs/a"} for _ in range(9)]}
    schema = {"properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": {"a": again}}
    known = lark.Kinds()
    assert lark.kind_of(schema, "x", known) == "either"
    assert len(followed) < 50, "not 9 to the fourth"
    assert lark.kind_of({"properties": {"x": {"anyOf": [{"type": "string"}, {"enum": ["a"]}]}}}, "x", known) == "text"
    followed.clear()
    many = {f"p{at}": {"$ref": "#/$defs/a"} for at in range(50)}
    tool = Tool(
        "f", "", {"properties": many, "$defs": {"a": {"anyOf": 50 * [{"$ref": "#/$defs/b"}]}, "b": {"type": "string"}}}
    )
    QWEN_CODER.grammar([tool], "required", parallel=False)
    assert len(followed) < 200, "not 50 for each argument"


@pytest.mark.parametrize("form", [QWEN_CODER, LFM], ids=lambda form: form.name)
def test_a_grammar_that_repeats_definitions_ends_at_its_limit(form: ToolForm) -> None:
    definitions = {"a": {"type": "object", "description": "x" * 100_000}}
    schema = {"$defs": definitions, "properties": {f"p{at}": {"$ref": "#/$defs/a"} for at in range(200)}}
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match="characters"):
            form.grammar([Tool("find", "", schema)], "required", False)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20, "not the 20 MB of all"
