"""The events of the page pool's prefix index: each full page that is cached, and each that is evicted.

A log of these, from an empty pool on, is the index itself: routers and other caches read it to know which texts this
engine need not compute. Tails, whose pages are not full, are not reported. Without a listener nothing is made.
"""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class CachedPage:
    """A full page that can be found. before: the hash that its own follows: of the page before it, or (first) the root.

    tokens: the page's.
    """

    page_hash: bytes
    before: bytes
    first: bool
    tokens: tuple[int, ...]


class PageListener(Protocol):
    """Hears what the pool reports, in the engine thread and in the middle of a step: it must not block."""

    def cached(self, group: int, page: CachedPage) -> None: ...

    def evicted(self, group: int, page_hash: bytes) -> None: ...
