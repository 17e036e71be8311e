"""Has an idle engine compute the beginnings of next turns: the conversation, up to the next message's text."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any, Literal, TypeVar

from tokenwright.errors import RequestError
from tokenwright.llm.chat.chat_options import ChatRequest
from tokenwright.llm.chat.template_messages import thought_of
from tokenwright.llm.outputs import ToolCall

log = logging.getLogger(__name__)

Warm = Literal["off", "auto", "on"]
MOST_ANSWERED = 16  # conversations; the oldest leave first
POWER = Path("/sys/class/power_supply")
PROCESSORS = Path("/proc/stat")
BUSY = 0.25  # of the processors' time, which other programs take
LOOK_S = 0.5  # between two looks
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
        each = [{"name": call.name, "arguments": call.arguments} for call in calls]
        pairs = zip(calls, each, strict=True)
        message["tool_calls"] = [{"id": call.id, "type": "function", "function": one} for call, one in pairs]
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


class SpareMachine:
    """Whether the machine is free: not on battery, other programs at rest. Without Linux it counts as busy."""

    def __init__(self, power: Path = POWER, processors: Path = PROCESSORS) -> None:
        self._power, self._processors = power, processors
        self._lock = Lock()
        self._looked, self._free = 0.0, False
        self._last: tuple[float, float, float] | None = None

    @property
    def free(self) -> bool:
        """Whether the machine was free at the last look; known from the second look on."""
        with self._lock:
            if (now := time.monotonic()) >= self._looked + LOOK_S:
                self._looked = now
                self._free = self._rests() and not self._on_battery()
            return self._free

    def _rests(self) -> bool:
        before, self._last = self._last, self._times()
        if before is None or self._last is None:
            return False
        whole, busy, own = (now - then for now, then in zip(self._last, before, strict=True))
        return whole > 0 and busy - own < BUSY * whole

    def _times(self) -> tuple[float, float, float] | None:
        """Seconds of the processors: all, those in use, and this process's."""
        try:
            fields = self._processors.read_text().split("\n", 1)[0].split()[1:9]
            user, nice, system, idle, waiting, *others = (int(one) / os.sysconf("SC_CLK_TCK") for one in fields)
        except (OSError, ValueError):
            return None
        yielding = nice if os.nice(0) <= 0 else 0.0  # programs of a lower priority make way
        busy = user + nice + system + sum(others) - yielding
        return busy + yielding + idle + waiting, busy, time.process_time()

    def _on_battery(self) -> bool:
        if not self._power.is_dir():
            return False  # no such devices
        supplies = list(self._power.iterdir())
        try:
            kinds = {one: (one / "type").read_text().strip() for one in supplies if (one / "type").is_file()}
            batteries = [one for one, kind in kinds.items() if kind == "Battery" and not (one / "scope").is_file()]
            return any((one / "status").read_text().strip() == "Discharging" for one in batteries)
        except OSError:
            return True
