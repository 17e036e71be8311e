"""The messages of a request as one chat template knows them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]

# Lines of system messages that programs change with each request, by how they begin: they tell a company who pays, and
# nothing to a model, and no prefix of a prompt that begins with one is ever found again.
VOLATILE = {"x-anthropic-billing-header:": "Claude Code's billing line"}
_NINE = re.compile(r"(\.id|\[['\"]id['\"]\]|tool_call_id)\s*\|\s*length\s*(!=|==)\s*9|length\s*(!=|==)\s*9")
_ITEMS = re.compile(r"arguments\s*(\.items\(\)|\|\s*(items|dictsort))")
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # names of the reasoning of a message
_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


class TemplateMessages:
    """Adapts messages to a template, by its source."""

    def __init__(self, source: str) -> None:
        self._developer = "developer" in source
        self._nine = _NINE.search(source) is not None
        self._items = _ITEMS.search(source) is not None
        self._channels = "<|channel|>" in source

    def known(self, messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages as the template knows them.

        A developer is the system where the template has no role of that name, volatile lines are left out, ids of
        calls have nine letters where it demands that, arguments that are no object become one where it asks for
        their fields, and reasoning has the names under which transformers gives it to templates.
        """
        return [self._known(message) for message in messages]

    def _known(self, message: Mapping[str, Any]) -> dict[str, Any]:
        found = dict(message)
        if found.get("tool_calls"):
            found["tool_calls"] = [self._call(call) for call in found["tool_calls"]]
        if thought := thought_of(found):
            refused = self._channels and found.get("content") and found.get("tool_calls")  # thoughts beside both
            found = {**({} if refused else {"thinking": thought}), **found, "reasoning_content": thought}
        if self._nine and "tool_call_id" in found:
            found["tool_call_id"] = nine_letters(found["tool_call_id"])
        if found["role"] in ("system", "developer"):
            found["content"] = without_volatile(found["content"])
            found["role"] = found["role"] if self._developer else "system"
        return found

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        if self._items and isinstance(function["arguments"], str):
            function = {**function, "arguments": {"arguments": function["arguments"]}}
        return {**call, "id": nine_letters(call["id"]) if self._nine else call["id"], "function": function}


def thought_of(message: Mapping[str, Any]) -> str:
    """The reasoning of a message, whatever its name."""
    return next((one for name in _THOUGHTS if isinstance(one := message.get(name), str)), "")


def without_volatile(content: Any) -> Any:
    """The content of a system message without the lines of VOLATILE."""
    if isinstance(content, list | tuple):
        return [{**part, "text": without_volatile(part["text"])} if "text" in part else part for part in content]
    if not isinstance(content, str) or not any(start in content for start in VOLATILE):
        return content
    return "\n".join(line for line in content.split("\n") if not line.startswith(tuple(VOLATILE)))


def nine_letters(identity: str) -> str:
    """An id of nine letters or digits: the same for the same id."""
    if len(identity) == 9 and identity.isascii() and identity.isalnum():
        return identity
    number, found = int.from_bytes(hashlib.sha256(identity.encode("utf-8", "surrogatepass")).digest()[:8]), ""
    for _ in range(9):
        number, at = divmod(number, len(_LETTERS))
        found += _LETTERS[at]
    return found


_WRITTEN = ("content", "reasoning_content", "tool_calls")  # of a message


def without_oldest(messages: Messages, share: float) -> list[Mapping[str, Any]]:
    """The messages without their oldest, about this share of their text: the system's stay, and the last one.

    The rest begins with a user's message, if there is one. Empty if nothing can be left out.
    """
    start = next((at for at, one in enumerate(messages) if one["role"] not in ("system", "developer")), len(messages))
    sizes = [1 + sum(len(str(one.get(name) or "")) for name in _WRITTEN) for one in messages]
    excess, at = share * sum(sizes), start
    while at < len(messages) - 1 and (excess > 0 or at == start):
        excess -= sizes[at]
        at += 1
    while at < len(messages) - 1 and messages[at]["role"] != "user":
        at += 1
    return [*messages[:start], *messages[at:]] if at > start else []
