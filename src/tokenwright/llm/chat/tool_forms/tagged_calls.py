"""Calls that give each argument its own tag."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenwright.llm.chat.chat_options import Tool
from tokenwright.llm.chat.tool_forms.form import WORDS, CallSink, as_json, name_into
from tokenwright.llm.chat.tool_forms.lark import Kind, Kinds, LarkRules, kind_of, named_values, parameters_of
from tokenwright.llm.chat.tool_forms.source import Cut, Steps, TextSource

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)  # of JSON


@dataclass(frozen=True, slots=True)
class TaggedCall:
    """The call: open NAME shut, for each argument key_open KEY key_shut value_open VALUE value_shut, then `end`.

    Texts are written without quotes, other values as JSON; the schema or the mark before a value says which. A closing
    mark closes a value only before the next key or the call's end; elsewhere it is part of a text.
    """

    key_open: str
    key_shut: str
    value_shut: str
    open: str = ""
    shut: str = ""  # "": the name ends with its line or where the first argument begins
    end: str = ""
    value_open: str = ""
    text_open: str = ""
    json_open: str = ""
    pad: str = ""  # on both sides of a value
    gap: str = "\n"  # between the parts, when it is written

    @property
    def first(self) -> str:
        return self.open

    def read(self, source: TextSource, sink: CallSink, close: str) -> Steps[None]:
        if self.open:
            yield from source.expect(self.open.strip())
        yield from self._name(source, sink, close)
        end, count, known = (self.end or close).strip(), 0, Kinds()
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
            name = "".join(key).strip()
            sink.arguments(("{" if count == 0 else ", ") + as_json(name) + ": ")
            kind = kind_of(sink.schema, name, known)
            yield from self._value(source, sink, kind, tuple(filter(None, (self.key_open, end))))
            count += 1
        sink.arguments("}" if count else "{}")
        if self.end and found == end:
            source.take(len(end))

    def _name(self, source: TextSource, sink: CallSink, close: str) -> Steps[None]:
        name: list[str] = []
        if self.shut:
            yield from source.until(self.shut, give=name_into(name))
        else:
            yield from source.space()
            yield from source.until("\n", self.key_open, close.strip(), give=name_into(name), keep=True)
        sink.begin("".join(name).strip())

    def _value(self, source: TextSource, sink: CallSink, kind: Kind, after: tuple[str, ...]) -> Steps[None]:
        kinds: dict[str, Kind] = {self.value_open: kind, self.text_open.strip(): "text", self.json_open.strip(): "json"}
        if marks := tuple(filter(None, kinds)):
            yield from source.space()
            kind = kinds[(yield from source.expect(*marks))]
        shut = self.value_shut
        if self.pad and (yield from source.begins(self.pad)) is not None:
            source.take(len(self.pad))
            shut = self.pad + shut
        parts: list[str] = []

        def give(part: str) -> None:
            if kind == "text":
                sink.arguments(as_json(part)[1:-1])
            else:
                parts.append(part)

        sink.arguments('"' if kind == "text" else "")
        while True:
            yield from source.until(shut, give=give)
            text = "".join(parts).lstrip() if kind == "json" else ""  # JSON, in whose strings a tag is text
            quoted = text[:1] in ("{", "[", '"') and '"' in _STRING.sub("", text)
            if not quoted and (yield from source.followed(*after)):
                break
            give(shut)
        sink.arguments('"' if kind == "text" else _value_of("".join(parts), kind))

    def write(self, name: str, arguments: Mapping[str, Any], index: int) -> str:  # noqa: ARG002
        shown = [
            f"{self.key_open}{key}{self.key_shut}"
            + (f"{self.gap}{self.value_open}" if self.value_open else "")
            + (self.text_open if isinstance(value, str) else self.json_open)
            + f"{self.pad}{value if isinstance(value, str) else as_json(value)}{self.pad}{self.value_shut}"
            for key, value in arguments.items()
        ]
        return self.gap.join([f"{self.open}{name}{self.shut}", *shown, *filter(None, [self.end])])

    def rule(self, tool: Tool, lark: LarkRules) -> str:
        head = lark.literal(f"{self.open}{tool.name}{self.shut}")
        parts = [head]
        listed = parameters_of(tool.parameters)
        if listed is None:
            key = lark.until(self.key_shut, '/[^<>"]+/')
            value = f"{lark.literal(self.pad)} {lark.closed(self.pad + self.value_shut)}"
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
        kind = kind_of(tool.parameters, key, lark.kinds)
        mark, shut = self._marked(lark, kind), lark.literal(self.pad + self.value_shut)
        pad = lark.literal(self.pad)
        if kind == "json":
            return f"{mark} {pad} {lark.json(schema)} {shut}"
        if (named := named_values(schema)) is not None:
            return f"{mark} {pad} ({' | '.join(map(lark.literal, named))}) {shut}"
        return f"{mark} {pad} {lark.closed(self.pad + self.value_shut)}"


def _value_of(text: str, kind: str) -> str:
    """A value between tags as JSON; anything else as a JSON string."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return WORDS[text.strip()] if kind == "json" and text.strip() in WORDS else as_json(text)
    return text.strip()
