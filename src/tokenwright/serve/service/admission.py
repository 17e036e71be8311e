"""Admission: which of the waiting requests may enter the engine next.

A key's requests are ordered by priority, then by arrival; the key with the fewest places in use goes first, so that no
key waits longer than one request takes. Beyond `most` waiting requests, only keys with less than their share may wait.
"""

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from tokenwright.serve.service.types import Busy, Late


class Quota:
    """A bounded count, in all (`used`) and per key: each of `keys` keys is sure of its share of `most`."""

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
    """The right of one request to be in the engine, worth `weight` of its sequences; `leave` gives it back once."""

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
class _Key:
    waiting: dict[int, OrderedDict[AdmissionSlot, None]] = field(default_factory=dict)
    held: int = 0
    served: int = 0  # rises with every admission: the key that waited longest goes first

    def first(self) -> AdmissionSlot:
        return next(iter(self.waiting[min(self.waiting)]))

    def remove(self, place: AdmissionSlot) -> None:
        queue = self.waiting[place.priority]
        del queue[place]
        if not queue:
            del self.waiting[place.priority]


class Admission:
    """A bounded queue of one event loop. places: sequences that may be in the engine. most: requests that may wait."""

    def __init__(self, places: int, most: int, keys: int = 1) -> None:
        self.places = places
        self.used = 0
        self._queue = Quota(most, keys)
        self.refused = 0
        self._keys: dict[str, _Key] = {}
        self._admissions = 0
        self._mean_s = 1.0  # between two requests that leave, smoothed
        self._left_at = time.monotonic()

    async def enter(
        self, key: str, weight: int, priority: int, deadline_s: float | None, *, taken: bool = False
    ) -> AdmissionSlot:
        """Wait for a place. Raises Busy where too many wait, Late after the deadline. taken: a full queue takes it."""
        place = AdmissionSlot(self, key, min(weight, self.places), priority)
        its = self._keys.setdefault(key, _Key())
        if not self.waiting and self.used + place.weight <= self.places:
            self._admit(its, place)
            return place
        if not taken and not self._queue.fits(key):
            self._forget(key)
            raise self.busy()
        place.admitted = asyncio.get_running_loop().create_future()
        its.waiting.setdefault(priority, OrderedDict())[place] = None  # a dict's first entry is slow to find
        self._queue.add(key)
        try:
            async with asyncio.timeout(deadline_s):
                await place.admitted
        except BaseException as error:
            self._give_up(its, place)
            if isinstance(error, TimeoutError):
                raise Late(f"the request waited for {deadline_s:g} s, which is its deadline") from None
            raise
        return place

    @property
    def waiting(self) -> int:
        return self._queue.used

    def full(self, key: str) -> bool:
        return not self._queue.fits(key) and (self.waiting > 0 or self.used >= self.places)

    def busy(self, more: int = 0) -> Busy:
        """The error of a request that is refused now; counts it. more: requests that wait elsewhere."""
        self.refused += 1
        wait, waiting = self.retry_after_s, self.waiting + more
        what = "1 request waits" if waiting == 1 else f"{waiting:,} requests wait"
        return Busy(f"{what} already; try again in {wait} s", wait)

    @property
    def retry_after_s(self) -> int:
        """Seconds until half of the waiting requests will have been admitted, at the present rate."""
        return max(1, min(_LONGEST_WAIT_S, round(self.waiting * self._mean_s / 2)))

    def close(self, error: Exception) -> None:
        for place in [one for its in self._keys.values() for queue in its.waiting.values() for one in queue]:
            assert place.admitted is not None, "a place that waits has a future"
            if not place.admitted.done():
                place.admitted.set_exception(error)

    def release(self, place: AdmissionSlot) -> None:
        now = time.monotonic()
        self._mean_s += 0.1 * (now - self._left_at - self._mean_s)
        self._left_at = now
        self.used -= place.weight
        self._keys[place.key].held -= place.weight
        self._forget(place.key)
        self._admit_waiting()

    def _admit_waiting(self) -> None:
        while self.waiting:
            its = min((its for its in self._keys.values() if its.waiting), key=lambda one: (one.held, one.served))
            place = its.first()
            if self.used + place.weight > self.places:
                return
            its.remove(place)
            self._queue.remove(place.key)
            self._admit(its, place)
            assert place.admitted is not None, "a place that waits has a future"
            if not place.admitted.done():
                place.admitted.set_result(None)

    def _admit(self, its: _Key, place: AdmissionSlot) -> None:
        self._admissions += 1
        its.served = self._admissions
        its.held += place.weight
        self.used += place.weight
        place.held = True

    def _give_up(self, its: _Key, place: AdmissionSlot) -> None:
        """Take a request whose client is gone or late out of the queue, or out of its place."""
        if place.held:
            place.leave()
            return
        its.remove(place)
        self._queue.remove(place.key)
        self._forget(place.key)
        self._admit_waiting()  # its weight may have kept a lighter one waiting

    def _forget(self, key: str) -> None:
        its = self._keys[key]
        if not its.held and not its.waiting:
            del self._keys[key]


def retrieved(work: asyncio.Future[Any]) -> None:
    """Take a task's exception, which asyncio would report where no request waits for it any more."""
    if not work.cancelled():
        work.exception()
