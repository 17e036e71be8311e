"""Starts, watches and restarts replicas, and replaces all of them on request.

It ends a replica that sends no message, or whose engine ends no step. Silence is counted in its own ticks, so a router
that was stopped does not blame its replicas.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

from tokenwright.cluster import replica_messages as messages
from tokenwright.cluster.dispatcher import Dispatcher, Link, Member
from tokenwright.cluster.router import ReplicaPages
from tokenwright.errors import CheckpointError

TICK_S = 0.25
PING_S = 1.0
HANG_S = 60.0  # without a step's end; a large model's steps take seconds
AGAIN_S = 0.5  # before a replica that failed to open restarts; doubles each time
MOST_AGAIN_S = 60.0
POLL_S = 0.02  # between two checks
UNOPENED = 3  # failures after which a seat gives up that has never opened the model
MOST_WITHOUT_S = 120.0  # without a replica, until texts fail

log = logging.getLogger(__name__)

News = messages.ReplicaShape | messages.Progress | CheckpointError  # while the first replica opens the model


@dataclass(frozen=True, slots=True)
class RouterSettings:
    retries: int = 3  # replicas that may die with a text before it fails
    drain_s: float = 30.0  # for a replica to finish its texts before it is replaced
    heartbeat_s: float = 10.0  # the longest silence of a replica


class StartedLink(Link, Protocol):
    @property
    def name(self) -> str: ...

    def messages(self) -> AsyncIterator[Any]: ...

    def kill(self) -> None:
        """End the replica now."""

    async def close(self) -> None:
        """End the replica, unless it has ended, and free its resources."""


class Launcher(Protocol):
    """Starts replicas: processes, or anything that answers messages. Its length is their number."""

    def __len__(self) -> int: ...

    async def start(self, number: int) -> StartedLink: ...

    def close(self) -> None:
        """Free what the replicas shared. They must have ended."""


@dataclass(slots=True, eq=False)
class Seat:
    link: StartedLink | None = None
    member: Member | None = None
    silent: float = 0.0  # seconds without a message
    stuck: float = 0.0  # seconds without a step
    leaving: bool = False
    opened: int = 0  # replicas that opened the model here
    failures: int = 0  # replicas that failed to, since the last success
    experts: Mapping[str, int] = field(default_factory=dict)  # counts of the replica, as last reported
    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class Supervisor:
    def __init__(
        self,
        launcher: Launcher,
        dispatcher: Dispatcher,
        secret: bytes,
        settings: RouterSettings,
        tell: Callable[[News], None],
        starting: int | None = None,  # replicas at first; None: all
    ) -> None:
        self.seats = [Seat() for _ in range(len(launcher))]
        for seat in self.seats[:starting]:
            seat.wanted.set()
        self.launcher = launcher
        self._dispatcher = dispatcher
        self.secret = secret
        self._settings = settings
        self._without_s = 0.0  # seconds
        self._news = tell
        self._rolling = asyncio.Lock()
        self._rolls: set[asyncio.Task[None]] = set()
        self._retiring = False
        self._faults: asyncio.Queue[Exception] = asyncio.Queue()
        self.experts = Counter[str]()  # of all replicas, dead ones included

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number, seat in enumerate(self.seats):
                seat.task = tasks.create_task(self._keep(number, seat))
            tasks.create_task(self._tick())
            raise await self._faults.get()

    def fail(self, error: Exception) -> None:
        self._faults.put_nowait(error)

    def start_rolling(self) -> None:
        """Start `roll`, unless one runs and another waits already."""
        if len(self._rolls) < 2:
            self._rolls.add(task := asyncio.create_task(self.roll()))
            task.add_done_callback(self._rolls.discard)

    async def roll(self) -> None:
        async with self._rolling:
            for seat in self.seats:
                await self._replace(seat)

    async def start_one(self) -> None:
        """Start one more replica, if one is left, and wait until it takes texts or fails."""
        if (seat := next((one for one in self.seats if not one.wanted.is_set()), None)) is not None:
            seat.wanted.set()
            while not seat.opened and not seat.failures:
                await asyncio.sleep(POLL_S)

    def retire(self) -> None:
        """Restart no replica any more. Texts fail once none is left."""
        self._retiring = True
        for roll in self._rolls:
            roll.cancel()
        for seat in list(self.seats):
            if seat.member is not None:
                seat.member.routed.taking = True
            elif seat.failures:
                self._end(seat)

    async def retire_one(self) -> None:
        """Drain and end one replica, unless it is the last; others continue its texts."""
        waiting = [seat for seat in self.seats if seat.member is None]
        taking = [(self._dispatcher.texts_of(seat.member), seat) for seat in self.seats if seat.member is not None]
        if len(self.seats) > 1:
            seat = waiting[0] if waiting else min(taking, key=lambda one: one[0])[1]
            if seat.member is not None:
                await self._drain(seat, seat.member)
            if seat not in self.seats:  # it died meanwhile and cannot restart
                return
            if any(other.member is not None for other in self.seats if other is not seat):
                self._end(seat)
            elif seat.member is not None:  # the others have died meanwhile
                seat.member.routed.taking = True

    def _end(self, seat: Seat) -> None:
        self.seats.remove(seat)
        if seat.task is not None and seat.task is not asyncio.current_task():
            seat.task.cancel()
        if not self.seats:
            self._dispatcher.abandon("the model was replaced, and no former replica is left; send the request again")

    async def _drain(self, seat: Seat, member: Member) -> None:
        self._dispatcher.drain(member)
        until = time.monotonic() + self._settings.drain_s
        while seat.member is member and self._dispatcher.texts_of(member) and time.monotonic() < until:
            await asyncio.sleep(POLL_S)

    async def _replace(self, seat: Seat) -> None:
        member, opened = seat.member, seat.opened
        if member is not None and seat.link is not None:
            await self._drain(seat, member)
            if seat.member is member:  # else it has died
                seat.leaving = True
                seat.link.kill()
        while seat.member is None or seat.opened == opened:
            await asyncio.sleep(POLL_S)

    async def _keep(self, number: int, seat: Seat) -> None:
        await seat.wanted.wait()
        while True:
            opened = seat.opened
            try:
                link = await self.launcher.start(number)
            except Exception as error:  # usually for want of memory or descriptors
                log.warning("a replica could not be started: %s", error, exc_info=not isinstance(error, OSError))
            else:
                await self._host(number, seat, link)
            if seat.opened > opened:
                seat.failures = 0
                continue
            seat.failures += 1
            if seat.failures == UNOPENED:
                self._news(CheckpointError(f"{UNOPENED} replicas in a row ended before they had opened the model"))
            if all(one.member is None and one.failures >= UNOPENED for one in self.seats):
                self._dispatcher.abandon(f"{UNOPENED} replicas in a row ended before they had opened the model")
            if self._retiring:
                self._end(seat)
                return
            await asyncio.sleep(min(MOST_AGAIN_S, AGAIN_S * 2 ** (seat.failures - 1)))

    async def _host(self, number: int, seat: Seat, link: StartedLink) -> None:
        seat.link, seat.silent, seat.stuck, seat.leaving, seat.experts = link, 0.0, 0.0, False, {}
        try:
            async for message in _messages(link):
                seat.silent = 0.0
                self._read(number, seat, message)
        except asyncio.CancelledError:
            seat.leaving = True  # all replicas end
            raise
        finally:
            self._left(seat)
            await _closed(link)

    def _read(self, number: int, seat: Seat, message: object) -> None:
        match message:
            case messages.Report() if seat.member is not None:
                self._dispatcher.report(seat.member, message)
                for name, total in message.experts.items():  # one addition each: another thread reads
                    self.experts[name] += total - seat.experts.get(name, 0)
                seat.experts = message.experts
            case messages.Warmed():
                self._dispatcher.warmed(message)
            case messages.KeptFound() if seat.link is not None:
                self._dispatcher.answered(message, seat.link)
            case messages.Pong():
                seat.stuck = 0.0
            case messages.ReplicaOpened(shape=shape):
                self._news(shape)
                evictions = self._dispatcher.evictions
                pages = ReplicaPages(shape.groups, shape.page_size, shape.seed, self.secret, evictions)
                assert seat.link is not None, "it has sent this message"
                count = sum(group.pages for group in shape.groups)
                seat.member = self._dispatcher.join(seat.link, pages, count, number, seat.link.name)
                if seat.opened:
                    log.warning("replica %s takes texts in place of the last one", seat.link.name)
                seat.opened, self._without_s = seat.opened + 1, 0.0
            case messages.Progress():
                self._news(message)
            case messages.ReplicaUnopened(reason=reason):
                if any(one.opened for one in self.seats):  # else the caller of `opened` reports it
                    log.error("a replica could not open the model: %s", reason)
                self._news(CheckpointError(reason))
                seat.leaving = True
                if seat.link is not None:
                    seat.link.kill()

    def _left(self, seat: Seat) -> None:
        member, seat.member = seat.member, None
        if not seat.leaving:
            when = "" if member is not None else " before it had opened the model"
            log.warning("replica %s has died%s; another one is started", seat.link and seat.link.name, when)
        if member is not None:
            self._dispatcher.leave(member, died=not seat.leaving)

    async def _tick(self) -> None:
        for turn in count():
            await asyncio.sleep(TICK_S)
            self._dispatcher.expire()
            for seat in self.seats:
                if seat.link is not None and seat.member is not None:
                    self._prove(seat, seat.link, asks=turn % max(1, round(PING_S / TICK_S)) == 0)
            if any(seat.opened for seat in self.seats) and not self._dispatcher.members:
                self._without_s += TICK_S
                if self._without_s >= MOST_WITHOUT_S:
                    self._dispatcher.abandon(
                        f"no replica has taken texts for {MOST_WITHOUT_S:.0f} s; the server's log says why"
                    )

    def _prove(self, seat: Seat, link: StartedLink, *, asks: bool) -> None:
        """Ping a replica, and end one that is silent or stuck for too long."""
        seat.silent += TICK_S
        seat.stuck += TICK_S
        if asks:
            link.send(messages.Ping())
        for seconds, most, fault in (
            (seat.silent, self._settings.heartbeat_s, "sent nothing"),
            (seat.stuck, HANG_S, "ended no step"),
        ):
            if seconds >= most:
                log.warning("replica %s has %s for %.3g s and is ended", link.name, fault, seconds)
                with suppress(OSError):
                    link.kill()
                return


async def _messages(link: StartedLink) -> AsyncIterator[Any]:
    try:
        async for message in link.messages():
            yield message
    except Exception as error:
        log.warning("replica %s is ended because it sent a malformed message: %r", link.name, error)


async def _closed(link: StartedLink) -> None:
    try:
        await link.close()
    except Exception:
        log.exception("the resources of replica %s could not be freed", link.name)
