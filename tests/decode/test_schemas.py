"""Schemas of clients: what no grammar enforces is left out by name, objects are closed, and the rest is unchanged."""

import json
import random
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from tokenwright.decode.grammars.grammar import Grammars, GrammarState
from tokenwright.decode.grammars.grammar_kinds import json_rule
from tokenwright.decode.schemas import LACKING, enforceable, mistake_in
from tokenwright.decode.schemas.one_of import MOST_COMPARED, Comparison
from tokenwright.engine import Grammar

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
        ({"type": "string", "pattern": "^(?<!a)b$"}, ["pattern"]),
        ({"patternProperties": {"(?<=a)b": {}, "c": {}}, "additionalProperties": False}, ["patternProperties.(?<=a)b"]),
        ({"type": "string", "pattern": r"(a)\1"}, ["pattern"]),
        ({"type": "string", "pattern": "^(?=.*[0-9])[0-9a-c]{2,4}$"}, ["pattern"]),
        ({"type": "string", "pattern": r"^[ !#-\[\]-~\x00-\x1f]$"}, ["pattern"]),
        ({"patternProperties": {"^a": {"type": "integer"}, "b$": {"minimum": 5}}}, ["patternProperties.b$"]),
        ({"type": "string", "pattern": "^[a-z]+$"}, []),
        ({"type": "string", "format": "made-up"}, []),
        (
            {"anyOf": [{"not": {"multipleOf": 7}}, {"type": "array", "items": {"uniqueItems": True}}]},
            ["anyOf.0.not", "anyOf.1.items.uniqueItems"],
        ),
        ({"$defs": {"a": {"unevaluatedItems": False}}, "$ref": "#/$defs/a"}, ["$defs.a.unevaluatedItems"]),
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, ["uniqueItems"]),
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": False}, []),
        ({"additionalProperties": {"type": "null"}, "minProperties": 2}, ["minProperties"]),
        ({"additionalProperties": {"type": "null"}, "minProperties": 1}, []),
        ({"oneOf": [{"type": "integer", "multipleOf": 2}, {"type": "integer", "multipleOf": 3}]}, ["oneOf"]),
        ({"oneOf": [{"format": "ipv4"}, {"format": "ipv6"}]}, ["oneOf"]),
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


def test_alternatives_are_compared_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is compared with each: of a document with hundreds, the later ones are enforced as an anyOf."""
    compared = []
    apart = Comparison.apart
    monkeypatch.setattr(Comparison, "apart", lambda *given, **more: compared.append(1) or apart(*given, **more))
    kinds = [{"type": "object", "properties": {"kind": {"const": n}}, "required": ["kind"]} for n in range(60)]
    schema = {"type": "object", "properties": {f"p{n}": {"oneOf": kinds} for n in range(23)}}
    made, places = enforceable(schema)
    whole = 23 - len(places)
    assert 1 <= whole < 10 and places == [f"properties.p{n}.oneOf" for n in range(whole, 23)]
    assert len(compared) < 2 * MOST_COMPARED + 23 * 60 * 60
    assert [one["properties"]["kind"]["const"] for one in made["properties"]["p22"]["anyOf"]] == list(range(60))


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


_CITY = {"type": "object", "properties": {"kind": {"const": "city"}, "name": {"type": "string"}}, "required": ["kind"]}
_AREA = {"type": "object", "properties": {"kind": {"const": "area"}, "name": {"type": "string"}}, "required": ["kind"]}
_AB: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}}
_TREE: dict[str, Any] = {  # whose root and whose reference are each other's
    "type": "object",
    "minProperties": 1,
    "anyOf": [{"$ref": "#/$defs/t"}, {"$ref": "#/$defs/l"}],
    "$defs": {
        "t": {
            "type": "object",
            "properties": {"k": {"const": "t"}, "in": {"type": "array", "items": {"$ref": "#"}}},
            "required": ["k"],
        },
        "l": {"type": "object", "properties": {"k": {"const": "l"}}, "required": ["k"]},
    },
}
# A schema, a value of it that can be written, and one that it refuses.
KINDS: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "oneOf by a field": ({"oneOf": [_CITY, _AREA]}, {"kind": "area", "name": "x"}, {"kind": "lake"}),
    "oneOf by what is required": (
        _AB | {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"b": True},
        {"a": 1, "b": True},
    ),
    "oneOf by a field that may be absent": (
        {"oneOf": [{"properties": {"k": {"const": 1}}}, {"properties": {"k": {"const": 2}, "b": {"type": "null"}}}]},
        {"k": 2, "b": None},
        {"b": None},
    ),
    "minProperties": (_AB | {"minProperties": 1, "maxProperties": 1}, {"b": False}, {}),
    "not required": (_AB | {"not": {"required": ["a", "b"]}}, {"a": 1}, {"a": 1, "b": True}),
    "propertyNames": (
        {"type": "object", "propertyNames": {"pattern": "^[a-c]$"}, "additionalProperties": {"type": "boolean"}},
        {"a": True},
        {"d": True},
    ),
    "not anything": (_AB | {"properties": {**_AB["properties"], "b": {"not": {}}}}, {"a": 1}, {"a": 1, "b": True}),
    "uniqueItems of what is no array": ({"uniqueItems": True, "anyOf": [{"const": "a"}, {"type": "null"}]}, "a", []),
    "schemas kept under a name of one's own": (
        {"parts": {"in": {"p": {"oneOf": [{"const": 1}, {"const": 2}]}}}, "allOf": [{"$ref": "#/parts/in/p"}]},
        2,
        3,
    ),
    "a list of items": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "array",
            "items": [{"oneOf": [{"const": 2}, {"const": 3}]}],
            "additionalItems": {"oneOf": [{"const": "b"}, {"const": "c"}]},
            "minItems": 1,
        },
        [2, "b"],
        [2, "a"],
    ),
    "a tree, and more about it": (_TREE, {"k": "t", "in": [{"k": "l"}, {"k": "t"}]}, {"k": "t", "in": [{"k": "m"}]}),
    "parts by reference": (
        {"$defs": {"p": _AB}, "allOf": [{"$ref": "#/$defs/p"}, {"properties": {"c": {"const": 0}}, "required": ["c"]}]},
        {"a": 1, "c": 0},
        {"a": 1},
    ),
    "references to schemas without values": (
        {
            "properties": {"a": {"$ref": "#/definitions/none"}, "b": {}, "c": {"$ref": "#/definitions/lacking"}},
            "definitions": {
                "none": {"allOf": [{"type": "string"}, {"type": "null"}]},
                "lacking": {"type": "object", "required": ["d"], "additionalProperties": False},
            },
        },
        {"b": 1},
        {"c": {}},
    ),
    "a class of all but quotes": ({"type": "string", "pattern": '^[^"\\\\]+$'}, "a\n", 'a"'),
    "a class without a backslash": ({"type": "string", "pattern": r"^[^<\\+]*$"}, '"', "\\"),
    "a class with a bracket": ({"type": "string", "pattern": "^[[a-z]*]$"}, "a[]", "a*"),
    "a class with two signs": ({"type": "string", "pattern": "^[a&&b]+$"}, "&b", "c"),
    "required and not listed": (_AB | {"required": ["c"]}, {"c": 1}, {"a": 1}),
}


@pytest.mark.filterwarnings("ignore:Possible (nested set|set intersection):FutureWarning")  # by re, in the validator
@pytest.mark.parametrize("kind", KINDS)
def test_what_no_keyword_of_a_grammar_says_is_said_by_alternatives(kind: str) -> None:
    """Nothing is left out, and random texts follow the client's schema, whatever the rewritten one allows."""
    schema, right, wrong = KINDS[kind]
    check = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)
    assert check.is_valid(right)
    assert not check.is_valid(wrong)
    made, places = enforceable(schema)
    assert places == []
    start = GRAMMARS.compile(Grammar.json_schema(made))
    assert written(start.fork(), json.dumps(right))
    assert not written(start.fork(), json.dumps(wrong))
    rng = random.Random(kind)
    texts = [text for _ in range(20) if (text := at_random(start.fork(), rng)) is not None]
    assert texts
    for text in texts:
        check.validate(json.loads(text))


@pytest.mark.parametrize(
    ("schema", "place", "value"),
    [
        ({"oneOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 9}]}, "oneOf", 2),
        ({"oneOf": [{"enum": ["a"]}, {"type": "string", "maxLength": 2}, {"type": "null"}]}, "oneOf", None),
        ({"oneOf": [{"type": "string", "pattern": "^a"}, {"enum": ["", "b"]}]}, "oneOf", "ax"),
        (
            {"type": "array", "uniqueItems": True, "items": {"enum": ["x", "y"]}, "minItems": 1},
            "uniqueItems",
            ["y", "x"],
        ),
        (_AB | {"dependentRequired": {"a": ["b"]}}, "dependentRequired", {"a": 1, "b": True}),
        (_AB | {"dependentSchemas": {"a": {"required": ["b"]}}}, "dependentSchemas", {"b": True}),
        ({"type": "array", "items": {"enum": [1, 2]}, "contains": {"const": 2}}, "contains", [2, 1]),
        ({"type": "string", "maxLength": 4, "not": {"enum": ["a", "ab"]}}, "not", "abc"),
        ({"enum": [1, "x", None], "not": {"type": ["integer", "null"]}}, "not", "x"),
        (_AB | {"if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["b"]}}, "if", {"a": 2}),
        (_AB | {"minProperties": 2}, "minProperties", {"a": 1, "b": True}),
        (
            {
                "oneOf": [
                    {"additionalProperties": False, **_AB},
                    {"properties": {"c": {}}, "additionalProperties": False},
                ]
            },
            "oneOf",
            {"c": 0},
        ),
        (
            {"oneOf": [{"allOf": [_CITY, {"required": ["name"]}]}, {"allOf": [_AREA, {"required": ["name"]}]}]},
            "oneOf",
            {"kind": "area", "name": "x"},
        ),
        (_AB | {"patternProperties": {"^[ac]$": {"maximum": 5}}}, "patternProperties.^[ac]$", {"a": 1}),
    ],
)
def test_what_few_clients_send_is_loosened_and_said(schema: dict[str, Any], place: str, value: Any) -> None:
    made, places = enforceable(schema)
    assert places == [place]
    assert written(GRAMMARS.compile(Grammar.json_schema(made)), json.dumps(value))


GRAMMARS = Grammars(lambda token, first: bytes([token]) if token < 256 else None, 257, [256])


def written(state: GrammarState, text: str) -> bool:
    """Whether a text can be written as a whole."""
    for byte in text.encode():
        if not allowed(state, byte):
            return False
        state.advance(byte)
    return state.accepting


CLOSING = (256, *b'"}],:0')


def at_random(state: GrammarState, rng: random.Random) -> bytes | None:
    """A text of random bytes, which closes what it can behind 40 of them; None: it came to no end."""
    text = b""
    while len(text) < 200:
        choices = [byte for byte in (*range(32, 127), 256) if allowed(state, byte)]
        closing = [byte for byte in CLOSING if byte in choices] if len(text) > 40 and rng.random() < 0.9 else []
        byte = 256 if 256 in closing else rng.choice(closing or choices)
        text += bytes([byte]) if byte < 256 else b""
        if state.advance(byte):
            return text
    return None


def allowed(state: GrammarState, token: int) -> bool:
    return bool(int(state.mask()[token // 32]) >> token % 32 & 1)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "objekt"}, "type"),
        ({"properties": {"a": {"items": {"type": ["string", 7]}}}}, "properties.a.items.type"),
        ({"anyOf": [{}, {"minLength": 5, "maxLength": 2}]}, "anyOf.1.maxLength"),
        ({"minimum": 3, "maximum": 2.5}, "maximum"),
        ({"properties": {"a": {"pattern": "("}}}, "properties.a.pattern"),
        ({"$ref": "http://127.0.0.1/schema"}, "$ref"),
        ({"title": "half of a pair: \ud800"}, "its text"),
        ({"type": {"a": 1}}, "type"),
        ({"items": {"type": [[]]}}, "items.type"),
        ({"properties": ["a"]}, "properties"),
        ({"properties": {"a": {"properties": 7}}}, "properties.a.properties"),
        ({"properties": {"a": {}}, "required": [{}]}, "required"),
        ({"anyOf": 0}, "anyOf"),
        ({"not": {"format": []}}, "not.format"),
    ],
)
def test_where_a_schema_is_wrong_in_itself(schema: Any, place: str) -> None:
    assert mistake_in(schema) == place
    assert mistake_in(enforceable(schema)[0]) == place


@pytest.mark.parametrize("keyword", ["required", "properties", "anyOf", "enum", "$ref", "type", "minLength", "format"])
def test_a_keyword_that_is_null_is_none(keyword: str) -> None:
    """Clients in Go write each field, with null for an empty list."""
    inner = {"type": "object", "properties": {"a": {"const": None}, keyword: {"type": "integer"}}}
    schema: dict[str, Any] = {**inner, "required": ["a", keyword]} | {"minLength": None, "anyOf": None, "enum": None}
    schema["properties"][keyword] |= {keyword: None} if keyword != "type" else {}
    start = GRAMMARS.compile(Grammar.json_schema(enforceable(schema)[0]))
    assert written(start, json.dumps({"a": None, keyword: 3}))
    assert enforceable({"type": "object", "properties": []})[0] == {"type": "object"}


def test_control_characters_are_written_where_no_name_could_be_spelt_with_them() -> None:
    """JSON can only write them so. A letter is never written so, and nothing in an object of names and others."""
    text = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
    for schema in (text, {"type": "object", "additionalProperties": {"type": "string"}}, {"type": "object"}):
        start = GRAMMARS.compile(Grammar.json_schema(enforceable(schema)[0]))
        for letter in ("\\u001b", "\\u0000", "\\u001F", "\\u007f", "\\n"):
            assert written(start.fork(), f'{{"text": "{letter}[31mred"}}'), (schema, letter)
        assert not written(start.fork(), '{"text": "\\u0061"}')
        assert not written(start.fork(), '{"te\\u0078t": "a"}')
    several = {"patternProperties": {"^a": text}, "properties": {"b": text}, "additionalProperties": {"type": "string"}}
    start = GRAMMARS.compile(Grammar.json_schema(enforceable({"type": "object", **several})[0]))
    assert not any(written(start.fork(), f'{{"{name}": "a"}}') for name in ("\\u0061", "\\u0062", "a", "b"))


def test_a_name_that_is_spelt_otherwise_is_the_same_name() -> None:
    """JSON has two ways to write the name a, and its value must be a string in both."""
    for given in ({"properties": {"a": {"type": "string"}}}, {"patternProperties": {"^a": {"type": "string"}}}):
        made, left = enforceable({"type": "object", **given, "additionalProperties": {"type": "integer"}})
        start = GRAMMARS.compile(Grammar.json_schema(made))
        assert not left and not written(start.fork(), '{"\\u0061": 5}')
        assert written(start, '{"a": "x", "b": 5}')


def test_a_schema_that_is_only_hard_to_enforce_is_not_wrong() -> None:
    hard = {
        "$defs": {"a": {"pattern": "^(?=.*[0-9])a+$", "minLength": 2, "maxLength": 2}},
        "properties": {"type": {"type": ["string", "null"]}, "pattern": {"$ref": "#/$defs/a"}, "rest": True},
        "unevaluatedProperties": False,
        "oneOf": [{"required": ["type"]}, {"required": ["pattern"]}],
        "enum": [{"type": "objekt", "$ref": 7}],
    }
    assert not mistake_in(hard)
