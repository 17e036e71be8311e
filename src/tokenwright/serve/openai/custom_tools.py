"""Custom tools, whose input is text. The model sees functions with one string."""

import json
import re
from collections.abc import Collection, Iterator
from contextlib import suppress

from tokenwright.llm.chat.chat_options import read_json
from tokenwright.serve.openai.message_bodies import CustomFormat
from tokenwright.serve.service.types import Tool, ToolCallDelta

INPUT = "input"
MOST_ESCAPE = 12  # characters of a cut JSON escape, and of half a pair before it
_BEGUN = re.compile(r'\{\s*"input"\s*:\s*"')


def custom_tool(name: str, description: str | None, form: CustomFormat | None) -> Tool:
    """The function of a custom tool. Its regular expression is enforced, a Lark grammar only described."""
    rule = None if form is None else form.rule
    text: dict[str, str] = {"type": "string"}
    description_parts = [description or ""]
    if rule is not None:
        description_parts.append(f"The input follows this {rule[0]} grammar:\n{rule[1]}")
        text |= {"pattern": f"^(?:{rule[1]})$"} if rule[0] == "regex" else {}
    parameters = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
    return Tool(name, "\n\n".join(filter(None, description_parts)), parameters)


def is_described_only(form: CustomFormat | None) -> bool:
    return form is not None and form.rule is not None and form.rule[0] == "lark"


def input_of(arguments: str) -> str:
    """The input in a call's arguments, which may be cut off."""
    begun = _BEGUN.match(arguments)
    for cut in range(MOST_ESCAPE) if begun else ():
        for ending in ("", '"}'):
            with suppress(ValueError, RecursionError):
                found = str(read_json(arguments[: len(arguments) - cut] + ending)[INPUT])
                return found.rstrip("\ufffd") if cut else found
    return ""


def arguments_of_input(text: str) -> str:
    return json.dumps({INPUT: text}, ensure_ascii=False)


class CustomCalls:
    """The calls of one text. Fragments of calls to custom tools (`names`) are held until they are whole."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held: dict[int, ToolCallDelta] = {}

    def take(self, calls: Collection[ToolCallDelta]) -> Iterator[tuple[ToolCallDelta, bool]]:
        """Yields fragments to send, and whether each is a custom call, whose `arguments` are its input."""
        for call in calls:
            if call.id is not None:
                yield from self.rest()
            if call.index in self._held:
                self._held[call.index].arguments += call.arguments
            elif call.id is not None and call.name in self._names:
                self._held[call.index] = ToolCallDelta(call.index, call.id, call.name, call.arguments)
            else:
                yield call, False

    def rest(self) -> Iterator[tuple[ToolCallDelta, bool]]:
        held, self._held = self._held, {}
        for call in held.values():
            yield ToolCallDelta(call.index, call.id, call.name, input_of(call.arguments)), True
