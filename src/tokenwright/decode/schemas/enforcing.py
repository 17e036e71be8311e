"""JSON schemas as clients send them, made such that a grammar can enforce them.

What a grammar cannot say in a keyword is said by alternatives where that is possible (schema_logic.py), perhaps
stricter than the schema. Keywords that are left are left out where the client did not ask for strictness, and their
places are returned. An object that lists properties and says nothing of others has no others (as in OpenAI's strict
mode), so that a model cannot go on for ever. A `format` that is not known is an annotation, as the standard has it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import combinations, permutations
from typing import Any
from urllib.parse import unquote

from tokenwright.decode.schemas.mistakes import OF_NAMES, OF_ONE, SEVERAL, named, readable, without_nulls
from tokenwright.decode.schemas.patterns import listed, parted, plain, with_written_classes
from tokenwright.decode.schemas.schema_logic import (
    RESTRICTING,
    References,
    Schema,
    any_of,
    meeting_names,
    pointer,
    same,
)
from tokenwright.decode.schemas.schema_pairs import Pairs
from tokenwright.decode.schemas.schema_values import Values

# Keywords that restrict JSON and that no grammar here enforces.
LACKING = frozenset(("$dynamicRef", "$recursiveRef", "unevaluatedItems", "unevaluatedProperties"))
FORMATS = frozenset(
    ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid", "unknown")
)
MOST_VALUES = 8  # of an array's distinct items that are written as alternatives
MOST_ORDERED = 4  # of those in any order
MOST_EXCLUDED = 4_000  # characters of what one alternative of a oneOf excludes
MOST_COMPARED = 10_000  # pairs of alternatives of a document's oneOfs; a pair costs 0.1 ms
MOST_PARTED = 3  # patterns of names that are made such that no name follows two of them
MOST_COPIED = 50  # schemas that stand in the place of references to them
_LOOKS = re.compile(r"\(\?(?:[=!]|<[=!])|(?<!\\)(?:\\\\)*\\[1-9]")  # look-around and references to groups
_WITH_OTHERS = ("then", "else", "minContains", "maxContains")  # read with `if` and `contains`
_ELSEWHERE = frozenset(("additionalProperties", "patternProperties", "allOf", "$ref"))  # may name more properties


def enforceable(schema: Mapping[str, Any], *, rewritten: bool = True) -> tuple[Schema, list[str]]:
    """The schema without what no grammar enforces, and the places of that, such as "properties.tags.uniqueItems".

    rewritten: alternatives say what keywords cannot. One that is wrong in itself may be returned as it is.
    """
    said: Schema = without_nulls(schema)
    if not readable(said):
        return said, []
    maker = _Maker(said, rewritten=rewritten)
    return maker.made(said, (), close=True), maker.places


Place = tuple[str, ...]  # names that lead to a part of a schema


class _Maker:
    """Makes one document's schemas. places: what was left out.

    parts: references to schemas that are one part of others, so that closing them would forbid the others' properties.
    copied: the references that the schema being made stands for, from the outside inwards.
    """

    def __init__(self, root: Mapping[str, Any], *, rewritten: bool) -> None:
        self._rewritten = rewritten
        self.places: list[str] = []
        self._references = References(root)
        self._pairs = Pairs(self._references)
        self._values = Values(self._references)
        self._parts = frozenset(_parts(root, within=False))
        self._copied: list[str] = []
        self._copies = self._compared = 0
        self._joined_below = False  # whether all that is made belongs to one of two schemas that are joined

    def made(self, schema: Any, place: Place, *, close: bool) -> Any:
        if not isinstance(schema, Mapping):
            return schema
        if place and not self._references.types(schema):
            return False  # llguidance takes no reference to a schema without values
        if (listed := self._listed(schema, place)) is not None:
            return {"enum": listed} if listed else False
        schema = self._naming(self._references.terse(schema), place, close=close)
        found: Schema = {}
        more: list[Any] = []
        branches_close = close and not schema.get("properties")
        shared = len(schema.keys() & RESTRICTING) > 1
        meeting = meeting_names(schema)
        for name, value in schema.items():
            at = (*place, name)
            if name in _WITH_OTHERS or (name == "format" and value not in FORMATS):
                continue
            if name in LACKING or (name == "pattern" and _readable(value) is None):
                self._left_out(at)
            elif name == "pattern":
                found[name] = _readable(value)
            elif name == "oneOf" and isinstance(value, list):
                more.append({"anyOf": self._one_of(value, at, close=branches_close, shared=shared)})
            elif name in _REWRITES:
                part = _REWRITES[name](self, value, schema, at) if self._rewritten else None
                if part is None:
                    self._left_out(at)
                elif part is not True:
                    more.append(part)
            elif name in ("allOf", "anyOf") and isinstance(value, list):  # closing a part would forbid the others'
                closes = branches_close and name == "anyOf"
                both = shared or self._joined_below or name == "allOf"
                found[name] = [self._member(one, (*at, str(n)), close=closes, both=both) for n, one in enumerate(value)]
            else:
                found[name] = self._inner(name, value, at, meeting)
        if len(named(found.get("patternProperties"))) < len(named(schema.get("patternProperties"))):
            found.pop("additionalProperties", None)
        return self._closed(self._joined(found, more), close=close)

    def _naming(self, schema: Mapping[str, Any], place: Place, *, close: bool) -> Mapping[str, Any]:
        """A schema that demands several properties by their names, where they are listed and few.

        Where others are allowed, `minProperties` is left out: a grammar counts a name again that is written again.
        """
        least, required = schema.get("minProperties"), schema.get("required", [])
        if type(least) is not int or least <= max(1, len(required) if isinstance(required, list) else 0):
            return schema
        schema = _names_listed(schema)
        given = schema.get("additionalProperties", not (close and schema.get("properties")))
        if given is not False or schema.get("patternProperties"):
            self._left_out((*place, "minProperties"))
            return schema
        known = [name for name, _ in named(schema.get("properties"))]
        if not self._rewritten or len(known) > MOST_VALUES or "maxProperties" in schema:
            return schema
        ways = {"anyOf": [{"required": list(one)} for one in combinations(known, least)]}
        kept = {name: value for name, value in schema.items() if name != "minProperties"}
        return {**kept, "allOf": [*schema.get("allOf", ()), ways]}

    def _listed(self, schema: Mapping[str, Any], place: Place) -> list[Any] | None:
        """The values of a schema that lists some and says more about them; None: it lists none, or more is unknown."""
        more = schema.keys() & RESTRICTING - {"type", "enum", "const"}
        if not more or "$ref" in schema or pointer(place) in self._references.above or not self._rewritten:
            return None
        each = (self._references.values(one) for one in self._pairs.joined(schema))
        values = next((one for one in each if one is not None), None)
        if values is None:
            return None
        verdicts = [self._values.follows(one, schema) for one in values]
        listed = [one for one, good in zip(values, verdicts, strict=True) if good]
        return None if None in verdicts or not (listed or place) else listed

    def _of_patterns(self, value: Mapping[str, Any], at: Place, meeting: Collection[str]) -> Schema:
        """patternProperties without the patterns that no grammar reads."""
        found: Schema = {}
        for key, one in value.items():
            pattern = _readable(key)
            if pattern is None or pattern in found:
                self._left_out((*at, key))
            else:
                found[pattern] = self._named(one, (*at, key), joined=key in meeting)
        each = parted(tuple(found)) if len(found) <= MOST_PARTED else None
        if each is None:
            return found
        several = {pattern: [found[one] for one in of] for pattern, of in each.items()}
        return {pattern: of[0] if len(of) == 1 else {"allOf": of} for pattern, of in several.items()}

    def _inner(self, name: str, value: Any, at: Place, meeting: Collection[str]) -> Any:
        """The value of a keyword that alternatives do not rewrite. meeting: names whose schemas are joined."""
        if name == "patternProperties" and isinstance(value, Mapping):
            return self._of_patterns(value, at, meeting)
        if name in OF_NAMES and isinstance(value, Mapping):
            return {key: self._named(one, (*at, key), joined=key in meeting) for key, one in value.items()}
        if name in (*OF_ONE, "prefixItems") and isinstance(value, list):
            return [self.made(one, (*at, str(n)), close=True) for n, one in enumerate(value)]
        if name in OF_ONE:
            return self._member(value, at, close=True, both=self._joined_below)
        return self._elsewhere(value, at)

    def _named(self, schema: Any, place: Place, *, joined: bool = False) -> Any:
        before, self._joined_below = self._joined_below, self._joined_below or joined
        made = self._member(schema, place, close=pointer(place) not in self._parts, both=joined)
        self._joined_below = before
        return made

    def _elsewhere(self, value: Any, place: Place) -> Any:
        """A value with the schemas made that references find within it, wherever a document keeps them."""
        here = pointer(place)
        if here in self._references.named:
            return self._named(value, place)
        if isinstance(value, Mapping) and here in self._references.above:
            return {key: self._elsewhere(one, (*place, key)) for key, one in value.items()}
        return value

    def _member(self, schema: Any, place: Place, *, close: bool, both: bool) -> Any:
        """One of several schemas. both: a value follows other keywords too.

        llguidance cannot join those with a reference whose schema leads back to it, but with the schema itself.
        """
        name = schema.get("$ref") if both and isinstance(schema, Mapping) and len(schema) == 1 else None
        if name is None or name in self._copied or self._copies == MOST_COPIED or not self._references.circular(name):
            return self.made(schema, place, close=close)
        self._copies += 1
        self._copied.append(name)
        before, self._joined_below = self._joined_below, False
        made = self.made(self._references.followed(schema), place, close=close and unquote(name) not in self._parts)
        self._copied.pop()
        self._joined_below = before
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
        """Alternatives of which a value satisfies one alone. shared: and other keywords.

        Beyond MOST_COMPARED a value may satisfy several.
        """
        self._compared += len(schemas) * (len(schemas) - 1)
        if self._compared > MOST_COMPARED:
            self._left_out(at)
            return [self._member(one, (*at, str(n)), close=close, both=shared) for n, one in enumerate(schemas)]
        lacking, found = not self._rewritten, []
        for n, one in self._alone(schemas):
            place = (*at, str(n))
            rest, whole = self._rest(n, schemas, place, close=close) if self._rewritten else ([], True)
            lacking |= not whole
            made = self._member(one, place, close=close, both=shared or bool(rest))
            found.append({"allOf": [made, *rest]} if rest else made)
        if lacking:
            self._left_out(at)
        return found

    def _alone(self, schemas: list[Any]) -> list[tuple[int, Any]]:
        """The alternatives with values of their own: none of one that is within another; all, where none is left."""
        each = list(enumerate(schemas))
        within = {n for n, one in each if any(self._pairs.within(one, other) for m, other in each if m != n)}
        return [(n, one) for n, one in each if n not in within or len(within) == len(each) or not self._rewritten]

    def _rest(self, n: int, schemas: list[Any], place: Place, *, close: bool) -> tuple[list[Any], bool]:
        """What values of the n-th schema must follow besides, so that no other holds; and whether that is all."""
        one = schemas[n]
        shut = close and not (isinstance(one, Mapping) and unquote(str(one.get("$ref"))) in self._parts)
        rivals = [other for m, other in enumerate(schemas) if m != n]
        others = [other for other in rivals if not self._pairs.apart(one, other, closed=shut)]
        partings = [self._pairs.parting(one, other) for other in others]
        named = sorted({name for name in partings if name is not None})
        others = [other for other, name in zip(others, partings, strict=True) if name is None]
        excluded = [self._references.excluded(other) for other in others]
        rest = [self._of_types(other, one) for other in excluded if other]
        whole = None not in rest and len(str(rest)) <= MOST_EXCLUDED
        made = [self.made(other, place, close=False) for other in rest] if whole else []
        made += [{"type": "object", "required": named}] if named else []
        return made, whole and None not in excluded and False not in excluded

    def _not(self, value: Any, schema: Mapping[str, Any], at: Place) -> Any:
        excluded = self._references.excluded(value)
        if excluded is None or isinstance(excluded, bool):
            return excluded
        fitting = self._of_types(excluded, schema)
        return None if fitting is None else self.made(fitting, at, close=False)

    def _of_types(self, excluded: Schema, schema: Any) -> Any:
        """Those alternatives that the types of a schema allow; None: none."""
        types = self._references.types(schema)
        each = excluded["anyOf"] if excluded.keys() == {"anyOf"} else [excluded]
        return any_of([one for one in each if self._references.types(one) & types]) or None

    def _if(self, value: Any, schema: Mapping[str, Any], at: Place) -> Any:
        then, other = schema.get("then", True), schema.get("else", True)
        if then is True and other is True:
            return True
        excluded = self._references.excluded(value)
        if excluded is None:
            return None
        both = {"allOf": [value, then]} if then is not True else value
        apart = {"allOf": [excluded, other]} if other is not True else excluded
        return self.made(any_of([both, apart] if excluded else [both]), at, close=False)

    def _dependencies(self, value: Any, _: Mapping[str, Any], at: Place) -> Any:
        if not isinstance(value, Mapping):
            return None
        each = [
            any_of([{"properties": {name: False}}, {"required": [name, *one]} if isinstance(one, list) else one])
            for name, one in value.items()
        ]
        return {"allOf": [self.made(one, at, close=False) for one in each]} if each else True

    def _contains(self, value: Any, schema: Mapping[str, Any], at: Place) -> Any:
        least = schema.get("minContains", 1)
        if "maxContains" in schema or type(least) is not int or isinstance(schema.get("items"), list):
            return None
        if least == 0:
            return True
        if "prefixItems" in schema:
            return None
        made = self.made(value, at, close=False)
        return {"prefixItems": [made] * least, "minItems": least}

    def _unique(self, value: Any, schema: Mapping[str, Any], _: Place) -> Any:
        if value is not True or schema.get("maxItems", 2) in (0, 1) or "array" not in self._references.types(schema):
            return True
        values = self._references.values(schema.get("items"))
        if values is None:
            return None
        kept = [one for n, one in enumerate(values) if not any(same(one, other) for other in values[:n])]
        if len(kept) > MOST_VALUES:
            return None
        least, most = schema.get("minItems", 0), min(schema.get("maxItems", len(kept)), len(kept))
        arranged: Callable[..., Any] = permutations if len(kept) <= MOST_ORDERED else combinations
        return {"enum": [list(one) for size in range(least, most + 1) for one in arranged(kept, size)]}

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
        if restricting == {"pattern"} and (pattern := _readable(names["pattern"])) is not None:
            return {"patternProperties": {pattern: of_each}, "additionalProperties": False}
        if restricting <= {"minLength", "maxLength"}:
            length = f"{names.get('minLength', 0)},{names.get('maxLength', '')}"
            return {"patternProperties": {rf"^[\s\S]{{{length}}}$": of_each}, "additionalProperties": False}
        return None


def _readable(pattern: Any) -> Any:
    """A pattern as a grammar reads it, or None."""
    if not isinstance(pattern, str):
        return pattern
    read = plain(pattern) if _LOOKS.search(pattern) else pattern
    return read if read is None else with_written_classes(read)


def _names_listed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema whose properties are listed, in place of patterns of few names."""
    patterns = schema.get("patternProperties")
    if not isinstance(patterns, Mapping) or len(patterns) != 1 or schema.get("properties"):
        return schema
    [(pattern, one)] = patterns.items()
    names = listed(pattern, MOST_VALUES)
    return {**schema, "patternProperties": {}, "properties": dict.fromkeys(names, one)} if names else schema


def _parts(schema: Any, *, within: bool) -> Iterator[str]:
    """The references within parts of schemas: in allOf, and beside other keywords."""
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
    """Whether a part of a schema names properties that the whole does not."""
    own = branch.get("properties")
    inner = [one for name in SEVERAL for one in branch.get(name, ()) if isinstance(one, Mapping)]
    more = isinstance(own, Mapping) and bool(own.keys() - base["properties"].keys()) if "properties" in base else True
    return "$ref" in branch or more or any(_adds(one, base) for one in inner)


_REWRITES: dict[str, Callable[[_Maker, Any, Mapping[str, Any], Place], Any]] = {
    "contains": _Maker._contains,
    "dependencies": _Maker._dependencies,
    "dependentRequired": _Maker._dependencies,
    "dependentSchemas": _Maker._dependencies,
    "if": _Maker._if,
    "not": _Maker._not,
    "propertyNames": _Maker._names,
    "uniqueItems": _Maker._unique,
}
