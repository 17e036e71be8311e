"""The order of messages that one chat template takes: many take one system message only, at the beginning.

Agents send several: instructions and a developer's message, or reminders in the middle of a conversation. What a
template refuses, or silently leaves out, is found by rendering short conversations, each the first time it matters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenwright.errors import RequestError

Message = Mapping[str, Any]
SYSTEMS = ("system", "developer")


class TemplateOrder:
    """Arranges messages for one template. Thread-safe. render: what it prints for messages; raises RequestError."""

    def __init__(self, render: Callable[[Sequence[Message]], str]) -> None:
        self._render = render
        self._known: dict[tuple[str, ...], bool] = {}

    def arranged(self, messages: Sequence[Message]) -> list[Message]:
        """The messages as the template takes them.

        Where it must be, system messages at the beginning become one, later ones become the user's, in their place,
        and messages of the user's that follow each other become one.
        """
        found: list[Message] = []
        for message in messages:
            role = message["role"]
            if role in SYSTEMS:
                if found and all(one["role"] in SYSTEMS for one in found):
                    if not self._takes(found[-1]["role"], role, "user"):
                        found[-1] = _joined(found[-1], message)
                        continue
                elif not (self._takes("user", "assistant", role, "user") if found else self._takes(role, "user")):
                    message, role = {"role": "user", "content": message.get("content")}, "user"
            if role == "user" and found and found[-1]["role"] == "user" and not self._takes("user", "user"):
                found[-1] = _joined(found[-1], message)
            else:
                found.append(message)
        return found

    def _takes(self, *roles: str) -> bool:
        """Whether the template prints messages of these roles in this order; one that prints none is left alone."""
        if roles not in self._known:
            self._known[roles] = self._prints(roles) or not self._prints(("user",))
        return self._known[roles]

    def _prints(self, roles: Sequence[str]) -> bool:
        probe = [{"role": role, "content": f"probe text {at}"} for at, role in enumerate(roles)]
        try:
            text = self._render(probe)
        except RequestError:
            return False
        return all(one["content"] in text for one in probe if one["role"] != "assistant")


def _joined(one: Message, other: Message) -> Message:
    texts = (str(message.get("content") or "") for message in (one, other))
    return {**one, "content": "\n\n".join(filter(None, texts))}
