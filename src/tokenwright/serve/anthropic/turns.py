"""The messages of Anthropic's bodies as the service reads them, and what context_management leaves out of them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tokenwright.errors import RequestError
from tokenwright.llm.chat.chat_options import read_arguments
from tokenwright.serve.anthropic import bodies
from tokenwright.serve.http.api import About
from tokenwright.serve.http.cache_fields import marks_in, with_marks
from tokenwright.serve.http.picture_bodies import mark_of, seen_in


def conversation(body: bodies.AnthropicPrompted) -> list[dict[str, Any]]:
    """The messages of a request as the service reads them. Raises RequestError for a result without its call."""
    found: list[dict[str, Any]] = []
    if body.system:
        found.append(marked({"role": "system", "content": text_of(body.system)}, body.system))
    names: dict[str, str] = {}  # of the tools, by the id of their call
    for at, message in enumerate(body.messages):
        match message:
            case bodies.AnthropicUserMessage():
                found.extend(_from_user(message, names, at))
            case bodies.AnthropicAssistantMessage():
                found.append(_from_assistant(message, names))
            case bodies.AnthropicSystemMessage():
                found.append(marked({"role": "system", "content": text_of(message.content)}, message.content))
    return found


def marked(message: dict[str, Any], content: object) -> dict[str, Any]:
    """A message with the breakpoints of the blocks that it was made of."""
    blocks = content if isinstance(content, list) else ()
    return with_marks(message | seen_in(content), marks_in(blocks, map(_text, blocks)))


def text_of(content: str | Iterable[object]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(text for block in content if (text := _text(block)) is not None)


def _text(block: object) -> str | None:
    match block:
        case bodies.TextBlock():
            return block.text
        case bodies.CompactionBlock():
            return block.content
        case bodies.SearchResultBlock():
            return "\n".join((block.title, block.source, text_of(block.content)))
        case bodies.DocumentBlock():
            told = (
                text_of(block.source.content) if isinstance(block.source, bodies.ContentSource) else block.source.data
            )
            return "\n".join(filter(None, (block.title, block.context, told)))
    return mark_of(block)


def left_out(body: bodies.AnthropicPrompted) -> list[str]:
    """The types of the blocks that are not read."""
    found: list[str] = []
    for message in body.messages:
        for block in () if isinstance(message.content, str) else message.content:
            inner = block.content if isinstance(block, bodies.ToolResultBlock) else ()
            each = (block, *(() if isinstance(inner, str) else inner))
            found += [f"messages.content.{one.type}" for one in each if isinstance(one, bodies.HostedBlock)]
    return found


def _from_user(message: bodies.AnthropicUserMessage, names: Mapping[str, str], at: int) -> Iterator[dict[str, Any]]:
    """A message for each tool result, then one with the text."""
    if isinstance(message.content, str):
        yield {"role": "user", "content": message.content}
        return
    for place, block in enumerate(message.content):
        if isinstance(block, bodies.ToolResultBlock):
            if block.tool_use_id not in names:
                raise RequestError(
                    f"messages.{at}.content.{place}.tool_use_id: no tool_use block before it has the id "
                    f"{block.tool_use_id!r}"
                )
            text = text_of(block.content)
            content = f"Error: {text}" if block.is_error else text
            name = names[block.tool_use_id]
            told = {"role": "tool", "tool_call_id": block.tool_use_id, "name": name, "content": content}
            told |= seen_in(block.content)
            own = block.kept_s()
            yield with_marks(told, [(len(content), own)]) if own is not None else marked(told, block.content)
    texts = [block for block in message.content if _text(block) is not None]
    if texts or not message.content:
        yield marked({"role": "user", "content": text_of(texts)}, texts)


def _from_assistant(message: bodies.AnthropicAssistantMessage, names: dict[str, str]) -> dict[str, Any]:
    if isinstance(message.content, str):
        return {"role": "assistant", "content": message.content}
    found = marked({"role": "assistant", "content": text_of(message.content)}, message.content)
    thoughts = [block.thinking for block in message.content if isinstance(block, bodies.ThinkingBlock)]
    calls = [block for block in message.content if isinstance(block, bodies.ToolUseBlock)]
    names.update({call.id: call.name for call in calls})
    if thoughts:
        found["reasoning_content"] = "\n".join(thoughts)
    if calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": read_arguments(call.input)},
            }
            for call in calls
        ]
    return found


CLEARED = "[cleared]"  # what stands in the place of a result
THINKING, TOOL_USES = "clear_thinking_20251015", "clear_tool_uses_20250919"
KEPT = {THINKING: 1, TOOL_USES: 3}  # turns and uses that stay where nothing is said
CHARACTERS = 4  # of a token, about: the prompt has no tokens yet

Message = dict[str, Any]


def edited(body: bodies.AnthropicPrompted, messages: list[Message], about: About) -> list[Message]:
    """The messages after the edits that a request asks for. Unknown edits are noted as ignored."""
    for edit in [] if body.context_management is None else body.context_management.edits:
        if edit.type not in KEPT:
            about.ignored.append(f"context_management.edits.{edit.type[:100]}")
        elif edit.keep != "all" and _due(edit.trigger, messages):
            kept = edit.keep.value if edit.keep is not None else KEPT[edit.type]
            messages = (_without_thoughts if edit.type == THINKING else _without_results)(messages, kept, edit)
    return messages


def _due(trigger: bodies.Amount | None, messages: Sequence[Message]) -> bool:
    if trigger is None:
        return True
    if trigger.type == "input_tokens":
        return sum(len(str(one)) for one in messages) > CHARACTERS * trigger.value
    return sum(len(one.get("tool_calls", ())) for one in messages) > trigger.value


def _without_thoughts(messages: Sequence[Message], kept: int, _: bodies.Edit) -> list[Message]:
    turns = [at for at, one in enumerate(messages) if "reasoning_content" in one]
    gone = set(turns[: max(0, len(turns) - kept)])
    return [
        {name: value for name, value in one.items() if name != "reasoning_content"} if at in gone else one
        for at, one in enumerate(messages)
    ]


def _without_results(messages: Sequence[Message], kept: int, edit: bodies.Edit) -> list[Message]:
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
