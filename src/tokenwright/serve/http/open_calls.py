"""The calls of a conversation that wait for their results, for APIs whose results need not name their call."""

from __future__ import annotations

from collections import deque
from itertools import product


class OpenCalls:
    """The calls of a conversation that have no result yet. However many there are, none is searched for."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[str, str]] = {}  # (id, name), by the number of the call
        self._numbers: dict[tuple[str | None, str | None], deque[int]] = {}  # by what a result may say; some are closed
        self._count = 0

    def add(self, identity: str, name: str) -> None:
        """A call is open from now on."""
        self._count += 1
        self._open[self._count] = (identity, name)
        for given in product((identity, None), (name, None)):
            self._numbers.setdefault(given, deque()).append(self._count)

    def answer(self, identity: str | None, name: str | None) -> tuple[str, str] | None:
        """The id and the name of the first open call that has these, as far as they are given; it is closed then."""
        numbers = self._numbers.get((identity, name), deque())
        while numbers:
            if (call := self._open.pop(numbers.popleft(), None)) is not None:
                return call
        return None
