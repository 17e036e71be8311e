"""The provenance of a prompt: which part of the request each of its tokens comes from.

The template's process reports which characters come from each string of the request (`text/template_process.py`). Here
they become token ranges: bytes are counted from the nearest known start of a token, such as a control token. A token
that two parts share belongs to the first.

Limits: a string that a template rebuilds (`upper`, `join`, iteration) is searched for after the message before it; a
short one may be found too early, or not at all and count as the template's. Where a tokenizer changes the text (NFC,
squeezed spaces), ranges may be off by the tokens changed since the last control token.
"""

import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from tokenwright.text.renderer import TextSpan

if TYPE_CHECKING:
    from tokenwright.text import Rendered, Tokenizer

Kind = Literal["tools", "system", "message", "thoughts", "calls", "prompt", "template"]
Message = Mapping[str, Any]
PLACES = "places"  # of a message: [(character, number)]: from there on its content is that message's of the request

_KINDS: Mapping[str, Kind] = {
    "tools": "tools",
    "tool_calls": "calls",
    "reasoning_content": "thoughts",
    "thinking": "thoughts",
}


class PromptPart(NamedTuple):
    """Tokens [start, stop) of a prompt and their origin. kind "template": its own text, before a message or last."""

    start: int
    stop: int
    kind: Kind
    message: int = -1  # the index in the request's conversation, or -1
    role: str = ""

    def __str__(self) -> str:
        if self.message < 0 or self.kind == "system":
            return self.kind
        return f"{'template before ' * (self.kind == 'template')}message {self.message} ({self.role})"


def numbered(messages: Iterable[Message]) -> list[Message]:
    """The messages with their numbers, which stay with their texts while they are arranged and joined."""
    return [{**message, PLACES: [(0, at)]} for at, message in enumerate(messages)]


def plain(messages: Iterable[Message]) -> list[Message]:
    return [{n: v for n, v in one.items() if n != PLACES} if PLACES in one else one for one in messages]


def joined(texts: Iterable[tuple[str, Message]], between: str) -> dict[str, Any]:
    """The content of a message joined from the texts of others, without empty ones; and its numbers."""
    found, places, length = list[str](), list[tuple[int, int]](), 0
    for text, message in texts:
        behind = length + len(between) if length else 0
        places += [(start + behind, at) for start, at in message.get(PLACES, ())]
        if text:
            found.append(text)
            length = behind + len(text)
    return {"content": between.join(found), **({PLACES: places} if places else {})}


def own_spans(spans: Iterable[TextSpan], messages: Sequence[Message]) -> tuple[TextSpan, ...]:
    """The spans of a rendered text by the numbers of `numbered`; those without a number are about tools."""
    found: list[TextSpan] = []
    for span in spans:
        places = messages[span.message].get(PLACES, []) if span.message >= 0 else []
        if span.field != "content" or len(places) < 2:
            at = places[0][1] if places else -1
            found.append(span._replace(message=at, field="tools" if at < 0 else span.field))
            continue
        for (start, at), (stop, _) in pairwise([*places, (sys.maxsize, -1)]):
            begin, end = (span.start + max(0, place - span.source) for place in (start, stop))
            if begin < min(end, span.stop):
                field = "tools" if at < 0 else span.field
                found.append(TextSpan(begin, min(end, span.stop), at, field, max(0, span.source - start)))
    return tuple(found)


class TokenPlaces:
    """Finds the token of a character. Call `at` with rising characters."""

    def __init__(self, tokenizer: "Tokenizer", rendered: "Rendered") -> None:
        self._text, self._ids = rendered.text, rendered.ids
        lengths = tokenizer.bytes_table(skip_special=False).lengths(rendered.ids)
        if len(lengths):
            lengths[0] = len(tokenizer.bytes_table(first=True, skip_special=False)[rendered.ids[0]] or b"")
        self._bytes = array("q", (0,))  # [T + 1]: bytes of the tokens before each
        self._bytes.frombytes(lengths.cumsum().tobytes())
        self._marks = [(0, 0), *rendered.marks]
        self._chars = [char for _, char in self._marks]
        self._last = (0, 0)  # a token that begins at a character

    def at(self, char: int, *, end: bool = False) -> int:
        """The token of a character; end: the first token after the characters before it."""
        mark = bisect_right(self._chars, char) - 1
        token, start = max(self._marks[mark], self._last)
        if mark + 1 < len(self._marks):
            stop, after = self._marks[mark + 1]
            if after - char < char - start:
                return self._back(char, stop, after, end)
        place = self._bytes[token] + len(self._text[start:char].encode())
        found = bisect_left(self._bytes, place, token)
        if found == len(self._bytes):
            return len(self._ids)
        if self._bytes[found] == place:
            self._last = (found, char)
            return found
        return found if end else found - 1

    def _back(self, char: int, token: int, after: int, end: bool) -> int:
        place = self._bytes[token] - len(self._text[char:after].encode())
        found = bisect_right(self._bytes, place, 0, token + 1) - 1
        if end and (found < 0 or self._bytes[found] < place):
            return found + 1
        return max(0, found)


def parts_of(
    tokenizer: "Tokenizer", rendered: "Rendered", messages: Sequence[Mapping[str, Any]], thoughts_end: str = ""
) -> tuple[PromptPart, ...]:
    """The parts of a prompt, in order, without the template's own text. thoughts_end: the tag that ends reasoning."""
    found: list[PromptPart] = []
    tokens = TokenPlaces(tokenizer, rendered)
    for start, stop, at, field, source in rendered.spans:
        message = messages[at] if at >= 0 else {}
        role, content = str(message.get("role", "")), message.get("content")
        kind = _KINDS.get(field, "system" if role in ("system", "developer") else "message")
        thinks = field == "content" and role == "assistant" and thoughts_end and thoughts_end in str(content)
        apart = start - source + str(content).rindex(thoughts_end) + len(thoughts_end) if thinks else 0
        for first, last, part_kind in ((start, min(stop, apart), "thoughts"), (max(start, apart), stop, kind)):
            if first < last:
                begin = max(found[-1].stop if found else 0, tokens.at(first))
                if (end := tokens.at(last, end=True)) > begin:
                    found.append(PromptPart(begin, end, cast("Kind", part_kind), at, role))
    return tuple(found)


def token_after(tokenizer: "Tokenizer", rendered: "Rendered", message: int, offset: int | None = None) -> int | None:
    """How many first tokens have a message's content (-1: the tools) up to an offset, or all of it; None: unknown."""
    field = "content" if message >= 0 else "tools"
    spans = [span for span in rendered.spans if span.message == message and span.field == field]
    if offset is not None:
        spans = [span for span in spans if span.source < offset]
    if not spans:
        return None
    last = spans[-1]
    stop = last.stop if offset is None else min(last.stop, last.start + offset - last.source)
    return TokenPlaces(tokenizer, rendered).at(stop, end=True)


def part_at(parts: Sequence[PromptPart], token: int) -> PromptPart:
    """A token's part: one of `parts`, or the template's text before one or after the last."""
    at = bisect_right(parts, token, key=lambda part: part.start) - 1
    if at >= 0 and token < parts[at].stop:
        return parts[at]
    start = parts[at].stop if at >= 0 else 0
    if at + 1 == len(parts):
        return PromptPart(start, sys.maxsize, "template")
    after = parts[at + 1]
    return after._replace(start=start, stop=after.start, kind="template")
