"""Steers a constrained text to an end while one still fits the tokens that are left.

A grammar says which tokens may come next, not how far away an end is. So a *way* to an end is walked on a copy: at each
state it takes one token by a fixed order, and its length bounds what an end needs. A way depends on the state alone,
so behind its first token one token fewer is needed: a text whose end fits can always go on such that it still fits.
Everything here follows from the tokens of the text and the number of those left, whoever computes them in which batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from tokenwright.errors import EngineError

Mask = NDArray[np.uint32]

MOST_STEPS = 256  # of a way; an end farther away is none
MARGIN = 8  # tokens to spare, because the model's tokens may open more than the single characters that are tried
MOST_TRIED = 96  # tokens that are tried one by one; where more are allowed, only single characters are
_INTERVAL, _GROWTH = 8, 4  # between two looks ahead, in tokens; what one token may add to a way, at most
_WORD = 32
_QUOTE, _BRACES = b'"', (b"}", b"]")
_CLOSERS = (*_BRACES, b")", _QUOTE, b",", b":", *(b"%d" % digit for digit in range(10)), b"[", b"{", b"'")
_OPENERS = (_QUOTE, b",", b":", b"[", b"{")
_DEPTH = 3  # openers in a row that one token of a model may have


class State(Protocol):
    """A place in a text of a grammar."""

    def allowed(self) -> Mask:
        """The tokens that may follow."""

    def advance(self, token: int) -> bool:
        """Go on by a token; True: nothing may follow it."""

    def fork(self) -> Self:
        """An independent copy."""

    @property
    def accepting(self) -> bool:
        """Whether the text may end here."""


class Closers:
    """The tokens of one vocabulary by which texts are closed. pieces: the bytes of each token, b"" for those without.

    plain: tokens of letters, digits and signs that neither end a string nor begin an escape.
    """

    def __init__(self, pieces: Sequence[bytes], words: Callable[[Iterator[int]], Mask]) -> None:
        found = {piece: token for token, piece in reversed(list(enumerate(pieces))) if len(piece) == 1}
        self.of = {piece: found[piece] for piece in (*_CLOSERS, *_OPENERS) if piece in found}
        self.quote = found.get(_QUOTE)
        self.braces = [found[one] for one in _BRACES if one in found]
        structure = [self.of[one] for one in _CLOSERS if one in self.of]
        quote_first = sorted(structure, key=lambda token: token != self.quote)
        self.openers = [self.of[one] for one in _OPENERS if one in self.of]
        self.plain = words(token for token, piece in enumerate(pieces) if _is_plain(piece))
        length = np.array([len(piece) for piece in pieces], dtype=np.int64)
        first = np.array([piece[0] if piece else 0 for piece in pieces], dtype=np.int64)
        of_first = 4096 * first  # longer than any token
        self.ways = tuple(
            _Way(np.array(order, dtype=np.int64), worth)
            for order, worth in ((structure, length), (structure, length + of_first), (quote_first, length - of_first))
        )

    def free(self, mask: Mask) -> bool:
        """Whether any text may stand here, as in a string: brackets that nothing has opened, and what ends a string."""
        return self.quote is not None and all(has(mask, token) for token in (self.quote, *self.braces))

    def next(self, way: _Way, mask: Mask) -> int:
        """The token that a way takes."""
        if self.quote is not None and self.free(mask):
            return self.quote
        among = way.order[_bits(mask, way.order)]
        if len(among):
            return int(among[0])
        ids = listed(mask)
        return int(ids[np.argmax(way.worth[ids])])


@dataclass(frozen=True, slots=True)
class _Way:
    """An order in which tokens are taken: the first of these, else the one of most worth."""

    order: NDArray[np.int64]
    worth: NDArray[np.int64]


def _is_plain(piece: bytes) -> bool:
    if not piece or any(byte < 0x20 or byte in b'"\\' for byte in piece):
        return False
    try:
        return piece.decode().isprintable()
    except UnicodeDecodeError:
        return False


def has(mask: Mask, token: int) -> bool:
    """Whether a mask allows a token."""
    return bool(int(mask[token // _WORD]) >> token % _WORD & 1)


def listed(mask: Mask) -> NDArray[np.int64]:
    """The ids that a mask allows."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def _bits(mask: Mask, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    return (mask[ids // _WORD] >> (ids % _WORD).astype(np.uint32) & 1).astype(bool)


def steps_to_end(state: State, closers: Closers, most: int) -> int | None:
    """An upper bound of the tokens after which the text may end; None: no end was found within `most`."""
    most = min(most, MOST_STEPS)
    return next((found for way in closers.ways if (found := _walked(state, closers, way, most)) is not None), None)


def _walked(state: State, closers: Closers, way: _Way, most: int) -> int | None:
    state, quoted = state.fork(), False
    for steps in range(most + 1):
        if state.accepting:
            return steps
        if steps == most:
            break
        try:
            mask = state.allowed()
            free = closers.free(mask)
            if free and quoted:  # the quote was a letter of the text
                break
            quoted = free
            state.advance(closers.next(way, mask))
        except EngineError:  # beyond the grammar's limits
            break
    return None


class Steering:
    """Steers one sequence. It looks ahead now and then, and before each token where the end may be near.

    gate: with more tokens left than these nothing is steered; -1: no end was found.
    """

    def __init__(self, closers: Closers, state: State) -> None:
        self._closers = closers
        self._written = 0
        self._next = 0
        self._gate = -1
        self.advanced(state, 0)

    def advanced(self, state: State, tokens: int = 1) -> None:
        """The text has gone on to this state."""
        self._written += tokens
        if self._written < self._next:
            return
        interval = _INTERVAL + self._written // 8
        self._next = self._written + interval
        steps = steps_to_end(state, self._closers, MOST_STEPS)
        self._gate = -1 if steps is None else 2 * steps + _GROWTH * (interval + MARGIN)

    def mask(self, state: State, allowed: Mask, left: int) -> Mask:
        """Of the allowed tokens those behind which an end fits `left` tokens; all where none fits or many are left."""
        if left > self._gate or not self._fits(state, left) or self._spare(state, allowed, left):
            return allowed
        free = self._closers.free(allowed)
        if free and state.accepting:
            return allowed
        ids = self._tried(allowed, free)
        good = [token for token in ids if self._fits(_after(state, token), left - 1)]
        found = allowed & np.bitwise_not(allowed)
        for token in good:
            found[token // _WORD] |= np.uint32(1 << token % _WORD)
        if free and self._fits(state, left - 1):
            found |= allowed & self._closers.plain
        return found if found.any() else allowed

    def _fits(self, state: State, left: int) -> bool:
        return left >= 0 and steps_to_end(state, self._closers, left) is not None

    def _tried(self, allowed: Mask, free: bool) -> list[int]:
        ids = [] if free else listed(allowed).tolist()
        if free or len(ids) > MOST_TRIED:
            ids = [token for token in self._closers.of.values() if has(allowed, token)]
        return list(dict.fromkeys([*ids, *(self._closers.next(way, allowed) for way in self._closers.ways)]))

    def _spare(self, state: State, allowed: Mask, left: int) -> bool:
        """Whether an end fits whatever the next token opens, as far as single characters show it."""
        free = self._closers.free(allowed)
        if not free and len(ids := listed(allowed)) <= MOST_TRIED:
            return all(self._fits(_after(state, token), left - 1 - MARGIN) for token in ids.tolist())
        return self._fits(state, left - MARGIN) and self._opens(state, allowed, left - 1 - MARGIN, _DEPTH)

    def _opens(self, state: State, allowed: Mask, left: int, depth: int) -> bool:
        quote, free = self._closers.quote, self._closers.free(allowed)
        for token in self._closers.openers:
            if not has(allowed, token) or (free and token != quote):
                continue
            after = _after(state, token)
            if not self._fits(after, left):
                return False
            if depth > 1 and not after.accepting and not self._opens(after, after.allowed(), left - 1, depth - 1):
                return False
        return True


def _after(state: State, token: int) -> Any:
    after = state.fork()
    after.advance(token)
    return after
