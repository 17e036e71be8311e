"""Compares two schemas of one document: apart, parted by a property, or one within the other.

Each answer is certain where it is given: where a reason is not seen, schemas count as neither apart nor within.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import product
from typing import Any

from tokenwright.decode.schemas.patterns import disjoint
from tokenwright.decode.schemas.schema_logic import RESTRICTING, References
from tokenwright.decode.schemas.schema_values import Values, found

_MOST_DEPTH = 6
_MOST_JOINED = 30  # schemas that one joins by allOf


class Pairs:
    """Compares the schemas of one document."""

    def __init__(self, references: References) -> None:
        self._references = references
        self._values = Values(references)

    def within(self, one: Any, other: Any) -> bool:
        """Whether every value of `one` satisfies `other`, which says nothing but types."""
        other = self._references.followed(other)
        if not isinstance(other, Mapping):
            return other is True
        if other.keys() & RESTRICTING - {"type"} or "integer" in _listed(other.get("type")):
            return False
        return self._references.types(one) <= self._references.types(other)

    def parting(self, one: Any, other: Any) -> str | None:
        """A property of `one` with which no value satisfies both; None: there is none."""
        mine, others = self._object(one), self._object(other)
        able = (name for name in mine.names if all(map(self._references.types, mine.of(name))))
        return next((name for name in able if self._any_apart(mine.of(name), others.of(name), 0)), None)

    def apart(self, one: Any, other: Any, *, closed: bool = False, depth: int = 0) -> bool:
        """Whether no value of `one` satisfies `other`. closed: `one` has no properties but those that it lists."""
        one, other = self._references.followed(one), self._references.followed(other)
        types = self._references.types(one) & self._references.types(other)
        if not types or depth > _MOST_DEPTH:
            return not types
        for this, that in ((one, other), (other, one)):
            values = self._references.values(this)
            if values is not None and all(self._values.follows(value, that) is False for value in values):
                return True
            ways = (each.get(name) for each in self.joined(this) for name in ("anyOf", "oneOf"))
            if any(each and all(self.apart(way, that, depth=depth + 1) for way in each) for each in ways):
                return True
        if types == {"string"}:
            mine, others = (self._patterns(each) for each in (one, other))
            return any(disjoint(a, b) for a, b in product(mine, others))
        return types == {"object"} and self._objects_apart(self._object(one, closed), self._object(other), depth)

    def _objects_apart(self, one: _Object, other: _Object, depth: int) -> bool:
        required = dict.fromkeys([*one.required, *other.required])
        if len(required) > min(one.most, other.most):
            return True
        return any(self._any_apart(one.of(name), other.of(name), depth + 1) for name in required)

    def _any_apart(self, mine: Sequence[Any], others: Sequence[Any], depth: int) -> bool:
        return any(self.apart(a, b, depth=depth) for a, b in product(mine, others))

    def joined(self, schema: Any) -> list[Mapping[str, Any]]:
        """A schema and those that it joins by allOf."""
        waiting, found = [schema], list[Mapping[str, Any]]()
        while waiting and len(found) < _MOST_JOINED:
            one = self._references.followed(waiting.pop(0))
            if isinstance(one, Mapping):
                found.append(one)
                waiting += one["allOf"] if isinstance(one.get("allOf"), list) else []
        return found

    def _object(self, schema: Any, closed: bool = False) -> _Object:
        return _Object(self.joined(schema), closed)

    def _patterns(self, schema: Any) -> Iterator[str]:
        yield from (one["pattern"] for one in self.joined(schema) if isinstance(one.get("pattern"), str))


class _Object:
    """What several schemas together say of an object. closed: the first one's properties are all."""

    def __init__(self, joined: Sequence[Mapping[str, Any]], closed: bool) -> None:
        self._joined = joined
        self._closed = closed

    @cached_property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name for one in self._joined for name in _mapping(one.get("properties"))))

    @cached_property
    def required(self) -> list[str]:
        return [name for one in self._joined if isinstance(one.get("required"), list) for name in one["required"]]

    @cached_property
    def most(self) -> float:
        bounds = (one.get("maxProperties") for one in self._joined)
        return min((bound for bound in bounds if isinstance(bound, int | float)), default=float("inf"))

    def of(self, name: str) -> list[Any]:
        """The schemas that a property has to satisfy."""
        schemas: list[Any] = []
        for n, one in enumerate(self._joined):
            named, patterns = _mapping(one.get("properties")), _mapping(one.get("patternProperties"))
            schemas += [each for key, each in patterns.items() if found(key, name) is not False]
            if name in named:
                schemas.append(named[name])
            elif not patterns and "additionalProperties" in one:
                schemas.append(one["additionalProperties"])
            elif not patterns and named and self._closed and n == 0:
                schemas.append(False)
        return schemas or [True]


def _listed(value: Any) -> list[Any]:
    return [value] if isinstance(value, str) else value if isinstance(value, list) else []


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
