"""Calls in the syntax of Python."""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenwright.llm.chat.chat_options import Tool
from tokenwright.llm.chat.tool_forms.form import LONGEST_NAME, WORDS, CallSink, as_json
from tokenwright.llm.chat.tool_forms.lark import LarkRules, parameters_of
from tokenwright.llm.chat.tool_forms.source import NoCall, Steps, TextSource

_PYTHON = re.compile(r"(?P<text>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")|(?P<word>True|False|None)\b", re.DOTALL)


@dataclass(frozen=True, slots=True)
class PythonCall:
    """NAME(key=value, ...), with the values of Python."""

    first = ""

    def read(self, source: TextSource, sink: CallSink, close: str) -> Steps[None]:  # noqa: ARG002
        name: list[str] = []

        def add(part: str) -> None:
            name.append(part)
            if len("".join(name)) > LONGEST_NAME or not re.fullmatch(r"[\w.\-]*", "".join(name).strip()):
                raise NoCall

        yield from source.until("(", give=add)
        sink.begin("".join(name).strip())
        count = 0
        while True:
            yield from source.space()
            found = yield from source.begins(")", ",")
            if found is not None:
                source.take(1)
                if found == ")":
                    break
                continue
            key: list[str] = []
            yield from source.until("=", give=key.append)
            yield from source.space()
            sink.arguments(("{" if count == 0 else ", ") + as_json("".join(key).strip()) + ": ")
            count += 1
            value: list[str] = []
            yield from _python_value(source, value)
            sink.arguments(_of_python("".join(value).strip()))
        sink.arguments("}" if count else "{}")

    def write(self, name: str, arguments: Mapping[str, Any], index: int) -> str:  # noqa: ARG002
        return f"{name}({', '.join(f'{key}={_as_python(value)}' for key, value in arguments.items())})"

    def rule(self, tool: Tool, lark: LarkRules) -> str:
        listed = parameters_of(tool.parameters)
        if listed is None:
            value = lark.json({})
            one = f"{lark.add('KEY', '/[A-Za-z_][A-Za-z0-9_]*/')} {lark.literal('=')} {value}"
            inner = f"({one} ({lark.literal(', ')} {one})*)?"
            return f"{lark.literal(tool.name + '(')} {inner} {lark.literal(')')}"
        # Required arguments come first; each other one brings the comma before it.
        listed = sorted(listed, key=lambda one: not one[2])
        parts: list[str] = []
        for at, (key, schema, required) in enumerate(listed):
            comma = lark.literal(", ") if at else ""
            one = f"{lark.literal(key + '=')} {_python_rule(schema, lark)}"
            parts.append(f"{comma} {one}" if required else f"({comma} {one})?")
        if parts and not listed[0][2]:  # none is required: the first that is written has no comma
            parts = [_optional(listed, lark)]
        return f"{lark.literal(tool.name + '(')} {' '.join(parts)} {lark.literal(')')}"


def _optional(listed: Sequence[tuple[str, Any, bool]], lark: LarkRules) -> str:
    comma, rest, firsts = lark.literal(", "), "", list[str]()
    for key, schema, _ in reversed(listed):
        one = f"{lark.literal(key + '=')} {_python_rule(schema, lark)}"
        firsts.append(f"{one} {rest}".strip())
        rest = lark.fresh("rest", f"({comma} {one})? {rest}".strip())
    return f"({' | '.join(reversed(firsts))})?"


def _python_rule(schema: Any, lark: LarkRules) -> str:
    match schema:
        case {"type": "boolean"}:
            return '("True" | "False")'
        case {"type": "null"}:
            return '"None"'
    return lark.json(schema if isinstance(schema, Mapping) else {})


def _python_value(source: TextSource, parts: list[str]) -> Steps[None]:
    depth, quote = 0, ""
    while True:
        at = 0
        while at < len(source.text):
            char = source.text[at]
            if quote:
                if char == "\\":
                    if at + 1 == len(source.text):
                        break
                    at += 1
                elif char == quote:
                    quote = ""
            elif char in "'\"":
                quote = char
            elif char in "([{":
                depth += 1
            elif char in ")]}" and depth:
                depth -= 1
            elif depth == 0 and char in ",)":
                parts.append(source.take(at))
                return
            at += 1
        parts.append(source.take(at))
        yield from source.more()


def _of_python(text: str) -> str:
    """A Python value as JSON; anything else as a text."""

    def spelled(match: re.Match[str]) -> str:
        return WORDS[match["word"]] if match["word"] else as_json(ast.literal_eval(match["text"]))

    try:
        made = _PYTHON.sub(spelled, text)
        json.loads(made)
    except (ValueError, SyntaxError, RecursionError):
        return as_json(text)
    return made


def _as_python(value: Any) -> str:
    match value:
        case bool() | None:
            return str(value)
        case dict():
            return "{" + ", ".join(f"{as_json(key)}: {_as_python(one)}" for key, one in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(_as_python, value)) + "]"
    return as_json(value)
