"""The suffix index finds earlier occurrences of a text's last tokens, whose continuation may follow again.

Positions are chained by a hash of their last `LEAST` tokens (Ziv and Lempel 1977), in constant time per token.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

LEAST = 3  # tokens of the shortest match
LONGEST = 32
CANDIDATES = 8  # earlier places that are compared, the latest first
SLOTS = 1 << 12  # of the hash table
BETWEEN = -1  # separates two texts; no token has this id
GENERATION = 1 << 15  # tokens of one index of earlier texts; a key has the current one and the one before
LEAD = 8  # the last tokens of a prompt that are kept before the text written after it


class Match(NamedTuple):
    """The last `length` tokens of a text occur in `source`, right before the place `after`."""

    length: int
    after: int
    source: "SuffixIndex"

    def following(self, count: int, *, repeats: bool) -> list[int]:
        """Up to `count` tokens that follow. repeats: at the end of the index, start over (for a text's own index)."""
        tokens = self.source.tokens[self.after : self.after + count].tolist()
        if BETWEEN in tokens:
            return tokens[: tokens.index(BETWEEN)]
        if repeats and len(tokens) < count:
            tokens = (tokens * count)[:count]
        return tokens


class SuffixIndex:
    __slots__ = ("_earlier", "_last", "tokens")

    def __init__(self) -> None:
        self.tokens: array[int] = array("i")
        self._last: array[int] = array("i", [-1]) * SLOTS  # by hash: the last place whose tokens end there
        self._earlier: array[int] = array("i")  # by place: the one before it with the same hash

    @property
    def nbytes(self) -> int:
        return sum(one.itemsize * len(one) for one in (self.tokens, self._last, self._earlier))

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens. A place can be found once the token after it is known."""
        known, last, earlier = self.tokens, self._last, self._earlier
        for token in tokens:
            place = len(known) - 1
            known.append(token)
            if place < LEAST - 1:
                if place >= 0:
                    earlier.append(-1)
                continue
            slot = hash((known[place - 2], known[place - 1], known[place])) & (SLOTS - 1)
            earlier.append(last[slot])
            last[slot] = place

    def longest(self, text: Sequence[int]) -> Match | None:
        """The longest match of the last tokens of `text`, the latest of several; None if shorter than LEAST."""
        if len(text) < LEAST:
            return None
        place = self._last[hash((text[-3], text[-2], text[-1])) & (SLOTS - 1)]
        best: Match | None = None
        for _ in range(CANDIDATES):
            if place < 0:
                break
            length = self._agreeing(text, place)
            if length >= LEAST and (best is None or length > best.length):
                best = Match(length, place + 1, self)
                if length == LONGEST:
                    break
            place = self._earlier[place]
        return best

    def _agreeing(self, text: Sequence[int], place: int) -> int:
        known, most = self.tokens, min(LONGEST, len(text), place + 1)
        for length in range(most):
            if known[place - length] != text[-1 - length]:
                return length
        return most


class EarlierTexts:
    """The texts that requests of each key have written, in at most `capacity` bytes; drops the least recently used."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._keys: OrderedDict[bytes, list[SuffixIndex]] = OrderedDict()  # of each the current index, and one before

    @property
    def nbytes(self) -> int:
        return sum(index.nbytes for indexes in self._keys.values() for index in indexes)

    def of(self, key: bytes) -> Sequence[SuffixIndex]:
        found = self._keys.get(key)
        if found is None:
            return ()
        self._keys.move_to_end(key)
        return found

    def add(self, key: bytes, prompt: Sequence[int], written: Sequence[int]) -> None:
        if not self.capacity or len(written) <= LEAST:
            return
        indexes = self._keys.setdefault(key, [SuffixIndex()])
        if len(indexes[0].tokens) >= GENERATION:
            indexes[:] = [SuffixIndex(), indexes[0]]
        indexes[0].extend((BETWEEN, *prompt[-LEAD:], *written[-GENERATION:], BETWEEN))
        self._keys.move_to_end(key)
        while self._keys and self.nbytes > self.capacity:
            self._keys.popitem(last=False)
