"""Finds mistakes in a schema, whatever a grammar can enforce."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from tokenwright.decode.schemas.references import elements, mapping

OF_NAMES = ("$defs", "definitions", "patternProperties", "properties")  # whose values are schemas, by name
OF_ONE = ("additionalItems", "additionalProperties", "items")
SEVERAL = ("allOf", "anyOf", "oneOf")
_TYPES = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))
_LISTS = (*SEVERAL, "enum", "prefixItems")
_SCHEMAS = (*OF_ONE, "not", "if", "then", "else", "contains", "propertyNames")
_OBJECTS = (*OF_NAMES, "dependencies", "dependentRequired", "dependentSchemas")
_VALUES = frozenset(("const", "default", "enum", "example", "examples"))  # whose values are no schemas
_BOUNDED = tuple((f"min{name}", f"max{name}") for name in ("Items", "Length", "Properties", "imum"))
_PLAIN = ("required", "type", "format", "pattern", "$ref", "multipleOf", "exclusiveMinimum", "exclusiveMaximum")
_KEYWORDS = frozenset((*_LISTS, *_SCHEMAS, *_OBJECTS, *_PLAIN, *(name for pair in _BOUNDED for name in pair)))


def mistake_in(schema: Any) -> str:
    """The place of a mistake in a schema, such as "properties.a.type"; "": there is none."""
    for place, one in _schemas(schema):
        if wrong := _misshapen(one):
            return f"{place}{wrong}"
        kinds = one.get("type") or []
        if any(kind not in _TYPES for kind in (kinds if isinstance(kinds, list) else [kinds])):
            return f"{place}type"
        for least, most in _BOUNDED:
            low, high = one.get(least), one.get(most)
            if isinstance(low, int | float) and isinstance(high, int | float) and low > high:
                return f"{place}{most}"
        if not _is_text(one.get("$ref", "#"), "#") or not _is_text(one.get("pattern", "")):
            return f"{place}{'pattern' if _is_text(one.get('$ref', '#'), '#') else '$ref'}"
    return "" if _is_unicode(schema) else "its text"


def readable(schema: Any) -> bool:
    return not any(_misshapen(one) for _, one in _schemas(schema))


def _schemas(schema: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    waiting = [("", schema)]
    while waiting:
        place, one = waiting.pop()
        if isinstance(one, Mapping):
            yield place, one
            waiting += _inner(one, place)


def without_nulls(schema: Any) -> Any:
    """The schema without keywords that are null, PHP's empty lists as objects, and types in small letters."""
    if isinstance(schema, list):
        return [without_nulls(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for name, one in schema.items():
        if (one is None and name in _KEYWORDS) or (one == [] and name in _OBJECTS):
            continue
        if name == "type" and isinstance(one, str) and one.lower() in _TYPES:
            found[name] = one.lower()
        elif name in _OBJECTS and isinstance(one, Mapping):
            found[name] = {key: without_nulls(of) for key, of in one.items()}
        else:
            found[name] = one if name in _VALUES else without_nulls(one)
    return found


def _inner(schema: Mapping[str, Any], place: str) -> list[tuple[str, Any]]:
    found = [(f"{place}{name}.", schema.get(name)) for name in _SCHEMAS]
    for name in OF_NAMES:
        found += [(f"{place}{name}.{key}.", of) for key, of in mapping(schema.get(name)).items()]
    for name in (*SEVERAL, "prefixItems"):
        found += [(f"{place}{name}.{n}.", of) for n, of in enumerate(elements(schema.get(name)))]
    return found


def _misshapen(schema: Mapping[str, Any]) -> str:
    shapes: list[tuple[tuple[str, ...], type | tuple[type, ...]]] = [
        (_LISTS, list),
        (_OBJECTS, Mapping),
        (_SCHEMAS, (Mapping, bool, list)),
        (("format",), str),
        (("type",), (str, list)),
    ]
    for names, kinds in shapes:
        for name in names:
            if schema.get(name) is not None and not isinstance(schema[name], kinds):
                return name
    texts = (
        name for name in ("type", "required") if not all(isinstance(one, str) for one in elements(schema.get(name)))
    )
    return next(texts, "")


def _is_text(value: Any, begins: str = "") -> bool:
    """Whether a value is a text that begins with `begins`; without `begins`, whether it is a regular expression."""
    if not isinstance(value, str) or not value.startswith(begins):
        return False
    try:
        return bool(begins) or bool(re.compile(value))
    except (re.error, OverflowError, RecursionError):
        return False


def _is_unicode(schema: Any) -> bool:
    try:
        return bool(json.dumps(schema, ensure_ascii=False).encode())
    except (UnicodeEncodeError, RecursionError):
        return False
