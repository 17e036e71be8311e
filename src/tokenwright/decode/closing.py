"""Steers a constrained text to an end while one still fits the tokens that are left.

A grammar says which tokens may come next, not how far away an end is. So a *way* to an end is walked on a copy: at each
state it takes one token, the longest along bytes that follow in any case, else by a fixed order, and its length bounds
what an end needs. A way depends on the state only, so behind its first token one token fewer is needed: a text whose
end fits can always go on such that it still fits.
The results of walks are kept for later ones, by the bytes of the text; no mask depends on them.
Everything here follows from the tokens of the text and the number of those left, whoever computes them in which batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from tokenwright.decode.closers import Ahead, Closers, Far, Mask, Matcher, TextPlace, Way

MOST_STEPS = 256  # of a way; an end farther away is none
MOST_WORK = 1_500  # steps of all ways that are walked for half a mask, of some 10 us each; beyond them no end is found
MARGIN = 8  # tokens to spare, because the model's tokens may open more than the single characters that are tried
MOST_TRIED = 96  # tokens that are tried one by one; where more are allowed, only single characters are
_INTERVAL, _GROWTH = 8, 4  # between two looks ahead, in tokens; what one token may add to a way, at most
_WORD = 32
_DEPTH = 3  # openers in a row that one token of a model may have


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
        self._place = TextPlace()  # of the text; forks share it
        self._cuts: dict[bytes, list[int]] = {}  # the tokens along bytes that follow in any case
        self._looked(matcher)

    def advanced(self, matcher: Matcher, token: int | None) -> None:
        """The text has gone on by one token to this place; None: by one that no walk takes."""
        self._place = TextPlace() if token is None else self._place.behind(self._closers.keys(token))
        self._written += 1
        if self._written >= self._next:
            self._looked(matcher)

    def _looked(self, matcher: Matcher) -> None:
        interval = _INTERVAL + self._written // 8
        self._next = self._written + interval
        self._work = 0
        here = Ahead(matcher, self._place)
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
        here = Ahead(matcher, self._place)
        if left > self._gate or not self._fits(here, left):
            return allowed
        here.bits()  # once for all that is asked here
        free = self._closers.free(here)
        if self._spare(here, left, free) or (free and here.ends):
            return allowed
        self._work = 0
        found: Mask = allowed & self._closers.ends
        if free and self._fits(here, left - 1):
            found |= allowed & self._closers.plain
        tried = [one for one in self._tried(here, free) if not found[one // _WORD] >> one % _WORD & 1]
        for token in self._held(here, tried, left - 1):
            found[token // _WORD] |= np.uint32(1 << token % _WORD)
        return found if found.any() else allowed

    def steps_to_end(self, matcher: Matcher) -> int | None:
        """An upper bound of the tokens after which the text may end; None: no end was found."""
        return self._steps(Ahead(matcher, self._place))

    def _steps(self, here: Ahead, most: int = MOST_STEPS) -> int | None:
        ways = (self._walked(here, way, min(most, MOST_STEPS)) for way in self._closers.ways)
        return next((found for found in ways if found is not None), None)

    def _walked(self, here: Ahead, way: Way, most: int) -> int | None:
        if most < 0:
            return None
        room = max(MOST_WORK - self._work, 0)
        far = self._far(here, way, min(most, room))
        ends = far.ends and far.steps <= most
        work = far.steps if ends else min(far.steps, most) + 1
        self._work = min(self._work + work, MOST_WORK + 1)
        return far.steps if ends and work <= room else None

    def _far(self, here: Ahead, way: Way, most: int) -> Far:
        """How a way goes on from here; it is followed for `most` steps, where that is not known."""
        ahead, quoted, passed = here.fork(), False, list[TextPlace]()
        while (far := self._settled(ahead, way, most - len(passed), quoted)) is None:
            token, quoted = self._step(ahead, way)
            passed.append(ahead.place)
            ahead.take(token, self._closers.keys(token))
        for place in reversed(passed):
            far = place.far[way] = Far(far.steps + 1, far.ends, far.stops)
        return far

    def _settled(self, ahead: Ahead, way: Way, most: int, quoted: bool) -> Far | None:
        """How a way goes on, where that is known. quoted: its last token was the quote in a free text."""
        if ahead.ends:
            return Far(0, ends=True)
        if most == 0:
            return Far(0)
        token, free = self._step(ahead, way)
        if token < 0 or (free and quoted):  # the quote was a letter of the text
            return Far(0, stops=True)
        known = ahead.place.far.get(way)
        return known if known and (known.ends or known.stops or known.steps >= most) else None

    def _after(self, here: Ahead, token: int) -> Ahead:
        ahead = here.fork()
        ahead.take(token, self._closers.keys(token))
        return ahead

    def _step(self, ahead: Ahead, way: Way) -> tuple[int, bool]:
        """The token that a way takes, and whether it is the quote in a free text."""
        if not ahead.place.steps:
            self._foresee(ahead)
        steps = ahead.place.steps
        if way not in steps:
            token = self._closers.next(way, ahead, self._special)
            if ahead.matcher.is_error():  # beyond the grammar's limits
                token = -1
            steps[way] = token, token == self._closers.quote and self._closers.free(ahead)
        return steps[way]

    def _foresee(self, ahead: Ahead) -> None:
        """Take down the steps along the bytes that follow in any case, which all ways take."""
        place = ahead.place
        for token in self._cut(ahead.forced()):
            if place.steps:  # so they are from here on
                break
            place.ends = place.free = False
            place.steps = dict.fromkeys(self._closers.ways, (token, False))
            place = place.behind(self._closers.keys(token))

    def _cut(self, text: bytes) -> list[int]:
        known = self._cuts.get(text)
        if known is None:
            known = list(islice(self._closers.cut(text), MOST_STEPS))
            if len(text) <= MOST_STEPS:
                if len(self._cuts) == MOST_STEPS:
                    self._cuts.clear()
                self._cuts[text] = known
        return known

    def _fits(self, here: Ahead, left: int) -> bool:
        return left >= 0 and self._steps(here, left) is not None

    def _held(self, here: Ahead, ids: Sequence[int], left: int) -> list[int]:
        """Those of the ids behind which an end fits."""
        alike = self._alike(here, ids)
        fits = {one: self._fits(self._after(here, one), left) for one in dict.fromkeys(alike.values())}
        return [token for token in ids if fits[alike[token]]]

    def _alike(self, here: Ahead, ids: Sequence[int]) -> dict[int, int]:
        """For each id the one that stands for it: for text in a free string, the token that only opens the string.

        One of white space, the last, stands for all of that kind.
        """
        heads = set(ids).intersection(self._closers.opens.get(token, -1) for token in ids)
        freed = {head for head in heads if self._closers.free(self._after(here, head))}
        blanks = [token for token in ids if token in self._closers.blanks]
        alike = {token: token for token in ids if token not in self._closers.blanks}
        alike |= {token: head for token in alike if (head := self._closers.opens.get(token, -1)) in freed}
        return alike | dict.fromkeys(blanks, next(iter(blanks), -1))

    def _tried(self, here: Ahead, free: bool) -> list[int]:
        ids = [] if free else self._closers.listed(here.bits()).tolist()
        if free or len(ids) > MOST_TRIED:
            ids = [token for token in (*self._special, *self._closers.structure) if here.allows(token)]
        ways = (self._step(here, way)[0] for way in self._closers.ways)
        return [token for token in dict.fromkeys((*ways, *ids)) if token >= 0]

    def _spare(self, here: Ahead, left: int, free: bool) -> bool:
        """Whether an end fits whatever the next token opens, as far as single characters show it."""
        left -= 1 + MARGIN
        ids = [] if free else self._closers.listed(here.bits()).tolist()
        if 0 < len(ids) <= MOST_TRIED:
            unlike = dict.fromkeys(self._alike(here, ids).values())
            return all(self._fits(self._after(here, one), left) for one in unlike)
        return self._fits(here, left) and None not in self._openings(here, left + 1, _DEPTH)

    def _openings(self, here: Ahead, most: int, depth: int) -> Iterator[int | None]:
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
