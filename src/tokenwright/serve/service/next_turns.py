"""Has an idle engine compute the beginnings of next turns: the conversation, up to the next message's text."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal, TypeVar

from tokenwright.errors import RequestError
from tokenwright.llm.chat.chat_options import ChatRequest
from tokenwright.llm.chat.template_messages import thought_of
from tokenwright.llm.outputs import ToolCall

log = logging.getLogger(__name__)

Warm = Literal["off", "auto", "on"]
MOST_ANSWERED = 16  # conversations; the oldest leave first
Asked = TypeVar("Asked", bound=ChatRequest)
# Beginnings of the next message; they differ, so the tokens that all prompts share depend on none of them.
PROBES = ("A", "1", "{")


class NextTurns:
    """The conversations that were answered last. busy: whether there is a request. run: runs a function in a thread."""

    def __init__(self, busy: Callable[[], bool], run: Callable[[Callable[[], None]], Awaitable[None]]) -> None:
        self._busy, self._run = busy, run
        self._answered: deque[Callable[[], None]] = deque(maxlen=MOST_ANSWERED)
        self._task: asyncio.Task[None] | None = None

    def ended(self, follow: Callable[[], None] | None) -> None:
        """A request has ended. follow: prepares the conversation's next turn, which takes time; None: it has none."""
        if follow is not None:
            self._answered.append(follow)
        if self._answered and self._task is None and not self._busy():
            self._task = asyncio.get_running_loop().create_task(self._prepare())

    async def _prepare(self) -> None:
        try:
            while self._answered and not self._busy():
                with suppress(RequestError):  # the template refuses the placeholder for the next words
                    await self._run(self._answered.popleft())
        except Exception:
            log.exception("the next turn of a conversation could not be prepared")
        finally:
            self._task = None


def following(wanted: Asked, answer: Mapping[str, Any]) -> Iterator[Asked]:
    """The conversation, its answer (with thoughts if earlier ones have them) and one of PROBES as the next message."""
    calls: Sequence[ToolCall] = answer["tool_calls"]
    earlier = wanted.messages or ()
    message: dict[str, Any] = {"role": "assistant", "content": answer["content"]}
    if calls:
        message["tool_calls"] = [call.as_message() for call in calls]
    if answer["reasoning"] and any(thought_of(one) for one in earlier if one.get("role") == "assistant"):
        message["reasoning_content"] = answer["reasoning"]
    said = {"role": "tool", "tool_call_id": calls[0].id, "name": calls[0].name} if calls else {"role": "user"}
    for probe in PROBES:
        yield replace(wanted, messages=[*earlier, message, {**said, "content": probe}])


def common_beginning(prompts: Iterable[Sequence[int]]) -> tuple[int, ...]:
    found: list[int] = []
    for column in zip(*prompts, strict=False):
        if len(set(column)) > 1:
            break
        found.append(column[0])
    return tuple(found)
