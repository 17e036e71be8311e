"""Publishes KV events over ZeroMQ, as vLLM's ZmqEventPublisher does: a PUB socket, and a ROUTER socket for replays.

    PUB      [topic, number (8 bytes, big endian), payload]
    ROUTER   <- ["", the first number that is missing]    -> ["", number, payload] ..., ["", -1, ""]

Each socket belongs to one thread. Subscribers learn all token ids: only the cluster may reach the address.
"""

from __future__ import annotations

import logging
import re
import socket
import threading
from ipaddress import ip_address
from typing import TYPE_CHECKING

from tokenwright.cluster.event_log import EventLog, PageChanges
from tokenwright.errors import RequestError

if TYPE_CHECKING:
    import zmq

    from tokenwright.engine import PagePool
    from tokenwright.llm.llm import LLM

_ADDRESS = re.compile(r"tcp://(?P<host>\[[0-9a-fA-F:]+\]|[^:/\[\]]+):(?P<port>\d{1,5})")
_END = (-1).to_bytes(8, "big", signed=True)
MOST_UNSENT = 100_000  # batches for one slow subscriber; it asks for those that were dropped

log = logging.getLogger(__name__)


def check_address(address: str) -> tuple[str, int]:
    """Host and port of an address such as tcp://*:5557. Raises RequestError for another form, or no zmq."""
    found = _ADDRESS.fullmatch(address)
    if found is None or not 0 < int(found["port"]) < 65_535:  # the next port is the replay's
        raise RequestError(f"--kv-events is an address such as tcp://*:5557, not {address[:200]!r}", "kv_events")
    try:
        import zmq  # noqa: F401
    except ImportError as error:
        raise RequestError("--kv-events needs pyzmq: pip install pyzmq", "kv_events") from error
    return found["host"], int(found["port"])


def binds(host: str) -> bool:
    """Whether a publisher listens at this host; it connects to any other, as vLLM's does, to reach a collector."""
    try:
        return host == "*" or (address := ip_address(host.strip("[]"))).is_loopback or address.is_unspecified
    except ValueError:
        return host == "localhost"


def address_towards(host: str, port: int) -> str:
    """This machine's address on its way to a host, as a URL has it; loopback's where there is no way."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)  # sends nothing
            found = str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
    return f"[{found}]" if family == socket.AF_INET6 else found


class KVPublisher:
    """The replay socket listens at the next port: of the address towards a collector, where PUB connects to one."""

    def __init__(self, llm: LLM, address: str, topic: str = "") -> None:
        import zmq

        host, port = check_address(address)
        self._topic = topic.encode()
        self._changes = PageChanges()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        publish, replay = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        publish.set_hwm(MOST_UNSENT)
        replay.set_hwm(MOST_UNSENT)  # a replay is up to KEPT batches; beyond the mark a ROUTER drops them
        here = host if binds(host) else address_towards(host.strip("[]"), port)
        try:
            (publish.bind if binds(host) else publish.connect)(f"tcp://{host}:{port}")
            replay.bind(f"tcp://{here}:{port + 1}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise RequestError(
                f"--kv-events {address}: this port and the next cannot both be taken ({error})", "kv_events"
            ) from error
        self._log = llm.inspect(lambda engine: self._listen(engine.pool, engine.prefixes.hashes().root))
        self._threads = [
            threading.Thread(target=self._publish, args=(publish,), name="kv events", daemon=True),
            threading.Thread(target=self._replay, args=(replay,), name="kv replay", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _listen(self, pool: PagePool, root: bytes) -> EventLog:
        pool.listen(self._changes)
        return EventLog(pool.page_size, root, len(pool.groups))

    def close(self) -> None:
        self._changes.close()
        self._threads[0].join()
        self._context.term()  # the replay thread's `recv` raises, and its socket is closed
        self._threads[1].join()

    def _publish(self, socket: zmq.Socket[bytes]) -> None:
        number, payload = self._log.begin()
        while True:
            socket.send_multipart((self._topic, number.to_bytes(8, "big"), payload))
            if (changes := self._changes.take()) is None:
                socket.close(linger=1000)
                return
            number, payload = self._log.add(changes)

    def _replay(self, socket: zmq.Socket[bytes]) -> None:
        import zmq

        while True:
            try:
                frames = socket.recv_multipart()
            except zmq.ContextTerminated:
                socket.close(linger=0)
                return
            if len(frames) != 3 or len(frames[2]) != 8:
                log.warning("a request for a replay of KV events has another form, and is ignored")
                continue
            client = frames[0]
            for number, payload in self._log.replay(int.from_bytes(frames[2], "big")):
                socket.send_multipart((client, b"", number.to_bytes(8, "big"), payload))
            socket.send_multipart((client, b"", _END, b""))
