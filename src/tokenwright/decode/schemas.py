"""JSON schemas as clients send them, made such that a grammar can enforce them.

Keywords that a grammar cannot enforce are left out where the client did not ask for strictness, and their places are
returned. An object that lists properties and says nothing of others has no others (as in OpenAI's strict mode), so that
a model cannot go on for ever. A `format` that is not known is an annotation, as the standard has it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]

# Keywords that restrict JSON and that no grammar here enforces.
LACKING = frozenset(
    (
        *("$dynamicRef", "$recursiveRef", "contains", "dependencies", "dependentRequired", "dependentSchemas", "else"),
        *("if", "maxContains", "minContains", "not", "propertyNames", "then", "unevaluatedItems"),
        *("unevaluatedProperties", "uniqueItems"),
    )
)
FORMATS = frozenset(
    ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid", "unknown")
)
_LOOKS = re.compile(r"\(\?(?:[=!]|<[=!])|(?<!\\)(?:\\\\)*\\[1-9]")  # look-around and references to groups
_OF_NAMES = ("$defs", "definitions", "patternProperties", "properties")  # whose values are schemas, by name
_OF_ONE = ("additionalProperties", "items")
_OF_SEVERAL = ("anyOf", "oneOf", "prefixItems")


def enforceable(schema: Mapping[str, Any]) -> tuple[Schema, list[str]]:
    """The schema without what no grammar enforces, and the places of that, such as "properties.tags.uniqueItems"."""
    places: list[str] = []
    return _made(schema, "", places, close=True), places


def _made(schema: Any, place: str, places: list[str], *, close: bool) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    found: Schema = {}
    for name, value in schema.items():
        at = f"{place}{name}"
        if name in LACKING or (name == "pattern" and isinstance(value, str) and _LOOKS.search(value)):
            places.append(at)
        elif name == "format" and value not in FORMATS:
            continue
        elif name in _OF_NAMES and isinstance(value, Mapping):
            found[name] = {key: _made(one, f"{at}.{key}.", places, close=True) for key, one in value.items()}
        elif name in _OF_ONE:
            found[name] = _made(value, f"{at}.", places, close=True)
        elif name in _OF_SEVERAL and isinstance(value, list):
            made = [_made(one, f"{at}.{n}.", places, close=True) for n, one in enumerate(value)]
            found["anyOf" if name == "oneOf" and "anyOf" not in schema else name] = made
        elif name == "allOf" and isinstance(value, list):  # closing one part would forbid the other's properties
            found[name] = [_made(one, f"{at}.{n}.", places, close=False) for n, one in enumerate(value)]
        else:
            found[name] = value
    if close and found.get("properties") and not found.keys() & {"additionalProperties", "patternProperties", "allOf"}:
        found["additionalProperties"] = False
    return found
