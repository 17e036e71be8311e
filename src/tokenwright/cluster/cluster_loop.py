"""The router's thread, which takes an engine thread's place: it routes requests and delivers the replicas' texts.

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
from tokenwright.cluster.replica_messages import Progress, ReplicaShape, TextCommand, orders_of
from tokenwright.cluster.routed_handle import RoutedHandle, TextInFlight, TextPath
from tokenwright.cluster.supervisor import Launcher, News, RouterSettings, Seat, Supervisor
from tokenwright.engine import Engine, PagePool, PrefixIndex, Request, Scheduler
from tokenwright.engine.loop import CLOSED
from tokenwright.engine.port import Listener
from tokenwright.engine.warming import WarmRules
from tokenwright.errors import EngineError
from tokenwright.llm.prompts.kept import KeptText, KeptTokens
from tokenwright.trace.rooms import ReplicaRoom, ReplicasCard, TextRoute

log = logging.getLogger(__name__)

ANSWER_S = 10.0  # for the router's thread to answer another
POLL_S = 0.002  # between two checks whether all replicas have answered


class ClusterLoop:
    def __init__(
        self, launcher: Launcher, secret: bytes, settings: RouterSettings, *, shared: bool, starting: int | None = None
    ) -> None:
        self.clock = time.perf_counter
        self.engine: Engine  # only checks requests
        self.dispatcher = Dispatcher(settings.retries, self.clock, shared=shared)
        self._news: SimpleQueue[News | EngineError] | None = SimpleQueue()  # until a replica takes texts
        self._submitted: SimpleQueue[RoutedHandle] = SimpleQueue()  # submitted, not yet seen by the router
        self.closed = False
        self._ended_by: EngineError | None = None
        self.watched: list[Callable[[], object]] = []  # called in the router's thread when the router has failed
        self._asyncio = _new_event_loop()
        self._supervisor = Supervisor(launcher, self.dispatcher, secret, settings, self._add_news, starting)
        self._main = self._asyncio.create_task(self._supervisor.run())
        self._thread = threading.Thread(target=self._run, name="tokenwright router", daemon=True)
        self._thread.start()

    def opened(self, context: int, report: Callable[[int, int], None] | None) -> ReplicaShape:
        """Wait until a replica takes texts. Raises CheckpointError with a replica's reason, EngineError if closed."""
        assert self._news is not None, "`opened` is called once"
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

    def _add_news(self, news: News | EngineError) -> None:
        if (queue := self._news) is not None:
            queue.put(news)

    def _accepting(self, shape: ReplicaShape, context: int) -> Engine:
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
        return asyncio.run_coroutine_threadsafe(self._look(), self._asyncio).result(ANSWER_S)

    async def _look(self) -> ReplicasCard:
        pages = self.engine.pool.pages
        return ReplicasCard(
            page_size=self.engine.pool.page_size,
            waiting=self.dispatcher.waiting,
            rooms=tuple(_room(seat, pages) for seat in self._supervisor.seats),
            texts=tuple(map(_routed, reversed(self.dispatcher.paths.paths.values()))),
        )

    def route(self, requests: ListLike[Request], listener: Listener, adapters: ListLike[str]) -> list[RoutedHandle]:
        """Raises RequestError, for beam search too."""
        self.check()
        handles = [self._handle(request, listener, adapters) for request in requests]
        for handle in handles:
            self._submitted.put(handle)
        try:
            self._asyncio.call_soon_threadsafe(self._in_thread, self._add_submitted)
        except RuntimeError:  # the thread has ended
            self._refuse()
        return handles

    def release(self, owner: str, session: str) -> None:
        with suppress(RuntimeError):
            self._asyncio.call_soon_threadsafe(self._in_thread, self.dispatcher.release, owner, session)

    def warm(self, request: Request, rules: WarmRules, adapters: ListLike[str]) -> None:
        [order], hashes = orders_of(request, adapters), self.engine.accept(request).prefix_hashes
        with suppress(RuntimeError):
            self._asyncio.call_soon_threadsafe(self._in_thread, self.dispatcher.warm, order, hashes, rules)

    def kept(self, texts: ListLike[KeptText], owner: str) -> list[KeptTokens]:
        """The texts and pins that each replica has cached; one that hangs is left out."""
        self.check()
        return asyncio.run_coroutine_threadsafe(self._kept(texts, owner), self._asyncio).result(ANSWER_S)

    async def _kept(self, texts: ListLike[KeptText], owner: str) -> list[KeptTokens]:
        until = self.clock() + ANSWER_S / 2
        with self.dispatcher.look(texts, owner) as found:
            while len(found) < len(self.dispatcher.members) and self.clock() < until:
                await asyncio.sleep(POLL_S)
        return found

    def _add_submitted(self) -> None:
        with suppress(Empty):
            while self._ended_by is None:
                self.dispatcher.add(self._submitted.get_nowait())

    def _refuse(self) -> None:
        with suppress(Empty):
            while self._ended_by is not None:
                self._submitted.get_nowait().fail(self._ended_by)

    def _handle(self, request: Request, listener: Listener, adapters: ListLike[str]) -> RoutedHandle:
        orders, first = list(orders_of(request, adapters)), self.engine.accept(request)
        ids = self.engine.scheduler.ids
        others = [first.fork(next(ids), [], order.choice) for order in orders[1:]]
        texts = [
            TextInFlight(sequence, order, shown=sequence is first)
            for sequence, order in zip([first, *others], orders, strict=True)
        ]
        return RoutedHandle(self.clock, texts, listener, self.clock(), self._tell)

    def _tell(self, command: TextCommand, handle: RoutedHandle) -> None:
        with suppress(RuntimeError):
            self._asyncio.call_soon_threadsafe(self._in_thread, self.dispatcher.tell, command, handle)

    def _in_thread(self, function: Callable[..., object], *arguments: object) -> None:
        """Run another thread's call in the router's thread; its exception ends the router."""
        try:
            function(*arguments)
        except Exception as error:
            self._supervisor.fail(error)

    @property
    def experts(self) -> Mapping[str, int]:
        return self._supervisor.experts

    def roll(self) -> None:
        """Begin to replace all replicas, one after another; no request is lost. Any thread may call it."""
        with suppress(RuntimeError):  # the thread has ended: SIGHUP may come at any time
            self._asyncio.call_soon_threadsafe(self._supervisor.start_rolling)

    async def retire(self, other: "ClusterLoop") -> None:
        """Replace these replicas one by one by `other`'s; the last one ends its texts first. In any event loop."""
        with suppress(RuntimeError):
            self._asyncio.call_soon_threadsafe(self._in_thread, self._supervisor.retire)
        for _ in range(other.replicas - 1):
            await self._in_router(self._supervisor.retire_one)
            await other._in_router(other._supervisor.start_one)

    async def _in_router(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `function` in the router's event loop; wait in any other for its end or the router's."""
        started = function()
        try:
            future = asyncio.run_coroutine_threadsafe(started, self._asyncio)
        except RuntimeError:
            started.close()
            return
        await asyncio.wait((asyncio.wrap_future(future),))

    def check(self) -> None:
        if self._ended_by is not None:
            raise EngineError(str(self._ended_by)) from self._ended_by.__cause__

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._ended_by = self._ended_by or EngineError(CLOSED)
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
            self._ended_by = EngineError(f"the router of the replicas has failed ({_causes(error)}); open a new LLM")
            self._ended_by.__cause__ = error
        self._ended_by = self._ended_by or EngineError(CLOSED)
        self._add_news(self._ended_by)
        self.dispatcher.close(self._ended_by)
        if self._ended_by.__cause__ is not None:
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


def _routed(path: TextPath) -> TextRoute:
    return TextRoute(path.number, path.prompt, len(path.written), path.ended, tuple(path.stays))
