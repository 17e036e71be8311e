"""The neighbours of the page pool's prefix index: a listener, and a tier of pages outside the KV memory.

A listener hears of each full page that is cached, and each that is evicted. A log of these, from an empty pool on, is
the index itself: routers and other caches read it to know which texts this engine need not compute. Tails, whose pages
are not full, are not reported. Without a listener nothing is made.

A tier keeps full pages by group and hash, so that they outlive eviction and the process. The engine writes every page
that it caches to the tier, and reads pages back when a text asks for them (`PrefixIndex.restore`). How a tier keeps
pages, and which ones it accepts, is its own matter (`cache/disk_pages.py`).
"""

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class CachedPage:
    """A full page that can be found. before: the hash that its own follows: of the page before it, or (first) the root.

    tokens: the page's.
    """

    page_hash: bytes
    before: bytes
    first: bool
    tokens: tuple[int, ...]


class EvictionLog:
    """When full pages were evicted last, by the first HASH bytes of their hashes; the last `most` of them.

    The engine thread, or a router's, writes it; other threads may read it.
    """

    HASH = 8

    def __init__(self, most: int = 1 << 15) -> None:
        self._times: OrderedDict[bytes, float] = OrderedDict()
        self._most = most

    def add(self, page_hash: bytes) -> None:
        """A page is evicted now."""
        short = page_hash[: self.HASH]
        self._times[short] = time.monotonic()
        self._times.move_to_end(short)
        if len(self._times) > self._most:
            self._times.popitem(last=False)

    def when(self, short: bytes) -> float | None:
        """When a page was evicted, in seconds of the monotonic clock; None: it was not, as far as is known."""
        return self._times.get(short)


class PageListener(Protocol):
    """Hears what the pool reports, in the engine thread and in the middle of a step: it must not block."""

    def cached(self, group: int, page: CachedPage) -> None: ...

    def evicted(self, group: int, page_hash: bytes) -> None: ...


class PageTier(Protocol):
    """Pages by group and hash. The engine thread calls it in the middle of a step, so no call may wait for long."""

    def held(self, group: int, hashes: Sequence[bytes]) -> list[bool]:
        """Which pages can be read."""

    def wanted(self, group: int, hashes: Sequence[bytes]) -> list[int]:
        """The indices of the pages that `write` would keep: those that it lacks and that are worth their bytes."""

    def write(self, group: int, hashes: Sequence[bytes], contents: Any) -> None:
        """Keep pages with the contents that `Memory.read` returned; it may drop them."""

    def worth_reading(self, tokens: int, nbytes: int) -> bool:
        """Whether reading `nbytes` takes less time than computing `tokens`."""

    def read(self, group: int, hashes: Sequence[bytes], memory: Any, pages: Sequence[int]) -> list[int]:
        """Read the first ones into `pages` of the KV memory, for about a step's time, one at least.

        Returns the indices of those that are good. It writes from several threads at once. A page that cannot be read
        is left out and no longer `held`; what it has written there is not to be used. Raises what `Memory.write` does.
        """

    def used(self, group: int, hashes: Sequence[bytes]) -> None:
        """A text with these pages, in its order, has been used: they are to be removed last, its first page last."""
