"""Steers a constrained text to an end while one still fits the tokens that are left.

A grammar says which tokens may come next, not how far away an end is. So a *way* to an end is walked on a copy: at each
state it takes one token by a fixed order, and its length bounds what an end needs. A way depends on the state alone,
so behind its first token one token fewer is needed: a text whose end fits can always go on such that it still fits.
The results of walks are kept for later ones, by the bytes of the text; no mask depends on them.
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

    def validate_tokens(self, tokens: list[int]) -> int: ...


class Closers:
    """The tokens of one vocabulary by which texts are closed. pieces: the bytes of each token, b"" for those without.

    plain: tokens of letters, digits and signs that neither end a string nor begin an escape. blanks: of white space.
    """

    def __init__(self, pieces: Sequence[bytes], ends: Mask, words: Callable[[Iterable[int]], Mask]) -> None:
        found = {piece: token for token, piece in reversed(list(enumerate(pieces))) if len(piece) == 1}
        self.ends = ends
        self._pieces = pieces
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

    def keys(self, token: int) -> Iterable[int]:
        """The path of a token in a tree of places: its bytes, if it has any."""
        return self._pieces[token] or (~token,)

    def free(self, ahead: _Ahead) -> bool:
        """Whether any text may stand here, as in a string: brackets that nothing has opened, and what ends a string."""
        return self.quote is not None and ahead.allows(self.quote) and self.inside(ahead)

    def inside(self, ahead: _Ahead) -> bool:
        """Whether brackets of all kinds may stand here, as they may only within a text."""
        return all(ahead.allows(token) for token in self.braces)

    def next(self, way: _Way, ahead: _Ahead, special: Sequence[int]) -> int:
        """The token that a way takes; -1: none is allowed."""
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

    def listed(self, bits: bytes) -> NDArray[np.int64]:
        """The ids of the model's that a mask allows."""
        found = np.frombuffer(bits, dtype=np.uint8)
        places = np.flatnonzero(found)
        rows, columns = np.nonzero(np.unpackbits(found[places, None], axis=1, bitorder="little"))
        ids = places[rows] * 8 + columns
        return ids[ids < len(self.ways[0].worth)]


@dataclass(frozen=True, slots=True, eq=False)
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


class _Place:
    """What is known of a place in a text, by whatever tokens it was reached.

    ends: whether the text may end here. steps: the token that a way takes, and whether it is the quote in a free text.
    after: the places behind one byte, or behind ~token of a token without bytes.
    """

    __slots__ = ("after", "ends", "steps")

    def __init__(self) -> None:
        self.ends: bool | None = None
        self.steps: dict[_Way, tuple[int, bool]] = {}
        self.after: dict[int, _Place] = {}

    def behind(self, keys: Iterable[int]) -> _Place:
        """The place behind these bytes."""
        place = self
        for key in keys:
            known = place.after.get(key)
            if known is None:
                known = place.after[key] = _Place()
            place = known
        return place


class _Ahead:
    """A place some tokens behind a matcher's, of which a copy takes them only when it is asked."""

    __slots__ = ("_bits", "_copy", "_start", "_tokens", "place")

    def __init__(self, start: Matcher, place: _Place, tokens: Iterable[int] = ()) -> None:
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

    def take(self, token: int, keys: Iterable[int]) -> None:
        """Go on by a token of these bytes."""
        self._bits = None
        self._tokens.append(token)
        self.place = self.place.behind(keys)

    def fork(self) -> _Ahead:
        """The same place, for a walk from here."""
        return _Ahead(self._copy or self._start, self.place, self._tokens)


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
        self._work = 0  # steps walked since it was set to 0, known or not
        self._place = _Place()  # of the text; forks share it
        self._looked(matcher)

    def advanced(self, matcher: Matcher, token: int | None) -> None:
        """The text has gone on by one token to this place; None: by one that no walk takes."""
        self._place = _Place() if token is None else self._place.behind(self._closers.keys(token))
        self._written += 1
        if self._written >= self._next:
            self._looked(matcher)

    def _looked(self, matcher: Matcher) -> None:
        interval = _INTERVAL + self._written // 8
        self._next = self._written + interval
        self._work = 0
        here = _Ahead(matcher, self._place)
        steps = self._steps(here)
        if steps is None:
            self._gate = -1
            return
        opened = self._openings(here, MOST_STEPS, 2) if steps else ()
        self._jump = max(self._jump, *(more - steps for more in opened if more is not None), 0)
        self._gate = steps + 2 * self._jump + _GROWTH * (interval + MARGIN)

    def mask(self, matcher: Matcher, allowed: Mask, left: int) -> Mask:
        """The allowed tokens behind which an end fits `left` tokens; all where none fits or many are left."""
        self._work = 0
        here = _Ahead(matcher, self._place)
        if left > self._gate or not self._fits(here, left):
            return allowed
        here.bits()  # once for all that is asked here
        free = self._closers.free(here)
        if self._spare(here, left, free) or (free and here.ends):
            return allowed
        self._work = 0
        found: Mask = allowed & self._closers.ends
        for token in self._held(here, self._tried(here, free), left - 1):
            found[token // _WORD] |= np.uint32(1 << token % _WORD)
        if free and self._fits(here, left - 1):
            found |= allowed & self._closers.plain
        return found if found.any() else allowed

    def steps_to_end(self, matcher: Matcher) -> int | None:
        """An upper bound of the tokens after which the text may end; None: no end was found."""
        return self._steps(_Ahead(matcher, self._place))

    def _steps(self, here: _Ahead, most: int = MOST_STEPS) -> int | None:
        ways = (self._walked(here, way, min(most, MOST_STEPS)) for way in self._closers.ways)
        return next((found for found in ways if found is not None), None)

    def _walked(self, here: _Ahead, way: _Way, most: int) -> int | None:
        ahead, quoted = here.fork(), False
        for steps in range(most + 1):
            if ahead.ends:
                return steps
            self._work += 1
            if steps == most or self._work > MOST_WORK:
                break
            token, free = ahead.place.steps.get(way) or self._step(ahead, way)
            if (free and quoted) or token < 0:  # the quote was a letter of the text
                break
            quoted = free
            ahead.take(token, self._closers.keys(token))
        return None

    def _after(self, here: _Ahead, token: int) -> _Ahead:
        ahead = here.fork()
        ahead.take(token, self._closers.keys(token))
        return ahead

    def _step(self, ahead: _Ahead, way: _Way) -> tuple[int, bool]:
        token = self._closers.next(way, ahead, self._special)
        if ahead.matcher.is_error():  # beyond the grammar's limits
            token = -1
        step = ahead.place.steps[way] = token, token == self._closers.quote and self._closers.free(ahead)
        return step

    def _fits(self, here: _Ahead, left: int) -> bool:
        return left >= 0 and self._steps(here, left) is not None

    def _held(self, here: _Ahead, ids: Sequence[int], left: int) -> list[int]:
        """Those of the ids behind which an end fits."""
        fits = {one: self._fits(self._after(here, one), left) for one in self._unlike(ids)}
        spaced = any(fits[one] for one in fits if one in self._closers.blanks)
        return [token for token in ids if fits.get(token, spaced)]

    def _unlike(self, ids: Sequence[int]) -> list[int]:
        """The ids, of which one of white space, the last, stands for all of that kind."""
        blank = next((token for token in ids if token in self._closers.blanks), None)
        others = [token for token in ids if token not in self._closers.blanks]
        return others if blank is None else [*others, blank]

    def _tried(self, here: _Ahead, free: bool) -> list[int]:
        ids = [] if free else self._closers.listed(here.bits()).tolist()
        if free or len(ids) > MOST_TRIED:
            ids = [token for token in (*self._special, *self._closers.structure) if here.allows(token)]
        ways = (self._closers.next(way, here, self._special) for way in self._closers.ways)
        return [token for token in dict.fromkeys((*ways, *ids)) if token >= 0]

    def _spare(self, here: _Ahead, left: int, free: bool) -> bool:
        """Whether an end fits whatever the next token opens, as far as single characters show it."""
        left -= 1 + MARGIN
        ids = [] if free else self._closers.listed(here.bits()).tolist()
        if 0 < len(ids) <= MOST_TRIED:
            return all(self._fits(self._after(here, token), left) for token in self._unlike(ids))
        return self._fits(here, left) and None not in self._openings(here, left + 1, _DEPTH)

    def _openings(self, here: _Ahead, most: int, depth: int) -> Iterator[int | None]:
        """The tokens to an end from here through each opener, and through those that follow it; None: over `most`."""
        free = self._closers.free(here)
        for token in [self._closers.quote] if free else self._closers.openers:
            if token is None or not here.allows(token):
                continue
            after = self._after(here, token)
            steps = self._steps(after, most - 1)
            yield None if steps is None else steps + 1
            if depth > 1 and not after.ends:
                for steps in self._openings(after, most - 1, depth - 1):
                    yield None if steps is None else steps + 1
