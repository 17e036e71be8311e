"""Calls in Python's syntax, and in Gemma's, which encloses texts in marks."""

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenwright.llm.chat.chat_options import Tool
from tokenwright.llm.chat.tool_forms.form import LONGEST_NAME, WORDS, CallSink, as_json
from tokenwright.llm.chat.tool_forms.lark import LarkRules, named_values, parameters_of
from tokenwright.llm.chat.tool_forms.source import NoCall, Steps, TextSource

_PYTHON = re.compile(r"(?P<text>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")|(?P<word>True|False|None)\b", re.DOTALL)
_PLAIN = {"type": ["number", "boolean", "null"]}


@dataclass(frozen=True, slots=True)
class PythonCall:
    """The call: before NAME open key equals value, ... shut.

    The values are Python's; with a `quote`, they are JSON with bare keys, and texts without escapes between quotes.
    """

    before: str = ""
    open: str = "("
    equals: str = "="
    shut: str = ")"
    quote: str = ""
    comma: str = ", "

    @property
    def first(self) -> str:
        return self.before

    def read(self, source: TextSource, sink: CallSink, close: str) -> Steps[None]:  # noqa: ARG002
        name: list[str] = []

        def add(part: str) -> None:
            name.append(part)
            if len("".join(name)) > LONGEST_NAME or not re.fullmatch(r"[\w.\-]*", "".join(name).strip()):
                raise NoCall

        if self.before:
            yield from source.expect(self.before)
        yield from source.until(self.open, give=add)
        sink.begin("".join(name).strip())
        count = 0
        while True:
            yield from source.space()
            found = yield from source.begins(self.shut, ",")
            if found is not None:
                source.take(1)
                if found == self.shut:
                    break
                continue
            key: list[str] = []
            yield from source.until(self.equals, give=key.append)
            yield from source.space()
            sink.arguments(("{" if count == 0 else ", ") + as_json("".join(key).strip()) + ": ")
            count += 1
            value: list[str] = []
            yield from _value(source, self.quote, value)
            sink.arguments(_of_python("".join(value).strip(), literals=not self.quote))
        sink.arguments("}" if count else "{}")

    def write(self, name: str, arguments: Mapping[str, Any], index: int) -> str:  # noqa: ARG002
        shown = (f"{key}{self.equals}{self._written(value)}" for key, value in arguments.items())
        return f"{self.before}{name}{self.open}{self.comma.join(shown)}{self.shut}"

    def _written(self, value: Any) -> str:
        match value:
            case str() if self.quote:
                return f"{self.quote}{value}{self.quote}"
            case bool() | None if not self.quote:
                return str(value)
            case dict():
                keys = [f"{key}:" if self.quote else f"{as_json(key)}: " for key in value]
                return "{" + self.comma.join(map(str.__add__, keys, map(self._written, value.values()))) + "}"
            case list():
                return "[" + self.comma.join(map(self._written, value)) + "]"
        return as_json(value)

    def rule(self, tool: Tool, lark: LarkRules) -> str:
        members = self._members(tool.parameters, lark, self.equals)
        return f"{lark.literal(self.before + tool.name + self.open)} {members} {lark.literal(self.shut)}"

    def _members(self, schema: Mapping[str, Any], lark: LarkRules, equals: str) -> str:
        listed, comma = parameters_of(schema), lark.literal(self.comma)
        if listed is None:
            one = f"{lark.add('KEY', '/[A-Za-z_][A-Za-z0-9_]*/')} {lark.literal(equals)} {self._value({}, lark)}"
            return f"({one} ({comma} {one})*)?"
        firsts, after, needed = list[str](), "", False  # a flat list of alternatives: llguidance refuses deep groups
        for key, of, required in reversed(listed):
            one = f"{lark.literal(key + equals)} {self._value(of, lark)}"
            firsts, needed = ([], True) if required else (firsts, needed)
            firsts.append(f"{one} {after}")
            after = lark.fresh("rest", f"{comma} {one} {after}" if required else f"({comma} {one})? {after}")
        return f"({' | '.join(reversed(firsts))}){'' if needed else '?'}" if firsts else ""

    def _value(self, schema: Any, lark: LarkRules) -> str:
        schema = schema if isinstance(schema, Mapping) else {}
        if not self.quote:
            words = {"boolean": '("True" | "False")', "null": '"None"'}
            return words.get(str(schema.get("type"))) or lark.json(schema)
        if (named := named_values(schema)) is not None:
            return f"({' | '.join(lark.literal(f'{self.quote}{one}{self.quote}') for one in named)})"
        match schema:
            case {"type": "string"}:
                return f"{lark.literal(self.quote)} {lark.until(self.quote)}"
            case {"type": "array"}:
                one = lark.fresh("item", self._value(schema.get("items"), lark))  # a rule, because it is used twice
                return f"{lark.literal('[')} ({one} ({lark.literal(',')} {one})*)? {lark.literal(']')}"
            case {"type": "object"}:
                inner = self._members(schema, lark, ":")
                return lark.fresh("object", f"{lark.literal('{')} {inner} {lark.literal('}')}")
            case {"type": "number" | "integer" | "boolean" | "null"}:
                return lark.json(schema)
        kinds = ({"type": "string"}, {"type": "array"}, {"type": "object"}, _PLAIN)
        return lark.once(
            "any", lambda: " | ".join(self._value(one, lark) if one is not _PLAIN else lark.json(one) for one in kinds)
        )


def _value(source: TextSource, quote: str, parts: list[str]) -> Steps[None]:
    """Read a value in Python's syntax or, with a `quote` around texts and perhaps keys, as JSON."""
    quotes, opening, closing = ((quote,), "{[", "}]") if quote else (("'", '"'), "{[(", "}])")
    depth = 0
    while True:
        bare: list[str] = []
        found = yield from source.until(*quotes, *opening, *closing, ",", give=bare.append, keep=True)
        key, colon, value = "".join(bare).rpartition(":")
        parts.append(f"{as_json(key.strip())}:{value}" if quote and depth and key.strip() else f"{key}{colon}{value}")
        if depth == 0 and found in (*closing, ","):
            return
        source.take(len(found))
        if found in quotes:
            text: list[str] = []
            yield from source.until(found, give=text.append)
            while not quote and _is_escaped(text):
                text.append(found)
                yield from source.until(found, give=text.append)
            parts.append(as_json("".join(text)) if quote else "".join((found, *text, found)))
        else:
            parts.append(found)
        depth += (found in opening) - (found in closing)


def _is_escaped(parts: list[str]) -> bool:
    """Whether a text ends with an odd number of backslashes, in constant time."""
    count = 0
    for part in reversed(parts):
        count += len(part) - len(part.rstrip("\\"))
        if part.rstrip("\\"):
            break
    return bool(count & 1)


def _of_python(text: str, literals: bool) -> str:
    """A value in Python or JSON as JSON; anything else as a JSON string."""

    def spelled(match: re.Match[str]) -> str:
        return WORDS[match["word"]] if match["word"] else as_json(ast.literal_eval(match["text"]))

    try:
        made = _PYTHON.sub(spelled, text) if literals else WORDS.get(text, text)
        json.loads(made)
    except (ValueError, SyntaxError, RecursionError):
        return as_json(text)
    return made
