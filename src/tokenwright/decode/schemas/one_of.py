"""Tells, only if it is certain, that no value satisfies two alternatives of a oneOf, and the property that differs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from tokenwright.decode.schemas.references import RESTRICTING, References, listed, mapping, same

MOST_COMPARED = 20_000  # pairs of schemas in one document, and pairs of values; a pair takes some 10 us
_MOST_DEPTH = 6
_MOST_JOINED = 30


class Comparison:
    """Compares the schemas of one document. exhausted: no more comparisons are allowed."""

    def __init__(self, references: References) -> None:
        self._references = references
        self._compared = 0

    @property
    def exhausted(self) -> bool:
        return self._compared > MOST_COMPARED

    def parting(self, one: Any, other: Any) -> str | None:
        """A property of `one` with which no value satisfies both, or None."""
        mine, others = _Object(self._joined(one)), _Object(self._joined(other))
        able = (name for name in mine.names() if all(map(self._references.types, mine.of(name))))
        return next((name for name in able if self._any_apart(mine.of(name), others.of(name), 0)), None)

    def apart(self, one: Any, other: Any, *, closed: bool = False, depth: int = 0) -> bool:
        """Whether no value of `one` satisfies `other`. closed: `one` has only its listed properties."""
        self._compared += 1
        one, other = self._references.followed(one), self._references.followed(other)
        types = self._references.types(one) & self._references.types(other)
        if not types or depth > _MOST_DEPTH or self.exhausted:
            return not types
        if self._unequal(self._references.values(one), self._references.values(other)):
            return True
        for this, that in ((one, other), (other, one)):
            ways = (each.get(name) for each in self._joined(this) for name in ("anyOf", "oneOf"))
            if any(each and all(self.apart(way, that, depth=depth + 1) for way in each) for each in ways):
                return True
        return types == {"object"} and self._objects_apart(
            _Object(self._joined(one), closed), _Object(self._joined(other)), depth
        )

    def _unequal(self, values: Sequence[Any] | None, others: Sequence[Any] | None) -> bool:
        if values is None or others is None:
            return False
        self._compared += len(values) * len(others)
        return not self.exhausted and not any(same(one, other) for one, other in product(values, others))

    def _objects_apart(self, one: _Object, other: _Object, depth: int) -> bool:
        required = dict.fromkeys([*one.required(), *other.required()])
        if len(required) > min(one.most(), other.most()):
            return True
        return any(self._any_apart(one.of(name), other.of(name), depth + 1) for name in required)

    def _any_apart(self, mine: Sequence[Any], others: Sequence[Any], depth: int) -> bool:
        return any(self.apart(a, b, depth=depth) for a, b in product(mine, others))

    def _joined(self, schema: Any) -> list[Mapping[str, Any]]:
        waiting, found = [schema], list[Mapping[str, Any]]()
        while waiting and len(found) < _MOST_JOINED:
            one = self._references.followed(waiting.pop(0))
            if isinstance(one, Mapping):
                found.append(one)
                waiting += listed(one.get("allOf"))
        return found


def apart_names(names: Sequence[str], patterns: Sequence[str]) -> bool:
    """Whether, for llguidance, no name matches two patterns, or a pattern and a listed name. Takes milliseconds."""
    from llguidance import LLMatcher, LLTokenizer

    each = [*(f"^{re.escape(name)}$" for name in names), *patterns]
    schema = {"type": "object", "patternProperties": dict.fromkeys(each, True)}
    grammar = LLMatcher.grammar_from_json_schema(schema)
    return len(each) < 2 or "disjoint" not in str(LLMatcher.validate_grammar(grammar, LLTokenizer("byte")))


def required_alone(schema: Any) -> list[str]:
    """The properties that a schema demands, if it says nothing else."""
    said = mapping(schema)
    restricting = said.keys() & RESTRICTING
    of_objects = restricting <= {"required", "type"} and said.get("type", "object") == "object"
    return [name for name in listed(said.get("required")) if isinstance(name, str)] if of_objects else []


class _Object:
    """Several schemas of one object together. closed: the first one's properties are all."""

    def __init__(self, joined: Sequence[Mapping[str, Any]], closed: bool = False) -> None:
        self._joined = joined
        self._closed = closed

    def names(self) -> list[str]:
        return list(dict.fromkeys(name for one in self._joined for name in mapping(one.get("properties"))))

    def required(self) -> list[str]:
        return [name for one in self._joined for name in listed(one.get("required"))]

    def most(self) -> float:
        bounds = (one.get("maxProperties") for one in self._joined)
        return min((bound for bound in bounds if isinstance(bound, int | float)), default=float("inf"))

    def of(self, name: str) -> list[Any]:
        schemas: list[Any] = []
        for n, one in enumerate(self._joined):
            named, patterns = mapping(one.get("properties")), mapping(one.get("patternProperties"))
            if name in named:
                schemas.append(named[name])
            elif not patterns and "additionalProperties" in one:
                schemas.append(one["additionalProperties"])
            elif not patterns and named and self._closed and n == 0:
                schemas.append(False)
        return schemas or [True]
