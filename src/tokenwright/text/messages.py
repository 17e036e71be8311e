"""The messages of a conversation: checked, and their texts changed or listed."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenwright.errors import RequestError
from tokenwright.text.tokenizer import check_text

Message = Mapping[str, Any]  # "role", "content" (text, or a list of parts), and other fields for the chat template

# Parts that a model of text cannot read.
_MEDIA = frozenset(
    ("image", "image_url", "input_image", "audio", "audio_url", "input_audio", "video", "video_url", "file")
)
_WRITTEN = frozenset(
    ("", "content", "text", "name", "arguments", "description", "reasoning_content", "reasoning", "thinking")
)

PICTURE = "\ufffc"  # Unicode's object replacement character, in place of a picture
PICTURES = "pictures"  # the field of a message's pictures: a tuple, so it cannot come from JSON

MOST_MESSAGES = 100_000
MOST_LEVELS = 64  # of objects and lists in tools and their arguments


def called(identity: str, name: str, arguments: Any) -> dict[str, Any]:
    """An entry of a message's tool_calls."""
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def check_messages(messages: object) -> list[dict[str, Any]]:
    """A checked copy of the messages. Missing content of an assistant's message becomes empty, or null if it has calls.

    Raises RequestError.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise RequestError(f'messages must be a list of {{"role", "content"}}, not {type(messages).__name__}')
    if not 0 < len(messages) <= MOST_MESSAGES:
        raise RequestError(f"there are {len(messages):,} messages; a conversation has 1 to {MOST_MESSAGES:,}")
    return [_checked(at, message) for at, message in enumerate(messages)]


def _checked(at: int, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f'message {at} must have "role" and "content"; it is {type(message).__name__}')
    found = dict(message)
    others = [one for name, one in found.items() if name not in ("role", "name", "content")]
    null = bool(found.get("tool_calls")) and found.get("content") is None
    if null or (found.get("content") is None and found.get("role") == "assistant" and any(others)):
        found["content"] = None if null else ""
    if "role" not in found or "content" not in found:
        raise RequestError(f'message {at} must have "role" and "content"; it has {sorted(map(str, message))}'[:500])
    for name in ("role", "tool_call_id", "name"):
        if not isinstance(found.get(name, ""), str):
            raise RequestError(f"the {name} of message {at} must be text, not {type(found[name]).__name__}")
    if isinstance(found["content"], list | tuple):  # bare strings are parts of text
        found["content"] = [{"type": "text", "text": one} if isinstance(one, str) else one for one in found["content"]]
    _check_content(at, "" if null else found["content"])
    texts = strings({name: one for name, one in found.items() if not (name == PICTURES and isinstance(one, tuple))})
    if not "".join(texts).isascii():
        for text in texts:
            check_text(text)
    if not found["role"]:
        raise RequestError(f"the role of message {at} is empty; it is system, user or assistant")
    return found


def _check_content(at: int, content: object) -> None:
    if isinstance(content, str):
        return
    if not isinstance(content, list | tuple):
        raise RequestError(f"the content of message {at} must be text, not {type(content).__name__}")
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if not isinstance(part, Mapping) or kind in _MEDIA or not isinstance(part.get("text", ""), str):
            raise RequestError(
                f"the content of message {at} has a part that is no text ({kind!r}); give text, or parts of the form "
                '{"type": "text", "text": "..."}'
            )


def text_of(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(str(part.get("text", "")) for part in content)


def strings(value: object, depth: int = 0) -> list[str]:
    """All strings in a value of JSON, names of fields included. Raises RequestError beyond MOST_LEVELS."""
    if depth > MOST_LEVELS:
        raise RequestError(f"the messages and tools are nested in more than {MOST_LEVELS} levels; flatten them")
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise _no_json(f"a name that is {type(name).__name__}")
        return [text for name, one in value.items() for text in (name, *strings(one, depth + 1))]
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [text for one in value for text in strings(one, depth + 1)]
    if not isinstance(value, bool | int | float | None):
        raise _no_json(f"a {type(value).__name__}")
    return []


def _no_json(what: str) -> RequestError:
    return RequestError(f"the messages and tools hold what JSON lacks: {what}; give texts, numbers, lists and objects")


def mapped(value: Any, change: Callable[[str], str], field: str = "") -> Any:
    """A copy of a JSON value with its strings changed, except names and words that templates may compare."""
    if isinstance(value, str):
        word = field not in _WRITTEN and value.replace("-", "_").isidentifier()
        return value if word else change(value)
    if isinstance(value, Mapping):
        return {n if n.isidentifier() else change(n): mapped(one, change, n) for n, one in value.items()}
    return [mapped(one, change, field) for one in value] if isinstance(value, Sequence) else value
