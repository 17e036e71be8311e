"""Admission: which of the waiting requests may enter the engine next.

An API key's requests are ordered by priority, then by arrival. The key with the least weight in the engine goes first,
so no key waits longer than one request takes. Once the queue is full, only keys below their share of it may wait.
"""

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from tokenwright.serve.service.types import Busy


class Quota:
    """A count of at most `most`, in which each of `keys` keys is sure of its share."""

    __slots__ = ("_by_key", "most", "share", "used")

    def __init__(self, most: int, keys: int = 1) -> None:
        self.most = most
        self.share = -(-most // keys) if keys > 1 else 0
        self.used = 0
        self._by_key: dict[str, int] = {}

    def fits(self, key: str, more: int = 1) -> bool:
        return self.used + more <= self.most or self._by_key.get(key, 0) + more <= self.share

    def add(self, key: str, more: int = 1) -> None:
        self.used += more
        self._by_key[key] = self._by_key.get(key, 0) + more

    def remove(self, key: str, less: int = 1) -> None:
        self.add(key, -less)
        if not self._by_key[key]:
            del self._by_key[key]


_LONGEST_WAIT_S = 60


@dataclass(slots=True, eq=False)
class AdmissionSlot:
    """The right of one request to have `weight` sequences in the engine. The first call of `leave` gives it back."""

    admission: "Admission"
    key: str
    weight: int
    priority: int
    admitted: asyncio.Future[None] | None = None
    held: bool = False

    def leave(self) -> None:
        if self.held:
            self.held = False
            self.admission.release(self)


@dataclass(slots=True)
class _KeyQueue:
    waiting: dict[int, OrderedDict[AdmissionSlot, None]] = field(default_factory=dict)
    held: int = 0
    served: int = 0  # the number of its last admission

    def first(self) -> AdmissionSlot:
        return next(iter(self.waiting[min(self.waiting)]))

    def remove(self, slot: AdmissionSlot) -> None:
        queue = self.waiting[slot.priority]
        del queue[slot]
        if not queue:
            del self.waiting[slot.priority]


class Admission:
    """A bounded queue, used by one event loop. capacity: sequences in the engine. most: requests that may wait."""

    def __init__(self, capacity: int, most: int, keys: int = 1) -> None:
        self.capacity = capacity
        self.used = 0
        self._queue = Quota(most, keys)
        self.refused = 0
        self._keys: dict[str, _KeyQueue] = {}
        self._admissions = 0
        self._mean_s = 1.0  # between two releases, smoothed
        self._left_at = time.monotonic()

    async def enter(self, key: str, weight: int, priority: int, *, unlimited: bool = False) -> AdmissionSlot:
        """Wait for a slot. Raises Busy if the queue is full, unless `unlimited`."""
        slot = AdmissionSlot(self, key, min(weight, self.capacity), priority)
        queue = self._keys.setdefault(key, _KeyQueue())
        if not self.waiting and self.used + slot.weight <= self.capacity:
            self._admit(queue, slot)
            return slot
        if not unlimited and not self._queue.fits(key):
            self._remove_if_empty(key)
            raise self.busy()
        slot.admitted = asyncio.get_running_loop().create_future()
        queue.waiting.setdefault(priority, OrderedDict())[slot] = None  # a dict's first entry is slow to find
        self._queue.add(key)
        try:
            await slot.admitted
        except BaseException:
            self._withdraw(queue, slot)
            raise
        return slot

    @property
    def waiting(self) -> int:
        return self._queue.used

    def full(self, key: str) -> bool:
        return not self._queue.fits(key) and (self.waiting > 0 or self.used >= self.capacity)

    def busy(self, more: int = 0) -> Busy:
        """Count a refusal and return its error. more: requests that wait outside this queue."""
        self.refused += 1
        wait, waiting = self.retry_after_s, self.waiting + more
        what = "1 request waits" if waiting == 1 else f"{waiting:,} requests wait"
        return Busy(f"{what} already; try again in {wait} s", wait)

    @property
    def retry_after_s(self) -> int:
        """Seconds until half of the waiting requests will have been admitted, at the present rate."""
        return max(1, min(_LONGEST_WAIT_S, round(self.waiting * self._mean_s / 2)))

    def close(self, error: Exception) -> None:
        for slot in [slot for key in self._keys.values() for queue in key.waiting.values() for slot in queue]:
            assert slot.admitted is not None, "a slot that waits has a future"
            if not slot.admitted.done():
                slot.admitted.set_exception(error)

    def release(self, slot: AdmissionSlot) -> None:
        now = time.monotonic()
        self._mean_s += 0.1 * (now - self._left_at - self._mean_s)
        self._left_at = now
        self.used -= slot.weight
        self._keys[slot.key].held -= slot.weight
        self._remove_if_empty(slot.key)
        self._admit_waiting()

    def _admit_waiting(self) -> None:
        while self.waiting:
            queues = (queue for queue in self._keys.values() if queue.waiting)
            queue = min(queues, key=lambda queue: (queue.held, queue.served))
            slot = queue.first()
            if self.used + slot.weight > self.capacity:
                return
            queue.remove(slot)
            self._queue.remove(slot.key)
            self._admit(queue, slot)
            assert slot.admitted is not None, "a slot that waits has a future"
            if not slot.admitted.done():
                slot.admitted.set_result(None)

    def _admit(self, queue: _KeyQueue, slot: AdmissionSlot) -> None:
        self._admissions += 1
        queue.served = self._admissions
        queue.held += slot.weight
        self.used += slot.weight
        slot.held = True

    def _withdraw(self, queue: _KeyQueue, slot: AdmissionSlot) -> None:
        """Remove a request whose client is gone or late from the queue, or give back its slot."""
        if slot.held:
            slot.leave()
            return
        queue.remove(slot)
        self._queue.remove(slot.key)
        self._remove_if_empty(slot.key)
        self._admit_waiting()

    def _remove_if_empty(self, key: str) -> None:
        queue = self._keys[key]
        if not queue.held and not queue.waiting:
            del self._keys[key]


def retrieved(work: asyncio.Future[Any]) -> None:
    """Retrieve a task's exception, which asyncio would log if no request awaits it any more."""
    if not work.cancelled():
        work.exception()
