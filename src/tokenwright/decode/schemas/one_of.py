"""Finds alternatives of a oneOf that certainly no value satisfies together, and the property that differs."""

import re
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from tokenwright.decode.schemas.references import RESTRICTING, References, listed, mapping, same

MOST_COMPARED = 20_000  # pairs of schemas in one document, and pairs of values; a pair takes some 10 us
_MOST_DEPTH = 6


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
        mine, others = self._properties(one), self._properties(other)
        able = (name for name in mine if name in others and self._references.types(mine[name]))
        return next((name for name in able if self.apart(mine[name], others[name])), None)

    def apart(self, one: Any, other: Any, depth: int = 0) -> bool:
        """Whether types, listed values, or a property that one of them demands, leave no value for both."""
        self._compared += 1
        one, other = self._references.followed(one), self._references.followed(other)
        types = self._references.types(one) & self._references.types(other)
        if not types or depth > _MOST_DEPTH or self.exhausted:
            return not types
        if self._unequal(self._references.values(one), self._references.values(other)):
            return True
        mine, others = self._properties(one), self._properties(other)
        demanded = dict.fromkeys(name for each in (one, other) for name in listed(mapping(each).get("required")))
        shared = [name for name in demanded if name in mine and name in others]
        return types == {"object"} and any(self.apart(mine[name], others[name], depth + 1) for name in shared)

    def _properties(self, schema: Any) -> Mapping[str, Any]:
        return mapping(mapping(self._references.followed(schema)).get("properties"))

    def _unequal(self, values: Sequence[Any] | None, others: Sequence[Any] | None) -> bool:
        if values is None or others is None:
            return False
        self._compared += len(values) * len(others)
        return not self.exhausted and not any(same(one, other) for one, other in product(values, others))


def apart_names(names: Sequence[str], patterns: Sequence[str]) -> bool:
    """Whether, for llguidance, no name matches two patterns, or a pattern and a listed name. Takes milliseconds."""
    from llguidance import LLMatcher, LLTokenizer

    each = [*(f"^{re.escape(name)}$" for name in names), *patterns]
    schema = {"type": "object", "patternProperties": dict.fromkeys(each, True)}
    grammar = LLMatcher.grammar_from_json_schema(schema)
    return len(each) < 2 or "disjoint" not in str(LLMatcher.validate_grammar(grammar, LLTokenizer("byte")))


def required_alone(schema: Any) -> list[str]:
    """The properties that a schema requires, if it says nothing else."""
    said = mapping(schema)
    restricting = said.keys() & RESTRICTING
    of_objects = restricting <= {"required", "type"} and said.get("type", "object") == "object"
    return [name for name in listed(said.get("required")) if isinstance(name, str)] if of_objects else []
