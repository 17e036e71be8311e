"""The order of messages that one chat template takes: many take one system message only, at the beginning.

Agents send several: instructions and a developer's message, or reminders in the middle of a conversation. They also go
on after the result of a call before the model has answered, where many templates want the model's turn. What a
template refuses, or silently leaves out, is found by rendering short conversations, each the first time it matters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenwright.errors import RequestError
from tokenwright.text.messages import text_of

Message = Mapping[str, Any]
SYSTEMS = ("system", "developer")
# Turns of the model's that can stand between the result of a call and the user's next message.
FILLERS: tuple[Message, ...] = tuple({"role": "assistant", "content": text} for text in ("", "Done."))


class TemplateOrder:
    """Arranges messages for one template. Thread-safe. render: what it prints for messages; raises RequestError."""

    def __init__(self, render: Callable[[Sequence[Message]], str]) -> None:
        self._render = render
        self._known: dict[tuple[str, ...], bool] = {}
        self._after_result: tuple[Message, ...] | None = None  # once it is known

    def arranged(self, messages: Sequence[Message]) -> list[Message]:
        """The messages as the template takes them.

        Where it must be, system messages at the beginning become one, later ones become the user's, in their place,
        messages of the user that follow each other become one, as do messages of the assistant, and one of FILLERS
        comes between the result of a call and the user.
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
            before = found[-1] if found else {"role": ""}
            if role == before["role"] in ("user", "assistant") and not self._stand_apart(before):
                found[-1] = _joined(before, message)
            else:
                found += self._filler(found) if role == "user" and before["role"] == "tool" else ()
                found.append(message)
        return found

    def _stand_apart(self, before: Message) -> bool:
        """Whether a message of the user or the assistant may follow this one of the same role."""
        if before["role"] == "user":
            return self._takes("user", "user")
        return bool(before.get("tool_calls")) or self._takes("user", "assistant", "assistant", "user")

    def _filler(self, found: Sequence[Message]) -> tuple[Message, ...]:
        """The message that the template needs between the result of a call, the last of `found`, and the user."""
        if self._after_result is not None:
            return self._after_result
        start = next((at for at in range(len(found) - 1, -1, -1) if found[at].get("tool_calls")), len(found))
        turns = [one for one in found[start:] if one["role"] in ("assistant", "tool")]
        first, last = ({"role": "user", "content": f"probe text {place}"} for place in ("before", "after"))
        for way in ((), *((one,) for one in FILLERS)):
            if turns and self._shows([first, *turns, *way, last]):
                self._after_result = way
                return way
        return ()

    def _takes(self, *roles: str) -> bool:
        """Whether the template prints messages of these roles in this order; one that prints none is left alone."""
        if roles not in self._known:
            self._known[roles] = self._prints(roles) or not self._prints(("user",))
        return self._known[roles]

    def _prints(self, roles: Sequence[str]) -> bool:
        return self._shows([{"role": role, "content": f"probe text {at}"} for at, role in enumerate(roles)])

    def _shows(self, probe: Sequence[Message]) -> bool:
        """Whether the template takes messages and prints those of the user's and the system's."""
        try:
            text = self._render(probe)
        except RequestError:
            return False
        return all(one["content"] in text for one in probe if one["role"] not in ("assistant", "tool"))


def _joined(one: Message, other: Message) -> Message:
    texts = (text_of(message.get("content")) for message in (one, other))
    return {**one, **other, "role": one["role"], "content": "\n\n".join(filter(None, texts))}
