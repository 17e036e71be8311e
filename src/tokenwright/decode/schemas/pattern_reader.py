"""Reads a pattern of a JSON schema as a tree: characters, classes, groups, alternatives, repetitions and look-ahead.

Classes are as in ECMA 262: \\d and \\w are ASCII. ^ is read at the beginning, and $ at the end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

MOST_READ = 400  # characters of a pattern
MOST_REPEATED = 60  # times that a part is written out

Span = tuple[int, int]  # the first character, and the one behind the last
Node = tuple[Any, ...]

ALL = 0x110000  # characters
_DIGITS, _SPACES = ((48, 58),), ((9, 14), (32, 33), (160, 161), (0x2028, 0x202A), (0xFEFF, 0xFF00))
_WORDS = ((48, 58), (65, 91), (95, 96), (97, 123))
_CLASSES: dict[str, Sequence[Span]] = {"d": _DIGITS, "w": _WORDS, "s": _SPACES}
_CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "0": 0}
_REPEATED = re.compile(r"([*+?]|\{(\d+)(,?)(\d*)\})\??")
_CODE = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]+)\}")


class UnreadError(Exception):
    """A pattern has a part that is not read here, or is too large."""


class PatternReader:
    """Reads one pattern as a tree of ("set", spans), ("cat", ...), ("or", ...), ("times", tree, least, most),
    ("look", tree, whether it must be there), ("begin",) and ("end",)."""

    def __init__(self, pattern: str) -> None:
        if len(pattern) > MOST_READ:
            raise UnreadError
        self._text, self._at = pattern, 0

    def read(self) -> Node:
        tree = self._either()
        if self._at < len(self._text):
            raise UnreadError
        return tree

    def read_class(self) -> tuple[Sequence[Span], int]:
        """The class that the text begins with, and where it ends."""
        self._at = 1
        return self._class(), self._at

    def _next(self, *expected: str) -> str:
        """The text expected that is next, if any; it is taken."""
        found = next((one for one in expected if self._text.startswith(one, self._at)), "")
        self._at += len(found)
        return found

    def _either(self) -> Node:
        ways = [self._row()]
        while self._next("|"):
            ways.append(self._row())
        return ways[0] if len(ways) == 1 else ("or", *ways)

    def _row(self) -> Node:
        row: list[Node] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            row.append(self._times(self._one()))
        return ("cat", *row)

    def _times(self, tree: Node) -> Node:
        while match := _REPEATED.match(self._text, self._at):
            self._at = match.end()
            bounds: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
            least, most = bounds.get(match[1]) or (int(match[2]), int(match[4]) if match[4] else None)
            if match[2] and not match[3]:
                most = least
            if max(least, most or 0) > MOST_REPEATED or (most is not None and most < least):
                raise UnreadError
            tree = ("times", tree, least, most)
        return tree

    def _one(self) -> Node:
        letter = self._text[self._at]
        if letter == "(":
            return self._group()
        self._at += 1
        if letter in "^$":
            return ("begin",) if letter == "^" else ("end",)
        if letter == ".":
            return ("set", ((0, 10), (11, ALL)))
        if letter == "[":
            return ("set", self._class())
        if letter == "\\":
            return ("set", self._escaped())
        if letter in "*+?{}":
            raise UnreadError
        return ("set", ((ord(letter), ord(letter) + 1),))

    def _group(self) -> Node:
        kind = self._next("(?:", "(?=", "(?!", "(")
        if kind == "(" and self._next("?"):
            raise UnreadError
        tree = self._either()
        if not self._next(")"):
            raise UnreadError
        return ("look", tree, kind == "(?=") if kind in ("(?=", "(?!") else tree

    def _escaped(self) -> Sequence[Span]:
        letter = self._text[self._at : self._at + 1]
        if match := _CODE.match(self._text, self._at):
            self._at = match.end()
            code = int(match[1] or match[2] or match[3], 16)
            return ((code, code + 1),)
        self._at += 1
        if spans := _CLASSES.get(letter.lower()):
            return spans if letter.islower() else without(spans)
        if not letter or (letter.isalnum() and letter not in _CONTROLS):
            raise UnreadError  # such as a reference to a group, or the border of a word
        code = _CONTROLS.get(letter, ord(letter))
        return ((code, code + 1),)

    def _class(self) -> Sequence[Span]:
        inverted, spans = bool(self._next("^")), list[Span]()
        while not self._next("]"):
            first = self._member()
            if len(first) == 1 and first[0][1] - first[0][0] == 1 and self._ranges():
                self._at += 1
                last = self._member()
                if len(last) != 1 or last[0][1] <= first[0][0]:
                    raise UnreadError
                first = ((first[0][0], last[0][1]),)
            spans += first
        return without(spans) if inverted else tuple(spans)

    def _ranges(self) -> bool:
        return self._text[self._at : self._at + 1] == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", "")

    def _member(self) -> Sequence[Span]:
        letter = self._text[self._at : self._at + 1]
        self._at += 1
        if not letter:
            raise UnreadError
        return self._escaped() if letter == "\\" else ((ord(letter), ord(letter) + 1),)


def without(spans: Iterable[Span]) -> Sequence[Span]:
    """The characters that are in none of the spans."""
    found, at = list[Span](), 0
    for first, behind in sorted(spans):
        if first > at:
            found.append((at, first))
        at = max(at, behind)
    return tuple(found + ([(at, ALL)] if at < ALL else []))
