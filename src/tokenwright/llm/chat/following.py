"""The beginnings of prompts that can follow an answer: the history, up to the next message's text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from tokenwright.llm.chat.chat_options import ChatRequest
from tokenwright.llm.chat.template_messages import thought_of
from tokenwright.llm.outputs import ToolCall

Asked = TypeVar("Asked", bound=ChatRequest)
# Beginnings of the next message; they differ, so the tokens that all prompts share depend on none of them.
PROBES = ("A", "1", "{")


def following(wanted: Asked, answer: Mapping[str, Any]) -> Iterator[Asked]:
    """The conversation, its answer (with thoughts if earlier ones have them) and one of PROBES as the next message."""
    calls: Sequence[ToolCall] = answer["tool_calls"]
    earlier = wanted.messages or ()
    message: dict[str, Any] = {"role": "assistant", "content": answer["content"]}
    if calls:
        each = [{"name": call.name, "arguments": call.arguments} for call in calls]
        pairs = zip(calls, each, strict=True)
        message["tool_calls"] = [{"id": call.id, "type": "function", "function": one} for call, one in pairs]
    if answer["reasoning"] and any(thought_of(one) for one in earlier if one.get("role") == "assistant"):
        message["reasoning_content"] = answer["reasoning"]
    said = {"role": "tool", "tool_call_id": calls[0].id, "name": calls[0].name} if calls else {"role": "user"}
    for probe in PROBES:
        yield replace(wanted, messages=[*earlier, message, {**said, "content": probe}])


def common_beginning(prompts: Iterable[Sequence[int]]) -> tuple[int, ...]:
    found: list[int] = []
    for column in zip(*prompts, strict=False):
        if len(set(column)) > 1:
            break
        found.append(column[0])
    return tuple(found)
