"""An answer of a model, whole or as it grows: its text, its reasoning and its calls of tools."""

from __future__ import annotations

import random
import secrets
from dataclasses import dataclass, field
from itertools import dropwhile, takewhile
from typing import Literal

from tokenwright.engine import FinishReason
from tokenwright.llm.outputs import Piece, ToolCall

Finish = Literal["stop", "length", "tool_calls"]


@dataclass(slots=True)
class ToolCallDelta:
    """A fragment of the JSON of a tool call's arguments. Only the first one of a call has `id` and `name`."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class Delta:
    """The addition of one step or more to the text number `choice`, or the sum of all: a whole answer.

    Its order: what continues a call of an earlier delta (`continued`), reasoning, text, calls that begin (`begun`).
    tokens: of its text, if logprobs were asked for. finish: why the text ended, in its last delta only; `reason` is the
    engine's word for it. unfinished: it ended inside its last call.
    """

    choice: int
    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)
    tokens: list[Piece] = field(default_factory=list)
    finish: Finish | None = None
    reason: FinishReason | None = None
    stopped: str | int | None = None
    unfinished: bool = False

    @property
    def continued(self) -> list[ToolCallDelta]:
        return list(takewhile(lambda call: call.id is None, self.tool_calls))

    @property
    def begun(self) -> list[ToolCallDelta]:
        return list(dropwhile(lambda call: call.id is None, self.tool_calls))

    @property
    def calls(self) -> list[ToolCall]:
        return [ToolCall(call.id or "", call.name or "", call.arguments) for call in self.tool_calls]

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.reasoning += delta.reasoning
        self.tokens += delta.tokens
        for part in delta.tool_calls:
            if part.id is not None:
                self.tool_calls.append(ToolCallDelta(part.index, part.id, part.name))
            self.tool_calls[part.index].arguments += part.arguments
        if delta.finish is not None:
            self.finish, self.reason, self.stopped = delta.finish, delta.reason, delta.stopped
            self.unfinished = delta.unfinished


_numbers = random.Random(secrets.randbits(256))


def new_hex(size: int) -> str:
    """An id of `size` bytes, in hexadecimal digits. Any thread may ask for one."""
    return f"{_numbers.getrandbits(8 * size):0{2 * size}x}"
