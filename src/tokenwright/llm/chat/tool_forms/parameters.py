"""A tool's schema for forms that write arguments one by one: its parameters, and how a value is written."""

from collections.abc import Mapping
from typing import Any, Literal

Kind = Literal["text", "json", "either"]
_COMBINED = ("allOf", "anyOf", "oneOf", "$ref", "patternProperties")


def parameters_of(schema: Mapping[str, Any]) -> list[tuple[str, Any, bool]] | None:
    """The parameters, their schemas with all definitions, and whether they are required; None: they are not listed."""
    listed = schema.get("properties", {})
    is_open = schema.get("additionalProperties", "properties" not in schema) is not False
    if any(name in schema for name in _COMBINED) or (is_open and not listed):
        return None
    required = frozenset(schema.get("required", ()))
    return [(key, _alone(schema, one), key in required) for key, one in listed.items()]


def _alone(schema: Mapping[str, Any], one: Any) -> Any:
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    return {**definitions, **one} if isinstance(one, Mapping) else one


def kind_of(schema: Mapping[str, Any], key: str) -> Kind:
    """Whether an argument is always a text, never one, or either."""
    listed = schema.get("properties")
    found = listed.get(key) if isinstance(listed, Mapping) else None
    if not isinstance(found, Mapping):
        return "either"
    return _kind(schema, found, 8)


def _kind(whole: Mapping[str, Any], schema: Mapping[str, Any], depth: int) -> Kind:
    if depth == 0:
        return "either"
    if isinstance(reference := schema.get("$ref"), str):
        found = _referred(whole, reference)
        return "either" if found is None else _kind(whole, found, depth - 1)
    if isinstance(values := schema.get("enum", [schema["const"]] if "const" in schema else None), list):
        return _together({"text" if isinstance(value, str) else "json" for value in values})
    if isinstance(kinds := schema.get("type"), str | list):
        names = [kinds] if isinstance(kinds, str) else kinds
        return _together({"text" if name == "string" else "json" for name in names})
    for name in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(name), list):
            return _together({_kind(whole, one, depth - 1) for one in options if isinstance(one, Mapping)})
    return "json" if "properties" in schema or "items" in schema else "either"


def _together(kinds: set[Any]) -> Kind:
    return kinds.pop() if len(kinds) == 1 else "either"


def _referred(whole: Mapping[str, Any], reference: str) -> Mapping[str, Any] | None:
    found: Any = whole
    if not reference.startswith("#/"):
        return None
    for name in reference[2:].split("/"):
        found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else None


def named_values(schema: Any) -> list[str] | None:
    """The texts that a schema names, if it allows no other value."""
    if not isinstance(schema, Mapping):
        return None
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not isinstance(values, list) or not values or not all(isinstance(one, str) and one for one in values):
        return None
    return values
