"""Complements of schemas, and pairs of schemas that no value satisfies together.

A grammar has alternatives and conjunctions, but no complement. So the complement is written as a schema, from the
keywords whose complement is one. It may be smaller than what is excluded, never larger: whatever it allows is refused
by the schema itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import pairwise
from typing import Any
from urllib.parse import unquote

from tokenwright.decode.schemas.patterns import others

Schema = dict[str, Any]

TYPES = ("null", "boolean", "number", "string", "array", "object")
_MOST_DEPTH = 8  # of schemas within schemas, and of references
_LEAST = {
    "minLength": ("string", "maxLength"),
    "minItems": ("array", "maxItems"),
    "minProperties": ("object", "maxProperties"),
}
_MOST = {below: (kind, least) for least, (kind, below) in _LEAST.items()}
_BOUNDS = {
    "minimum": "exclusiveMaximum",
    "exclusiveMinimum": "maximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMaximum": "minimum",
}


class References:
    """Finds the schemas that one document's references name, within the document."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._types: dict[int, tuple[Any, frozenset[str]]] = {}  # by id(); the schema is kept, and so is its id

    @cached_property
    def named(self) -> frozenset[str]:
        """The references within the document, as they are written there, without the escapes of addresses."""
        return frozenset(_references(self._root))

    @cached_property
    def above(self) -> frozenset[str]:
        """The references to what encloses the schemas that they name."""
        return frozenset(name[:at] for name in self.named for at, letter in enumerate(name) if letter == "/")

    def circular(self, name: str) -> bool:
        """Whether a reference's schema leads back to the reference."""
        seen: set[str] = set()
        waiting = [name]
        while waiting:
            new = set(_references(self._at(waiting.pop()))) - seen
            seen |= new
            waiting += new
        return unquote(name) in seen

    def followed(self, schema: Any) -> Any:
        """A schema, or the one that it refers to where it says nothing else. Another document's stays a reference."""
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
        """All values of a schema that lists them, or None."""
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
        """The types that its values can have, or more; number stands for integer too."""
        schema = self.followed(schema)
        if schema is False:
            return frozenset()
        if not isinstance(schema, Mapping):
            return frozenset(TYPES)
        if id(schema) in self._types:
            return self._types[id(schema)][1]
        self._types[id(schema)] = schema, frozenset(TYPES)  # what a schema that contains itself finds here
        found = frozenset(TYPES)
        if isinstance(given := schema.get("type"), str | list):
            found = frozenset("number" if one == "integer" else one for one in _listed(given))
        if (values := self.values(schema)) is not None:
            found &= frozenset(map(type_of, values))
        for each in _schemas(schema.get("allOf")):
            found &= self.types(each)
        for name in ("anyOf", "oneOf"):
            if several := _schemas(schema.get(name)):
                found &= frozenset[str]().union(*map(self.types, several))
        found -= self._whole_types(schema.get("not", False))
        known, other = _mapping(schema.get("properties")), schema.get("additionalProperties")
        if other is False and not _mapping(schema.get("patternProperties")):
            lacking = any(isinstance(one, str) and one not in known for one in _listed(schema.get("required", [])))
            found -= {"object"} if lacking else set()
        self._types[id(schema)] = schema, found
        return found

    def _whole_types(self, schema: Any) -> frozenset[str]:
        """The types all of whose values follow a schema that says nothing else."""
        schema = self.followed(schema)
        if isinstance(schema, Mapping) and not schema.keys() & (RESTRICTING | {"$ref"}) - {"type"}:
            return frozenset(_listed(schema.get("type", list(TYPES))))
        return frozenset(TYPES if schema is True else ())

    def terse(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """A schema without keywords that its others imply: llguidance joins each with what the references name."""
        idle = set()
        inner = [one for name in ("anyOf", "oneOf") for one in _schemas(schema.get(name))]
        if (
            inner
            and "type" in schema
            and "integer" not in _listed(schema["type"])
            and all(self.types(one) <= self.types({"type": schema["type"]}) for one in inner)
        ):
            idle.add("type")
        named, patterns = (_mapping(schema.get(name)) for name in ("properties", "patternProperties"))
        if not named and not patterns and schema.get("additionalProperties") in ({}, True):
            idle.add("additionalProperties")
        pairs = ((name, key) for name in named for key in patterns if _bare(named[name]) == _bare(patterns[key]))
        twice = [name for name, key in pairs if _matches(key, name)]
        kept = {name: value for name, value in schema.items() if name not in idle}
        return kept | {"properties": {name: one for name, one in named.items() if name not in twice}} if twice else kept

    def excluded(self, schema: Any, depth: int = 0) -> Any:
        """A schema of values that `schema` refuses; False: it refuses none; None: none can be written."""
        schema = self.followed(schema)
        if isinstance(schema, bool):
            return not schema
        if not isinstance(schema, Mapping) or "$ref" in schema or depth > _MOST_DEPTH:
            return None
        found = [one for name, value in schema.items() for one in self._alternatives(name, value, depth)]
        if any(one is None for one in found):
            found = [one for one in found if one is not None]
            return any_of(found) if found else None
        return any_of(found) if found else (False if not schema.keys() & RESTRICTING else None)

    def _alternatives(self, name: str, value: Any, depth: int) -> Iterable[Any]:
        """Schemas of values that one keyword refuses; None for what cannot be written."""
        if name == "type":
            yield from _other_types(value)
        elif name in ("enum", "const"):
            yield from _other_values(value if name == "enum" else [value])
        elif name in (*_BOUNDS, *_LEAST, *_MOST):
            yield _other_bound(name, value)
        elif name == "pattern":
            other = others(value) if isinstance(value, str) else None
            yield {"type": "string", "pattern": other} if other else None
        elif name == "required":
            yield from ({"type": "object", "properties": {one: False}} for one in _listed(value))
        elif name in ("allOf", "anyOf", "oneOf", "properties", "items"):
            yield from self._of_parts(name, value, depth + 1)
        elif name == "not":
            yield value
        elif name == "propertyNames":
            yield from self._other_names(value, depth + 1)
        elif name in RESTRICTING:
            yield None

    def _other_names(self, names: Any, depth: int) -> Iterable[Any]:
        """Objects that have a property of a name that is refused."""
        refused = self.excluded(names, depth)
        if refused is True:
            yield {"type": "object", "minProperties": 1}
        elif (listed := self.values(refused)) is not None:
            yield from ({"type": "object", "required": [name]} for name in listed if isinstance(name, str))
        else:
            yield refused and None

    def _of_parts(self, name: str, value: Any, depth: int) -> Iterable[Any]:
        if name == "allOf":
            yield from (self.excluded(one, depth) or None for one in _schemas(value))
        elif name == "properties":
            for key, one in _mapping(value).items():
                if other := self.excluded(one, depth):
                    yield {"type": "object", "properties": {key: other}, "required": [key]}
        elif name == "items":
            other = self.excluded(value, depth) if isinstance(value, Mapping) else None
            yield {"type": "array", "prefixItems": [other], "minItems": 1} if other else None
        else:
            each = [self.excluded(one, depth) for one in _schemas(value)]
            yield None if None in each else False if False in each else {"allOf": each}


RESTRICTING = frozenset(
    (
        *_BOUNDS, *_LEAST, *_MOST, "$ref", "additionalProperties", "allOf", "anyOf", "const", "contains",
        "dependencies", "dependentRequired", "dependentSchemas", "else", "enum", "if", "items", "multipleOf", "not",
        "oneOf", "pattern", "patternProperties", "prefixItems", "properties", "propertyNames", "required", "then",
        "type", "uniqueItems",
    )
)  # fmt: skip


def pointer(place: Sequence[str]) -> str:
    """The reference to a place in a document (RFC 6901)."""
    return "".join(["#", *(f"/{name.replace('~', '~0').replace('/', '~1')}" for name in place)])


def _references(schema: Any) -> Iterator[str]:
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Mapping):
            if isinstance(name := one.get("$ref"), str):
                yield unquote(name)
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one


def meeting_names(schema: Mapping[str, Any]) -> frozenset[str]:
    """The properties that a pattern of names matches too, and these patterns."""
    named, patterns = (_mapping(schema.get(name)) for name in ("properties", "patternProperties"))
    return frozenset(each for key in patterns for name in named if _matches(key, name) for each in (key, name))


def _matches(pattern: str, name: str) -> bool:
    with suppress(re.error):
        return bool(re.search(pattern, name))
    return False


def _bare(schema: Any) -> Any:
    return {name: one for name, one in schema.items() if name in RESTRICTING} if isinstance(schema, Mapping) else schema


def any_of(schemas: Sequence[Any]) -> Any:
    """One schema of several alternatives."""
    schemas = [one for one in schemas if one is not False]
    return False if not schemas else schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)}


def type_of(value: Any) -> str:
    """The type of a JSON value, integers as numbers."""
    if value is None:
        return "null"
    kinds = {bool: "boolean", int: "number", float: "number", str: "string", list: "array"}
    return kinds.get(type(value), "object")


def same(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal; 1 is 1.0, and is not true."""
    if type_of(one) == type_of(other) == "number":
        return bool(one == other)
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _listed(value: Any) -> list[Any]:
    return [value] if isinstance(value, str) else list(value) if isinstance(value, list | tuple) else []


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _schemas(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _other_types(given: Any) -> Iterable[Any]:
    named = _listed(given)
    rest = [kind for kind in TYPES if kind not in named and not (kind == "number" and "integer" in named)]
    yield {"type": rest} if rest else False


def _other_values(values: Sequence[Any]) -> Iterable[Any]:
    by_type: dict[str, list[Any]] = {kind: [] for kind in TYPES}
    for value in values:
        by_type[type_of(value)].append(value)
    free = [kind for kind in TYPES if not by_type[kind]]
    if free:
        yield {"type": free}
    if by_type["string"]:
        yield {"type": "string", "pattern": _no_text_of(by_type["string"])}
    if len(by_type["boolean"]) == 1:
        yield {"enum": [not by_type["boolean"][0]]}
    if numbers := sorted(set(by_type["number"])):
        yield {"type": "number", "exclusiveMaximum": numbers[0]}
        for low, high in pairwise(numbers):
            yield {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}
        yield {"type": "number", "exclusiveMinimum": numbers[-1]}
    for kind, most in (("array", "Items"), ("object", "Properties")):
        if by_type[kind]:
            yield {"type": kind, f"min{most}": max(map(len, by_type[kind])) + 1}
            if least := min(map(len, by_type[kind])):
                yield {"type": kind, f"max{most}": least - 1}


def _no_text_of(texts: Iterable[str]) -> str:
    """A pattern of all strings but these: at each prefix, the characters that leave them, or the end."""
    tree: dict[str, Any] = {}
    ends: list[dict[str, Any]] = []
    for text in texts:
        place = tree
        for letter in text:
            place = place.setdefault(letter, {})
        ends.append(place)
    return f"^{_others(tree, ends)}$"


def _others(place: dict[str, Any], ends: Sequence[dict[str, Any]]) -> str:
    letters = "".join(map(_in_class, place))
    ways = [rf"[^{letters}][\s\S]*" if place else r"[\s\S]+"]
    ways += [f"{re.escape(letter)}{_others(after, ends)}" for letter, after in place.items()]
    if not any(place is end for end in ends):
        ways.append("")
    return f"(?:{'|'.join(ways)})"


def _in_class(letter: str) -> str:
    return f"\\{letter}" if letter in "\\]^-[&~" else letter


def _other_bound(name: str, value: Any) -> Any:
    if type(value) not in (int, float):
        return None
    if name in _BOUNDS:
        return {"type": "number", _BOUNDS[name]: value}
    kind, other = _LEAST[name] if name in _LEAST else _MOST[name]
    beyond = value - 1 if name in _LEAST else value + 1
    return {"type": kind, other: beyond} if beyond >= 0 else None
