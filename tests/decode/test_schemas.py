"""Schemas of clients: what no grammar enforces is left out by name, objects are closed, and the rest is unchanged."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from tokenwright.decode.grammar_kinds import json_rule
from tokenwright.decode.schemas import LACKING, enforceable

BYTES = LLTokenizer("byte")


@pytest.mark.parametrize("keyword", sorted(LACKING))
def test_what_is_lacking_is_indeed_lacking(keyword: str) -> None:
    """Each keyword of the table is refused by the grammar's compiler, and is gone from the schema that is made."""
    schema: dict[str, Any] = {keyword: {"type": "string"}}
    made, places = enforceable({"type": "object", "properties": {"a": schema}})
    assert places == [f"properties.a.{keyword}"]
    assert compiled(schema)
    assert not compiled(made)


def compiled(schema: dict[str, Any]) -> str:
    """The compiler's complaint; '' if there is none."""
    return str(LLMatcher.validate_grammar("%llguidance {}\nstart: " + json_rule(schema), BYTES))


@pytest.mark.parametrize(
    ("schema", "places"),
    [
        ({"type": "string", "pattern": "^(?!a).*$"}, ["pattern"]),
        ({"type": "string", "pattern": r"(a)\1"}, ["pattern"]),
        ({"type": "string", "pattern": "^[a-z]+$"}, []),
        ({"type": "string", "format": "made-up"}, []),
        (
            {"anyOf": [{"not": {}}, {"type": "array", "items": {"uniqueItems": True}}]},
            ["anyOf.0.not", "anyOf.1.items.uniqueItems"],
        ),
        ({"$defs": {"a": {"if": {}}}, "$ref": "#/$defs/a"}, ["$defs.a.if"]),
        ({"type": "object", "properties": {"not": {"type": "string"}}}, []),
        ({"enum": [{"not": 1}]}, []),
        ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, []),
    ],
)
def test_places_are_named_and_the_rest_compiles(schema: dict[str, Any], places: list[str]) -> None:
    before = json.dumps(schema)
    made, found = enforceable(schema)
    assert found == places
    assert not compiled(made)
    assert json.dumps(schema) == before, "the client's own is unchanged"


def test_objects_are_closed_where_a_schema_says_nothing() -> None:
    inner = {"type": "object", "properties": {"a": {"type": "integer"}}}
    made, _ = enforceable({"type": "object", "properties": {"in": inner, "free": {"type": "object"}}})
    assert made["additionalProperties"] is False
    assert made["properties"]["in"]["additionalProperties"] is False
    assert "additionalProperties" not in made["properties"]["free"], "an object without properties is any object"
    kept, _ = enforceable({**inner, "additionalProperties": {"type": "string"}})
    assert kept["additionalProperties"] == {"type": "string"}
    both, _ = enforceable({"allOf": [inner, {"type": "object", "properties": {"b": {}}}]})
    assert "additionalProperties" not in json.dumps(both), "closing a part would forbid the other's properties"
