"""Text that a model is writing, for readers that are generators and yield when they need more."""

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]

_OUTSIDE = re.compile(r'[{}\[\]"]')
_INSIDE = re.compile(r'["\\]')
_PLAIN_END = re.compile(r"[,}\]\s]")


class Cut(Exception):
    """The text has ended inside an element that was being read."""


class NoCall(Exception):
    """The text does not have the form of a call."""


class TextSource:
    """The text that has arrived and is unread. `raw` was read since `record`. ended: no more will arrive."""

    def __init__(self) -> None:
        self.text = ""
        self.raw = ""
        self.ended = False
        self._recording = False

    def record(self, start: str = "") -> None:
        """From now on, append the text that is read to `raw`, which begins with `start`."""
        self.raw, self._recording = start, True

    def stop_recording(self) -> None:
        self.raw, self._recording = "", False

    def take(self, length: int) -> str:
        part, self.text = self.text[:length], self.text[length:]
        if self._recording:
            self.raw += part
        return part

    def more(self) -> Steps[None]:
        if self.ended:
            raise Cut
        yield

    def space(self) -> Steps[None]:
        while True:
            self.take(len(self.text) - len(self.text.lstrip()))
            if self.text or self.ended:
                return
            yield

    def begins(self, *marks: str) -> Steps[str | None]:
        """The longest of these marks with which the unread text begins, if any; it stays unread."""
        while True:
            found = max((mark for mark in marks if self.text.startswith(mark)), key=len, default=None)
            undecided = any(len(mark) > len(self.text) and mark.startswith(self.text) for mark in marks)
            if self.ended or not undecided:
                return found
            yield

    def followed(self, *marks: str) -> Steps[bool]:
        """Whether one of these marks follows, perhaps after white space, or the text ends. Reads nothing."""
        while True:
            rest = self.text.lstrip()
            undecided = any(mark.startswith(rest) for mark in marks)
            if self.ended or not undecided or rest in marks:
                return undecided or rest.startswith(marks)
            yield

    def expect(self, *marks: str) -> Steps[str]:
        """Read one of these marks. Raises NoCall without one, Cut where the text ends inside one."""
        found = yield from self.begins(*marks)
        if found is None:
            if self.ended and any(mark.startswith(self.text) for mark in marks):
                raise Cut
            raise NoCall
        self.take(len(found))
        return found

    def until(self, *marks: str, give: Callable[[str], object], keep: bool = False) -> Steps[str]:
        """Give the text up to the first mark in parts; read the mark unless `keep`, and return it. Raises Cut."""
        while True:
            places = [(at, -len(mark), mark) for mark in marks if (at := self.text.find(mark)) >= 0]
            at, _, mark = min(places, default=(len(self.text) - held_back(self.text, marks), 0, ""))
            longer = any(len(other) > len(self.text) - at and other.startswith(self.text[at:]) for other in marks)
            if at:
                give(self.take(at))
            if mark and (self.ended or not longer):
                if not keep:
                    self.take(len(mark))
                return mark
            yield from self.more()

    def json_string(self) -> Steps[str]:
        parts = [(yield from self.expect('"'))]
        while True:
            found = _INSIDE.search(self.text)
            if found is None:
                parts.append(self.take(len(self.text)))
                yield from self.more()
            elif found[0] == '"':
                parts.append(self.take(found.end()))
                return "".join(parts)
            elif len(self.text) > found.end():
                parts.append(self.take(found.end() + 1))
            else:
                yield from self.more()

    def json_value(self, give: Callable[[str], object]) -> Steps[None]:
        """Read a JSON value and give its text as it arrives. Checks only brackets."""
        while not self.text:
            yield from self.more()
        if self.text[0] == '"':
            give((yield from self.json_string()))
        elif self.text[0] in "{[":
            yield from self._nested(give)
        else:
            yield from self._plain(give)

    def _nested(self, give: Callable[[str], object]) -> Steps[None]:
        depth, string = 0, False
        while True:
            at, waiting = 0, False
            while (found := (_INSIDE if string else _OUTSIDE).search(self.text, at)) is not None:
                char, at = found[0], found.end()
                if char == "\\":
                    if at == len(self.text):
                        at, waiting = at - 1, True
                        break
                    at += 1
                elif char == '"':
                    string = not string
                elif char in "{[":
                    depth += 1
                else:
                    depth -= 1
                    if depth == 0:
                        give(self.take(at))
                        return
            if ready := at if waiting else len(self.text):
                give(self.take(ready))
            yield from self.more()

    def _plain(self, give: Callable[[str], object]) -> Steps[None]:
        while (found := _PLAIN_END.search(self.text)) is None:
            yield from self.more()
        if found.start() == 0:
            raise NoCall
        give(self.take(found.start()))


def held_back(text: str, marks: tuple[str, ...]) -> int:
    """The length of the longest suffix of `text` that is a proper prefix of a mark."""
    for length in range(min(len(text), max(map(len, marks), default=1) - 1), 0, -1):
        if any(len(mark) > length and mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0
