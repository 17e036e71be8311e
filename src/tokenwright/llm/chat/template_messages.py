"""Arranges the messages of a request for one chat template."""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from tokenwright.errors import RequestError
from tokenwright.llm.prompts.provenance import PLACES, joined
from tokenwright.text.messages import text_of

Messages = Sequence[Mapping[str, Any]]

# System lines with these beginnings change with each request, so no cached prefix would match. They are for billing and
# tell a model nothing.
VOLATILE = {"x-anthropic-billing-header:": "Claude Code's billing line"}
_NINE = re.compile(r"(\.id|\[['\"]id['\"]\]|tool_call_id)\s*\|\s*length\s*(!=|==)\s*9|length\s*(!=|==)\s*9")
_ITEMS = re.compile(r"arguments\s*(\.items\(\)|\|\s*(items|dictsort))")
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # names of the reasoning of a message


class TemplateMessages:
    def __init__(self, source: str) -> None:
        self._developer = "developer" in source
        self._nine = _NINE.search(source) is not None
        self._items = _ITEMS.search(source) is not None
        self._channels = "<|channel|>" in source

    def known(self, messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages with the template's roles, call ids and arguments, and transformers' names of reasoning."""
        return [self._known(message) for message in messages]

    def _known(self, message: Mapping[str, Any]) -> dict[str, Any]:
        found = dict(message)
        if found.get("tool_calls"):
            found["tool_calls"] = [self._call(call) for call in found["tool_calls"]]
        if thought := thought_of(found):
            refused = self._channels and found.get("content") and found.get("tool_calls")  # with reasoning as well
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
    return next((one for name in _THOUGHTS if isinstance(one := message.get(name), str)), "")


def without_volatile(content: Any) -> Any:
    if isinstance(content, list | tuple):
        return [{**part, "text": without_volatile(part["text"])} if "text" in part else part for part in content]
    if not isinstance(content, str) or not any(start in content for start in VOLATILE):
        return content
    return "\n".join(line for line in content.split("\n") if not line.startswith(tuple(VOLATILE)))


def nine_letters(identity: str) -> str:
    """The id as nine letters or digits, always the same for one id."""
    if len(identity) == 9 and identity.isascii() and identity.isalnum():
        return identity
    return hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()[:9]


_WRITTEN = ("content", "reasoning_content", "tool_calls")  # of a message


def without_oldest(messages: Messages, share: float) -> list[Mapping[str, Any]]:
    """Drop about this share of the text, oldest first, but no system message nor the last; [] if impossible."""
    start = next((at for at, one in enumerate(messages) if one["role"] not in ("system", "developer")), len(messages))
    sizes = [1 + sum(len(str(one.get(name) or "")) for name in _WRITTEN) for one in messages]
    excess, at = share * sum(sizes), start
    while at < len(messages) - 1 and (excess > 0 or at == start):
        excess -= sizes[at]
        at += 1
    while at < len(messages) - 1 and messages[at]["role"] != "user":
        at += 1
    return [*messages[:start], *messages[at:]] if at > start else []


Message = Mapping[str, Any]
SYSTEMS = ("system", "developer")
# Messages of the assistant to insert between a tool's result and the user's next message.
FILLERS: tuple[Message, ...] = tuple({"role": "assistant", "content": text} for text in ("", "Done."))


class TemplateOrder:
    """Arranges messages for one template. Thread-safe. render: prints messages; raises RequestError."""

    def __init__(self, render: Callable[[Sequence[Message]], str]) -> None:
        self._render = render
        self._known: dict[tuple[str, ...], bool] = {}
        self._after_result: tuple[Message, ...] | None = None  # once it is known

    def arranged(self, messages: Sequence[Message]) -> list[Message]:
        """The messages as the template takes them, changed only if needed.

        Leading system messages become one, later ones become the user's; messages of one role in a row are joined; one
        of FILLERS is inserted between a tool's result and the user.
        """
        groups: list[list[Message]] = [[{"role": ""}]]  # each becomes one message
        turns: list[Message] = []  # of the assistant and of tools, from the last calls on
        leading, filler = True, cast("tuple[Message, ...] | None", None)
        for message in messages:
            role, before, begun = message["role"], groups[-1], len(groups) > 1
            if role in SYSTEMS:
                if leading and begun:
                    if not self._takes(before[0]["role"], role, "user"):
                        before.append(message)
                        continue
                elif not (self._takes("user", "assistant", role, "user") if begun else self._takes(role, "user")):
                    content, places, role = message.get("content"), message.get(PLACES, []), "user"
                    message = {"role": role, "content": content, PLACES: places}
            leading = leading and role in SYSTEMS
            if message.get("tool_calls"):
                turns = [message]
            elif turns and role in ("assistant", "tool"):
                turns.append(message)
            if role == before[0]["role"] in ("user", "assistant") and not self._stand_apart(before[-1]):
                before.append(message)
                continue
            if role == "user" and before[0]["role"] == "tool":
                filler = self._filler(turns) if filler is None else filler
                groups += [[one] for one in filler or ()]
            groups.append([message])
        return [_joined(one) for one in groups[1:]]

    def _stand_apart(self, before: Message) -> bool:
        if before["role"] == "user":
            return self._takes("user", "user")
        return bool(before.get("tool_calls")) or self._takes("user", "assistant", "assistant", "user")

    def _filler(self, turns: Sequence[Message]) -> tuple[Message, ...] | None:
        """The message that the template needs between a call's result, the last of `turns`, and the user."""
        if self._after_result is not None or not turns:
            return self._after_result
        first, last = ({"role": "user", "content": f"probe text {place}"} for place in ("before", "after"))
        for way in ((), *((one,) for one in FILLERS)):
            if self._shows([first, *turns, *way, last]):
                self._after_result = way
                return way
        return ()

    def _takes(self, *roles: str) -> bool:
        """Whether the template prints messages of these roles in this order, or prints no messages at all."""
        if roles not in self._known:
            self._known[roles] = self._prints(roles) or not self._prints(("user",))
        return self._known[roles]

    def _prints(self, roles: Sequence[str]) -> bool:
        return self._shows([{"role": role, "content": f"probe text {at}"} for at, role in enumerate(roles)])

    def _shows(self, probe: Sequence[Message]) -> bool:
        try:
            text = self._render(probe)
        except RequestError:
            return False
        return all(one["content"] in text for one in probe if one["role"] not in ("assistant", "tool"))


def _joined(messages: Sequence[Message]) -> Message:
    if len(messages) == 1:
        return messages[0]
    fields = dict(field for one in messages for field in one.items())
    content = joined(((text_of(one.get("content")), one) for one in messages), "\n\n")
    return {**fields, **content, "role": messages[0]["role"]}
