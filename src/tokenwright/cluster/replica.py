"""A replica: a process with the model and its engine, which generates texts for the router.

    socket ──► this thread ──► build (threads) ──► engine thread ──► Outbox ──► writer thread ──► socket

`python -m tokenwright.cluster.replica FD` reads its options from the socket FD, and ends when the socket closes, so a
killed router leaves no replica behind.
"""

import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from tokenwright.backends.device import compute_with, leave_a_core_if_quick
from tokenwright.cluster import replica_messages as wire
from tokenwright.engine import Engine, Failed, Request
from tokenwright.engine.page_events import CachedPage
from tokenwright.engine.port import Delivery, RequestHandle
from tokenwright.engine.warming import WarmRules
from tokenwright.errors import EngineError, TokenwrightError
from tokenwright.llm.llm import LLM
from tokenwright.llm.model import LoadedModel
from tokenwright.llm.prompts.kept import KeptHashes, KeptTokens, kept_in

BUILDERS = 2  # threads that compile grammars


class Outbox:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._queue: SimpleQueue[object] = SimpleQueue()
        threading.Thread(target=self._send, name="outbox", daemon=True).start()

    def put(self, message: object) -> None:
        self._queue.put(message)

    def close(self) -> None:
        self._queue.put(None)

    def _send(self) -> None:
        with suppress(OSError):  # the router has gone, which the reader notices
            while True:
                batch = [self._queue.get()]
                with suppress(Empty):
                    while True:
                        batch.append(self._queue.get_nowait())
                if None in batch:
                    return
                self._connection.sendall(wire.framed(batch))


class PageNews:
    """Page changes to report. Belongs to the engine thread."""

    def __init__(self, changes: Iterable[tuple[int, bytes, bool]] = ()) -> None:
        self._changes = list(changes)

    def cached(self, group: int, page: CachedPage) -> None:
        self._changes.append((group, page.page_hash, True))

    def evicted(self, group: int, page_hash: bytes) -> None:
        self._changes.append((group, page_hash, False))

    def take(self) -> list[tuple[int, bytes, bool]]:
        found, self._changes = self._changes, []
        return found


class ReplicaTexts:
    """Texts by the router's numbers. Messages about a text wait until it is built."""

    def __init__(self, llm: LLM, pages: PageNews, put: Callable[[object], None]) -> None:
        self._llm = llm
        self._pages = pages
        self._put = put
        self._pool = llm.engine.pool
        self._sequences = llm.engine.scheduler.sequences
        self._experts = dict(llm.llm_engine.expert_counts)  # counts from before this router connected
        self._numbers: dict[RequestHandle, int] = {}
        self._handles: dict[int, RequestHandle | list[wire.Tell]] = {}
        self._lock = threading.Lock()

    def expect(self, number: int) -> None:
        """Raises ValueError if a text of this number has not ended."""
        with self._lock:
            if number in self._handles:
                raise ValueError(f"the text {number} is begun twice")
            self._handles[number] = []

    def submit(self, number: int, request: Request, paused: bool) -> None:
        """Submit a built text, then apply the messages that came meanwhile. Raises what `LLM.submit` raises."""
        with self._lock:  # the engine may deliver at once
            [handle] = self._llm.submit([request], self, paused=paused)
            waiting, self._handles[number] = self._handles[number], handle
            self._numbers[handle] = number
        assert isinstance(waiting, list), "a text is built once"
        for message in waiting:
            getattr(handle, message.what)()

    def fail(self, number: int, error: Exception) -> None:
        with self._lock:
            del self._handles[number]
        self._report([], [wire.TextNews(number, [wire.packed_event(Failed(0, error))], True, None, 0, 0, 0)])

    def tell(self, message: wire.Tell) -> None:
        with self._lock:
            found = self._handles.get(message.number)
            if isinstance(found, list):
                found.append(message)
                return
        if found is not None:
            getattr(found, message.what)()

    def deliver(self, deliveries: list[Delivery]) -> None:
        try:
            self._llm.check()
        except EngineError:  # the engine has failed: another replica continues its texts
            os._exit(1)
        with self._lock:
            texts = [self._news(delivery) for delivery in deliveries]
        self._report(self._pages.take(), texts)

    def report_pages(self) -> None:
        self._report(self._pages.take(), [])

    def cancel(self) -> None:
        with self._lock:
            numbers = list(self._handles)
        for number in numbers:
            self.tell(wire.Tell(number, "cancel"))

    def _report(self, pages: list[tuple[int, bytes, bool]], texts: list[wire.TextNews]) -> None:
        counts = self._pool.available, self._pool.cached, len(self._sequences)
        experts = {name: one - self._experts[name] for name, one in self._llm.llm_engine.expert_counts.items()}
        self._put(wire.Report(pages, texts, *counts, experts))

    def _news(self, delivery: Delivery) -> wire.TextNews:
        handle, queue_s = delivery.handle, None
        number = self._numbers[handle]
        if delivery.ended:
            del self._numbers[handle], self._handles[number]
        if handle.started is not None:
            queue_s = handle.started - handle.submitted
        counts = handle.sequence.counts
        events = [wire.packed_event(event) for event in delivery.events]
        found = counts.prefix_hit, counts.preemptions, counts.restored, counts.drafted, counts.accepted
        return wire.TextNews(number, events, delivery.ended, queue_s, *found, counts.declined, tuple(counts.pinned))


class Worker:
    def __init__(self, llm: LLM, pages: PageNews, put: Callable[[object], None]) -> None:
        self._llm = llm
        self._put = put
        self._builders = ThreadPoolExecutor(BUILDERS, "tokenwright build")
        self._lookers = ThreadPoolExecutor(1, "tokenwright look")  # waits for steps, which builders must not
        self._texts, self._hashes = ReplicaTexts(llm, pages, put), KeptHashes()
        self._busy = False  # the router has texts

    @property
    def shape(self) -> wire.ReplicaShape:
        llm, engine = self._llm, self._llm.engine
        return wire.ReplicaShape(
            groups=engine.pool.groups,
            page_size=engine.pool.page_size,
            seed=engine.prefixes.seed,
            token_budget=engine.scheduler.token_budget,
            max_sequences=engine.scheduler.max_sequences,
            weight_bytes=llm.weight_bytes,
            kv_memory=llm.kv_memory,
            kv_format=llm.kv_format,
            experts=tuple(llm.llm_engine.expert_counts),
        )

    def do(self, message: object) -> None:
        match message:
            case wire.Begin(number=number):
                self._texts.expect(number)
                self._builders.submit(self._begin, message)
            case wire.Tell():
                self._texts.tell(message)
            case wire.Release(owner=owner, session=session):
                self._llm.llm_engine.release(owner, session)
            case wire.RouterBusy(busy=busy):
                self._busy = busy
            case wire.WarmOrder():
                self._builders.submit(self._warm, message)
            case wire.KeptAsked():
                self._lookers.submit(self._look, message)
            case wire.Ping():
                self._put(wire.Alive())
                self._llm.llm_engine.local("inspect").loop.post(self._answer)
            case wire.End():
                os._exit(1)

    def _answer(self, _: Engine) -> None:
        self._put(wire.Pong())
        self.report_pages()

    def report_pages(self) -> None:
        self._texts.report_pages()

    def close(self) -> None:
        self._busy = False
        self._lookers.shutdown(wait=False, cancel_futures=True)
        self._builders.shutdown(cancel_futures=True)
        self._texts.cancel()

    def _warm(self, asked: wire.WarmOrder) -> None:
        def computed(found: int, tokens: int) -> None:
            self.report_pages()
            self._put(wire.Warmed(asked.number, found, tokens))

        rules = WarmRules(asked.after, lambda: not self._busy, computed, asked.spare)
        with suppress(TokenwrightError):
            self._llm.llm_engine.warm(wire.requested(self._llm.llm_engine.inputs, asked.order), rules)

    def _look(self, asked: wire.KeptAsked) -> None:
        texts, found = [self._hashes.of(one) for one in asked.texts], KeptTokens((), ())
        lacking = texts.index(None) if None in texts else None
        with suppress(TokenwrightError):
            if lacking is None:
                found = self._llm.inspect(kept_in([one for one in texts if one], asked.owner))
            self._put(wire.KeptFound(asked.number, found, lacking))

    def _begin(self, begin: wire.Begin) -> None:
        try:
            self._texts.submit(begin.number, wire.requested(self._llm.llm_engine.inputs, begin.order), begin.paused)
        except Exception as error:  # ends one text
            self._texts.fail(begin.number, error)


def messages_of(connection: socket.socket) -> Iterator[Any]:
    with connection.makefile("rb") as stream, suppress(ConnectionError):  # a killed router resets it
        while len(head := stream.read(wire.LENGTH)) == wire.LENGTH:
            size = int.from_bytes(head, "little")
            if len(data := stream.read(size)) < size:
                return
            yield wire.unframed(data)


def _opened(options: wire.ReplicaOptions, outbox: Outbox) -> Worker | None:
    loading: dict[str, Any] = dict(options.loading)
    engine: dict[str, Any] = dict(options.engine)
    try:
        compute_with(options.threads)
        if options.files is not None:
            options.files.check()
        loaded = LoadedModel(
            options.model, report=lambda done, total: outbox.put(wire.Progress(done, total)), **loading
        )
        llm = LLM(loaded, **engine)
        if options.files is not None:
            options.files.check()  # again, after reading them
        if options.spare:
            leave_a_core_if_quick(llm.kernels, llm.weight_bytes)
    except TokenwrightError as error:
        outbox.put(wire.ReplicaUnopened(wire.utf8_text(str(error))))
        return None
    pages = PageNews()

    def listen(engine: Engine) -> None:
        engine.prefixes.secret = options.secret
        engine.pool.listen(pages)

    llm.inspect(listen)
    worker = Worker(llm, pages, outbox.put)
    gc.collect()
    gc.freeze()  # a collection of a model's objects stops all texts for 30 ms and more
    outbox.put(wire.ReplicaOpened(worker.shape))
    return worker


def _end_without_router(connection: socket.socket) -> None:
    """End this process if the router disconnects while the main thread still opens the model."""
    with suppress(OSError):
        if connection.recv(1, socket.MSG_PEEK):
            return
    os._exit(0)


def main(descriptor: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the router ends it
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    connection = socket.socket(fileno=descriptor)
    incoming, outbox = messages_of(connection), Outbox(connection)
    options: wire.ReplicaOptions | None = next(incoming, None)
    if options is None:  # the router has gone
        return
    threading.Thread(target=_end_without_router, args=(connection,), name="router", daemon=True).start()
    if options.cores:
        os.sched_setaffinity(0, options.cores)
    worker = _opened(options, outbox)
    for message in incoming:
        if worker is not None:
            worker.do(message)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
