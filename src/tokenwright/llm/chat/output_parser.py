"""Sorts a text into text, reasoning and tool calls while it is being written; holds back what may begin a tag.

A mark that is a special token counts only as that token, never as text, which grammars leave free: readers see it as a
character that no decoded text has.
"""

import random
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import dropwhile, takewhile
from typing import Literal, Protocol

from tokenwright.engine import FinishReason, Thoughts
from tokenwright.llm.outputs import Piece, ToolCall

Finish = Literal["stop", "length", "tool_calls"]


@dataclass(slots=True)
class ToolCallDelta:
    """A fragment of the JSON of a call's arguments. Only the first one of a call has `id` and `name`."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class Delta:
    """An addition to the text number `choice` by one step or more; the sum of all is a whole answer.

    Its order: the rest of an earlier delta's call (`continued`), reasoning, text, new calls (`begun`).
    """

    choice: int
    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)
    tokens: list[Piece] = field(default_factory=list)  # the tokens of its text, if logprobs were requested
    finish: Finish | None = None  # why the text ended, in its last delta only
    reason: FinishReason | None = None  # the engine's reason
    stopped: str | int | None = None
    unfinished: bool = False  # the text ended inside its last call

    @property
    def continued(self) -> list[ToolCallDelta]:
        return list(takewhile(lambda call: call.id is None, self.tool_calls))

    @property
    def begun(self) -> list[ToolCallDelta]:
        return list(dropwhile(lambda call: call.id is None, self.tool_calls))

    @property
    def calls(self) -> list[ToolCall]:
        return [ToolCall(call.id or "", call.name or "", call.arguments) for call in self.tool_calls]

    def add(self, delta: "Delta") -> None:
        self.text += delta.text
        self.reasoning += delta.reasoning
        self.tokens += delta.tokens
        for part in delta.tool_calls:
            if part.id is not None:
                self.tool_calls.append(ToolCallDelta(part.index, part.id, part.name))
            self.tool_calls[part.index].arguments += part.arguments
        if delta.finish is not None:
            self.finish, self.reason, self.stopped = delta.finish, delta.reason, delta.stopped
            self.unfinished = delta.unfinished


_numbers = random.Random(secrets.randbits(256))


def new_hex(size: int) -> str:
    return f"{_numbers.getrandbits(8 * size):0{2 * size}x}"


_FIRST = 0xDC00  # a surrogate: bytes of UTF-8 never decode to one


def stand_ins(marks: Mapping[int, str]) -> dict[str, str]:
    """The stand-in character of each mark that is a special token; marks: their texts by id."""
    return {mark: chr(_FIRST + n) for n, mark in enumerate(marks.values())}


class OutputParser(Protocol):
    """Sorts the text of one choice. Its last characters, `held`, are not sorted yet."""

    reasoning_tokens: int
    pushed: int  # the characters so far, a special token as one
    said: int  # the characters that were shown as text

    @property
    def unfinished(self) -> bool:
        """Whether the text ends inside a call."""

    @property
    def held(self) -> int: ...

    def push(self, text: str, token: int | None, delta: Delta) -> None:
        """Take the next text, and put the sorted part into `delta`."""

    def finish(self, delta: Delta, cut: bool = False) -> None:
        """End the text (cut: by a limit or a stop string), and put what was held back into `delta`."""

    @property
    def called(self) -> bool:
        """Whether a tool was called."""


class PlainReader:
    reasoning_tokens = 0
    called = unfinished = False
    held = 0

    def __init__(self) -> None:
        self.pushed = self.said = 0

    def push(self, text: str, token: int | None, delta: Delta) -> None:  # noqa: ARG002  (part of the protocol)
        delta.text += text
        self.pushed = self.said = self.said + len(text)

    def finish(self, delta: Delta, cut: bool = False) -> None:
        """Do nothing: no text is held back."""


@dataclass(frozen=True, slots=True)
class ThinkTags:
    """The tags between which a model reasons. opened: the prompt ends inside them."""

    start: str = "<think>"
    end: str = "</think>"
    opened: bool = False

    def thoughts(self, budget: int | None) -> Thoughts:
        return Thoughts(self.start, self.end, self.opened, budget)

    def written(self, stands: Mapping[str, str]) -> "ThinkTags":
        start, end = self.start, self.end
        for mark, stand in stands.items():
            start, end = start.replace(mark, stand), end.replace(mark, stand)
        return replace(self, start=start, end=end)


TAGS = (
    ThinkTags(),
    ThinkTags("<seed:think>", "</seed:think>"),
    ThinkTags("[THINK]", "[/THINK]"),
    ThinkTags("<|START_THINKING|>", "<|END_THINKING|>"),
    ThinkTags("<thinking>", "</thinking>"),
    ThinkTags("<thought>", "</thought>"),  # EXAONE Deep
    ThinkTags("<|channel>thought", "<channel|>"),  # Gemma 4
)


class CallReader(Protocol):
    """Reads tool calls from the text that is not reasoning."""

    def push(self, text: str, token: int | None, delta: Delta) -> None: ...

    def finish(self, delta: Delta, cut: bool = False) -> None: ...

    @property
    def called(self) -> bool: ...

    @property
    def unfinished(self) -> bool: ...

    @property
    def held(self) -> int: ...


class SortingReader:
    """Sorts text between think tags as reasoning; the rest goes to a reader of tool calls, or is text.

    The start tag counts only before any other text; white space around both tags is dropped. apart=False: reasoning,
    with its tags, is part of the text, and has no calls. marks: special tokens that steer reading, shown where they
    steer nothing. shown: others that are shown.
    """

    def __init__(
        self,
        tags: ThinkTags | None,
        calls: CallReader | None,
        marks: Mapping[int, str],
        *,
        apart: bool = True,
        shown: Mapping[int, str] | None = None,
    ) -> None:
        self.reasoning_tokens = self.pushed = self.said = 0
        stands = stand_ins(marks)
        self._tags = None if tags is None else tags.written(stands)
        self._marks = {**(shown or {})} | {token: stands[mark] for token, mark in marks.items()}
        self._spelled = str.maketrans({stand: mark for mark, stand in stands.items()})
        self._calls: CallReader = calls or PlainReader()
        self._apart = apart
        self._state = "said" if tags is None else "thought" if tags.opened else "begins"
        self._held = ""
        self._bare = True  # nothing but white space since the last tag

    @property
    def called(self) -> bool:
        return self._calls.called

    @property
    def unfinished(self) -> bool:
        return self._calls.unfinished

    @property
    def held(self) -> int:
        return len(self._held) + self._calls.held

    def push(self, text: str, token: int | None, delta: Delta) -> None:
        if self._state == "thought" and token is not None:
            self.reasoning_tokens += 1
        if token is not None:
            text += self._marks.get(token, "")
        self.pushed += len(text)
        before = len(delta.text)
        if self._state == "said" and not self._bare:
            self._calls.push(text, token, delta)
        else:
            self._sort(self._held + text, token, delta)
        self.said += len(delta.text) - before
        self._spell(delta)

    def finish(self, delta: Delta, cut: bool = False) -> None:
        rest, self._held, before = self._held, "", len(delta.text)
        if cut and self._tags is not None and self._state != "said":
            mark = self._tags.start if self._state == "begins" else self._tags.end
            whole = len(rest.translate(self._spelled)) <= 1  # a special token that begins a tag is more
            rest = rest if whole else rest[: len(rest) - held_back(rest, mark)]
        if self._state == "thought":
            self._reason(rest, delta)
        elif rest:
            self._calls.push(rest, None, delta)
        self._calls.finish(delta, cut)
        self.said += len(delta.text) - before
        self._spell(delta)

    def _reason(self, thought: str, delta: Delta) -> None:
        if self._apart:
            delta.reasoning += thought
        else:
            delta.text += thought

    def _spell(self, delta: Delta) -> None:
        if self._marks:
            delta.text, delta.reasoning = delta.text.translate(self._spelled), delta.reasoning.translate(self._spelled)

    def _sort(self, text: str, token: int | None, delta: Delta) -> None:
        self._held = ""
        if self._state == "begins":
            text = self._begin(text, delta)
        if self._state == "thought":
            text = self._think(text, delta)
        if self._state == "said":
            if self._bare and self._apart and self._tags is not None:
                text = text.lstrip()
                self._bare = not text
            else:
                self._bare = False
            if text or token is not None:
                self._calls.push(text, token, delta)

    def _begin(self, text: str, delta: Delta) -> str:
        assert self._tags is not None, "a text begins with a tag only where there are tags"
        core, start = text.lstrip(), self._tags.start
        if core.startswith(start):
            self._state = "thought"
            if not self._apart:
                self._reason(text[: -len(core)] + start, delta)
                return core[len(start) :]
            return core[len(start) :].lstrip("\n")
        if start.startswith(core):
            self._held = text
            return ""
        self._state, self._bare = "said", False
        return text

    def _think(self, text: str, delta: Delta) -> str:
        assert self._tags is not None, "a model thinks between tags"
        if self._bare and self._apart:
            text = text.lstrip("\n")
        thought, end, rest = text.partition(self._tags.end)
        if end:
            self._state, self._bare = "said", True
            self._reason(thought.rstrip() if self._apart else thought + end, delta)
            return rest
        sure = thought[: len(thought) - held_back(thought, self._tags.end)]
        keep = len(sure.rstrip() if self._apart else sure)
        self._reason(thought[:keep], delta)
        self._held = thought[keep:]
        self._bare = self._bare and not thought[:keep]
        return ""


def held_back(text: str, tag: str) -> int:
    """The length of the longest suffix of `text` that is a prefix of `tag`."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if tag.startswith(text[-length:]):
            return length
    return 0


NewReader = Callable[[], OutputParser]
