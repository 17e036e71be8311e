"""Anthropic's context_management, which leaves out parts of a conversation: old reasoning, and old results of tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenwright.serve.anthropic.bodies import Amount, AnthropicPrompted, Edit
from tokenwright.serve.http.api import About

CLEARED = "[cleared]"  # what stands in the place of a result
THINKING, TOOL_USES = "clear_thinking_20251015", "clear_tool_uses_20250919"
KEPT = {THINKING: 1, TOOL_USES: 3}  # turns and uses that stay where nothing is said
CHARACTERS = 4  # of a token, about: the prompt has no tokens yet

Message = dict[str, Any]


def edited(body: AnthropicPrompted, messages: list[Message], about: About) -> list[Message]:
    """The messages after the edits that a request asks for. Unknown edits are noted as ignored."""
    for edit in [] if body.context_management is None else body.context_management.edits:
        if edit.type not in KEPT:
            about.ignored.append(f"context_management.edits.{edit.type[:100]}")
        elif edit.keep != "all" and _due(edit.trigger, messages):
            kept = edit.keep.value if edit.keep is not None else KEPT[edit.type]
            messages = (_without_thoughts if edit.type == THINKING else _without_results)(messages, kept, edit)
    return messages


def _due(trigger: Amount | None, messages: Sequence[Message]) -> bool:
    """Whether there is as much as an edit waits for."""
    if trigger is None:
        return True
    if trigger.type == "input_tokens":
        return sum(len(str(one)) for one in messages) > CHARACTERS * trigger.value
    return sum(len(one.get("tool_calls", ())) for one in messages) > trigger.value


def _without_thoughts(messages: Sequence[Message], kept: int, _: Edit) -> list[Message]:
    """Without the reasoning of all turns but the last ones."""
    turns = [at for at, one in enumerate(messages) if "reasoning_content" in one]
    gone = set(turns[: max(0, len(turns) - kept)])
    return [
        {name: value for name, value in one.items() if name != "reasoning_content"} if at in gone else one
        for at, one in enumerate(messages)
    ]


def _without_results(messages: Sequence[Message], kept: int, edit: Edit) -> list[Message]:
    """Without the results of all calls but the last ones, and without what they were called with if that is asked."""
    results = [at for at, one in enumerate(messages) if one["role"] == "tool" and one["name"] not in edit.exclude_tools]
    gone = set(results[: max(0, len(results) - kept)])
    calls = {messages[at]["tool_call_id"] for at in gone}
    return [
        {**one, "content": CLEARED} if at in gone else _without_inputs(one, calls, edit.clear_tool_inputs)
        for at, one in enumerate(messages)
    ]


def _without_inputs(message: Message, calls: set[str], clear: bool | list[str]) -> Message:
    if not clear or "tool_calls" not in message:
        return message

    def cleared(call: Message) -> Message:
        named = clear if isinstance(clear, bool) else call["function"]["name"] in clear
        function = {**call["function"], "arguments": {}} if named and call["id"] in calls else call["function"]
        return {**call, "function": function}

    return {**message, "tool_calls": [cleared(call) for call in message["tool_calls"]]}
