"""JSON schemas as clients send them, made such that a grammar can enforce them.

What a grammar cannot say in a keyword is said by alternatives where that is possible (one_of.py, complements.py),
perhaps stricter than the schema. Other keywords are left out, and their places returned. An object that lists
properties and says nothing of others has no others (as in OpenAI's strict mode), so that a model cannot go on for ever.
The time grows faster than a schema: a client's is rewritten in a grammar worker.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations, permutations
from typing import Any, Literal
from urllib.parse import unquote

from tokenwright.decode.schemas.complements import Complements
from tokenwright.decode.schemas.mistakes import OF_NAMES, OF_ONE, SEVERAL, mistake_in, named, readable, without_nulls
from tokenwright.decode.schemas.one_of import Comparison
from tokenwright.decode.schemas.patterns import readable as readable_pattern
from tokenwright.decode.schemas.references import RESTRICTING, References, Schema, any_of, pointer, same

# Keywords that restrict JSON and that no grammar here enforces.
LACKING = frozenset(("$dynamicRef", "$recursiveRef", "unevaluatedItems", "unevaluatedProperties"))
FORMATS = frozenset(
    ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid", "unknown")
)
MOST_VALUES = 8  # of an array's distinct items that are written as alternatives
MOST_ORDERED = 4  # of those in any order
MOST_EXCLUDED = 4_000  # characters of what one alternative of a oneOf excludes
MOST_COPIED = 50  # schemas that stand in the place of references to them
_WITH_OTHERS = ("then", "else", "minContains", "maxContains")  # read with `if` and `contains`
_ELSEWHERE = frozenset(("additionalProperties", "patternProperties", "allOf", "$ref"))  # may name more properties


def enforceable(schema: Mapping[str, Any]) -> tuple[Schema, list[str]]:
    """The schema without what no grammar enforces, and the places of that, such as "properties.tags.uniqueItems"."""
    said: Schema = without_nulls(schema)
    if not readable(said):
        return said, []
    maker = _Maker(said)
    return maker.made(said, (), close=True), maker.places


def answered(schema: str, ask: Literal["enforceable", "mistake"]) -> Any:
    """A grammar worker's answer about a schema: what is enforced of it and the places of the rest, or its mistake."""
    given = json.loads(schema)
    if ask == "mistake":
        return mistake_in(given)
    made, places = enforceable(given)
    return json.dumps(made), places


Place = tuple[str, ...]  # names that lead to a part of a schema


class _Maker:
    """Makes one document's schemas. places: what was left out.

    parts: references to schemas that are one part of others, so that closing them would forbid the others' properties.
    copied: the references that the schema being made stands for, from the outside inwards.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.places: list[str] = []
        self._references = References(root)
        self._complements = Complements(self._references)
        self._comparison = Comparison(self._references)
        self._parts = frozenset(_parts(root, within=False))
        self._copied: list[str] = []
        self._copies = 0
        self._joined_below = False  # whether all that is made belongs to one of two schemas that are joined

    def made(self, schema: Any, place: Place, *, close: bool) -> Any:
        if not isinstance(schema, Mapping):
            return schema
        if place and not self._references.types(schema):
            return False  # llguidance takes no reference to a schema without values
        schema = self._naming(self._comparison.named_once(self._references.terse(schema)), place, close=close)
        found: Schema = {}
        more: list[Any] = []
        branches_close = close and not schema.get("properties")
        shared = len(schema.keys() & RESTRICTING) > 1
        meeting = bool(schema.get("properties") and schema.get("patternProperties"))
        for name, value in schema.items():
            at = (*place, name)
            if name in _WITH_OTHERS or (name == "format" and value not in FORMATS):
                continue
            if name in LACKING or (name == "pattern" and readable_pattern(value) is None):
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
                closes = branches_close and name == "anyOf"
                both = shared or self._joined_below or name == "allOf"
                found[name] = [self._member(one, (*at, str(n)), close=closes, both=both) for n, one in enumerate(value)]
            else:
                found[name] = self._inner(name, value, at, meeting=meeting)
        if len(named(found.get("patternProperties"))) < len(named(schema.get("patternProperties"))):
            found.pop("additionalProperties", None)
        return self._closed(self._joined(found, more), close=close)

    def _naming(self, schema: Mapping[str, Any], place: Place, *, close: bool) -> Mapping[str, Any]:
        """A schema that demands properties by name; no `minProperties`, as grammars count repeated names again."""
        least, required = schema.get("minProperties"), schema.get("required", [])
        if type(least) is not int or least <= max(1, len(required) if isinstance(required, list) else 0):
            return schema
        given = schema.get("additionalProperties", not (close and schema.get("properties")))
        if given is not False or schema.get("patternProperties"):
            self._left_out((*place, "minProperties"))
            return schema
        known = [name for name, _ in named(schema.get("properties"))]
        if len(known) > MOST_VALUES or "maxProperties" in schema:
            return schema
        ways = {"anyOf": [{"required": list(one)} for one in combinations(known, least)]}
        kept = {name: value for name, value in schema.items() if name != "minProperties"}
        return {**kept, "allOf": [*schema.get("allOf", ()), ways]}

    def _of_patterns(self, value: Mapping[str, Any], at: Place, *, meeting: bool) -> Schema:
        """patternProperties without the patterns that no grammar reads, and without any that meets an earlier one."""
        found: Schema = {}
        apart = self._comparison.names_apart([readable_pattern(key) or key for key in value])
        for key, one in value.items():
            pattern, names = readable_pattern(key), {"type": "string", "pattern": key}
            others = () if apart else ({"type": "string", "pattern": other} for other in found)
            if pattern in (None, *found) or not all(self._comparison.apart(names, other) for other in others):
                self._left_out((*at, key))
            else:
                found[pattern] = self._named(one, (*at, key), joined=meeting)
        return found

    def _inner(self, name: str, value: Any, at: Place, *, meeting: bool) -> Any:
        """The value of a keyword that alternatives do not rewrite. meeting: a name may follow several schemas."""
        if name == "patternProperties" and isinstance(value, Mapping):
            return self._of_patterns(value, at, meeting=meeting)
        if name in OF_NAMES and isinstance(value, Mapping):
            joined = meeting and name == "properties"
            return {key: self._named(one, (*at, key), joined=joined) for key, one in value.items()}
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

        Those that are beyond comparison may be satisfied together.
        """
        found, whole = [], True
        for n, one in self._alone(schemas):
            place = (*at, str(n))
            rest = self._rest(n, schemas, place, close=close)
            whole = whole and rest is not None
            made = self._member(one, place, close=close, both=shared or bool(rest))
            found.append({"allOf": [made, *rest]} if rest else made)
        if not whole:
            self._left_out(at)
        return found

    def _alone(self, schemas: list[Any]) -> list[tuple[int, Any]]:
        """The alternatives with values of their own: none of one that is within another; all, where none is left."""
        each = list(enumerate(schemas))
        broad = [(m, other) for m, other in each if self._comparison.broad(other)]
        within = {n for n, one in each if any(self._comparison.within(one, other) for m, other in broad if m != n)}
        return [(n, one) for n, one in each if n not in within or len(within) == len(each)]

    def _rest(self, n: int, schemas: list[Any], place: Place, *, close: bool) -> list[Any] | None:
        """What values of the n-th schema must follow besides, so that no other holds; None: that cannot be said."""
        one = schemas[n]
        shut = close and not (isinstance(one, Mapping) and unquote(str(one.get("$ref"))) in self._parts)
        rivals = [other for m, other in enumerate(schemas) if m != n]
        others = [other for other in rivals if not self._comparison.apart(one, other, closed=shut)]
        if self._comparison.exhausted:
            return None
        partings = [self._comparison.parting(one, other) for other in others]
        names = sorted({name for name in partings if name is not None})
        excluded = [self._complements.of(other) for other, name in zip(others, partings, strict=True) if name is None]
        rest = [self._of_types(other, one) for other in excluded if other]
        if None in rest or None in excluded or False in excluded or len(str(rest)) > MOST_EXCLUDED:
            return None
        made = [self.made(other, place, close=False) for other in rest]
        return [*made, {"type": "object", "required": names}] if names else made

    def _not(self, value: Any, schema: Mapping[str, Any], at: Place) -> Any:
        excluded = self._complements.of(value)
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
        excluded = self._complements.of(value)
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
        if restricting == {"pattern"} and (pattern := readable_pattern(names["pattern"])) is not None:
            return {"patternProperties": {pattern: of_each}, "additionalProperties": False}
        if restricting <= {"minLength", "maxLength"}:
            length = f"{names.get('minLength', 0)},{names.get('maxLength', '')}"
            return {"patternProperties": {rf"^[\s\S]{{{length}}}$": of_each}, "additionalProperties": False}
        return None


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
