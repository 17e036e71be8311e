"""The messages of Anthropic's bodies as the service reads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tokenwright.errors import RequestError
from tokenwright.llm.chat.chat_options import read_arguments
from tokenwright.serve.anthropic.bodies import (
    AnthropicAssistantMessage,
    AnthropicPrompted,
    AnthropicSystemMessage,
    AnthropicUserMessage,
    CompactionBlock,
    ContentSource,
    DocumentBlock,
    HostedBlock,
    SearchResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)


def conversation(body: AnthropicPrompted) -> list[dict[str, Any]]:
    """The messages of a request as the service reads them. Raises RequestError for a result without its call."""
    found: list[dict[str, Any]] = []
    if body.system:
        found.append({"role": "system", "content": text_of(body.system)})
    names: dict[str, str] = {}  # of the tools, by the id of their call
    for at, message in enumerate(body.messages):
        match message:
            case AnthropicUserMessage():
                found.extend(_from_user(message, names, at))
            case AnthropicAssistantMessage():
                found.append(_from_assistant(message, names))
            case AnthropicSystemMessage():
                found.append({"role": "system", "content": text_of(message.content)})
    return found


def text_of(content: str | Iterable[object]) -> str:
    """The text of a message's content."""
    if isinstance(content, str):
        return content
    return "\n".join(text for block in content if (text := _text(block)) is not None)


def _text(block: object) -> str | None:
    """The text of a block; None: it is none."""
    match block:
        case TextBlock():
            return block.text
        case CompactionBlock():
            return block.content
        case SearchResultBlock():
            return "\n".join((block.title, block.source, text_of(block.content)))
        case DocumentBlock():
            told = text_of(block.source.content) if isinstance(block.source, ContentSource) else block.source.data
            return "\n".join(filter(None, (block.title, block.context, told)))
    return None


def left_out(body: AnthropicPrompted) -> list[str]:
    """The types of the blocks that are not read."""
    found: list[str] = []
    for message in body.messages:
        for block in () if isinstance(message.content, str) else message.content:
            inner = block.content if isinstance(block, ToolResultBlock) else ()
            each = (block, *(() if isinstance(inner, str) else inner))
            found += [f"messages.content.{one.type}" for one in each if isinstance(one, HostedBlock)]
    return found


def _from_user(message: AnthropicUserMessage, names: Mapping[str, str], at: int) -> Iterator[dict[str, Any]]:
    """A message for each tool result, then one with the text."""
    if isinstance(message.content, str):
        yield {"role": "user", "content": message.content}
        return
    for place, block in enumerate(message.content):
        if isinstance(block, ToolResultBlock):
            if block.tool_use_id not in names:
                raise RequestError(
                    f"messages.{at}.content.{place}.tool_use_id: no tool_use block before it has the id "
                    f"{block.tool_use_id!r}"
                )
            text = text_of(block.content)
            content = f"Error: {text}" if block.is_error else text
            name = names[block.tool_use_id]
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "name": name, "content": content}
    texts = [block for block in message.content if _text(block) is not None]
    if texts or not message.content:
        yield {"role": "user", "content": text_of(texts)}


def _from_assistant(message: AnthropicAssistantMessage, names: dict[str, str]) -> dict[str, Any]:
    if isinstance(message.content, str):
        return {"role": "assistant", "content": message.content}
    found: dict[str, Any] = {"role": "assistant", "content": text_of(message.content)}
    thoughts = [block.thinking for block in message.content if isinstance(block, ThinkingBlock)]
    calls = [block for block in message.content if isinstance(block, ToolUseBlock)]
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
