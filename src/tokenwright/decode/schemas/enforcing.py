"""Rewrites the JSON schemas that clients send so that a grammar can enforce them.

Keywords that no grammar enforces are left out, and their places returned. An object that lists properties and says
nothing of others is closed (as in OpenAI's strict mode), so that a model cannot add properties for ever.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal
from urllib.parse import unquote

from tokenwright.decode.schemas.mistakes import OF_NAMES, OF_ONE, SEVERAL, mistake_in, readable, without_nulls
from tokenwright.decode.schemas.one_of import Comparison, apart_names, required_alone
from tokenwright.decode.schemas.references import RESTRICTING, References, Schema, mapping, pointer

LACKING = frozenset(
    (
        "$dynamicRef", "$recursiveRef", "contains", "dependencies", "dependentRequired", "dependentSchemas",
        "unevaluatedItems", "unevaluatedProperties",
    )
)  # fmt: skip
FORMATS = frozenset(
    ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid", "unknown")
)
MOST_COPIED = 50  # schemas copied in place of references to them
_WITH_OTHERS = ("then", "else", "minContains", "maxContains")  # read with `if` and `contains`
_ELSEWHERE = frozenset(("additionalProperties", "patternProperties", "allOf", "$ref"))  # may name more properties
_TOKEN = re.compile(r"\\u(?:\{[0-9a-fA-F]*\}|[0-9a-fA-F]{4})|\\x[0-9a-fA-F]{2}|\\.|\(\?<?[=!]|\[\^?|.", re.DOTALL)
_ESCAPES = frozenset("btnfr")  # of control characters that JSON writes with one letter
_OTHERS = r"\x00-\x07\x0b\x0e-\x1f"


def enforceable(schema: Mapping[str, Any]) -> tuple[Schema, list[str]]:
    """The schema without keywords that no grammar enforces, and their places, such as "properties.tags.uniqueItems"."""
    said: Schema = without_nulls(schema)
    if not readable(said):
        return said, []
    maker = _Maker(said)
    return maker.made(said, (), close=True), maker.places


def answered(schema: str, ask: Literal["enforceable", "mistake"]) -> Any:
    """A grammar worker's answer: the enforceable schema and the places of the rest, or the schema's mistake."""
    given = json.loads(schema)
    if ask == "mistake":
        return mistake_in(given)
    made, places = enforceable(given)
    return json.dumps(made), places


Place = tuple[str, ...]


class _Maker:
    """Makes one document's schemas. places: what was left out.

    parts: references within other schemas; closing them would forbid the others' properties. copied: the references
    that lead to the schema being made.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.places: list[str] = []
        self._references = References(root)
        self._comparison = Comparison(self._references)
        self._parts = frozenset(_parts(root, within=False))
        self._copied: list[str] = []
        self._copies = 0

    def made(self, schema: Any, place: Place, *, close: bool) -> Any:
        if not isinstance(schema, Mapping):
            return schema
        if place and not self._references.types(schema):
            return False  # llguidance takes no reference to a schema without values
        schema = self._references.terse(schema)
        found: Schema = {}
        more: list[Any] = []
        branches_close = close and not schema.get("properties")
        shared = len(schema.keys() & RESTRICTING) > 1
        for name, value in schema.items():
            at = (*place, name)
            if name in _WITH_OTHERS or (name == "format" and value not in FORMATS):
                continue
            unread = (name == "pattern" and readable_pattern(value) is None) or (
                name == "minProperties" and _many(schema)
            )
            if name in LACKING or unread:
                self._left_out(at)
            elif name == "pattern":
                found[name] = readable_pattern(value)
            elif name == "oneOf" and isinstance(value, list):
                more.append({"anyOf": self._one_of(value, at, close=branches_close, shared=shared)})
            elif name in _REWRITES:
                part = _REWRITES[name](self, value, schema, at)
                if part is None:
                    self._left_out(at)
                elif part is not True:
                    more.append(part)
            elif name in ("allOf", "anyOf") and isinstance(value, list):  # closing a part would forbid the others'
                closes, both = branches_close and name == "anyOf", shared or name == "allOf"
                found[name] = [self._member(one, (*at, str(n)), close=closes, both=both) for n, one in enumerate(value)]
            elif name == "patternProperties" and isinstance(value, Mapping):
                found[name] = self._of_patterns(value, mapping(schema.get("properties")), at)
            else:
                found[name] = self._inner(name, value, at)
        if len(mapping(found.get("patternProperties"))) < len(mapping(schema.get("patternProperties"))):
            found.pop("additionalProperties", None)
        return self._closed(self._joined(found, more), close=close)

    def _of_patterns(self, value: Mapping[str, Any], properties: Mapping[str, Any], at: Place) -> Schema:
        """patternProperties without unreadable patterns, and patterns that meet a property or another pattern."""
        found: Schema = {}
        for key, one in value.items():
            pattern = readable_pattern(key)
            if pattern is None or not apart_names([*properties], [*found, pattern]):
                self._left_out((*at, key))
            else:
                found[pattern] = self._named(one, (*at, key))
        return found

    def _inner(self, name: str, value: Any, at: Place) -> Any:
        if name in OF_NAMES and isinstance(value, Mapping):
            return {key: self._named(one, (*at, key)) for key, one in value.items()}
        if name in (*OF_ONE, "prefixItems") and isinstance(value, list):
            return [self.made(one, (*at, str(n)), close=True) for n, one in enumerate(value)]
        return self.made(value, at, close=True) if name in OF_ONE else self._elsewhere(value, at)

    def _named(self, schema: Any, place: Place) -> Any:
        return self.made(schema, place, close=pointer(place) not in self._parts)

    def _elsewhere(self, value: Any, place: Place) -> Any:
        here = pointer(place)
        if here in self._references.named:
            return self._named(value, place)
        if isinstance(value, Mapping) and here in self._references.above:
            return {key: self._elsewhere(one, (*place, key)) for key, one in value.items()}
        return value

    def _member(self, schema: Any, place: Place, *, close: bool, both: bool) -> Any:
        """One of several schemas. both: a value follows other keywords too.

        llguidance cannot join a reference whose schema leads back to it, but it can join the schema.
        """
        name = schema.get("$ref") if both and isinstance(schema, Mapping) and len(schema) == 1 else None
        if name is None or name in self._copied or self._copies == MOST_COPIED or not self._references.circular(name):
            return self.made(schema, place, close=close)
        self._copies += 1
        self._copied.append(name)
        made = self.made(self._references.followed(schema), place, close=close and unquote(name) not in self._parts)
        self._copied.pop()
        return made

    def _left_out(self, place: Place) -> None:
        self.places.append(".".join(place))

    def _joined(self, found: Schema, more: list[Any]) -> Schema:
        if len(more) == 1 and isinstance(more[0], Mapping) and more[0].keys() == {"anyOf"} and "anyOf" not in found:
            found["anyOf"] = more[0]["anyOf"]
        elif more:
            found["allOf"] = [*found.get("allOf", ()), *more]
        return found

    def _closed(self, found: Schema, *, close: bool) -> Schema:
        branches = [one for name in SEVERAL for one in found.get(name, ()) if isinstance(one, Mapping)]
        adding = any(_adds(one, found) for one in branches)
        if close and found.get("properties") and not adding and not found.keys() & (_ELSEWHERE - {"allOf"}):
            required = found.get("required")
            missing = [one for one in required if one not in found["properties"]] if isinstance(required, list) else []
            found["properties"] = {**found["properties"], **{name: {} for name in missing}}
            found["additionalProperties"] = False
        return found

    def _one_of(self, schemas: list[Any], at: Place, *, close: bool, shared: bool) -> list[Any]:
        """The alternatives of a oneOf. shared: there are other keywords. A value may satisfy two incomparable ones."""
        found, whole = [], True
        for n, one in enumerate(schemas):
            place = (*at, str(n))
            rest = self._rest(n, schemas)
            whole = whole and rest is not None
            made = self._member(one, place, close=close, both=shared or bool(rest))
            found.append({"allOf": [made, *rest]} if rest else made)
        if not whole:
            self._left_out(at)
        return found

    def _rest(self, n: int, schemas: list[Any]) -> list[Any] | None:
        """The schema that excludes all but the n-th of several schemas, beside the n-th; None: it cannot be written."""
        one = schemas[n]
        rest: list[Any] = []
        for other in (other for m, other in enumerate(schemas) if m != n):
            if self._comparison.apart(one, other):
                continue
            if name := self._comparison.parting(one, other):
                rest.append({"type": "object", "required": [name]})
            elif lacked := _lacking_one(other):
                rest.append(lacked)
            else:
                return None
        return None if self._comparison.exhausted else rest

    def _not(self, value: Any, *_: Any) -> Any:
        """The schema of all other values, if a schema has all values or none, or only required properties."""
        return value is False if isinstance(value, bool) or value == {} else _lacking_one(value)

    def _unique(self, value: Any, schema: Mapping[str, Any], _: Place) -> Any:
        idle = value is not True or schema.get("maxItems", 2) in (0, 1) or "array" not in self._references.types(schema)
        return True if idle else None

    def _if(self, value: Any, schema: Mapping[str, Any], _: Place) -> Any:  # noqa: ARG002
        return True if schema.get("then", True) is True and schema.get("else", True) is True else None

    def _names(self, value: Any, schema: Mapping[str, Any], at: Place) -> Any:
        names = self._references.followed(value)
        if names is True or (isinstance(names, Mapping) and not names.keys() - {"type", "description", "title"}):
            return True
        if not isinstance(names, Mapping) or schema.keys() & {"patternProperties", "properties"}:
            return None
        of_each = self.made(schema.get("additionalProperties", True), at, close=True)
        if (listed := self._references.values(names)) is not None:
            return {"properties": dict.fromkeys(listed, of_each), "additionalProperties": False}
        restricting = names.keys() - {"type", "description", "title"}
        if restricting == {"pattern"} and (pattern := readable_pattern(names["pattern"])) is not None:
            return {"patternProperties": {pattern: of_each}, "additionalProperties": False}
        return None


def _many(schema: Mapping[str, Any]) -> bool:
    """Whether minProperties is above the required properties and one: llguidance counts a repeated name twice."""
    least, required = schema.get("minProperties"), schema.get("required", [])
    return type(least) is int and least > max(1, len(required) if isinstance(required, list) else 0)


def _lacking_one(schema: Any) -> Schema | None:
    """The schema of objects that lack a property that a schema requires, if it says nothing else."""
    ways = [{"type": "object", "properties": {name: False}} for name in required_alone(schema)]
    return {"anyOf": ways} if len(ways) > 1 else ways[0] if ways else None


def _parts(schema: Any, *, within: bool) -> Iterator[str]:
    if isinstance(schema, list):
        for one in schema:
            yield from _parts(one, within=within)
    elif isinstance(schema, Mapping):
        own = schema.get("$ref")
        if isinstance(own, str) and (within or schema.keys() & {"properties", *SEVERAL}):
            yield unquote(own)
        shared = "properties" in schema
        for name, value in schema.items():
            inner = name in ("allOf", "if", "then", "else") or (name in ("anyOf", "oneOf") and (shared or within))
            yield from _parts(value, within=inner)


def _adds(branch: Mapping[str, Any], base: Schema) -> bool:
    own = branch.get("properties")
    inner = [one for name in SEVERAL for one in branch.get(name, ()) if isinstance(one, Mapping)]
    more = isinstance(own, Mapping) and bool(own.keys() - base["properties"].keys()) if "properties" in base else True
    return "$ref" in branch or more or any(_adds(one, base) for one in inner)


_REWRITES: dict[str, Callable[[_Maker, Any, Mapping[str, Any], Place], Any]] = {
    "if": _Maker._if,
    "not": _Maker._not,
    "propertyNames": _Maker._names,
    "uniqueItems": _Maker._unique,
}


def readable_pattern(pattern: Any) -> Any:
    """A pattern (ECMA 262) in llguidance's syntax; None for one with look-around or references to groups.

    llguidance adds a quote and a backslash to a class with control characters that lacks one of them. Such a class
    loses its control characters, or the result is None.
    """
    if not isinstance(pattern, str):
        return pattern  # `mistake_in` reports it
    found: list[str] = []
    opened = ""  # how the open class begins
    for token in _TOKEN.findall(pattern):
        before = found[-1] if found else ""
        if not opened:
            if token.startswith("(?") or (token[0] == "\\" and token[1:2] in "123456789"):
                return None
            opened = token if token[0] == "[" else ""
            found.append(token)
        elif token == "]":
            if before == "[":
                return None
            found.append((_OTHERS if opened == "[^" else "") + token)
            opened = ""
        else:
            if opened == "[" and (_is_control(token) or (token == "-" and before[1:] in _ESCAPES)):
                return None
            found.append(f"\\{token}" if token[0] in "[&~" or token == before == "-" else token)
    return "".join(found)


def _is_control(token: str) -> bool:
    if token[:2] in ("\\x", "\\u"):
        digits = token[2:].strip("{}")
        return digits != "" and int(digits, 16) < 32
    return token[:2] in ("\\0", "\\c", "\\v") or token < " "
