"""Calls whose arguments are a JSON object: a field of a larger object, or after the tool's name."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenwright.llm.chat.chat_options import Tool
from tokenwright.llm.chat.tool_forms.form import CallSink, as_json, name_into
from tokenwright.llm.chat.tool_forms.lark import LarkRules
from tokenwright.llm.chat.tool_forms.source import NoCall, Steps, TextSource


@dataclass(frozen=True, slots=True)
class JsonCall:
    """The call {"name": ..., "arguments": {...}}, read in any order of fields, and written after the fields `extra`."""

    name: str = "name"
    arguments: str = "arguments"
    extra: str = ""  # such as '"tool_call_id": "{index}", '

    first = "{"

    def read(self, source: TextSource, sink: CallSink, close: str) -> Steps[None]:  # noqa: ARG002
        yield from source.expect("{")
        begun = yield from self._members(source, sink, False, None)
        if not begun:
            raise NoCall

    def _members(self, source: TextSource, sink: CallSink, begun: bool, early: str | None) -> Steps[bool]:
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
        return f"{{{extra}{as_json(self.name)}: {as_json(name)}, {as_json(self.arguments)}: {as_json(arguments)}}}"

    def rule(self, tool: Tool, lark: LarkRules) -> str:
        before, _, after = self.extra.partition("{index}")
        extra = (
            f"{lark.literal('{' + before)} {lark.add('DIGITS', '/[0-9]{1,3}/')} {lark.literal(after)}"
            if self.extra
            else lark.literal("{")
        )
        head = f"{extra} {lark.literal(f'{as_json(self.name)}: {as_json(tool.name)}, {as_json(self.arguments)}: ')}"
        return f"{head} {lark.json(tool.parameters)} {lark.literal('}')}"


def _string(source: TextSource) -> Steps[str]:
    text = yield from source.json_string()
    try:
        return str(json.loads(text))
    except ValueError:
        raise NoCall from None


def _arguments(source: TextSource, sink: CallSink, begun: bool) -> Steps[str | None]:
    """Read the arguments' value: give it to the sink if the call has begun, else return it."""
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
    """The call: before NAME between {...} after. counted: the name ends with `:NUMBER`. `aside` may follow it."""

    between: str
    before: str = ""
    after: str = ""
    prefix: str = ""
    counted: bool = False
    aside: str = ""

    @property
    def first(self) -> str:
        return self.before

    def read(self, source: TextSource, sink: CallSink, close: str) -> Steps[None]:  # noqa: ARG002
        if self.before:
            yield from source.expect(self.before.strip() or self.before)
        head: list[str] = []
        yield from source.until(self.between.strip() or self.between, give=name_into(head))
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
        return f"{self.before}{self.prefix}{name}{number}{self.between}{as_json(arguments)}{self.after}"

    def rule(self, tool: Tool, lark: LarkRules) -> str:
        head = lark.literal(f"{self.before}{self.prefix}{tool.name}")
        if self.counted:
            head += f" {lark.literal(':')} {lark.add('DIGITS', '/[0-9]{1,3}/')}"
        if self.aside:
            head += f" ({lark.literal(self.aside)} {lark.add('CALLID', '/[A-Za-z0-9_-]{1,40}/')})?"
        inner = f"{lark.literal(self.between)} {lark.json(tool.parameters)} {lark.literal(self.after)}"
        return f"{head} {inner}"


def _closing(source: TextSource, mark: str) -> Steps[None]:
    """Read the mark that closes a call, if it follows; at the end of the text also a part of it."""
    yield from source.space()
    core = mark.strip()
    if (yield from source.begins(core)) is not None:
        source.take(len(core))
    elif source.ended and core.startswith(source.text):
        source.take(len(source.text))
