"""The models of a server that are in memory: loaded on demand, the longest unused evicted.

A leaving model takes no new requests and is freed when its last one ends. The model of the longest waiting request is
loaded next, so no model waits for ever. One event loop owns all this.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from tokenwright.errors import TokenwrightError
from tokenwright.serve.service.types import ENDING, Busy, NotReady, no_model, without_folders
from tokenwright.units import binary

State = Literal["absent", "loading", "ready", "leaving"]
log = logging.getLogger(__name__)

TAG = ":latest"  # Ollama's clients append it


class LoadedResident(Protocol):
    """A model that is loading or loaded."""

    async def settled(self) -> None:
        """Wait until it is loaded. Raises the error if it cannot be."""

    @property
    def failed(self) -> bool:
        """Whether its engine has failed."""

    @property
    def nbytes(self) -> int:
        """The bytes of its weights and cache, once loaded."""

    @property
    def progress(self) -> tuple[int, int]:
        """The bytes of weights read so far, and their total; 0 if unknown."""

    def stop(self) -> None:
        """End all its requests now."""

    def close(self) -> None:
        """Free its memory. Called in a thread."""


@dataclass(slots=True, eq=False)
class ResidentModel:
    """A model that requests may name. need: its approximate bytes in memory; it reads files, so it runs in a thread."""

    names: list[str]  # its own first
    load: "Callable[[ResidentModel], LoadedResident]"  # begins to load it
    need: Callable[[], int]
    state: State = "absent"
    loaded: LoadedResident | None = None
    users: int = 0
    used_at: float = 0.0
    keep_s: float = math.inf  # seconds that it stays without users
    pinned: bool = False  # evicted last
    nbytes: int = 0  # when last loaded
    failure: str = ""  # why the last load failed
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    leaving: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self.names[0]


def find(name: str, entries: Sequence[ResidentModel]) -> ResidentModel:
    """The entry of a name, with or without Ollama's tag. Raises Missing."""
    for wanted in (name, name.removesuffix(TAG)):
        for entry in entries:
            if wanted in entry.names:
                return entry
    raise no_model(name, [one for entry in entries for one in entry.names])


@dataclass(slots=True, eq=False)
class _Ticket:
    entry: ResidentModel
    admitted: asyncio.Future[None]


class Residents:
    """The models of a server. limit: bytes of all models in memory. most: requests that may wait."""

    def __init__(self, entries: Sequence[ResidentModel], limit: int, most: int) -> None:
        self.entries = list(entries)
        self.limit = limit
        self.most = most
        self.loads = 0
        self.stopped = False
        self._waiting: list[_Ticket] = []
        self._mover: asyncio.Task[None] | None = None

    @property
    def names(self) -> list[str]:
        return [name for entry in self.entries for name in entry.names]

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def used(self) -> int:
        return sum(entry.nbytes for entry in self.entries if entry.state in ("ready", "leaving"))

    async def acquire(self, entry: ResidentModel) -> LoadedResident:
        """Wait for a model; `release` it afterwards. Raises NotReady with the reason, Busy if too many wait."""
        if self.stopped:
            raise NotReady(ENDING)
        if entry.state == "ready" and entry.loaded is not None and entry.loaded.failed:
            self._leave(entry)  # and load it again
        if entry.state != "ready":
            if self.waiting >= self.most:
                raise Busy(f"{self.waiting:,} requests wait for a model already; try again in 5 s", 5)
            ticket = _Ticket(entry, asyncio.get_running_loop().create_future())
            self._waiting.append(ticket)
            self._arrange()
            try:
                await ticket.admitted
            except BaseException:
                if ticket in self._waiting:
                    self._waiting.remove(ticket)
                elif ticket.admitted.done() and not ticket.admitted.cancelled() and not ticket.admitted.exception():
                    self.release(entry)  # it was admitted while its client left
                raise
        else:
            self._enter(entry)
        assert entry.loaded is not None, "a ready model is loaded"
        return entry.loaded

    def _enter(self, entry: ResidentModel) -> None:
        entry.users += 1
        entry.idle.clear()

    def release(self, entry: ResidentModel) -> None:
        entry.users -= 1
        entry.used_at = time.monotonic()
        if entry.users:
            return
        entry.idle.set()
        if entry.state == "ready" and entry.keep_s < math.inf:
            asyncio.get_running_loop().call_later(max(0.0, entry.keep_s), self._expire, entry, entry.used_at)

    def preload(self, entry: ResidentModel) -> None:
        if entry.state == "absent" and self._mover is None and not self.stopped:
            self._begin(entry)

    async def unload(self, entry: ResidentModel) -> None:
        if entry.state == "loading" and self._mover is not None:
            await asyncio.wait((self._mover,))
        if entry.state in ("ready", "leaving"):
            await self._leave(entry)

    def stop(self) -> None:
        self.stopped = True
        self._fail(self._waiting, NotReady(ENDING))
        for entry in self.entries:
            if entry.loaded is not None:
                entry.loaded.stop()

    def close(self) -> None:
        for entry in self.entries:
            if entry.loaded is not None:
                entry.loaded.close()

    def _expire(self, entry: ResidentModel, used_at: float) -> None:
        if entry.state == "ready" and not entry.users and entry.used_at == used_at:
            self._leave(entry)

    def _leave(self, entry: ResidentModel) -> Awaitable[None]:
        """Refuse new requests for a model, and free it when the last one ends."""
        if entry.leaving is None:
            entry.state = "leaving"
            entry.leaving = asyncio.create_task(self._left(entry))
        return asyncio.shield(entry.leaving)

    async def _left(self, entry: ResidentModel) -> None:
        try:
            if entry.users:
                await entry.idle.wait()
            await self._free(entry)
        finally:
            entry.leaving = None
            self._arrange()

    async def _free(self, entry: ResidentModel) -> None:
        opened, entry.loaded = entry.loaded, None
        if opened is not None:
            await asyncio.to_thread(opened.close)
        entry.state = "absent"

    def _arrange(self) -> None:
        """Admit requests whose models are loaded, and begin to load the model of the longest waiting one."""
        for ticket in [one for one in self._waiting if one.entry.state == "ready"]:
            self._waiting.remove(ticket)
            if not ticket.admitted.done():
                self._enter(ticket.entry)
                ticket.admitted.set_result(None)
        if self._waiting and self._mover is None and not self.stopped:
            self._begin(self._waiting[0].entry)

    def _begin(self, entry: ResidentModel) -> None:
        self._mover = asyncio.create_task(self._move(entry))

    async def _move(self, entry: ResidentModel) -> None:
        """Make room for a model and load it. If that fails, requests that wait for it fail."""
        try:
            if entry.leaving is not None:
                await asyncio.shield(entry.leaving)
            await self._load(entry)
            entry.failure = ""
        except Exception as error:
            await self._free(entry)
            reason = without_folders(str(error))
            if not isinstance(error, TokenwrightError):
                log.exception("the model %s could not be read", entry.name)
                reason = "an internal error; see the server's log"
            entry.failure = reason
            failure = NotReady(f"the model {entry.name} could not be read: {reason}")
            self._fail([one for one in self._waiting if one.entry is entry], failure)
        finally:
            self._mover = None
            self._arrange()

    async def _load(self, entry: ResidentModel) -> None:
        need = entry.nbytes or await asyncio.to_thread(entry.need)
        if need > self.limit:
            raise NotReady(f"it needs about {binary(need)}, and all models may take {binary(self.limit)} (--memory)")
        await self._make_room(entry, need)
        entry.state = "loading"
        entry.loaded = entry.load(entry)
        await entry.loaded.settled()
        if self.stopped:
            raise NotReady(ENDING)
        entry.nbytes, entry.used_at = entry.loaded.nbytes, time.monotonic()
        await self._make_room(entry, entry.nbytes)
        entry.state = "ready"
        self.loads += 1

    async def _make_room(self, entry: ResidentModel, need: int) -> None:
        while (victim := self._victim(entry, need)) is not None:
            await self._leave(victim)

    def _victim(self, entry: ResidentModel, need: int) -> ResidentModel | None:
        """The model to evict: a leaving one, else the longest unused, idle ones first."""
        others = [one for one in self.entries if one is not entry and one.state in ("ready", "leaving")]
        if not others or sum(one.nbytes for one in others) + need <= self.limit:
            return None
        return min(others, key=lambda one: (one.state == "ready", one.users > 0, one.pinned, one.used_at))

    def _fail(self, tickets: Iterable[_Ticket], error: Exception) -> None:
        for ticket in list(tickets):
            self._waiting.remove(ticket)
            if not ticket.admitted.done():
                ticket.admitted.set_exception(error)
