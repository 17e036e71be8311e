"""How one call is written: what every such syntax can do. There are three modules of them, by kind."""

import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from tokenwright.llm.chat.chat_request import Tool
from tokenwright.llm.chat.tool_forms.lark import LarkRules
from tokenwright.llm.chat.tool_forms.source import NoCall, Steps, TextSource

LONGEST_NAME = 256  # characters of what stands where a name must be
WORDS = {"True": "true", "False": "false", "None": "null"}  # of Python, as JSON has them


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

    def read(self, source: TextSource, sink: CallSink, close: str) -> Steps[None]:
        """Read one call. close: what may stand after the last one. Raises NoCall, Cut."""

    def write(self, name: str, arguments: Mapping[str, Any], index: int) -> str: ...

    def rule(self, tool: Tool, lark: LarkRules) -> str:
        """The expression of a call in a grammar. Raises RequestError."""


def name_into(parts: list[str]) -> Callable[[str], None]:
    """Collects what stands where a name must be. The result raises NoCall for a text that is too long."""

    def add(part: str) -> None:
        parts.append(part)
        if sum(map(len, parts)) > LONGEST_NAME:
            raise NoCall

    return add


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
