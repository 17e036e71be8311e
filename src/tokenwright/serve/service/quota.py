"""A limit on what all requests hold together, of which each API key has a share that the others cannot take.

While less than `most` is held, any key may hold more. Beyond that, only a key that holds less than its share may, which
is `most` divided by the number of keys, rounded up. So one busy key can use everything and yet locks out no other,
nothing that was accepted is taken back, and in all at most twice `most`, plus one for each key, is held.
"""

from __future__ import annotations


class Quota:
    """The number that is held of something countable, in all (`used`) and by each key. keys: how many there are."""

    __slots__ = ("_by_key", "most", "share", "used")

    def __init__(self, most: int, keys: int = 1) -> None:
        self.most = most
        self.share = -(-most // keys) if keys > 1 else 0
        self.used = 0
        self._by_key: dict[str, int] = {}

    def fits(self, key: str, more: int = 1) -> bool:
        """Whether a key may hold `more` than it does."""
        return self.used + more <= self.most or self._by_key.get(key, 0) + more <= self.share

    def add(self, key: str, more: int = 1) -> None:
        self.used += more
        self._by_key[key] = self._by_key.get(key, 0) + more

    def remove(self, key: str, less: int = 1) -> None:
        self.add(key, -less)
        if not self._by_key[key]:
            del self._by_key[key]
