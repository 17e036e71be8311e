"""The engine loop owns the engine; clients send it messages and receive events.

    client threads                         engine thread
    submit, cancel, pause, call   ──►  mailbox ──► step() ──► events, once per step and listener
    EngineHandle                  ◄──────────────────────────────┘

A driver (`driver.py`) calls the loop's turns, by default in a thread that blocks all signals. No client runs the
engine's code, so an exception in a client (Ctrl-C, a cancelled task) cannot interrupt a step. Mailbox and inboxes are
`SimpleQueue`s: one atomic call puts a message in, also from a finalizer or a signal handler, and no client holds a
lock. If the engine's own code fails, every request ends with an EngineError, and later ones are refused.
"""

import logging
import os
import time
import weakref
from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as ListLike
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeVar

from tokenwright.engine.core import Engine
from tokenwright.engine.driver import Action, Call, Driver, EngineThread, Message, close_at_exit
from tokenwright.engine.port import Delivery, Listener
from tokenwright.engine.request import Request, Sequence
from tokenwright.engine.step import Dropped, Event, Failed, Finished, Forked
from tokenwright.errors import EngineError, WorkerError

T = TypeVar("T")
EndStep = Callable[[float, float], object]

EXPIRE_S = 0.25  # seconds between two checks of deadlines while all requests are paused

CLOSED = "this LLM is closed; open a new one"
FORKED = (
    "this process was forked after an LLM was loaded, and its threads stayed behind in the parent; start workers with "
    "multiprocessing's 'spawn' or 'forkserver' method, or fork before the first LLM is loaded"
)

log = logging.getLogger(__name__)


def deliver_each(by_listener: Mapping[Listener, list[Delivery]]) -> None:
    for listener, deliveries in by_listener.items():
        try:
            listener.deliver(deliveries)
        except Exception:
            log.exception("a listener failed; its requests are cancelled")
            for delivery in deliveries:
                delivery.handle.cancel()


class Inbox:
    """A listener for a thread that waits for each step's events, or (at_end > 0) until `at_end` requests have ended."""

    def __init__(self, at_end: int = 0, driver: Driver | None = None) -> None:
        self._queue: SimpleQueue[list[Delivery]] = SimpleQueue()
        self._driver = driver
        self._waits_for = at_end
        self._held: list[Delivery] = []

    def deliver(self, deliveries: list[Delivery]) -> None:
        if not self._waits_for:
            self._queue.put(deliveries)
            return
        self._held += deliveries
        ended = sum(delivery.ended for delivery in deliveries)
        self._waits_for -= ended
        if not self._waits_for:
            self._queue.put(self._held)
            self._held = []

    def get(self) -> list[Delivery]:
        return self._queue.get() if self._driver is None else self._driver.wait(self._queue)


class AsyncListener:
    """A listener for asyncio: one `call_soon_threadsafe` per step. If that loop is gone, requests are cancelled."""

    def __init__(self, event_loop: AbstractEventLoop, receive: Callable[[list[Delivery]], object]) -> None:
        self._event_loop = weakref.ref(event_loop)
        self._receive = receive

    def deliver(self, deliveries: list[Delivery]) -> None:
        event_loop = self._event_loop()
        with suppress(RuntimeError):  # the event loop is closed
            if event_loop is not None:
                event_loop.call_soon_threadsafe(self._receive, deliveries)
                return
        for delivery in deliveries:  # nothing reads their events
            delivery.handle.cancel()


class EngineHandle:
    moves = 0

    def __init__(self, loop: "EngineLoop", sequence: Sequence, listener: Listener, submitted: float) -> None:
        self.sequence = sequence
        self.submitted = submitted
        self.started: float | None = None
        self.ended = False
        self.live = {sequence.id}  # its sequences that have not ended; only the engine thread uses it
        self.listener = listener
        self._loop = loop

    def cancel(self) -> None:
        if not self.ended:
            live = self.live
            self._loop.post(lambda engine: [event for identity in list(live) for event in engine.abort(identity)])

    def pause(self) -> None:
        self._loop.post(lambda engine: self._each(engine.pause))

    def let_write(self, tokens: int) -> None:
        self._loop.post(lambda engine: self._each(lambda one: engine.let_write(one, tokens)))

    def let_write_up_to(self, length: int) -> None:
        """Let each text, prompt included, grow to `length` tokens, then pause it."""
        self._loop.post(lambda engine: self._each(lambda one: engine.pause(one, length)))

    def resume(self) -> None:
        self._loop.post(lambda engine: self._each(engine.resume))

    def _each(self, change: Callable[[int], object]) -> None:
        for identity in self.live:
            change(identity)

    def use_cache(self, cache: bool) -> None:
        self._loop.post(lambda engine: self._each(lambda one: engine.use_cache(one, cache)))

    def fail(self, why: EngineError) -> None:
        events: list[Event] = [Failed(identity, why) for identity in sorted(self.live)]
        self.live.clear()
        self.ended = True
        self.listener.deliver([Delivery(self, events, self._loop.clock(), True)])

    def __iter__(self) -> Iterator[Event]:
        assert isinstance(self.listener, Inbox), "only the events of an Inbox can be waited for"
        ended = False
        while not ended:
            for delivery in self.listener.get():
                yield from delivery.events
                ended = delivery.ended


class EngineLoop:
    """Runs an engine until `close`. `make_driver` gets the function that the driver calls for each turn.

    `end_step` is called with a step's begin and end times, before its events are delivered.
    """

    def __init__(
        self,
        engine: Engine,
        clock: Callable[[], float] = time.perf_counter,
        end_step: EndStep | None = None,
        make_driver: Callable[[Callable[[], bool]], Driver] = EngineThread,
    ) -> None:
        self.engine = engine
        self.clock = clock
        self._end_step = end_step
        self._mailbox: SimpleQueue[Message | None] = SimpleQueue()  # None: close
        self._handles: dict[int, EngineHandle] = {}  # by the ids of their live sequences
        self._starting: list[EngineHandle] = []  # handles of which no token is computed yet
        self._stopped: EngineError | None = None  # why messages are refused
        self._expired = time.monotonic()  # the last check of the deadlines of paused requests
        self._pid = os.getpid()
        self.driver = make_driver(self.turn)
        close_at_exit(self.close)

    def submit(self, requests: ListLike[Request], listener: Listener, *, paused: bool = False) -> list[EngineHandle]:
        """Queue requests for the same step, without waiting; `paused` ones compute nothing until resumed.

        Queues none if it raises what `Engine.accept` raises, or EngineError if the engine has ended.
        """
        self.check()
        handles = [EngineHandle(self, self.engine.accept(one), listener, self.clock()) for one in requests]
        if paused:
            for handle in handles:
                handle.sequence.group.pause_at = 0

        def add(engine: Engine) -> None:
            for handle in handles:
                self._handles[handle.sequence.id] = handle
                self._starting.append(handle)
                engine.add(handle.sequence)

        def refuse(why: EngineError) -> None:
            for handle in handles:
                handle.fail(why)

        self._send(Message(add, refuse))
        return handles

    def call(self, function: Callable[[Engine], T]) -> T:
        """Run `function(engine)` between two steps; return its result, or raise what it raises."""
        self.check()
        call = Call(function)
        self._send(Message(call.run, call.refuse))
        return call.result(self.driver)

    def post(self, action: Action) -> None:
        """Run `action(engine)` between two steps, without waiting. Finalizers and signal handlers may call it."""
        self._send(Message(action))

    def end(self, why: WorkerError) -> None:
        """End the engine with an error, without waiting."""

        def fail(_: Engine) -> None:
            raise why

        self.post(fail)

    def _send(self, message: Message) -> None:
        self._mailbox.put(message)
        if self._stopped is not None:  # the loop may have read its mail for the last time: refuse it here
            self._refuse_mail(self._stopped)

    def close(self) -> None:
        """End every request with an error after the current step, and wait for the loop to end."""
        self.stop()
        if not self.forked:
            self.driver.join()

    def stop(self) -> None:
        self._mailbox.put(None)

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the loop's: it has the memory, but neither the thread nor its locks."""
        return os.getpid() != self._pid

    def refuse_forked(self) -> None:
        if self.forked:
            raise EngineError(FORKED)

    def check(self) -> None:
        """Raise EngineError, with the reason, if the loop has ended or stayed behind in a parent process."""
        self.refuse_forked()
        if self._stopped is not None:
            raise type(self._stopped)(str(self._stopped)) from self._stopped.__cause__

    # The driver's thread calls the following methods.

    @property
    def due(self) -> bool:
        return self._stopped is None and (not self._mailbox.empty() or self.engine.due)

    def turn(self) -> bool:
        """Read all messages, waiting for one if nothing is due; then compute a step. False: the loop has ended."""
        if self._stopped is not None:
            return False
        stopped: EngineError | None = None
        try:
            if self._read_mail():
                if self.engine.due:
                    self._step()
                return True
        except WorkerError as error:
            stopped = error
        except BaseException as error:  # of the engine's own code: its state is unknown from here on
            log.exception("the engine has failed")
            stopped = EngineError(f"the engine has failed ({type(error).__name__}: {error}); open a new LLM")
            stopped.__cause__ = error
        self._stopped = stopped or EngineError(CLOSED)
        self._refuse_all(self._stopped)
        return False

    def _read_mail(self) -> bool:
        """Run all messages; wait for the first if nothing is due. False: close the loop."""
        mailbox, engine, waited = self._mailbox, self.engine, False
        while not mailbox.empty() or not (waited or engine.due):
            events: list[Event] | None = None
            waited = True
            try:
                pending = engine.scheduler.sequences or engine.scheduler.warming.queue
                message = mailbox.get(timeout=EXPIRE_S if pending else None)
            except Empty:
                pass
            else:
                if message is None:
                    return False
                events = message.run(engine)
            if time.monotonic() >= self._expired + EXPIRE_S:
                events = [*(events or ()), *engine.scheduler.expire()]
                self._expired = time.monotonic()
            if events:
                self._deliver(events)
        return True

    def _step(self) -> None:
        began = self.clock()
        events = self.engine.step()
        if self._starting:
            for handle in self._starting:
                if handle.sequence.counts.forwarded:
                    handle.started = began
            self._starting = [handle for handle in self._starting if handle.started is None and not handle.ended]
        if self._end_step is not None:
            self._end_step(began, self.clock())
        if events:
            self._deliver(events)

    def _deliver(self, events: list[Event]) -> None:
        now, handles = self.clock(), self._handles
        by_handle: dict[EngineHandle, list[Event]] = {}
        for event in events:
            identity = event.sequence
            if isinstance(event, Forked):
                handle = handles[identity] = handles[event.parent]
                handle.live.add(identity)
            else:
                handle = handles[identity]
                if isinstance(event, Finished | Failed | Dropped):
                    handle.live.discard(identity)
                    del handles[identity]
            by_handle.setdefault(handle, []).append(event)
        by_listener: dict[Listener, list[Delivery]] = {}
        for handle, delivered in by_handle.items():
            handle.ended = not handle.live
            by_listener.setdefault(handle.listener, []).append(Delivery(handle, delivered, now, handle.ended))
        deliver_each(by_listener)

    def _refuse_all(self, why: EngineError) -> None:
        handles, self._handles = dict.fromkeys(self._handles.values()), {}
        for handle in handles:
            handle.fail(why)
        self._refuse_mail(why)

    def _refuse_mail(self, why: EngineError) -> None:
        while True:
            try:
                message = self._mailbox.get_nowait()
            except Empty:
                return
            if message is not None:
                message.refuse(why)
