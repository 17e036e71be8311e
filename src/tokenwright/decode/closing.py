"""Steers a constrained text to an end while one still fits the tokens that are left.

A grammar says which tokens may come next, not how far away an end is. So a *way* to an end is walked on a copy: at each
state it takes one token by a fixed order, and its length bounds what an end needs. A way depends on the state alone,
so behind its first token one token fewer is needed: a text whose end fits can always go on such that it still fits.
Everything here follows from the tokens of the text and the number of those left, whoever computes them in which batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.uint32]

MOST_STEPS = 256  # of a way; an end farther away is none
MOST_WORK = 1_500  # steps of all ways that are walked for half a mask, of some 40 us each; beyond them no end is found
MARGIN = 8  # tokens to spare, because the model's tokens may open more than the single characters that are tried
MOST_TRIED = 96  # tokens that are tried one by one; where more are allowed, only single characters are
_INTERVAL, _GROWTH = 8, 4  # between two looks ahead, in tokens; what one token may add to a way, at most
_WORD = 32
_QUOTE, _BRACES = b'"', (b"}", b"]")
_CLOSERS = (*_BRACES, b")", _QUOTE, b",", b":", *(b"%d" % digit for digit in range(10)), b"[", b"{", b"'")
_LETTERS = (b"a", b"0", b"A")
_OPENERS = (_QUOTE, b",", b":", b"[", b"{")
_DEPTH = 3  # openers in a row that one token of a model may have


class Matcher(Protocol):
    """The part of llguidance's matcher that is used here."""

    def compute_bitmask(self) -> bytes: ...

    def consume_token(self, token: int) -> bool: ...

    def deep_copy(self) -> Self: ...

    def is_accepting(self) -> bool: ...

    def is_error(self) -> bool: ...


class Closers:
    """The tokens of one vocabulary by which texts are closed. pieces: the bytes of each token, b"" for those without.

    plain: tokens of letters, digits and signs that neither end a string nor begin an escape. blanks: of white space.
    """

    def __init__(self, pieces: Sequence[bytes], ends: Mask, words: Callable[[Iterable[int]], Mask]) -> None:
        found = {piece: token for token, piece in reversed(list(enumerate(pieces))) if len(piece) == 1}
        self.ends = ends
        self.quote = found.get(_QUOTE)
        self.braces = [found[one] for one in _BRACES if one in found]
        self.openers = [found[one] for one in _OPENERS if one in found]
        letters = [found[one] for one in _LETTERS if one in found]
        self.structure = [found[one] for one in _CLOSERS if one in found]
        self.plain = words(token for token, piece in enumerate(pieces) if _is_plain(piece))
        self.blanks = frozenset(token for token, piece in enumerate(pieces) if piece and not piece.strip())
        length = np.array([len(piece) for piece in pieces], dtype=np.int64)
        of_first = 4096 * np.array([piece[0] if piece else 0 for piece in pieces], dtype=np.int64)  # beats any length
        quote_first = sorted(self.structure, key=lambda token: token != self.quote)
        self.ways = (
            _Way(self.structure, letters, length, 1),
            _Way(self.structure, letters[::-1], length + of_first, -1),
            _Way(quote_first, letters, length - of_first, 1),
        )

    def free(self, bits: bytes) -> bool:
        """Whether any text may stand here, as in a string: brackets that nothing has opened, and what ends a string."""
        return self.quote is not None and has(bits, self.quote) and self.inside(bits)

    def inside(self, bits: bytes) -> bool:
        """Whether brackets of all kinds may stand here, as they may only within a text."""
        return all(has(bits, token) for token in self.braces)

    def next(self, way: _Way, bits: bytes, special: Sequence[int]) -> int:
        """The token that a way takes; -1: none is allowed."""
        first = next((token for token in special[:: way.specials] if has(bits, token)), None)
        if first is None and self.quote is not None and self.free(bits):
            first = self.quote
        if first is None:
            order = (*way.letters, *way.order) if self.inside(bits) else way.order
            first = next((token for token in order if has(bits, token)), None)
        if first is not None:
            return first
        ids = self.listed(bits)
        return int(ids[np.argmax(way.worth[ids])]) if len(ids) else -1

    def listed(self, bits: bytes) -> NDArray[np.int64]:
        """The ids of the model's that a mask allows."""
        found = np.frombuffer(bits, dtype=np.uint8)
        places = np.flatnonzero(found)
        rows, columns = np.nonzero(np.unpackbits(found[places, None], axis=1, bitorder="little"))
        ids = places[rows] * 8 + columns
        return ids[ids < len(self.ways[0].worth)]


@dataclass(frozen=True, slots=True)
class _Way:
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


def has(bits: bytes, token: int) -> bool:
    """Whether a mask allows a token."""
    return bool(bits[token >> 3] >> (token & 7) & 1)


class Steering:
    """Steers one sequence. It looks ahead now and then, and before each token where the end may be near.

    special: the special tokens that its grammar may name. gate: with more tokens left than these nothing is steered;
    -1: no end was found.
    """

    def __init__(self, closers: Closers, special: Sequence[int], matcher: Matcher) -> None:
        self._closers = closers
        self._special = special
        self._written = 0
        self._next = 0
        self._gate = -1
        self._jump = 0  # the most that an opener added to the way to an end, so far
        self._work = 0  # steps walked since it was set to 0
        self.advanced(matcher, 0)

    def advanced(self, matcher: Matcher, tokens: int = 1) -> None:
        """The text has gone on to this place."""
        self._written += tokens
        if self._written < self._next:
            return
        interval = _INTERVAL + self._written // 8
        self._next = self._written + interval
        self._work = 0
        steps = self.steps_to_end(matcher)
        if steps is None:
            self._gate = -1
            return
        opened = self._openings(matcher, matcher.compute_bitmask(), MOST_STEPS, 2) if steps else ()
        self._jump = max(self._jump, *(more - steps for more in opened if more is not None), 0)
        self._gate = steps + 2 * self._jump + _GROWTH * (interval + MARGIN)

    def mask(self, matcher: Matcher, allowed: Mask, left: int) -> Mask:
        """The allowed tokens behind which an end fits `left` tokens; all where none fits or many are left."""
        self._work = 0
        if left > self._gate or not self._fits(matcher, left):
            return allowed
        bits = matcher.compute_bitmask()
        free = self._closers.free(bits)
        if self._spare(matcher, bits, left, free) or (free and matcher.is_accepting()):
            return allowed
        self._work = 0
        found: Mask = allowed & self._closers.ends
        for token in self._held(matcher, self._tried(bits, free), left - 1):
            found[token // _WORD] |= np.uint32(1 << token % _WORD)
        if free and self._fits(matcher, left - 1):
            found |= allowed & self._closers.plain
        return found if found.any() else allowed

    def steps_to_end(self, matcher: Matcher, most: int = MOST_STEPS) -> int | None:
        """An upper bound of the tokens after which the text may end; None: no end was found within `most`."""
        ways = (self._walked(matcher, way, min(most, MOST_STEPS)) for way in self._closers.ways)
        return next((found for found in ways if found is not None), None)

    def _walked(self, matcher: Matcher, way: _Way, most: int) -> int | None:
        matcher, quoted = matcher.deep_copy(), False
        for steps in range(most + 1):
            if matcher.is_accepting():
                return steps
            self._work += 1
            bits = matcher.compute_bitmask() if steps < most and self._work <= MOST_WORK else b""
            if not bits or matcher.is_error():  # beyond the grammar's limits
                break
            token = self._closers.next(way, bits, self._special)
            free = token == self._closers.quote and self._closers.free(bits)
            if (free and quoted) or token < 0:  # the quote was a letter of the text
                break
            quoted = free
            matcher.consume_token(token)
        return None

    def _fits(self, matcher: Matcher, left: int) -> bool:
        return left >= 0 and self.steps_to_end(matcher, left) is not None

    def _held(self, matcher: Matcher, ids: Sequence[int], left: int) -> list[int]:
        """Those of the ids behind which an end fits. One of white space stands for all."""
        blank = next((token for token in ids if token in self._closers.blanks), None)
        tried = {one: self._fits(_after(matcher, one), left) for one in ids if one not in self._closers.blanks}
        spaced = blank is not None and self._fits(_after(matcher, blank), left)
        return [token for token in ids if tried.get(token, spaced)]

    def _tried(self, bits: bytes, free: bool) -> list[int]:
        ids = [] if free else self._closers.listed(bits).tolist()
        if free or len(ids) > MOST_TRIED:
            ids = [token for token in (*self._special, *self._closers.structure) if has(bits, token)]
        ways = (self._closers.next(way, bits, self._special) for way in self._closers.ways)
        return [token for token in dict.fromkeys((*ways, *ids)) if token >= 0]

    def _spare(self, matcher: Matcher, bits: bytes, left: int, free: bool) -> bool:
        """Whether an end fits whatever the next token opens, as far as single characters show it."""
        left -= 1 + MARGIN
        ids = [] if free else self._closers.listed(bits).tolist()
        if 0 < len(ids) <= MOST_TRIED:
            return len(self._held(matcher, ids, left)) == len(ids)
        return self._fits(matcher, left) and None not in self._openings(matcher, bits, left + 1, _DEPTH)

    def _openings(self, matcher: Matcher, bits: bytes, most: int, depth: int) -> Iterator[int | None]:
        """The tokens to an end from here through each opener, and through those that follow it; None: over `most`."""
        free = self._closers.free(bits)
        for token in [self._closers.quote] if free else self._closers.openers:
            if token is None or not has(bits, token):
                continue
            after = _after(matcher, token)
            steps = self.steps_to_end(after, most - 1)
            yield None if steps is None else steps + 1
            if depth > 1 and not after.is_accepting():
                for steps in self._openings(after, after.compute_bitmask(), most - 1, depth - 1):
                    yield None if steps is None else steps + 1


def _after(matcher: Matcher, token: int) -> Matcher:
    after = matcher.deep_copy()
    after.consume_token(token)
    return after
