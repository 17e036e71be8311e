"""The messages of a conversation: checked, with limits on their number and depth, and their texts changed or listed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tokenwright.errors import RequestError
from tokenwright.text.tokenizer import check_text

# "role" and "content" (text, or a list of parts {"type": "text", "text": ...}), and perhaps what OPTIONAL names
Message = Mapping[str, Any]
OPTIONAL = frozenset(("tool_calls", "tool_call_id", "name", "reasoning_content"))  # of a message

MOST_MESSAGES = 100_000
MOST_LEVELS = 64  # of objects and lists in tools and their arguments


def check_messages(messages: object) -> list[dict[str, Any]]:
    """A copy of the messages, checked. Raises RequestError for anything but a list of messages in text.

    The content may be None or missing beside "tool_calls", and is then empty.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise RequestError(f'messages must be a list of {{"role", "content"}}, not {type(messages).__name__}')
    if not 0 < len(messages) <= MOST_MESSAGES:
        raise RequestError(f"there are {len(messages):,} messages; a conversation has 1 to {MOST_MESSAGES:,}")
    return [_checked(at, message) for at, message in enumerate(messages)]


def _checked(at: int, message: object) -> dict[str, Any]:
    if isinstance(message, Mapping) and message.get("tool_calls"):
        message = {"content": None, **message}
    if not isinstance(message, Mapping) or message.keys() - OPTIONAL != {"role", "content"}:
        is_what = f"has {sorted(map(str, message))}" if isinstance(message, Mapping) else f"is {type(message).__name__}"
        raise RequestError(f'message {at} must have "role" and "content" and nothing else; it {is_what}'[:500])
    found = {**message, "content": _content(at, message["content"])}
    if found["content"] is None and found.get("tool_calls"):
        found["content"] = ""
    for name, value in found.items():
        if name != "tool_calls" and not isinstance(value, str):
            raise RequestError(f"the {name} of message {at} must be text, not {type(value).__name__}")
        for text in strings(value, 0):
            check_text(text)
    if not found["role"]:
        raise RequestError(f"the role of message {at} is empty; it is system, user or assistant")
    return found


def strings(value: object, depth: int) -> Iterator[str]:
    """All strings in a value of JSON, the names of fields included.

    Raises RequestError beyond MOST_LEVELS, and for what JSON lacks.
    """
    if depth > MOST_LEVELS:
        raise RequestError(f"the messages and tools are nested in more than {MOST_LEVELS} levels; flatten them")
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, one in value.items():
            if not isinstance(name, str):
                raise _no_json(f"a name that is {type(name).__name__}")
            yield name
            yield from strings(one, depth + 1)
    elif isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        for one in value:
            yield from strings(one, depth + 1)
    elif not isinstance(value, bool | int | float | None):
        raise _no_json(f"a {type(value).__name__}")


def _no_json(what: str) -> RequestError:
    return RequestError(f"the messages and tools hold what JSON lacks: {what}; give texts, numbers, lists and objects")


def mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of a value of JSON with every string changed, but for names of fields that templates may ask for."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {n if n.isidentifier() else change(n): mapped(one, change) for n, one in value.items()}
    return [mapped(one, change) for one in value] if isinstance(value, Sequence) else value


def _content(at: int, content: Any) -> Any:
    """The text of a content in parts, which are joined by line breaks; any other value as it is."""
    if not isinstance(content, list | tuple):
        return content
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RequestError(
                f"the content of message {at} has a part that is no text ({kind!r}); give text, or parts of the form "
                '{"type": "text", "text": "..."}'
            )
    return "\n".join(part["text"] for part in content)
