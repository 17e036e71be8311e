"""Where a schema is wrong in itself: a mistake of the client, whatever a grammar can enforce."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

OF_NAMES = ("$defs", "definitions", "patternProperties", "properties")  # whose values are schemas, by name
OF_ONE = ("additionalItems", "additionalProperties", "items")
SEVERAL = ("allOf", "anyOf", "oneOf")
_TYPES = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))
_BOUNDED = tuple((f"min{name}", f"max{name}") for name in ("Items", "Length", "Properties", "imum"))


def mistake_in(schema: Any) -> str:
    """Where a schema is wrong in itself, whatever a grammar can enforce, such as "properties.a.type"; "": nowhere.

    It names a type that JSON has not, or another document; a pattern is no regular expression; a bound excludes
    another; or a text in it is no Unicode.
    """
    waiting = [("", schema)]
    while waiting:
        place, one = waiting.pop()
        if not isinstance(one, Mapping):
            continue
        kinds = one.get("type", [])
        if any(kind not in _TYPES for kind in (kinds if isinstance(kinds, list) else [kinds])):
            return f"{place}type"
        for least, most in _BOUNDED:
            if _excludes(one.get(least), one.get(most)):
                return f"{place}{most}"
        if not _is_text(one.get("$ref", "#"), "#") or not _is_text(one.get("pattern", "")):
            return f"{place}{'pattern' if _is_text(one.get('$ref', '#'), '#') else '$ref'}"
        singles = (*OF_ONE, "not", "if", "then", "else", "contains", "propertyNames")
        waiting += [(f"{place}{name}.", one.get(name)) for name in singles]
        for name in OF_NAMES:
            waiting += [(f"{place}{name}.{key}.", of) for key, of in named(one.get(name))]
        for name in (*SEVERAL, "prefixItems"):
            waiting += [(f"{place}{name}.{n}.", of) for n, of in enumerate(_listed(one.get(name)))]
    return "" if _is_unicode(schema) else "its text"


def named(value: Any) -> list[tuple[Any, Any]]:
    """The names and values of an object; none of anything else."""
    return [*value.items()] if isinstance(value, Mapping) else []


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _excludes(least: Any, most: Any) -> bool:
    return isinstance(least, int | float) and isinstance(most, int | float) and least > most


def _is_text(value: Any, begins: str = "") -> bool:
    """Whether a value is a text, begins so, and is a regular expression where it may begin as it likes."""
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
