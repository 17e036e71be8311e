"""Builds a Lark grammar from rules, and from texts in which special tokens stand for themselves."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from tokenwright.decode.grammars.grammar_kinds import json_rule
from tokenwright.errors import RequestError
from tokenwright.sampling_params import MOST_GRAMMAR

Kind = Literal["text", "json", "either"]
Kinds = dict[tuple[int, int, int], Kind]  # of parts of schemas, by id()s and depth: many references may lead to one
_COMBINED = ("allOf", "anyOf", "oneOf", "$ref", "patternProperties")


def parameters_of(schema: Mapping[str, Any]) -> list[tuple[str, Any, bool]] | None:
    """Each parameter, its schema with definitions, and whether it is required; None: the schema lists none.

    Raises RequestError.
    """
    listed, names = schema.get("properties", {}), schema.get("required", ())
    if not isinstance(listed, Mapping):
        raise RequestError("tools: properties of a schema must be an object")
    if not isinstance(names, list | tuple) or not all(isinstance(one, str) for one in names):
        raise RequestError("tools: required of a schema must be a list of names")
    is_open = schema.get("additionalProperties", "properties" not in schema) is not False
    if any(name in schema for name in _COMBINED) or (is_open and not listed):
        return None
    required = frozenset(names)
    return [(key, _alone(schema, one), key in required) for key, one in listed.items()]


def _alone(schema: Mapping[str, Any], one: Any) -> Any:
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    return {**definitions, **one} if isinstance(one, Mapping) else one


def kind_of(schema: Mapping[str, Any], key: str, known: Kinds) -> Kind:
    """The kind of a parameter's values. `known` keeps the kinds found, for other parameters."""
    listed = schema.get("properties")
    found = listed.get(key) if isinstance(listed, Mapping) else None
    return _kind(schema, found, 8, known) if isinstance(found, Mapping) else "either"


def _kind(whole: Mapping[str, Any], schema: Mapping[str, Any], depth: int, known: Kinds) -> Kind:
    if (place := (id(whole), id(schema), depth)) not in known:
        known[place] = _read_kind(whole, schema, depth, known)
    return known[place]


def _read_kind(whole: Mapping[str, Any], schema: Mapping[str, Any], depth: int, known: Kinds) -> Kind:
    if depth == 0:
        return "either"
    if isinstance(reference := schema.get("$ref"), str):
        found = _referred(whole, reference)
        return "either" if found is None else _kind(whole, found, depth - 1, known)
    if isinstance(values := schema.get("enum", [schema["const"]] if "const" in schema else None), list):
        return _together({"text" if isinstance(value, str) else "json" for value in values})
    if isinstance(kinds := schema.get("type"), str | list):
        names = [kinds] if isinstance(kinds, str) else kinds
        return _together({"text" if name == "string" else "json" for name in names})
    for name in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(name), list):
            return _together({_kind(whole, one, depth - 1, known) for one in options if isinstance(one, Mapping)})
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
    if not isinstance(schema, Mapping):
        return None
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not isinstance(values, list) or not values or not all(isinstance(one, str) and one for one in values):
        return None
    return values


_JSON_SYMBOLS = re.compile(r'"[^"]*"|\s+|.')  # in JSON whose strings have no escapes
_ANY_TEXT = r"/(.|\n)*/"


class LarkRules:
    """The rules of a grammar. symbols: split JSON into symbols, because the lexer prefers longer ones to text."""

    def __init__(self, special: Mapping[str, int], ends: Iterable[int] = (), *, symbols: bool = False) -> None:
        self._special = dict(special)
        self._ends = frozenset(ends)
        self._symbols = symbols
        self.kinds: Kinds = {}  # kinds in the schemas of this grammar's tools
        self._rules: dict[str, str] = {}
        self._length = 0  # characters of all rules
        names = sorted(self._special, key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, names)) if names else r"(?!)")

    @property
    def special(self) -> list[int]:
        return list(self._special.values())

    @property
    def special_names(self) -> frozenset[str]:
        return frozenset(self._special)

    def add(self, name: str, body: str) -> str:
        """Add a rule, or a symbol (in capitals); repeating one is allowed."""
        assert self._rules.get(name, body) == body, f"{name} has two meanings"
        self._rules[name] = body
        return name

    def fresh(self, stem: str, body: str, options: str = "") -> str:
        self._length += len(body)
        if self._length > MOST_GRAMMAR:  # each argument repeats its schema's definitions
            raise RequestError(f"the grammar of these tools has more than {MOST_GRAMMAR:,} characters")
        name = f"{stem}_{len(self._rules)}"
        self._rules[f"{name}{options}"] = body
        return name

    def once(self, name: str, make: Callable[[], str]) -> str:
        """Add a rule, which may refer to itself, unless it exists."""
        if name not in self._rules:
            self._rules[name] = ""
            self._rules[name] = make()
        return name

    def literal(self, text: str) -> str:
        places = [match.span() for match in self._names.finditer(text)]
        gaps = zip([0, *(end for _, end in places)], [*(start for start, _ in places), len(text)], strict=True)
        parts = [self._plain(text[a:b]) for a, b in gaps]
        tokens = [self._token(match[0]) for match in self._names.finditer(text)]
        return " ".join(filter(None, (one for pair in zip(parts, [*tokens, ""], strict=True) for one in pair)))

    def _plain(self, text: str) -> str:
        parts = _JSON_SYMBOLS.findall(text) if self._symbols else [text]
        return " ".join(json.dumps(part, ensure_ascii=False) for part in parts if part)

    def _token(self, name: str) -> str:
        at = self._special[name]
        return "" if at in self._ends else f"<[{at}]>"

    def text(self) -> str:
        return self.add("TEXT", _ANY_TEXT)

    def without(self, mark: str) -> str:
        """A rule of any text without this mark. A special token is never part of a text."""
        inside = _ANY_TEXT.strip("/")
        barred = "" if self._names.search(mark) else f" & ~/{inside}{_escaped(mark)}{inside}/"
        return self.add("TEXT", _ANY_TEXT + barred)

    def space(self) -> str:
        return self.add("SPACE", r"/[ \n]{1,2}/") + "?"

    def until(self, mark: str, before: str = _ANY_TEXT) -> str:
        """A rule of any text up to and with the first of these marks. before: a regular expression of the text."""
        first = self._names.match(mark)
        if first is not None:  # a special token is never part of a text
            return self.fresh("until", f"{self.fresh('TEXT', before)} {self.literal(mark)}".strip())
        spelled = self._names.split(mark)[0]
        rest = self.literal(mark[len(spelled) :])
        upto = self.fresh("upto", f"{before.rstrip('/')}{_escaped(spelled)}/", "[lazy]")
        return self.fresh("until", f"{upto} {rest}".strip())

    def closed(self, mark: str) -> str:
        """A rule of any text up to a closing mark, which closes only before another mark (<)."""
        first = self.until(mark)
        if self._names.search(mark) is not None:
            return first
        more = self.fresh("more", f"/[ \\n]*[^ \\n<](.|\\n)*{_escaped(mark)}/", "[lazy]")
        return f"{first} {more}*"

    def json(self, schema: Mapping[str, Any]) -> str:
        return self.fresh("json", json_rule(schema))

    def written(self, start: str) -> str:
        return "\n".join([f"start: {start}", *(f"{name}: {body}" for name, body in self._rules.items())])


def _escaped(text: str) -> str:
    return re.sub(r"([\\/.*+?()\[\]{}|^$])", r"\\\1", text).replace("\n", "\\n")
