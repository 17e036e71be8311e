"""The kinds of grammars as Lark in llguidance's dialect: JSON schemas, regular expressions, choices."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from tokenwright.decode.schemas.references import objects_in
from tokenwright.errors import RequestError
from tokenwright.sampling_params import Grammar, Whitespace

_ESCAPES = 'nrbtf\\"'  # and u, with which llguidance writes only control characters
_SPACES: Mapping[Whitespace, Mapping[str, Any]] = {
    "spaced": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
    "compact": {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"},
    "any": {"whitespace_pattern": r"\x20|\n\x20{0,16}"},  # a space, or a newline with indentation
}
_UNFORCED = '\n%llguidance {"no_forcing": true}\n'  # allow every tokenisation of the text


def _lark(text: str) -> str:
    """A Lark grammar in llguidance's wrapper: without it, a grammar that begins with { would be read as JSON."""
    return json.dumps({"grammars": [{"lark_grammar": text + _UNFORCED}]})


def schema_rule(grammar: Grammar) -> str:
    try:
        schema = json.loads(grammar.text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the JSON schema is not JSON: {error}") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise RequestError('a JSON schema is an object, such as {"type": "object"}; false allows no text')
    return json_rule(schema, grammar.whitespace)


def json_rule(schema: Mapping[str, Any], whitespace: Whitespace = "spaced") -> str:
    """JSON that matches a schema, as an expression in a rule of a Lark grammar. Raises RequestError."""
    if "x-guidance" in schema:
        raise RequestError("x-guidance in a JSON schema is not supported; leave it out")
    try:
        escapes = {"json_allowed_escapes": _ESCAPES if _has_other_names(schema) else _ESCAPES + "u"}
        return "%json " + json.dumps({**schema, "x-guidance": {**escapes, **_SPACES[whitespace]}})
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"the JSON schema cannot be written as JSON: {error}") from None


def _has_other_names(schema: Any) -> bool:
    """Whether an object names some properties and allows others, among which \\u could spell a named one."""
    named = ("properties", "patternProperties", "required")
    naming = (one for one in objects_in(schema) if any(one.get(name) for name in named))
    return any(one.get("additionalProperties") is not False for one in naming)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _regex(grammar: Grammar) -> str:
    from llguidance import LLMatcher

    [made] = json.loads(LLMatcher.grammar_from_regex(grammar.text))["grammars"]
    return _lark(made["lark_grammar"])


def _choice(grammar: Grammar) -> str:
    try:
        texts = json.loads(grammar.text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the choice is not a JSON list of texts: {error}") from None
    if not isinstance(texts, list) or not texts or not all(isinstance(item, str) and item for item in texts):
        raise RequestError("the choice must be a JSON list of texts that are not empty")
    return _lark("start: TEXT\nTEXT: " + " | ".join(json.dumps(item) for item in texts))


NAMES = {"json_schema": "JSON schema", "regex": "regex", "lark": "Lark grammar", "choice": "choice"}
SOURCES: dict[str, Callable[[Grammar], str]] = {
    "json_schema": lambda grammar: _lark(f"start: {schema_rule(grammar)}"),
    "regex": _regex,
    "lark": lambda grammar: _lark(grammar.text),
    "choice": _choice,
}
