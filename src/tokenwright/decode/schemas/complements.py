"""Complements of schemas, as schemas, since grammars have no "not". They may allow less than the rest, never more."""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from tokenwright.decode.schemas.references import (
    RESTRICTING,
    TYPES,
    References,
    any_of,
    listed,
    mapping,
    schemas_in,
    type_of,
)

_MOST_DEPTH = 8  # of schemas within schemas
_BOUNDS = {
    "minimum": "exclusiveMaximum",
    "exclusiveMinimum": "maximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMaximum": "minimum",
}
_SIZES = {"Length": "string", "Items": "array", "Properties": "object"}

_LETTER = r"(?P<letter>\\\W|\w)"
_ONE = re.compile(rf"(?P<open>\()?{_LETTER}(?(open)\))", re.ASCII)
_EACH = re.compile(rf"\^(?:\[(?P<not>\^?)(?P<kind>(?:[^\]\\\[]|\\.)+)\]|{_LETTER})(?P<times>[+*])\$", re.ASCII)


class Complements:
    def __init__(self, references: References) -> None:
        self._references = references

    def of(self, schema: Any, depth: int = 0) -> Any:
        """A schema of values that `schema` refuses; False: it refuses none; None: none can be written."""
        schema = self._references.followed(schema)
        if isinstance(schema, bool):
            return not schema
        if not isinstance(schema, Mapping) or "$ref" in schema or depth > _MOST_DEPTH:
            return None
        found = [one for name in schema.keys() & RESTRICTING for one in self._refused(name, schema[name], depth)]
        written = [one for one in found if one is not None]
        return any_of(written) if written or not found else None

    def _refused(self, name: str, value: Any, depth: int) -> Iterable[Any]:
        """Schemas of values that one keyword refuses; None for what cannot be written."""
        if name == "type":
            yield from _other_types(value)
        elif name in ("enum", "const"):
            yield from _other_values(value if name == "enum" else [value])
        elif name in _BOUNDS:
            yield {"type": "number", _BOUNDS[name]: value} if type(value) in (int, float) else None
        elif name[3:] in _SIZES:
            yield _other_size(name[:3], name[3:], value)
        elif name == "required":
            yield from ({"type": "object", "properties": {one: False}} for one in listed(value))
        elif name == "not":
            yield value
        elif name == "allOf":
            yield from (self.of(one, depth + 1) or None for one in schemas_in(value))
        elif name == "pattern":
            yield _other_pattern(value)
        elif name == "items":
            other = self.of(value, depth + 1) if isinstance(value, Mapping) else None
            yield {"type": "array", "prefixItems": [other], "minItems": 1} if other else None
        elif name == "properties":
            for key, one in mapping(value).items():
                if other := self.of(one, depth + 1):
                    yield {"type": "object", "properties": {key: other}, "required": [key]}
        elif name in ("anyOf", "oneOf"):
            each = [self.of(one, depth + 1) for one in schemas_in(value)]
            yield None if None in each else False if False in each else {"allOf": each}
        else:
            yield None


def _other_types(given: Any) -> Iterable[Any]:
    named = listed(given)
    rest = [kind for kind in TYPES if kind not in named and not (kind == "number" and "integer" in named)]
    yield {"type": rest} if rest else False


def _other_size(side: str, name: str, value: Any) -> Any:
    if type(value) is not int:
        return None
    beyond, other = (value - 1, "max") if side == "min" else (value + 1, "min")
    return {"type": _SIZES[name], f"{other}{name}": beyond} if beyond >= 0 else None


def _other_pattern(pattern: Any) -> Any:
    """Strings that a pattern refuses, where it is one character, or of characters of one kind and nothing else."""
    if one := _ONE.fullmatch(str(pattern)):
        return {"type": "string", "pattern": f"^[^{one['letter']}]*$"}
    if not (each := _EACH.fullmatch(str(pattern))):
        return None
    other = f"[{'' if each['not'] else '^'}{each['kind'] or each['letter']}]"
    return {"type": "string", "pattern": f"^$|{other}" if each["times"] == "+" else other}


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
    letters = "".join(f"\\{letter}" if letter in "\\]^-[&~" else letter for letter in place)
    ways = [rf"[^{letters}][\s\S]*" if place else r"[\s\S]+"]
    ways += [f"{re.escape(letter)}{_others(after, ends)}" for letter, after in place.items()]
    if not any(place is end for end in ends):
        ways.append("")
    return f"(?:{'|'.join(ways)})"
