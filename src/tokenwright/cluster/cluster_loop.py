"""The router's thread, in place of an engine's: it takes requests, and delivers what replicas write.

clients' threads                    router's thread                         replicas
submit, cancel, pause   ──►  Dispatcher ──► RoutedReplica, Link  ──►  Begin, Cancel, ...
listeners               ◄──             ◄── Supervisor           ◄──  Report
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from collections.abc import Sequence as ListLike
from contextlib import suppress
from queue import Empty, SimpleQueue
from traceback import format_exception
from typing import Any, Literal, cast

from tokenwright.cluster.dispatcher import Dispatcher
from tokenwright.cluster.replica_messages import Progress, ReplicaShape, Told, orders_of
from tokenwright.cluster.routed_handle import RoutedHandle, TextInFlight, TextWay
from tokenwright.cluster.supervisor import Launcher, News, RouterSettings, Seat, Supervisor
from tokenwright.engine import Engine, PagePool, PrefixIndex, Request, Scheduler
from tokenwright.engine.loop import CLOSED
from tokenwright.engine.port import Listener
from tokenwright.engine.warming import WarmRules
from tokenwright.errors import EngineError
from tokenwright.llm.prompts.kept import KeptText, KeptTokens
from tokenwright.trace.rooms import ReplicaRoom, ReplicasCard, TextRoute

log = logging.getLogger(__name__)

LOOK_S = 10.0
ASK_S = 0.002  # between two looks whether all replicas have answered


class ClusterLoop:
    def __init__(
        self, launcher: Launcher, secret: bytes, settings: RouterSettings, *, shared: bool, starting: int | None = None
    ) -> None:
        self.clock = time.perf_counter
        self.engine: Engine[Any]  # only checks requests
        self.dispatcher = Dispatcher(settings.retries, self.clock, shared=shared)
        self._news: SimpleQueue[News | EngineError] | None = SimpleQueue()  # until a replica takes texts
        self._coming: SimpleQueue[RoutedHandle] = SimpleQueue()  # not yet taken by the router
        self.closed = False
        self._why: EngineError | None = None  # set at the end
        self.watched: list[Callable[[], object]] = []  # called in the router's thread when the router has failed
        self._asyncio = _new_event_loop()
        self._supervisor = Supervisor(launcher, self.dispatcher, secret, settings, self._hear, starting)
        self._main = self._asyncio.create_task(self._supervisor.run())
        self._thread = threading.Thread(target=self._run, name="tokenwright router", daemon=True)
        self._thread.start()

    def opened(self, context: int, report: Callable[[int, int], None] | None) -> ReplicaShape:
        """Wait until a replica takes texts. Raises CheckpointError with a replica's reason, EngineError when closed."""
        assert self._news is not None, "it is opened once"
        while True:
            match self._news.get():
                case ReplicaShape() as shape:
                    self._news = None
                    self.engine = self._accepting(shape, context)
                    return shape
                case Progress(done=done, total=total):
                    if report is not None:
                        report(done, total)
                case error:
                    self.close()
                    raise error

    def _hear(self, news: News | EngineError) -> None:
        if (queue := self._news) is not None:
            queue.put(news)

    def _accepting(self, shape: ReplicaShape, context: int) -> Engine[Any]:
        pool = PagePool(shape.groups, shape.page_size)
        prefixes = PrefixIndex(pool, shape.seed, self._supervisor.secret)
        scheduler = Scheduler(pool, shape.token_budget, shape.max_sequences, prefixes)
        nothing = cast(Any, None)
        return Engine(nothing, nothing, scheduler, context)

    @property
    def replicas(self) -> int:
        return len(self._supervisor.seats)

    @property
    def names(self) -> list[str]:
        return [seat.link.name for seat in self._supervisor.seats if seat.link is not None and seat.member is not None]

    def look(self) -> ReplicasCard:
        self.check()
        return asyncio.run_coroutine_threadsafe(self._look(), self._asyncio).result(LOOK_S)

    async def _look(self) -> ReplicasCard:
        pages = self.engine.pool.pages
        return ReplicasCard(
            page_size=self.engine.pool.page_size,
            waiting=self.dispatcher.waiting,
            rooms=tuple(_room(seat, pages) for seat in self._supervisor.seats),
            texts=tuple(map(_routed, reversed(self.dispatcher.ways.ways.values()))),
        )

    def route(self, requests: ListLike[Request], listener: Listener, adapters: ListLike[str]) -> list[RoutedHandle]:
        """Raises RequestError, also for beams."""
        self.check()
        handles = [self._handle(request, listener, adapters) for request in requests]
        for handle in handles:
            self._coming.put(handle)
        try:
            self._asyncio.call_soon_threadsafe(self._do, self._take_in)
        except RuntimeError:  # the thread has ended, perhaps without refusing them
            self._refuse()
        return handles

    def release(self, owner: str, session: str) -> None:
        with suppress(RuntimeError):
            self._asyncio.call_soon_threadsafe(self._do, self.dispatcher.release, owner, session)

    def warm(self, request: Request, rules: WarmRules, adapters: ListLike[str]) -> None:
        [order], hashes = orders_of(request, adapters), self.engine.accept(request).prefix_hashes
        with suppress(RuntimeError):
            self._asyncio.call_soon_threadsafe(self._do, self.dispatcher.warm, order, hashes, rules)

    def kept(self, texts: ListLike[KeptText], owner: str) -> list[KeptTokens]:
        """The texts that each replica has cached, and an owner's pins; one that hangs is left out."""
        self.check()
        return asyncio.run_coroutine_threadsafe(self._kept(texts, owner), self._asyncio).result(LOOK_S)

    async def _kept(self, texts: ListLike[KeptText], owner: str) -> list[KeptTokens]:
        until = self.clock() + LOOK_S / 2
        with self.dispatcher.look(texts, owner) as found:
            while len(found) < len(self.dispatcher.members) and self.clock() < until:
                await asyncio.sleep(ASK_S)
        return found

    def _take_in(self) -> None:
        with suppress(Empty):
            while self._why is None:
                self.dispatcher.add(self._coming.get_nowait())

    def _refuse(self) -> None:
        with suppress(Empty):
            while self._why is not None:
                self._coming.get_nowait().fail(self._why)

    def _handle(self, request: Request, listener: Listener, adapters: ListLike[str]) -> RoutedHandle:
        orders, first = list(orders_of(request, adapters)), self.engine.accept(request)
        ids = self.engine.scheduler.ids
        others = [first.fork(next(ids), [], order.choice) for order in orders[1:]]
        texts = [
            TextInFlight(sequence, order, shown=sequence is first)
            for sequence, order in zip([first, *others], orders, strict=True)
        ]
        return RoutedHandle(self.clock, texts, listener, self.clock(), self._tell)

    def _tell(self, what: Told, handle: RoutedHandle) -> None:
        with suppress(RuntimeError):
            self._asyncio.call_soon_threadsafe(self._do, self.dispatcher.tell, what, handle)

    def _do(self, function: Callable[..., object], *arguments: object) -> None:
        """Run another thread's call in the router's thread. A fault ends the router."""
        try:
            function(*arguments)
        except Exception as error:
            self._supervisor.fail(error)

    @property
    def experts(self) -> Mapping[str, int]:
        return self._supervisor.experts

    def roll(self) -> None:
        """Replace all replicas, one after another, losing no request. Any thread may call it; it does not wait."""
        with suppress(RuntimeError):  # the thread has ended: SIGHUP may come at any time
            self._asyncio.call_soon_threadsafe(self._supervisor.start_rolling)

    async def retire(self, other: "ClusterLoop") -> None:
        """Let another model's replicas take the places one by one; the last one ends its texts. In any event loop."""
        with suppress(RuntimeError):
            self._asyncio.call_soon_threadsafe(self._do, self._supervisor.retire)
        for _ in range(other.replicas - 1):
            await self._in_router(self._supervisor.retire_one)
            await other._in_router(other._supervisor.start_one)

    async def _in_router(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Wait, in any event loop, for `function` in the router's, or for that one's end."""
        started = function()
        try:
            future = asyncio.run_coroutine_threadsafe(started, self._asyncio)
        except RuntimeError:
            started.close()
            return
        await asyncio.wait((asyncio.wrap_future(future),))

    def check(self) -> None:
        if self._why is not None:
            raise EngineError(str(self._why)) from self._why.__cause__

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._why = self._why or EngineError(CLOSED)
            with suppress(RuntimeError):
                self._asyncio.call_soon_threadsafe(self._main.cancel)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._asyncio)
        try:
            with suppress(asyncio.CancelledError):
                self._asyncio.run_until_complete(self._main)
        except BaseException as error:
            log.error("the router has failed\n%s", "".join(format_exception(error)))
            self._why = EngineError(f"the router of the replicas has failed ({_causes(error)}); open a new LLM")
            self._why.__cause__ = error
        self._why = self._why or EngineError(CLOSED)
        self._hear(self._why)
        self.dispatcher.close(self._why)
        if self._why.__cause__ is not None:
            for tell in self.watched:
                tell()
        for task in (left := asyncio.all_tasks(self._asyncio)):
            task.cancel()
        self._asyncio.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._asyncio.close()
        self._refuse()
        self._supervisor.launcher.close()


def _causes(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(map(_causes, error.exceptions))
    return f"{type(error).__name__}: {error}"


def _new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _room(seat: Seat, pages: int) -> ReplicaRoom:
    member, name = seat.member, "" if seat.link is None else seat.link.name
    if member is None:
        return ReplicaRoom(name, "starting", seat.opened, 0, pages, 0, 0)
    state: Literal["taking", "draining"] = "taking" if member.routed.taking else "draining"
    used, texts = pages - member.available, len(member.routed.texts)
    return ReplicaRoom(name, state, seat.opened, texts, pages, used, member.cached)


def _routed(way: TextWay) -> TextRoute:
    return TextRoute(way.number, way.prompt, len(way.written), way.ended, tuple(way.stays))
