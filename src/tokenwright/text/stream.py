"""Incremental detokenisation: a stream releases text as early as possible, and holds back the rest.

The text of a completion is decode(prompt + generated) without decode(prompt), so a Llama 2 completion keeps the space
of its first word. A stream holds back an incomplete character, at most three bytes, and text that may become a stop
string.

One automaton (Aho and Corasick, 1975) matches all stop strings. The match with the earliest start wins: after "abc"
with the stops "bc" and "abcd" the match of "bc" waits for one more character. Of two stops with the same start
the shorter wins.
"""

import codecs
import copy
from collections import deque
from collections.abc import Sequence

from tokenwright.errors import RequestError
from tokenwright.text.tokenizer import ByteTables, TokenBytes, Tokenizer, check_text

STOP_CHARACTERS = 65_536  # of a request's stop strings together; each takes about 300 bytes
_REPLACEMENT = "\ufffd"

_Released = tuple["_Released | None", str]  # a linked list, the last text first, so that forks share the earlier ones


class StopStrings:
    """The stop strings of a request as an immutable automaton. Raises RequestError.

    `hold[state]` is the length of the text's longest suffix that is a proper prefix of a stop string. `ends[state]` is
    the longest stop string that ends here (so with the earliest start), or None.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        _check(stops)
        self._edges: list[dict[str, int]] = [{}]
        self._back = [0]
        self.hold = [0]
        self.ends: list[str | None] = [None]
        for stop in stops:
            self._insert(stop)
        self._link()

    def advance(self, state: int, char: str) -> int:
        while state and char not in self._edges[state]:
            state = self._back[state]
        return self._edges[state].get(char, 0)

    def _insert(self, stop: str) -> None:
        state = 0
        for depth, char in enumerate(stop, 1):
            if char not in self._edges[state]:
                self._edges[state][char] = len(self._edges)
                self._edges.append({})
                self._back.append(0)
                self.hold.append(depth)
                self.ends.append(None)
            state = self._edges[state][char]
        self.ends[state] = stop

    def _link(self) -> None:
        """Set each state's failure link, breadth first: the state of its longest proper suffix."""
        queue = deque(self._edges[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self._edges[state].items():
                self._back[child] = self.advance(self._back[state], char)
                queue.append(child)
            if self.ends[state] is None:
                self.ends[state] = self.ends[self._back[state]]
            if not self._edges[state]:  # a complete stop string that begins no other one
                self.hold[state] = self.hold[self._back[state]]


class TextStream:
    """The text of one completion, token by token.

    `prompt`: the ids before the completion. `include_stop`: the stop string is part of the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] | StopStrings = (),
        prompt: Sequence[int] = (),
        *,
        skip_special: bool = True,
        include_stop: bool = False,
    ) -> None:
        self._tables = tokenizer.byte_tables[skip_special]
        self._include = include_stop
        self._stops = stops if isinstance(stops, StopStrings) else StopStrings(stops)
        self._pending, self._table = _tail(self._tables, prompt)
        self._lent = bool(self._pending)  # whether the pending bytes, an incomplete character, are the prompt's
        self._state = 0
        self._held = ""
        self._match: tuple[int, str] | None = None  # offset in `_held` of the best match so far, and its stop string
        self._released: _Released | None = None
        self._closed = False
        self.stopped: str | None = None

    @property
    def text(self) -> str:
        pieces, at = [], self._released
        while at is not None:
            at, piece = at
            pieces.append(piece)
        return "".join(reversed(pieces))

    def fork(self) -> "TextStream":
        """A stream that continues from the same text; O(1), as both share the released text."""
        return copy.copy(self)

    def push(self, token: int, armed: bool = True) -> str:
        """Append one token; return the text that it releases, often ''.

        armed=False (min_tokens): a stop string that this token completes does not end the text.
        """
        assert not self._closed or self.stopped is not None, "push() after finish(): open a new TextStream"
        piece = self._table[token]
        if piece is None or self._closed:
            return ""
        self._table = self._tables.behind(piece)
        return self._release(self._feed(self._decode(piece, final=False), armed))

    def finish(self) -> str:
        """End the text; return what was held back, up to a stop string. This may set `stopped`."""
        if self._closed:
            return ""
        ready = self._feed(self._decode(b"", final=True), armed=True)
        if not self._closed:
            ready = self._settle() if self._match is not None else len(self._held)
        self._closed = True
        return self._release(ready)

    def _decode(self, piece: bytes, *, final: bool) -> str:
        data = self._pending + piece
        text, used = codecs.utf_8_decode(data, "replace", final)
        self._pending = data[used:]
        if text and self._lent:
            self._lent = False
            text = text.removeprefix(_REPLACEMENT)
        return text

    def _feed(self, text: str, armed: bool) -> int:
        """Append to the held text and advance the automaton; return how many characters may be released."""
        at = len(self._held)
        self._held += text
        stops = self._stops
        for char in text:
            at += 1
            self._state = stops.advance(self._state, char)
            end = stops.ends[self._state]
            if armed and end is not None and (self._match is None or at - len(end) < self._match[0]):
                self._match = (at - len(end), end)
            if self._match is not None and at - stops.hold[self._state] >= self._match[0]:
                return self._settle()
        if not self._include:
            return at - stops.hold[self._state]
        return at if self._match is None else self._match[0] + len(self._match[1])

    def _settle(self) -> int:
        assert self._match is not None, "a stop is settled only where one was found"
        start, self.stopped = self._match
        self._closed = True
        return start + len(self.stopped) if self._include else start

    def _release(self, ready: int) -> str:
        piece, self._held = self._held[:ready], self._held[ready:]
        if self._match is not None:
            self._match = (self._match[0] - ready, self._match[1])
        if piece:
            self._released = (self._released, piece)
        return piece


def _check(stops: Sequence[str]) -> None:
    if isinstance(stops, str):
        raise RequestError(f"stop strings are given as a list: [{stops!r}]")
    for i, stop in enumerate(stops):
        if not isinstance(stop, str):
            raise RequestError(f"stop string {i} is a {type(stop).__name__}; stop strings must be text")
        check_text(stop)
        if not stop:
            raise RequestError(f"stop string {i} is empty; remove it, or give at least one character")
    total = sum(map(len, stops))
    if total > STOP_CHARACTERS:
        raise RequestError(f"the stop strings have {total} characters together; {STOP_CHARACTERS} are allowed")


def _tail(tables: ByteTables, prompt: Sequence[int]) -> tuple[bytes, TokenBytes]:
    """The bytes of an unfinished character at the prompt's end, and the table of the next token."""
    data, table = b"", tables.first
    for token in reversed(prompt):
        piece = tables.middle[token]
        if piece is not None:
            data, table = piece + data, tables.behind(piece + data)
        if len(data) >= 3:  # the most bytes of an unfinished character
            break
    _, used = codecs.utf_8_decode(data, "replace", False)
    return data[used:], table
