"""Whether a chat template takes a message's content as text, as a list of parts, or both: rendered to find out."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenwright.errors import RequestError
from tokenwright.text.messages import PICTURE, Message, text_of

Render = Callable[[Sequence[Message]], str]
_FIRST, _SECOND = "probe 9f1c6e", "probe 51d0a7"  # that no template treats specially
_PARTS = [{"type": "text", "text": text} for text in (_FIRST, _SECOND)]
_CALL = {"id": "a12345678", "type": "function", "function": {"name": "probe", "arguments": {}}}
_USER, _CALLING = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_AROUND: Mapping[str, tuple[list[Message], list[Message]]] = {
    "user": ([], []),
    "assistant": ([_USER], [_USER]),
    "tool": ([_USER, _CALLING], []),
}


class ContentForms:
    """Fits messages to one template. Thread-safe. `render`: what it prints for messages; raises RequestError."""

    def __init__(self, source: str) -> None:
        self._names_parts = "'text'" in source or '"text"' in source or ".text" in source
        self._names_pictures = "'image'" in source or '"image"' in source
        self._known: dict[tuple[str, bool], bool] = {}

    def fitted(self, message: Message, render: Render) -> Message:
        role, content = message["role"], message["content"]
        parts = not isinstance(content, str)
        if not parts and not (self._names_parts and content):
            return message
        if self._prints(role, parts, render) or not self._prints(role, not parts, render):
            return message
        return {**message, "content": text_of(content) if parts else [{"type": "text", "text": content}]}

    def with_pictures(self, message: Message, render: Render) -> Message:
        """Split a message at its pictures into parts, if the template prints such parts in messages of its role."""
        role, content = message["role"], message["content"]
        if not isinstance(content, str):
            content = text_of(content)
        if PICTURE not in content or not self._names_pictures or not self._prints(role, True, render):
            return message
        parts: list[Mapping[str, Any]] = []
        for at, text in enumerate(content.split(PICTURE)):
            parts += [{"type": "image"}] if at else []
            text = text.removeprefix("\n") if at else text
            parts += [{"type": "text", "text": text}] if text else []
        return {**message, "content": parts}

    def _prints(self, role: str, parts: bool, render: Render) -> bool:
        """Whether the template prints two parts, or two lines, in messages of a role, and no list as Python does."""
        if (role, parts) not in self._known:
            before, after = _AROUND.get(role, ([], [_USER]))
            content: Any = _PARTS if parts else text_of(_PARTS)
            try:
                text = render([*before, {"role": role, "content": content}, *after])
            except RequestError:
                text = ""
            between = text.partition(_FIRST)[2].partition(_SECOND)
            self._known[role, parts] = bool(between[1]) and "'type'" not in between[0]
        return self._known[role, parts]
