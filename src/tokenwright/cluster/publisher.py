"""Publishes KV events over ZeroMQ, as vLLM's ZmqEventPublisher does: a PUB socket, and a ROUTER socket for replays.

    PUB      [topic, number (8 bytes, big endian), payload]
    ROUTER   <- ["", the first number that is missing]    -> ["", number, payload] ..., ["", -1, ""]

Each socket belongs to one thread. Subscribers learn all token ids.
"""

import logging
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from ipaddress import ip_address
from itertools import groupby, pairwise
from queue import Empty, SimpleQueue
from struct import pack as packed
from threading import Lock
from typing import TYPE_CHECKING, Any

from tokenwright.engine.page_events import CachedPage
from tokenwright.errors import RequestError

if TYPE_CHECKING:
    import zmq

    from tokenwright.engine import PagePool
    from tokenwright.llm.llm import LLM


Value = int | float | str | bytes | None | Sequence["Value"]


def pack(value: Value) -> bytes:
    """A value as MessagePack. Integers are from 0 to 2**64 - 1."""
    match value:
        case None:
            return b"\xc0"
        case int():
            return _whole(value)
        case float():
            return packed(">Bd", 0xCB, value)
        case str():
            data = value.encode()
            return _head(len(data), 0xA0, 32, (0xD9, 0xDA, 0xDB)) + data
        case bytes():
            return _head(len(value), 0, 0, (0xC4, 0xC5, 0xC6)) + value
        case _:
            return _head(len(value), 0x90, 16, (None, 0xDC, 0xDD)) + b"".join(map(pack, value))


def _whole(value: int) -> bytes:
    assert 0 <= value < 1 << 64, "KV events have no other integers"
    if value < 0x80:
        return bytes((value,))
    if value < 1 << 8:
        return packed(">BB", 0xCC, value)
    if value < 1 << 16:
        return packed(">BH", 0xCD, value)
    return packed(">BI", 0xCE, value) if value < 1 << 32 else packed(">BQ", 0xCF, value)


def _head(length: int, short: int, fits: int, marks: tuple[int | None, int, int]) -> bytes:
    """The header of text, bytes or an array: one byte for lengths below `fits`, else a mark and 1, 2 or 4 bytes."""
    if length < fits:
        return bytes((short | length,))
    if marks[0] is not None and length < 1 << 8:
        return packed(">BB", marks[0], length)
    return packed(">BH", marks[1], length) if length < 1 << 16 else packed(">BI", marks[2], length)


KEPT = 10_000  # batches for replays
MEDIUM = "GPU"  # vLLM's word for the engine's own memory

Change = tuple[int, CachedPage | bytes]  # group, and the page that is now cached or the evicted page's hash


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
        """Wait for changes; None after `close`."""
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

    A payload is the MessagePack array [seconds, events, rank]; an event begins with its name (vLLM's
    vllm/distributed/kv_events.py). Numbers rise by one from `first`: the time in microseconds.
    root: the hash before the first page of a text without a salt.
    """

    def __init__(
        self, page_size: int, root: bytes, groups: int = 1, kept: int = KEPT, first: int | None = None
    ) -> None:
        self._page_size = page_size
        self._root = root
        self._groups = groups
        self._next = time.time_ns() // 1000 if first is None else first
        self._batches: deque[tuple[int, bytes]] = deque(maxlen=kept)
        self._pages: dict[tuple[int, bytes], CachedPage] = {}  # all cached pages
        self._lock = Lock()

    def begin(self) -> tuple[int, bytes]:
        """The first batch lets readers forget an earlier process at this address."""
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
        """The batches from number `start` on, or one batch with the whole index if some are no longer kept."""
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
        for (group, stored), each in groupby(changes, lambda one: (one[0], isinstance(one[1], CachedPage))):
            found: list[Any] = [change for _, change in each]
            if not stored:
                yield self._removed(group, found)
                continue
            breaks = [at for at, (one, after) in enumerate(pairwise(found), 1) if after.before != one.page_hash]
            for first, stop in pairwise([0, *breaks, len(found)]):
                yield self._stored(group, found[first:stop])

    def _stored(self, group: int, run: Sequence[CachedPage]) -> Value:
        """BlockStored: hashes, parent, token ids, block size, (LoRA id), medium, (LoRA name), extra keys, group."""
        first = run[0]
        parent = None if first.first else short(first.before)
        tokens = [token for page in run for token in page.tokens]
        event: list[Value] = ["BlockStored", [short(page.page_hash) for page in run], parent, tokens, self._page_size]
        event += [None, MEDIUM, None]
        salted = first.first and first.before != self._root
        if salted or self._groups > 1:  # equal tokens after another root are another text
            extra: list[Value] = [[first.before.hex()[:16]], *([None] * (len(run) - 1))]
            event.append(extra if salted else None)
        return [*event, group] if self._groups > 1 else event

    def _removed(self, group: int, gone: Sequence[bytes]) -> Value:
        event: list[Value] = ["BlockRemoved", [short(one) for one in gone], MEDIUM]
        return [*event, group] if self._groups > 1 else event


def short(page_hash: bytes) -> int:
    return int.from_bytes(page_hash[-8:], "big")  # subscribers' name of a page


def _payload(events: Sequence[Value]) -> bytes:
    return pack([time.time(), events, 0])


_ADDRESS = re.compile(r"tcp://(?P<host>\[[0-9a-fA-F:]+\]|[^:/\[\]]+):(?P<port>\d{1,5})")
_END = (-1).to_bytes(8, "big", signed=True)
MOST_UNSENT = 100_000  # batches for a slow subscriber

log = logging.getLogger(__name__)


def check_address(address: str) -> tuple[str, int]:
    """Host and port of an address such as tcp://*:5557. Raises RequestError for another form, or without zmq."""
    found = _ADDRESS.fullmatch(address)
    if found is None or not 0 < int(found["port"]) < 65_535:  # the next port is the replay's
        raise RequestError(f"--kv-events is an address such as tcp://*:5557, not {address[:200]!r}", "kv_events")
    try:
        import zmq  # noqa: F401
    except ImportError as error:
        raise RequestError("--kv-events needs pyzmq: pip install pyzmq", "kv_events") from error
    return found["host"], int(found["port"])


def binds(host: str) -> bool:
    """Whether a publisher listens at this host. To any other it connects, as vLLM's does."""
    try:
        return host == "*" or (address := ip_address(host.strip("[]"))).is_loopback or address.is_unspecified
    except ValueError:
        return host == "localhost"


def address_towards(host: str, port: int) -> str:
    """This machine's address on the route to a host, in URL form; loopback without a route."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)  # sends nothing
            found = str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
    return f"[{found}]" if family == socket.AF_INET6 else found


class KVPublisher:
    """Serves replays at the next port, for a collector at `address_towards` it."""

    def __init__(self, llm: "LLM", address: str, topic: str = "") -> None:
        import zmq

        host, port = check_address(address)
        self._topic = topic.encode()
        self._changes = PageChanges()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        publish, replay = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        publish.set_hwm(MOST_UNSENT)
        replay.set_hwm(MOST_UNSENT)  # a ROUTER drops what exceeds it
        here = host if binds(host) else address_towards(host.strip("[]"), port)
        try:
            (publish.bind if binds(host) else publish.connect)(f"tcp://{host}:{port}")
            replay.bind(f"tcp://{here}:{port + 1}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise RequestError(
                f"--kv-events {address}: this port and the next must both be free ({error}); give another port",
                "kv_events",
            ) from error
        self._log = llm.inspect(lambda engine: self._listen(engine.pool, engine.prefixes.hashes().root))
        self._threads = [
            threading.Thread(target=self._publish, args=(publish,), name="kv events", daemon=True),
            threading.Thread(target=self._replay, args=(replay,), name="kv replay", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _listen(self, pool: "PagePool", root: bytes) -> EventLog:
        pool.listen(self._changes)
        return EventLog(pool.page_size, root, len(pool.groups))

    def close(self) -> None:
        self._changes.close()
        self._threads[0].join()
        self._context.term()  # the replay thread's `recv` raises, and its socket is closed
        self._threads[1].join()

    def _publish(self, socket: "zmq.Socket[bytes]") -> None:
        number, payload = self._log.begin()
        while True:
            socket.send_multipart((self._topic, number.to_bytes(8, "big"), payload))
            if (changes := self._changes.take()) is None:
                socket.close(linger=1000)
                return
            number, payload = self._log.add(changes)

    def _replay(self, socket: "zmq.Socket[bytes]") -> None:
        import zmq

        while True:
            try:
                frames = socket.recv_multipart()
            except zmq.ContextTerminated:
                socket.close(linger=0)
                return
            if len(frames) != 3 or len(frames[2]) != 8:
                log.warning("a request for a replay of KV events is malformed, and is ignored")
                continue
            client = frames[0]
            for number, payload in self._log.replay(int.from_bytes(frames[2], "big")):
                socket.send_multipart((client, b"", number.to_bytes(8, "big"), payload))
            socket.send_multipart((client, b"", _END, b""))
