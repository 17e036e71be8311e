"""The references, types and listed values of the schemas of one document."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any]

TYPES = ("null", "boolean", "number", "string", "array", "object")
_MOST_DEPTH = 8

RESTRICTING = frozenset(
    (
        "$ref", "additionalProperties", "allOf", "anyOf", "const", "contains", "dependencies", "dependentRequired",
        "dependentSchemas", "else", "enum", "exclusiveMaximum", "exclusiveMinimum", "if", "items", "maxItems",
        "maxLength", "maxProperties", "maximum", "minItems", "minLength", "minProperties", "minimum", "multipleOf",
        "not", "oneOf", "pattern", "patternProperties", "prefixItems", "properties", "propertyNames", "required",
        "then", "type", "uniqueItems",
    )
)  # fmt: skip


class References:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._types: dict[int, tuple[Any, frozenset[str]]] = {}  # by id(); the schema is kept, and so is its id

    @cached_property
    def named(self) -> frozenset[str]:
        """The references within the document, as written there but without percent escapes."""
        return frozenset(_references(self._root))

    @cached_property
    def above(self) -> frozenset[str]:
        """The references to an enclosing schema."""
        return frozenset(name[:at] for name in self.named for at, letter in enumerate(name) if letter == "/")

    def circular(self, name: str) -> bool:
        seen: set[str] = set()
        waiting = [name]
        while waiting:
            new = set(_references(self._at(waiting.pop()))) - seen
            seen |= new
            waiting += new
        return unquote(name) in seen

    def followed(self, schema: Any) -> Any:
        """The schema that a mere reference leads to, or the schema itself. A reference to another document stays."""
        for _ in range(_MOST_DEPTH):
            if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
                break
            found = self._at(schema["$ref"])
            if found is None:
                break
            schema = found
        return schema

    def _at(self, reference: str) -> Any:
        if not reference.startswith("#"):
            return None
        found: Any = self._root
        for part in unquote(reference)[1:].split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isdigit() and int(name) < len(found):
                found = found[int(name)]
            elif isinstance(found, Mapping) and name in found:
                found = found[name]
            else:
                return None
        return found

    def values(self, schema: Any) -> list[Any] | None:
        schema = self.followed(schema)
        if not isinstance(schema, Mapping):
            return None
        if isinstance(schema.get("enum"), list):
            return list(schema["enum"])
        if "const" in schema:
            return [schema["const"]]
        listed: dict[str, list[Any]] = {"boolean": [False, True], "null": [None]}
        return listed.get(str(schema.get("type")))

    def types(self, schema: Any) -> frozenset[str]:
        """The types that its values may have, perhaps too many; number includes integer."""
        schema = self.followed(schema)
        if schema is False:
            return frozenset()
        if not isinstance(schema, Mapping):
            return frozenset(TYPES)
        if id(schema) in self._types:
            return self._types[id(schema)][1]
        self._types[id(schema)] = schema, frozenset(TYPES)  # for a schema that contains itself
        found = frozenset(TYPES)
        if isinstance(given := schema.get("type"), str | list):
            found = frozenset("number" if one == "integer" else one for one in listed(given))
        if (values := self.values(schema)) is not None:
            found &= frozenset(map(type_of, values))
        for each in elements(schema.get("allOf")):
            found &= self.types(each)
        for name in ("anyOf", "oneOf"):
            if several := elements(schema.get(name)):
                found &= frozenset[str]().union(*map(self.types, several))
        known, other = mapping(schema.get("properties")), schema.get("additionalProperties")
        if other is False and not mapping(schema.get("patternProperties")):
            lacking = any(isinstance(one, str) and one not in known for one in listed(schema.get("required", [])))
            found -= {"object"} if lacking else set()
        self._types[id(schema)] = schema, found
        return found

    def terse(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """A schema without keywords that its alternatives imply: llguidance joins each with the references."""
        idle = set()
        inner = [one for name in ("anyOf", "oneOf") for one in elements(schema.get(name))]
        kinds = listed(schema.get("type"))
        if inner and kinds and "integer" not in kinds and all(self.types(one) <= {*kinds} for one in inner):
            idle.add("type")
        if not schema.get("properties") and not schema.get("patternProperties"):
            idle |= {"additionalProperties"} if schema.get("additionalProperties") in ({}, True) else set()
        return {name: value for name, value in schema.items() if name not in idle} if idle else schema


def pointer(place: Sequence[str]) -> str:
    """The reference to a place in a document (RFC 6901)."""
    return "".join(["#", *(f"/{name.replace('~', '~0').replace('/', '~1')}" for name in place)])


def _references(schema: Any) -> Iterator[str]:
    return (unquote(name) for one in objects_in(schema) if isinstance(name := one.get("$ref"), str))


def objects_in(value: Any) -> Iterator[Mapping[str, Any]]:
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Mapping):
            yield one
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one


def type_of(value: Any) -> str:
    if value is None:
        return "null"
    kinds = {bool: "boolean", int: "number", float: "number", str: "string", list: "array"}
    return kinds.get(type(value), "object")


def same(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal; 1 is 1.0, and is not true."""
    if type_of(one) == type_of(other) == "number":
        return bool(one == other)
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def listed(value: Any) -> list[Any]:
    return [value] if isinstance(value, str) else list(value) if isinstance(value, list | tuple) else []


def mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def elements(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
