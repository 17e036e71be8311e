"""Lets an idle engine compute next prompts ahead: the conversation, up to the text of the user's next message."""

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
MOST_ANSWERED = 16  # conversations; the oldest are dropped first
Chat = TypeVar("Chat", bound=ChatRequest)
# Three possible next messages: the tokens that their prompts share do not depend on the message.
PROBES = ("A", "1", "{")


class NextTurns:
    """Prepares next turns of the last conversations. busy: whether a request runs. run: runs a function in a thread."""

    def __init__(self, busy: Callable[[], bool], run: Callable[[Callable[[], None]], Awaitable[None]]) -> None:
        self._busy, self._run = busy, run
        self._answered: deque[Callable[[], None]] = deque(maxlen=MOST_ANSWERED)
        self._task: asyncio.Task[None] | None = None

    def ended(self, follow: Callable[[], None] | None) -> None:
        """Note that a request has ended. follow: a slow function that prepares its conversation's next turn, if any."""
        if follow is not None:
            self._answered.append(follow)
        if self._answered and self._task is None and not self._busy():
            self._task = asyncio.get_running_loop().create_task(self._prepare())

    async def _prepare(self) -> None:
        try:
            while self._answered and not self._busy():
                with suppress(RequestError):  # the template refuses the probe
                    await self._run(self._answered.popleft())
        except Exception:
            log.exception("the next turn of a conversation could not be prepared")
        finally:
            self._task = None


def next_turns(wanted: Chat, answer: Mapping[str, Any]) -> Iterator[Chat]:
    """The conversation, its answer (with reasoning if earlier answers have it) and one of PROBES as next message."""
    calls: Sequence[ToolCall] = answer["tool_calls"]
    earlier = wanted.messages or ()
    message: dict[str, Any] = {"role": "assistant", "content": answer["content"]}
    if calls:
        message["tool_calls"] = [call.as_message() for call in calls]
    if answer["reasoning"] and any(thought_of(one) for one in earlier if one.get("role") == "assistant"):
        message["reasoning_content"] = answer["reasoning"]
    reply = {"role": "tool", "tool_call_id": calls[0].id, "name": calls[0].name} if calls else {"role": "user"}
    for probe in PROBES:
        yield replace(wanted, messages=[*earlier, message, {**reply, "content": probe}])


def common_beginning(prompts: Iterable[Sequence[int]]) -> tuple[int, ...]:
    common: list[int] = []
    for column in zip(*prompts, strict=False):
        if len(set(column)) > 1:
            break
        common.append(column[0])
    return tuple(common)
