"""Text from tokens, one at a time: what may be shown now is shown now, the rest is held back.

The text of a completion is what follows the prompt: decode(prompt + generated) less decode(prompt), so a
Llama 2 completion keeps the space of its first word. Two things are held back: the bytes of a character that
is not whole yet (at most three), and the longest end of the text that a stop string may still claim. Since
tokens are bytes that concatenate (`pieces`), no text is decoded twice and the cost per token is that of its
own characters.

Stop strings are matched by one automaton (Aho and Corasick, 1975), whose state is the longest end of the text
that opens a stop string: what has to be held. The match with the earliest start wins, however the text was cut
into tokens; so "bc" of the stops "bc" and "abcd" waits, after "abc", for one more character. Of two stops with
the same start the shorter is named: it was complete first. Where the stop is to stay in the text, nothing waits
but what follows such an undecided match.
"""

import codecs
import copy
from collections import deque
from collections.abc import Sequence

from tokenwright.errors import RequestError
from tokenwright.text.tokenizer import Tokenizer, check_text

STOP_CHARACTERS = 65_536  # of a request's stop strings together; the automaton takes about 300 bytes for each
_REPLACEMENT = "\ufffd"

_Released = tuple["_Released | None", str]  # the last piece, and those before it: forks share them


class StopStrings:
    """The stop strings of a request as an automaton; immutable, so it may be shared by many streams.

    `hold[state]`: characters of the longest end of the text that a stop string may still claim: that opens one, but
    is not the whole of it.
    `ends[state]`: the longest stop string that ends here (so the one that started first), or None.
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
        """The state after one more character."""
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
        """For each state, breadth first, the state of its longest proper end."""
        queue = deque(self._edges[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self._edges[state].items():
                self._back[child] = self.advance(self._back[state], char)
                queue.append(child)
            if self.ends[state] is None:
                self.ends[state] = self.ends[self._back[state]]
            if not self._edges[state]:  # a whole stop that opens no other one
                self.hold[state] = self.hold[self._back[state]]


class TextStream:
    """The text of one completion, as it comes.

    `prompt` are the ids that the completion follows; only their last character and whether they have text at
    all matter. `stops` may be given as StopStrings, built once for several streams. `include_stop`: the stop string
    that ends the text is part of it. `stopped`: that stop string, once it is found.
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
        self._tokenizer = tokenizer
        self._skip = skip_special
        self._include = include_stop
        self._stops = stops if isinstance(stops, StopStrings) else StopStrings(stops)
        self._pending, self._first = _tail(tokenizer, prompt, skip_special)
        self._lent = bool(self._pending)  # the pending bytes are the prompt's, until they become a character
        self._state = 0
        self._held = ""  # text that is not released
        self._match: tuple[int, str] | None = None  # the best stop so far, and where it begins: 0 is the held text
        self._released: _Released | None = None
        self._closed = False
        self.stopped: str | None = None

    @property
    def text(self) -> str:
        """Everything released so far, that of the stream this one was forked from included."""
        pieces, at = [], self._released
        while at is not None:
            at, piece = at
            pieces.append(piece)
        return "".join(reversed(pieces))

    def fork(self) -> "TextStream":
        """A stream that goes on from the same text by itself; what was released is shared, so it costs O(1)."""
        return copy.copy(self)  # all that a stream changes are references to values that do not change

    def push(self, token: int, armed: bool = True) -> str:
        """Take one token; returns the text that may be shown now, often ''; after a stop always ''.

        Not `armed` (min_tokens): stop strings whose last character comes with this token do not count. One that
        only begins here may be completed by a later token.
        """
        assert not self._closed or self.stopped is not None, "push() after finish(): open a new TextStream"
        piece = self._tokenizer.token_bytes(token, first=self._first, skip_special=self._skip)
        if piece is None or self._closed:
            return ""
        self._first = False
        return self._release(self._feed(self._decode(piece, final=False), armed))

    def finish(self) -> str:
        """End the text; returns what was held, up to a stop; `stopped` may be settled only here."""
        if self._closed:
            return ""
        ready = self._feed(self._decode(b"", final=True), armed=True)
        if not self._closed:
            ready = self._settle() if self._match is not None else len(self._held)
        self._closed = True
        return self._release(ready)

    def _decode(self, piece: bytes, *, final: bool) -> str:
        """The characters that `piece` makes whole; the prompt's unfinished one is shown if it gets whole."""
        data = self._pending + piece
        text, used = codecs.utf_8_decode(data, "replace", final)
        self._pending = data[used:]
        if text and self._lent:
            self._lent = False
            text = text.removeprefix(_REPLACEMENT)
        return text

    def _feed(self, text: str, armed: bool) -> int:
        """Append `text` to what is held and move the automaton; returns how much of it may be released."""
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
                return self._settle()  # nothing that began earlier is still open
        if not self._include:
            return at - stops.hold[self._state]
        return at if self._match is None else self._match[0] + len(self._match[1])

    def _settle(self) -> int:
        assert self._match is not None, "a stop is settled only where one was found"
        start, self.stopped = self._match
        self._closed = True
        return start + len(self.stopped) if self._include else start

    def _release(self, ready: int) -> str:
        """Release `ready` characters of the held text."""
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


def _tail(tokenizer: Tokenizer, prompt: Sequence[int], skip_special: bool) -> tuple[bytes, bool]:
    """The bytes of an unfinished character at the prompt's end, and whether the completion opens the text."""
    data, first = b"", True
    for token in reversed(prompt):
        piece = tokenizer.token_bytes(token, first=False, skip_special=skip_special)
        if piece is not None:
            data, first = piece + data, False
        if len(data) >= 3:  # as many as an unfinished character can have
            break
    _, used = codecs.utf_8_decode(data, "replace", False)
    return data[used:], first
