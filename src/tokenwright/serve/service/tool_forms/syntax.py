"""How one call is written: as JSON, as a name and JSON, with a tag for each argument, or like Python.

Each of these reads a call from a `Source`, and puts what it finds into a `CallSink`; writes a call; and makes the rule
of a grammar that holds calls of a tool to its schema.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tokenwright.serve.service.tool_forms.lark import LarkRules
from tokenwright.serve.service.tool_forms.parameters import Kind, kind_of, named_values, parameters_of
from tokenwright.serve.service.tool_forms.source import Cut, NoCall, Source, Steps
from tokenwright.serve.service.types import Tool

LONGEST_NAME = 256  # characters of what stands where a name must be


class CallSink(Protocol):
    """Takes a call while it is read."""

    def begin(self, name: str) -> None:
        """The tool is known. Raises NoCall for a tool that there is not."""

    def arguments(self, text: str) -> None:
        """The next characters of the arguments' JSON."""

    @property
    def schema(self) -> Mapping[str, Any]:
        """The schema of the tool's arguments."""


class CallSyntax(Protocol):
    """How one call is written. `first`: what it begins with, as far as that is the same for all calls."""

    @property
    def first(self) -> str: ...

    def read(self, source: Source, sink: CallSink, close: str) -> Steps[None]:
        """Read one call. close: what may stand after the last one. Raises NoCall, Cut."""

    def write(self, name: str, arguments: Mapping[str, Any], index: int) -> str: ...

    def rule(self, tool: Tool, lark: LarkRules, close: str) -> str:
        """The expression of a call; where the calls' end is part of it (`closes`), with that."""

    @property
    def closes(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class JsonCall:
    """{"name": ..., "arguments": {...}}, whatever the order of its fields when it is read; extra: fields before."""

    name: str = "name"
    arguments: str = "arguments"
    extra: str = ""  # such as '"tool_call_id": "{index}", '

    closes = False
    first = "{"

    def read(self, source: Source, sink: CallSink, close: str) -> Steps[None]:  # noqa: ARG002
        yield from source.expect("{")
        begun = yield from self._members(source, sink, False, None)
        if not begun:
            raise NoCall

    def _members(self, source: Source, sink: CallSink, begun: bool, early: str | None) -> Steps[bool]:
        given = False
        while True:
            yield from source.space()
            if (yield from source.begins("}", ",")) is None:
                key = yield from _string(source)
                yield from source.space()
                yield from source.expect(":")
                yield from source.space()
                begins = yield from source.begins("{", '"')
                if key in ("function", "tool") and begins == "{":
                    source.take(1)
                    begun = given = yield from self._members(source, sink, begun, early)
                elif key in (self.name, "name", "function") and begins == '"' and not begun:
                    sink.begin((yield from _string(source)))
                    begun = True
                    if early is not None:
                        sink.arguments(early)
                elif key in (self.arguments, "arguments", "parameters") and not given and early is None:
                    early = yield from _arguments(source, sink, begun)
                    given = begun
                else:
                    yield from source.json_value(lambda _: None)
            elif source.take(1) == "}":
                if begun and not given and early is None:
                    sink.arguments("{}")
                return begun

    def write(self, name: str, arguments: Mapping[str, Any], index: int) -> str:
        extra = self.extra.replace("{index}", str(index))
        return f"{{{extra}{_json(self.name)}: {_json(name)}, {_json(self.arguments)}: {_json(arguments)}}}"

    def rule(self, tool: Tool, lark: LarkRules, close: str) -> str:  # noqa: ARG002
        before, _, after = self.extra.partition("{index}")
        extra = (
            f"{lark.literal('{' + before)} {lark.add('DIGITS', '/[0-9]{1,3}/')} {lark.literal(after)}"
            if self.extra
            else lark.literal("{")
        )
        head = f"{extra} {lark.literal(f'{_json(self.name)}: {_json(tool.name)}, {_json(self.arguments)}: ')}"
        return f"{head} {lark.json(tool.parameters)} {lark.literal('}')}"


def _string(source: Source) -> Steps[str]:
    """A string of JSON as its value."""
    text = yield from source.json_string()
    try:
        return str(json.loads(text))
    except ValueError:
        raise NoCall from None


def _arguments(source: Source, sink: CallSink, begun: bool) -> Steps[str | None]:
    """The value of the arguments' field: given to the sink if the call has begun, else returned."""
    if begun and (yield from source.begins("{")):
        yield from source.json_value(sink.arguments)
        return None
    parts: list[str] = []
    yield from source.json_value(parts.append)
    try:
        value = json.loads("".join(parts))
    except (ValueError, RecursionError):
        raise NoCall from None
    text = value if isinstance(value, str) else "".join(parts)
    if not begun:
        return text
    sink.arguments(text)
    return None


@dataclass(frozen=True, slots=True)
class NamedCall:
    """before NAME between {...} after. prefix: of the name; counted: the name ends with a colon and its number.

    aside: what may stand, with more text, between the name and `between`.
    """

    between: str
    before: str = ""
    after: str = ""
    prefix: str = ""
    counted: bool = False
    aside: str = ""

    closes = False

    @property
    def first(self) -> str:
        return self.before

    def read(self, source: Source, sink: CallSink, close: str) -> Steps[None]:  # noqa: ARG002
        if self.before:
            yield from source.expect(self.before.strip() or self.before)
        head: list[str] = []

        def add(part: str) -> None:
            head.append(part)
            if sum(map(len, head)) > LONGEST_NAME:
                raise NoCall

        yield from source.until(self.between.strip() or self.between, give=add)
        name = "".join(head).strip()
        if self.aside:
            name = name.partition(self.aside)[0].strip()
        name = re.sub(r":\d+$", "", name) if self.counted else name
        sink.begin(name.removeprefix(self.prefix))
        yield from source.space()
        while not source.text:
            yield from source.more()
        if source.text[0] != "{":
            sink.arguments("{}")
        else:
            yield from source.json_value(sink.arguments)
        if self.after:
            yield from _closing(source, self.after)

    def write(self, name: str, arguments: Mapping[str, Any], index: int) -> str:
        number = f":{index}" if self.counted else ""
        return f"{self.before}{self.prefix}{name}{number}{self.between}{_json(arguments)}{self.after}"

    def rule(self, tool: Tool, lark: LarkRules, close: str) -> str:  # noqa: ARG002
        head = lark.literal(f"{self.before}{self.prefix}{tool.name}")
        if self.counted:
            head += f" {lark.literal(':')} {lark.add('DIGITS', '/[0-9]{1,3}/')}"
        if self.aside:
            head += f" ({lark.literal(self.aside)} {lark.add('CALLID', '/[A-Za-z0-9_-]{1,40}/')})?"
        inner = f"{lark.literal(self.between)} {lark.json(tool.parameters)} {lark.literal(self.after)}"
        return f"{head} {inner}"


def _closing(source: Source, mark: str) -> Steps[None]:
    """Read what closes a call, if it is there. At the end of the text, part of it goes."""
    yield from source.space()
    core = mark.strip()
    if (yield from source.begins(core)) is not None:
        source.take(len(core))
    elif source.ended and core.startswith(source.text):
        source.take(len(source.text))


@dataclass(frozen=True, slots=True)
class TaggedCall:
    """open NAME shut, then for each argument key_open KEY key_shut value_open VALUE value_shut, then `end`.

    A text stands as it is, other values as JSON; which of them a value is follows from the schema, or from the mark
    before it (`text_open`, `json_open`). pad: stands on both sides of a value. shut "": the name ends where the line
    does, or the first argument begins.
    """

    key_open: str
    key_shut: str
    value_shut: str
    open: str = ""
    shut: str = ""
    end: str = ""
    value_open: str = ""
    text_open: str = ""
    json_open: str = ""
    pad: str = ""
    gap: str = "\n"  # between the parts, when it is written

    @property
    def closes(self) -> bool:
        return False

    @property
    def first(self) -> str:
        return self.open

    def read(self, source: Source, sink: CallSink, close: str) -> Steps[None]:
        if self.open:
            yield from source.expect(self.open.strip())
        yield from self._name(source, sink, close)
        end, count = (self.end or close).strip(), 0
        while True:
            yield from source.space()
            found = yield from source.begins(self.key_open, *filter(None, (end,)))
            if found != self.key_open:
                if (
                    found is None
                    and source.ended
                    and any(mark.startswith(source.text) for mark in (self.key_open, end))
                ):
                    raise Cut
                break
            source.take(len(found))
            key: list[str] = []
            yield from source.until(self.key_shut, give=key.append)
            sink.arguments(("{" if count == 0 else ", ") + _json("".join(key).strip()) + ": ")
            yield from self._value(source, sink, "".join(key).strip())
            count += 1
        sink.arguments("}" if count else "{}")
        if self.end and found == end:
            source.take(len(end))

    def _name(self, source: Source, sink: CallSink, close: str) -> Steps[None]:
        name: list[str] = []

        def add(part: str) -> None:
            name.append(part)
            if sum(map(len, name)) > LONGEST_NAME:
                raise NoCall

        if self.shut:
            yield from source.until(self.shut, give=add)
        else:
            yield from source.space()
            yield from source.until("\n", self.key_open, close.strip(), give=add, keep=True)
        sink.begin("".join(name).strip())

    def _value(self, source: Source, sink: CallSink, key: str) -> Steps[None]:
        kind = kind_of(sink.schema, key)
        kinds: dict[str, Kind] = {self.value_open: kind, self.text_open.strip(): "text", self.json_open.strip(): "json"}
        if marks := tuple(filter(None, kinds)):
            yield from source.space()
            kind = kinds[(yield from source.expect(*marks))]
        if self.pad and (yield from source.begins(self.pad)) is not None:
            source.take(len(self.pad))
        shuts = (self.pad + self.value_shut, self.value_shut) if self.pad else (self.value_shut,)
        if kind == "text":
            sink.arguments('"')
            yield from source.until(*shuts, give=lambda part: sink.arguments(_json(part)[1:-1]))
            sink.arguments('"')
            return
        parts: list[str] = []
        yield from source.until(*shuts, give=parts.append)
        sink.arguments(_as_json("".join(parts), kind))

    def write(self, name: str, arguments: Mapping[str, Any], index: int) -> str:  # noqa: ARG002
        shown = [
            f"{self.key_open}{key}{self.key_shut}"
            + (f"{self.gap}{self.value_open}" if self.value_open else "")
            + (self.text_open if isinstance(value, str) else self.json_open)
            + f"{self.pad}{value if isinstance(value, str) else _json(value)}{self.pad}{self.value_shut}"
            for key, value in arguments.items()
        ]
        return self.gap.join([f"{self.open}{name}{self.shut}", *shown, *filter(None, [self.end])])

    def rule(self, tool: Tool, lark: LarkRules, close: str) -> str:  # noqa: ARG002
        head = lark.literal(f"{self.open}{tool.name}{self.shut}")
        parts = [head]
        listed = parameters_of(tool.parameters)
        if listed is None:
            key = lark.until(self.key_shut, '/[^<>"]+/')
            value = lark.until(self.value_shut)
            mark = self._marked(lark, "either")
            parts.append(f"({lark.space()} {lark.literal(self.key_open)} {key} {mark} {value})*")
        else:
            for key, schema, required in listed:
                one = f"{lark.space()} {lark.literal(f'{self.key_open}{key}{self.key_shut}')}"
                one += f" {self._value_rule(tool, key, schema, lark)}"
                parts.append(one if required else f"({one})?")
        return " ".join([*parts, lark.space(), lark.literal(self.end)])

    def _marked(self, lark: LarkRules, kind: str) -> str:
        if self.text_open:
            return {
                "text": lark.literal(self.text_open),
                "json": lark.literal(self.json_open),
                "either": f"({lark.literal(self.text_open)} | {lark.literal(self.json_open)})",
            }[kind]
        return f"{lark.space()} {lark.literal(self.value_open)}" if self.value_open else ""

    def _value_rule(self, tool: Tool, key: str, schema: Any, lark: LarkRules) -> str:
        kind = kind_of(tool.parameters, key)
        mark, shut = self._marked(lark, kind), lark.literal(self.pad + self.value_shut)
        pad = lark.literal(self.pad)
        if kind == "json":
            return f"{mark} {pad} {lark.json(schema)} {shut}"
        if (named := named_values(schema)) is not None:
            return f"{mark} {pad} ({' | '.join(map(lark.literal, named))}) {shut}"
        return f"{mark} {pad} {lark.until(self.pad + self.value_shut)}"


def _as_json(text: str, kind: str) -> str:
    """A value between tags as JSON: as it is if it is JSON, else as a text."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        if kind == "json" and text.strip() in _WORDS:
            return _WORDS[text.strip()]
        return _json(text)
    return text.strip()


_WORDS = {"True": "true", "False": "false", "None": "null"}
_PYTHON = re.compile(r"(?P<text>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")|(?P<word>True|False|None)\b", re.DOTALL)


@dataclass(frozen=True, slots=True)
class PythonCall:
    """NAME(key=value, ...), with the values of Python."""

    closes = False
    first = ""

    def read(self, source: Source, sink: CallSink, close: str) -> Steps[None]:  # noqa: ARG002
        name: list[str] = []

        def add(part: str) -> None:
            name.append(part)
            if not re.fullmatch(r"\s*[\w.\-]*\s*", "".join(name)) or len("".join(name)) > LONGEST_NAME:
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
            sink.arguments(("{" if count == 0 else ", ") + _json("".join(key).strip()) + ": ")
            count += 1
            value: list[str] = []
            yield from _python_value(source, value)
            sink.arguments(_of_python("".join(value).strip()))
        sink.arguments("}" if count else "{}")

    def write(self, name: str, arguments: Mapping[str, Any], index: int) -> str:  # noqa: ARG002
        return f"{name}({', '.join(f'{key}={_as_python(value)}' for key, value in arguments.items())})"

    def rule(self, tool: Tool, lark: LarkRules, close: str) -> str:  # noqa: ARG002
        listed = parameters_of(tool.parameters)
        if listed is None:
            value = lark.json({})
            one = f"{lark.add('KEY', '/[A-Za-z_][A-Za-z0-9_]*/')} {lark.literal('=')} {value}"
            inner = f"({one} ({lark.literal(', ')} {one})*)?"
            return f"{lark.literal(tool.name + '(')} {inner} {lark.literal(')')}"
        # Required arguments come first, and each other one brings the comma before it.
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
    """The rule of arguments none of which is required: any of them, in their order."""
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


def _python_value(source: Source, parts: list[str]) -> Steps[None]:
    """Read a value of Python, up to the comma or bracket after it."""
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
    """A value of Python as JSON; a text of anything else."""

    def spelled(match: re.Match[str]) -> str:
        return _WORDS[match["word"]] if match["word"] else _json(ast.literal_eval(match["text"]))

    try:
        made = _PYTHON.sub(spelled, text)
        json.loads(made)
    except (ValueError, SyntaxError, RecursionError):
        return _json(text)
    return made


def _as_python(value: Any) -> str:
    match value:
        case bool() | None:
            return str(value)
        case dict():
            return "{" + ", ".join(f"{_json(key)}: {_as_python(one)}" for key, one in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(_as_python, value)) + "]"
    return _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
