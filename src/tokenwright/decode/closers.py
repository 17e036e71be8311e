"""The tokens by which texts are closed, and what is known of the places of a text.

A place is reached by bytes, whatever tokens they are cut into. What is noted there follows from these bytes and the
grammar only, and spares the matcher's work where a place is met again. `closing.py` walks over the places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.uint32]

_QUOTE, _BRACES = b'"', (b"}", b"]")
_CLOSERS = (*_BRACES, b")", _QUOTE, b",", b":", *(b"%d" % digit for digit in range(10)), b"[", b"{", b"'")
_LETTERS = (b"a", b"0", b"A")
_OPENERS = (_QUOTE, b",", b":", b"[", b"{")


class Matcher(Protocol):
    """The part of llguidance's matcher that is used here."""

    def compute_bitmask(self) -> bytes: ...

    def compute_ff_bytes(self) -> bytes: ...

    def consume_token(self, token: int) -> bool: ...

    def deep_copy(self) -> Self: ...

    def is_accepting(self) -> bool: ...

    def is_error(self) -> bool: ...

    def validate_tokens(self, tokens: list[int]) -> int: ...


class Closers:
    """The tokens of one vocabulary by which texts are closed. pieces: the bytes of each token, b"" for those without.

    plain: tokens of letters, digits and signs that neither end a string nor begin an escape. blanks: of white space.
    opens: for a token that opens a string and goes on with plain text, the one that only opens it.
    """

    def __init__(self, pieces: Sequence[bytes], ends: Mask, words: Callable[[Iterable[int]], Mask]) -> None:
        found = {piece: token for token, piece in reversed(list(enumerate(pieces))) if piece}
        self.ends = ends
        self._pieces = pieces
        self._found = found
        self._longest = max(map(len, found), default=0)
        self.quote = found.get(_QUOTE)
        self.braces = [found[one] for one in _BRACES if one in found]
        self.openers = [found[one] for one in _OPENERS if one in found]
        letters = [found[one] for one in _LETTERS if one in found]
        self.structure = [found[one] for one in _CLOSERS if one in found]
        self.plain = words(token for token, piece in enumerate(pieces) if _is_plain(piece))
        self.opens = {
            token: found[head + _QUOTE]
            for token, piece in enumerate(pieces)
            for head, quote, rest in [piece.partition(_QUOTE)]
            if quote and head + quote in found and _is_plain(rest)
        }
        self.blanks = frozenset(token for token, piece in enumerate(pieces) if piece and not piece.strip())
        length = np.array([len(piece) for piece in pieces], dtype=np.int64)
        of_first = 4096 * np.array([piece[0] if piece else 0 for piece in pieces], dtype=np.int64)  # beats any length
        quote_first = sorted(self.structure, key=lambda token: token != self.quote)
        self.ways = (
            Way(self.structure, letters, length, 1),
            Way(self.structure, letters[::-1], length + of_first, -1),
            Way(quote_first, letters, length - of_first, 1),
        )

    def keys(self, token: int) -> Iterable[int]:
        """The path of a token in a tree of places: its bytes, if it has any."""
        return self._pieces[token] or (~token,)

    def free(self, ahead: Ahead) -> bool:
        """Whether any text may stand here, as in a string: brackets that nothing has opened, and what ends a string."""
        place = ahead.place
        if place.free is None:
            place.free = self.quote is not None and ahead.allows(self.quote) and self.inside(ahead)
        return place.free

    def inside(self, ahead: Ahead) -> bool:
        """Whether brackets of all kinds may stand here, as they may only within a text."""
        return all(ahead.allows(token) for token in self.braces)

    def next(self, way: Way, ahead: Ahead, special: Sequence[int]) -> int:
        """The token that a way takes where several may follow; -1: none is allowed."""
        first = next((token for token in special[:: way.specials] if ahead.allows(token)), None)
        if first is None and self.quote is not None and self.free(ahead):
            first = self.quote
        if first is None:
            order = (*way.letters, *way.order) if self.inside(ahead) else way.order
            first = next((token for token in order if ahead.allows(token)), None)
        if first is not None:
            return first
        ids = self.listed(ahead.bits())
        return int(ids[np.argmax(way.worth[ids])]) if len(ids) else -1

    def cut(self, text: bytes) -> Iterator[int]:
        """The tokens along these bytes, each the longest that the rest begins with."""
        start = 0
        while start < len(text):
            ends = range(min(len(text), start + self._longest), start, -1)
            end = next((end for end in ends if text[start:end] in self._found), 0)
            if not end:
                break
            yield self._found[text[start:end]]
            start = end

    def listed(self, bits: bytes) -> NDArray[np.int64]:
        """The ids of the model's that a mask allows."""
        found = np.frombuffer(bits, dtype=np.uint8)
        places = np.flatnonzero(found)
        rows, columns = np.nonzero(np.unpackbits(found[places, None], axis=1, bitorder="little"))
        ids = places[rows] * 8 + columns
        return ids[ids < len(self.ways[0].worth)]


@dataclass(frozen=True, slots=True, eq=False)
class Way:
    """An order in which tokens are taken: the first of these, else the one of most worth.

    letters: go before them in a text that may not end yet. specials: the direction in which special tokens are tried,
    before all others.
    """

    order: Sequence[int]
    letters: Sequence[int]
    worth: NDArray[np.int64]
    specials: int


def _is_plain(piece: bytes) -> bool:
    if not piece or any(byte < 0x20 or byte in b'"\\' for byte in piece):
        return False
    try:
        return piece.decode().isprintable()
    except UnicodeDecodeError:
        return False


class Far(NamedTuple):
    """How a way goes on from a place: its end is `steps` away; it stops there; or it was followed no farther."""

    steps: int
    ends: bool = False
    stops: bool = False


class TextPlace:
    """A place in a text, by whatever tokens it is reached, with the answers found there.

    ends: whether the text may end here. free: whether any text may stand here. steps: the token that a way takes, and
    whether it is the quote in a free text. far: how a way goes on. after: the places behind one byte, or behind ~token
    of a token without bytes.
    """

    __slots__ = ("after", "ends", "far", "free", "steps")

    def __init__(self) -> None:
        self.ends: bool | None = None
        self.free: bool | None = None
        self.steps: dict[Way, tuple[int, bool]] = {}
        self.far: dict[Way, Far] = {}
        self.after: dict[int, TextPlace] = {}

    def behind(self, keys: Iterable[int]) -> TextPlace:
        """The place behind these bytes."""
        place = self
        for key in keys:
            known = place.after.get(key)
            if known is None:
                known = place.after[key] = TextPlace()
            place = known
        return place


class Ahead:
    """A place some tokens behind a matcher's, of which a copy takes them only when it is asked."""

    __slots__ = ("_bits", "_copy", "_start", "_tokens", "place")

    def __init__(self, start: Matcher, place: TextPlace, tokens: Iterable[int] = ()) -> None:
        self._start = start
        self._copy: Matcher | None = None
        self._bits: bytes | None = None
        self._tokens = list(tokens)  # that no copy has taken yet
        self.place = place

    @property
    def matcher(self) -> Matcher:
        """Read-only."""
        if self._tokens:
            self._copy = self._copy or self._start.deep_copy()
            for token in self._tokens:
                self._copy.consume_token(token)
            self._tokens.clear()
        return self._copy or self._start

    @property
    def ends(self) -> bool:
        """Whether the text may end here."""
        if self.place.ends is None:
            self.place.ends = self.matcher.is_accepting()
        return self.place.ends

    def allows(self, token: int) -> bool:
        """Whether a token may come next. To ask for some takes a fraction of the time of the mask of all."""
        if self._bits is not None:
            return bool(self._bits[token >> 3] >> (token & 7) & 1)
        return self.matcher.validate_tokens([token]) > 0

    def bits(self) -> bytes:
        """The mask of the tokens that may come next."""
        if self._bits is None:
            self._bits = self.matcher.compute_bitmask()
        return self._bits

    def forced(self) -> bytes:
        """The bytes that follow in any case."""
        asked = self.matcher.deep_copy()  # it would wait for these bytes
        text = asked.compute_ff_bytes()
        return b"" if asked.is_error() else text

    def take(self, token: int, keys: Iterable[int]) -> None:
        """Go on by a token of these bytes."""
        self._bits = None
        self._tokens.append(token)
        self.place = self.place.behind(keys)

    def fork(self) -> Ahead:
        """The same place, for a walk from here."""
        return Ahead(self._copy or self._start, self.place, self._tokens)
