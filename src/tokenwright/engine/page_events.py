"""Observers of the prefix index: a listener, and a tier of pages outside the KV memory.

Routers rebuild the index of full pages from the calls of a listener that was there from the empty pool on.
"""

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class CachedPage:
    """A full page in the index. `before` is the hash of the page before it, or the root if it is the first."""

    page_hash: bytes
    before: bytes
    first: bool
    tokens: tuple[int, ...]


class EvictionLog:
    """The times at which the last `most` full pages were evicted, by the first HASH bytes of their hashes.

    One engine or router thread writes it; other threads may read it.
    """

    HASH = 8

    def __init__(self, most: int = 1 << 15) -> None:
        self._times: OrderedDict[bytes, float] = OrderedDict()
        self._most = most

    def add(self, page_hash: bytes) -> None:
        short = page_hash[: self.HASH]
        self._times[short] = time.monotonic()
        self._times.move_to_end(short)
        if len(self._times) > self._most:
            self._times.popitem(last=False)

    def when(self, short: bytes) -> float | None:
        """When a page was evicted, in seconds of the monotonic clock; None: it is not in the log."""
        return self._times.get(short)


class PageListener(Protocol):
    """Called by the pool in the engine thread, in the middle of a step: it must not block."""

    def cached(self, group: int, page: CachedPage) -> None: ...

    def evicted(self, group: int, page_hash: bytes) -> None: ...


class PageTier(Protocol):
    """Stores pages by group and hash. The engine thread calls it within a step, so no call may wait for long."""

    def held(self, group: int, hashes: Sequence[bytes]) -> list[bool]:
        """Which pages can be read."""

    def wanted(self, group: int, hashes: Sequence[bytes]) -> list[int]:
        """The indices of the pages that `write` would keep: those that it lacks and that are worth their bytes."""

    def write(self, group: int, hashes: Sequence[bytes], contents: Any) -> None:
        """Keep pages with the contents that `Memory.read` returned; it may drop them."""

    def worth_reading(self, tokens: int, nbytes: int) -> bool:
        """Whether reading `nbytes` takes less time than computing `tokens`."""

    def read(self, group: int, hashes: Sequence[bytes], memory: Any, pages: Sequence[int]) -> list[int]:
        """Read the first pages, at least one, into `pages` of the KV memory, for about a step's time.

        Returns the indices of the pages that it read; several threads write. A page that cannot be read is no longer
        `held`, and its place in the KV memory must not be used. Raises what `Memory.write` does.
        """

    def used(self, group: int, hashes: Sequence[bytes]) -> None:
        """A text with these pages was used: remove them after all others, and its first page last."""
