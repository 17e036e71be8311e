"""Whether a value follows a schema: True, False, or None where a keyword is not known here.

It judges the values that a schema lists, so that whatever else the schema says is said by a shorter list.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import combinations
from typing import Any

from tokenwright.decode.schemas.schema_logic import RESTRICTING, References, same, type_of

Verdict = bool | None

_MOST_DEPTH = 30
_BOUNDS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {  # the type, and how a value follows the bound
    "minimum": ("number", lambda value, bound: value >= bound),
    "maximum": ("number", lambda value, bound: value <= bound),
    "exclusiveMinimum": ("number", lambda value, bound: value > bound),
    "exclusiveMaximum": ("number", lambda value, bound: value < bound),
    "minLength": ("string", lambda value, bound: len(value) >= bound),
    "maxLength": ("string", lambda value, bound: len(value) <= bound),
    "minItems": ("array", lambda value, bound: len(value) >= bound),
    "maxItems": ("array", lambda value, bound: len(value) <= bound),
    "minProperties": ("object", lambda value, bound: len(value) >= bound),
    "maxProperties": ("object", lambda value, bound: len(value) <= bound),
}


class Values:
    """Judges values by the schemas of one document."""

    def __init__(self, references: References) -> None:
        self._references = references

    def follows(self, value: Any, schema: Any, depth: int = 0) -> Verdict:
        schema = self._references.followed(schema)
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping) or depth > _MOST_DEPTH or "$ref" in schema:
            return None
        return _all(self._keyword(name, value, schema, depth + 1) for name in schema if name in _JUDGED)

    def _keyword(self, name: str, value: Any, schema: Mapping[str, Any], depth: int) -> Verdict:
        said, kind = schema[name], type_of(value)
        if name in _BOUNDS:
            of, holds = _BOUNDS[name]
            return None if type(said) not in (int, float) else kind != of or holds(value, said)
        if name in ("type", "enum", "const"):
            return _listed(name, value, said)
        if name in ("allOf", "anyOf", "oneOf", "not", "if"):
            return self._logic(name, value, schema, depth)
        if name == "multipleOf":
            whole = type(value) is int and type(said) is int and said > 0
            return kind != "number" or (value % said == 0 if whole else None)
        if name == "pattern":
            return kind != "string" or found(said, value)
        if kind == "array" and name in _OF_ARRAYS:
            return self._array(name, value, schema, depth)
        if kind == "object" and name in _OF_OBJECTS:
            return self._object(name, value, schema, depth)
        return True if name in _OF_ARRAYS | _OF_OBJECTS | {"then", "else"} else None

    def _logic(self, name: str, value: Any, schema: Mapping[str, Any], depth: int) -> Verdict:
        said = schema[name]
        if name in ("not", "if"):
            verdict = self.follows(value, said, depth)
            if name == "not" or verdict is None:
                return None if verdict is None else not verdict
            return self.follows(value, schema.get("then" if verdict else "else", True), depth)
        each = [self.follows(value, one, depth) for one in said]
        if name == "allOf":
            return _all(each)
        if name == "anyOf":
            return _not(_all(map(_not, each)))
        return False if each.count(True) > 1 else None if None in each else each.count(True) == 1

    def _array(self, name: str, value: list[Any], schema: Mapping[str, Any], depth: int) -> Verdict:
        said = schema[name]
        if name == "uniqueItems":
            return said is not True or not any(same(one, other) for one, other in combinations(value, 2))
        if name == "contains":
            each = [self.follows(one, said, depth) for one in value]
            least, most = schema.get("minContains", 1), schema.get("maxContains", len(value))
            return None if None in each else least <= each.count(True) <= most
        if name in ("prefixItems", "items") and isinstance(said, list):
            return _all(self.follows(one, of, depth) for one, of in zip(value, said, strict=False))
        listed = schema.get("prefixItems" if name == "items" else "items")
        rest = value[len(listed) if isinstance(listed, list) else 0 :]
        applies = name == "items" or isinstance(listed, list)
        return not applies or _all(self.follows(one, said, depth) for one in rest)

    def _object(self, name: str, value: Mapping[str, Any], schema: Mapping[str, Any], depth: int) -> Verdict:
        said = schema[name]
        if name == "required":
            return all(one in value for one in said)
        if name == "properties":
            return _all(self.follows(value[key], of, depth) for key, of in said.items() if key in value)
        if name == "propertyNames":
            return _all(self.follows(key, said, depth) for key in value)
        if name == "patternProperties":
            pairs = ((found(pattern, key), one, of) for pattern, of in said.items() for key, one in value.items())
            return _all(None if hit is None else not hit or self.follows(one, of, depth) for hit, one, of in pairs)
        if name == "additionalProperties":
            patterns = schema.get("patternProperties", {})
            others = [key for key in value if key not in schema.get("properties", {})]
            hits = {key: [found(pattern, key) for pattern in patterns] for key in others}
            rest = (key for key in others if True not in hits[key])
            return _all(None if None in hits[key] else self.follows(value[key], said, depth) for key in rest)
        wanted = (of for key, of in said.items() if key in value)
        return _all(
            all(one in value for one in of) if isinstance(of, list) else self.follows(value, of, depth) for of in wanted
        )


_OF_ARRAYS = frozenset(("additionalItems", "contains", "items", "prefixItems", "uniqueItems"))
_OF_OBJECTS = frozenset(
    ("additionalProperties", "dependencies", "dependentRequired", "dependentSchemas", "patternProperties",
     "properties", "propertyNames", "required")
)  # fmt: skip
_JUDGED = RESTRICTING | _OF_ARRAYS | {"unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef"}


def _listed(name: str, value: Any, said: Any) -> Verdict:
    if name != "type":
        return any(same(value, one) for one in (said if name == "enum" else [said]))
    kinds = {said} if isinstance(said, str) else set(said)
    whole = type(value) is int or (type(value) is float and value.is_integer())
    return type_of(value) in kinds or ("integer" in kinds and whole)


def found(pattern: Any, text: str) -> Verdict:
    """Whether a text follows a pattern; None where that depends on the dialect, or the pattern is not understood."""
    with suppress(re.error, TypeError):
        return bool(re.search(pattern, text)) if text.isascii() else None
    return None


def _not(verdict: Verdict) -> Verdict:
    return None if verdict is None else not verdict


def _all(verdicts: Iterable[Verdict]) -> Verdict:
    each = list(verdicts)
    return False if False in each else None if None in each else True
