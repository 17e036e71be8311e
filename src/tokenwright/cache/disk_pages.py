"""A page tier on a disk (`engine/page_events.py`): an engine's pages in a folder, which a later process reads again.

Helpers read files, verify them and copy them into the KV memory, for about a step's time at once, while the engine
thread waits; `page_writer.py` writes them. A page is worth its bytes if reading them takes less time than computing its
tokens. Both speeds are measured: the disk's when pages are read, the model's in steps of many tokens. As long as one of
them is unknown, a page is worth it.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenwright.arrays import Array, Bytes, aligned_bytes
from tokenwright.cache.page_folder import BLOCK, OVERHEAD, PageFolder, page_key, taken
from tokenwright.cache.page_writer import QUEUE, PageToWrite, PageWriter
from tokenwright.errors import RequestError

READ_S = 0.05  # seconds of reading in one step
STALE_S = 60.0  # after which a disk that was too slow is measured again
_HELPERS = 2  # threads that read
_LEAST = 64  # tokens of a step whose time counts: smaller ones read the weights for few tokens


class MeasuredSpeed:
    """A measured speed, in units a second: the mean of the measurements, the newest with half the weight."""

    def __init__(self) -> None:
        self.value: float | None = None
        self.at = 0.0  # of the last measurement, on the monotonic clock

    def add(self, units: float, seconds: float) -> None:
        found = units / max(seconds, 1e-9)
        self.value = found if self.value is None else (self.value + found) / 2
        self.at = time.monotonic()


class PageLayout:
    """The arrays of one page of a group: [layers, 1, ...] each, as `KVStore.read` returns them."""

    def __init__(self, parts: Sequence[Array]) -> None:
        self.parts = tuple(parts)
        self.nbytes = sum(part.nbytes for part in parts)

    def views(self, contents: Bytes) -> tuple[Array, ...]:
        """The bytes [nbytes] of a page (`PageToWrite.to_bytes`) as arrays [layers, 1, ...], without a copy."""
        found, start = [], 0
        for one in self.parts:
            found.append(contents[start : start + one.nbytes].view(one.dtype).reshape(one.shape))
            start += one.nbytes
        return tuple(found)


class DiskPages:
    """The pages of one engine in a folder.

    model: sha256 of everything but the tokens that pages depend on. like: the contents of one page of each group, as
    `KVStore.read` returns them; page_size: its tokens. read_pages: pages read since it was opened. Raises RequestError
    for a folder or quota that cannot be used.
    """

    def __init__(self, folder: Path, quota: int, model: bytes, like: Sequence[Sequence[Array]], page_size: int) -> None:
        self._layouts = [PageLayout(parts) for parts in like]
        least = 2 * BLOCK + sum(taken(OVERHEAD + one.nbytes) for one in self._layouts)
        if quota < least:
            raise RequestError(
                f"kv_disk_size is {quota:,} bytes, and a page alone takes {least:,}; give more", "kv_disk_size"
            )
        self.folder = PageFolder(folder, quota, model)
        self.writer = PageWriter(self.folder)
        self.read_pages = 0
        self._helpers = ThreadPoolExecutor(_HELPERS, "tokenwright KV disk")
        self._page = page_size, sum(one.nbytes for one in self._layouts)
        self._disk, self._model = MeasuredSpeed(), MeasuredSpeed()

    @property
    def secret(self) -> bytes:
        """The secret of the page hashes."""
        return self.folder.secret

    def held(self, group: int, hashes: Sequence[bytes]) -> list[bool]:
        return self.folder.held([page_key(one, group) for one in hashes])

    def wanted(self, group: int, hashes: Sequence[bytes]) -> list[int]:
        writer, pages = self.writer, self.folder.pages
        if writer.closing or not self._worth(*self._page):
            return []
        keys = [page_key(one, group) for one in hashes]
        found = [index for index, key in enumerate(keys) if not (key in pages or key in writer.waiting)]
        return found[: max((QUEUE - writer.nbytes) // self._layouts[group].nbytes, not writer.nbytes)]

    def write(self, group: int, hashes: Sequence[bytes], contents: Any) -> None:
        nbytes = self._layouts[group].nbytes
        self.writer.put(
            [PageToWrite(page_key(one, group), contents, index, nbytes) for index, one in enumerate(hashes)]
        )

    def used(self, group: int, hashes: Sequence[bytes]) -> None:
        self.writer.touch([page_key(one, group) for one in hashes])

    def worth_reading(self, tokens: int, nbytes: int) -> bool:
        return time.monotonic() > self._disk.at + STALE_S or self._worth(tokens, nbytes)

    def _worth(self, tokens: int, nbytes: int) -> bool:
        disk, model = self._disk.value, self._model.value
        return disk is None or model is None or nbytes / disk < tokens / model

    def computed(self, tokens: int, seconds: float) -> None:
        """Measure the model's speed by a step that has computed `tokens` in `seconds`."""
        if tokens >= _LEAST:
            self._model.add(tokens, seconds)

    def read(self, group: int, hashes: Sequence[bytes], write: Callable[[int, Any], None]) -> list[int]:
        began, keys = time.perf_counter(), deque((index, page_key(one, group)) for index, one in enumerate(hashes))
        helpers = [
            self._helpers.submit(self._read_some, self._layouts[group], keys, began + READ_S, write)
            for _ in range(min(_HELPERS, len(hashes)))
        ]
        wait(helpers)  # none writes any more, even if another has failed
        good = sorted(index for one in helpers for index in one.result())
        self.read_pages += len(good)
        if good:
            self._disk.add(len(good) * self._layouts[group].nbytes, time.perf_counter() - began)
        return good

    def _read_some(
        self, layout: PageLayout, keys: deque[tuple[int, bytes]], stop: float, write: Callable[[int, Any], None]
    ) -> list[int]:
        """Read and write the first pages of `keys`, which the helpers share, until `stop`; returns those that are good.

        Page by page, so that a page is in the processor's cache when it is verified and copied.
        """
        place = aligned_bytes(OVERHEAD + layout.nbytes + 1)
        whole, contents = place.data, layout.views(place[OVERHEAD:-1])
        good: list[int] = []
        with suppress(IndexError):
            while True:
                index, key = keys.popleft()
                if self.folder.read(key, whole):
                    write(index, contents)
                    good.append(index)
                if time.perf_counter() > stop:
                    break
        return good

    def close(self) -> None:
        """Write what waits, and end the threads."""
        self._helpers.shutdown()
        self.writer.close()
