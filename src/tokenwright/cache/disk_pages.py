"""A page tier on a disk (`engine/page_events.py`), in a folder that later processes read, or in files of this process.

A page is stored if, by measured speeds, reading it takes less time than computing its tokens.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any

import numpy as np

from tokenwright.arrays import Array, Bytes, aligned_bytes, place_of
from tokenwright.cache.page_file import PageFile
from tokenwright.cache.page_folder import BLOCK, OVERHEAD, PageFolder, page_key, taken
from tokenwright.cache.page_writer import QUEUE, PageToWrite, PageWriter
from tokenwright.errors import RequestError

READ_S = 0.05  # seconds of reading in one step
STALE_S = 60.0  # seconds after which a disk that was too slow is measured again
_HELPERS = 2
_LEAST = 64  # the fewest tokens of a step whose speed is measured: smaller ones read the weights for few tokens


class MeasuredSpeed:
    """The mean of the measured speeds, in units a second, the newest with half the weight."""

    def __init__(self) -> None:
        self.value: float | None = None
        self.at = 0.0

    def add(self, units: float, seconds: float) -> None:
        found = units / max(seconds, 1e-9)
        self.value = found if self.value is None else (self.value + found) / 2
        self.at = time.monotonic()


class PageLayout:
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


# Copies a page's contents to places [parts, 4] and hashes them with the keys of rows (`page_folder.sums_of`). A place:
# the address of a part's first layer, the number of layers, the bytes from one to the next, and the bytes of each.
Unpack = Callable[[memoryview, Array, Array], Array]
_NOWHERE = np.empty((0, 4), np.int64)
ReadPage = Callable[[int, bytes, Bytes], bool]


class DiskPages:
    """The pages of one engine in a folder, or in files of its own. Raises RequestError for a quota below a page.

    like: the contents of one page of each group, as `KVStore.read` returns them; page_size: its tokens. unpack: of a KV
    memory of NumPy arrays; others are written by `Memory.write`.
    """

    def __init__(
        self,
        folder: PageFolder | PageFile,
        like: Sequence[Sequence[Array]],
        page_size: int,
        unpack: Unpack | None = None,
    ) -> None:
        self._layouts = [PageLayout(parts) for parts in like]
        least = 2 * BLOCK + sum(taken(OVERHEAD + one.nbytes) for one in self._layouts)
        if folder.quota < least:
            folder.close()
            raise RequestError(
                f"kv_disk_size is {folder.quota:,} bytes, and a page alone takes {least:,}; give more", "kv_disk_size"
            )
        self.folder = folder
        self.writer = PageWriter(self.folder)
        self.read_pages = 0
        self._helpers = ThreadPoolExecutor(_HELPERS, "tokenwright KV disk")
        self._unpack = unpack
        self._page = page_size, sum(one.nbytes for one in self._layouts)
        self._disk, self._model = MeasuredSpeed(), MeasuredSpeed()

    def hash_with(self, unpack: Unpack) -> None:
        """Let the kernel library hash pages that `unpack` does not copy: it is faster than NumPy."""
        self.folder.seal.hash_rows = lambda contents, keys: unpack(memoryview(contents), _NOWHERE, keys)

    @property
    def secret(self) -> bytes | None:
        """The secret of the page hashes, which all processes of a folder share; None: no other process needs it."""
        return self.folder.seal.secret if self.folder.lasts else None

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
        if tokens >= _LEAST:
            self._model.add(tokens, seconds)

    def read(self, group: int, hashes: Sequence[bytes], memory: Any, pages: Sequence[int]) -> list[int]:
        began, keys = time.perf_counter(), deque((index, page_key(one, group)) for index, one in enumerate(hashes))
        reads = self._copying(group, memory, pages) if self._unpack is None else self._unpacking(group, memory, pages)
        nbytes = self._layouts[group].nbytes
        helpers = [
            self._helpers.submit(_read_some, reads, nbytes, keys, began + READ_S)
            for _ in range(min(_HELPERS, len(hashes)))
        ]
        wait(helpers)  # even if one has failed, the others must not go on writing
        good = sorted(index for one in helpers for index in one.result())
        self.read_pages += len(good)
        if good:
            self._disk.add(len(good) * nbytes, time.perf_counter() - began)
        return good

    def _copying(self, group: int, memory: Any, pages: Sequence[int]) -> ReadPage:
        def read(index: int, key: bytes, place: Bytes) -> bool:
            if good := self.folder.read(key, place.data):
                memory.write(group, [pages[index]], self._layouts[group].views(place[OVERHEAD:-1]))
            return good

        return read

    def _unpacking(self, group: int, memory: Any, pages: Sequence[int]) -> ReadPage:
        unpack, arrays = self._unpack, list(memory.arrays(group))  # [layers, pages + 1, ...] each
        assert unpack is not None
        first = [(place_of(one), len(one), one.strides[0], one.strides[1]) for one in arrays]
        places = np.array([first] * len(pages), np.int64)  # [pages, parts, 4]
        places[:, :, 0] += np.outer(pages, places[0, :, 3])  # a page's bytes in a layer are those to the next page

        def read(index: int, key: bytes, place: Bytes) -> bool:
            return self.folder.read(key, place.data, lambda contents, keys: unpack(contents, places[index], keys))

        return read

    def close(self) -> None:
        self._helpers.shutdown()
        self.writer.close()


def _read_some(read: ReadPage, nbytes: int, keys: deque[tuple[int, bytes]], stop: float) -> list[int]:
    """Read pages of `keys`, which the helpers share, until `stop`; return the indices of those that could be read."""
    place = aligned_bytes(OVERHEAD + nbytes + 1)
    good: list[int] = []
    with suppress(IndexError):
        while True:
            index, key = keys.popleft()
            if read(index, key, place):
                good.append(index)
            if time.perf_counter() > stop:
                break
    return good
