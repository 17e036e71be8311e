"""A page tier: full pages kept outside the KV memory, by group and hash, so that they outlive eviction and the process.

The engine writes every page that it caches to the tier, and reads pages back when a text asks for them (`restore` of
the prefix index). What a tier is made of, and which pages it accepts, is its own matter (`cache/disk_pages.py`).
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol


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

    def read(self, group: int, hashes: Sequence[bytes]) -> Iterator[tuple[list[int], Any]]:
        """Read pages, the first ones, until about a step's time has passed, one at least: in batches.

        A batch has the indices of pages and their contents for `Memory.write`, which are valid until the next one. A
        page that cannot be read is left out and no longer `held`.
        """

    def used(self, group: int, hashes: Sequence[bytes]) -> None:
        """A text with these pages, in its order, has been used: they are to be removed last, its first page last."""
