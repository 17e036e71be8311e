"""The thread that writes pages to their folder (`page_folder.py`), so that the engine need not wait for a disk."""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tokenwright.arrays import Array, as_bytes
from tokenwright.cache.page_file import PageFile
from tokenwright.cache.page_folder import PageFolder
from tokenwright.engine.driver import close_at_exit

QUEUE = 64 << 20
RETRY_S = 60.0  # seconds without writes after one that failed
_BATCH = 8 << 20  # bytes written under one lock
_TEXTS = 256  # the most texts whose pages wait to be touched

log = logging.getLogger(__name__)


@dataclass(slots=True)
class PageToWrite:
    """The page `index` of contents [layers, n, ...]."""

    key: bytes
    contents: Sequence[Array]
    index: int
    nbytes: int

    def to_bytes(self) -> bytes:
        return b"".join(as_bytes(np.ascontiguousarray(part[:, self.index])).data for part in self.contents)


class PageWriter:
    """Writes and touches the pages of a folder in a thread, in order, until `close`."""

    def __init__(self, folder: PageFolder | PageFile) -> None:
        self.waiting: set[bytes] = set()
        self.nbytes = 0
        self.written = 0
        self.closing = False
        self._folder = folder
        self._pages: deque[PageToWrite] = deque()
        self._touched: deque[Sequence[bytes]] = deque(maxlen=_TEXTS)
        self._wake = threading.Condition()
        self._busy = False
        self._failed_at: float | None = None
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="tokenwright KV disk", daemon=True)
        self._thread.start()
        close_at_exit(self.close)

    def put(self, pages: Sequence[PageToWrite]) -> None:
        with self._wake:
            self.waiting.update(page.key for page in pages)
            self.nbytes += sum(page.nbytes for page in pages)
            self._pages += pages
            self._wake.notify_all()

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark pages as used, once the pages queued before are written."""
        with self._wake:
            self._touched.append(keys)
            self._wake.notify_all()

    def flush(self) -> None:
        with self._wake:
            self._wake.wait_for(lambda: not (self._busy or self._pages or self._touched))

    def close(self) -> None:
        """Write the queued pages and end the thread; do nothing in a forked process, which lacks the thread."""
        if os.getpid() == self._pid:
            self.stop()
            self._thread.join()

    def stop(self) -> None:
        with self._wake:
            self.closing = True
            if not self._folder.lasts:
                self._pages.clear()
                self._touched.clear()
            self._wake.notify_all()

    def _run(self) -> None:
        while (work := self._take()) is not None:
            pages, touched = work
            self._attempt(lambda pages=pages, touched=touched: self._write(pages, touched))  # type: ignore[misc]
            with self._wake:
                self.waiting.difference_update(page.key for page in pages)
                self.nbytes -= sum(page.nbytes for page in pages)
        self._folder.close()

    def _take(self) -> tuple[list[PageToWrite], list[Sequence[bytes]]] | None:
        """Wait for work: a batch of pages, or keys to touch once no page is left; None: closed."""
        with self._wake:
            self._busy = False
            self._wake.notify_all()
            self._wake.wait_for(lambda: self._pages or self._touched or self.closing)
            if not (self._pages or self._touched):
                return None
            self._busy = True
            pages, nbytes, touched = [], 0, []
            while self._pages and nbytes < _BATCH:
                pages.append(self._pages.popleft())
                nbytes += pages[-1].nbytes
            if not self._pages:
                touched, self._touched = list(self._touched), deque(maxlen=_TEXTS)
            return pages, touched

    def _write(self, pages: Sequence[PageToWrite], touched: Sequence[Sequence[bytes]]) -> None:
        self.written += self._folder.write([(page.key, page.to_bytes()) for page in pages])
        for keys in touched:
            self._folder.touch(keys)

    def _attempt(self, work: Callable[[], None]) -> None:
        """Do the work unless the disk failed recently; then drop all queued work, and log it once."""
        if self._failed_at is not None and time.monotonic() < self._failed_at + RETRY_S:
            return
        try:
            work()
            self._failed_at = None
        except (OSError, MemoryError) as error:
            if self._failed_at is None:
                log.warning("pages of the KV cache are not written to %s for now: %s", self._folder.folder, error)
            self._failed_at = time.monotonic()
