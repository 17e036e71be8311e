"""The changes of a pool's prefix index as vLLM's KV events: numbered batches, with a replay of those that were lost.

    pool ──► PageChanges ──► EventLog.add ──► (number, payload) ──► subscribers
                             EventLog.replay(number) ──► batches ──► a subscriber that has missed some

A payload is the MessagePack array [seconds, events, rank], and each event an array that begins with its name (vLLM's
vllm/distributed/kv_events.py). Numbers rise by one, and over restarts too: the first is the time in microseconds. A
subscriber that finds a gap asks for a replay; batches that are no longer kept become one that stores the whole index.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from queue import Empty, SimpleQueue
from threading import Lock

from tokenwright.cluster.msgpack import Value, pack
from tokenwright.engine.page_events import CachedPage

KEPT = 10_000  # batches for replays
MEDIUM = "GPU"  # vLLM's word for the memory that the engine computes from

Change = tuple[int, CachedPage | bytes]  # of a group: a page that can be found now, or the hash of one that cannot


class PageChanges:
    def __init__(self) -> None:
        self._queue: SimpleQueue[Change | None] = SimpleQueue()

    def cached(self, group: int, page: CachedPage) -> None:
        self._queue.put((group, page))

    def evicted(self, group: int, page_hash: bytes) -> None:
        self._queue.put((group, page_hash))

    def close(self) -> None:
        self._queue.put(None)

    def take(self) -> list[Change] | None:
        """Wait for changes, and return all that are there; None after `close`."""
        change = self._queue.get()
        found: list[Change] = []
        while change is not None:
            found.append(change)
            try:
                change = self._queue.get_nowait()
            except Empty:
                return found
        if found:
            self.close()  # for the next call
        return found or None


class EventLog:
    """Numbers and encodes batches, and keeps the last `kept` of them for replays. Thread-safe.

    root: the hash before the first page of a text without a salt. first: the first batch's number, by default the time.
    """

    def __init__(
        self, page_size: int, root: bytes, groups: int = 1, kept: int = KEPT, first: int | None = None
    ) -> None:
        self._page_size = page_size
        self._root = root
        self._groups = groups
        self._next = time.time_ns() // 1000 if first is None else first
        self._batches: deque[tuple[int, bytes]] = deque(maxlen=kept)
        self._pages: dict[tuple[int, bytes], CachedPage] = {}  # all that can be found now
        self._lock = Lock()

    def begin(self) -> tuple[int, bytes]:
        """The first batch: readers forget the pages of an earlier process at this address."""
        with self._lock:
            return self._batch([["AllBlocksCleared"]])

    def add(self, changes: Sequence[Change]) -> tuple[int, bytes]:
        with self._lock:
            for group, change in changes:
                if isinstance(change, CachedPage):
                    self._pages[group, change.page_hash] = change
                else:
                    del self._pages[group, change]
            return self._batch(list(self._events(changes)))

    def replay(self, start: int) -> list[tuple[int, bytes]]:
        """The batches from a number on; where they are not all kept, one in their place with all pages."""
        with self._lock:
            if not self._batches or start < self._batches[0][0]:
                changes = [(group, page) for (group, _), page in self._pages.items()]
                return [(self._next - 1, _payload([["AllBlocksCleared"], *self._events(changes)]))]
            return [batch for batch in self._batches if batch[0] >= start]

    def _batch(self, events: list[Value]) -> tuple[int, bytes]:
        batch = self._next, _payload(events)
        self._next += 1
        self._batches.append(batch)
        return batch

    def _events(self, changes: Iterable[Change]) -> Iterator[Value]:
        """Pages that follow each other in a text are one event."""
        run: list[CachedPage] = []
        of = 0
        gone: list[bytes] = []
        for group, change in changes:
            cached = isinstance(change, CachedPage)
            follows = isinstance(change, CachedPage) and bool(run) and change.before == run[-1].page_hash
            if run and not (follows and group == of):
                yield self._stored(of, run)
                run = []
            if gone and (cached or group != of):
                yield self._removed(of, gone)
                gone = []
            of = group
            if isinstance(change, CachedPage):
                run.append(change)
            else:
                gone.append(change)
        if run:
            yield self._stored(of, run)
        if gone:
            yield self._removed(of, gone)

    def _stored(self, group: int, run: Sequence[CachedPage]) -> Value:
        """BlockStored: hashes, parent, token ids, block size, (LoRA id), medium, (LoRA name), extra keys, group."""
        first = run[0]
        parent = None if first.first else short(first.before)
        tokens = [token for page in run for token in page.tokens]
        event: list[Value] = ["BlockStored", [short(page.page_hash) for page in run], parent, tokens, self._page_size]
        event += [None, MEDIUM, None]
        salted = first.first and first.before != self._root
        if salted or self._groups > 1:  # equal tokens behind another root are another text
            extra: list[Value] = [[first.before.hex()[:16]], *([None] * (len(run) - 1))]
            event.append(extra if salted else None)
        return [*event, group] if self._groups > 1 else event

    def _removed(self, group: int, gone: Sequence[bytes]) -> Value:
        """BlockRemoved: hashes, medium, group."""
        event: list[Value] = ["BlockRemoved", [short(one) for one in gone], MEDIUM]
        return [*event, group] if self._groups > 1 else event


def short(page_hash: bytes) -> int:
    """The last 64 bits of a hash, by which subscribers know a page."""
    return int.from_bytes(page_hash[-8:], "big")


def _payload(events: Sequence[Value]) -> bytes:
    return pack([time.time(), events, 0])
