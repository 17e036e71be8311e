"""A replica that serves routers over the network, each of which must prove that it knows the secret.

    router ──► connection ──► Worker ──┐
    router ──► connection ──► Worker ──┴──► one engine ──► SharedPages ──► every Worker's reports

The replica sends CHALLENGE random bytes, the router their HMAC under the secret, and the replica WELCOME. Later
messages are neither authenticated nor encrypted. A router that is silent for SILENT_S has its texts cancelled.
"""

import hmac
import logging
import socket
import threading
import time
from contextlib import suppress
from secrets import token_bytes

from tokenwright.cluster.replica import Outbox, PageNews, Worker, messages_of
from tokenwright.cluster.replica_messages import ReplicaOpened
from tokenwright.engine import Engine
from tokenwright.engine.page_events import CachedPage
from tokenwright.errors import TokenwrightError
from tokenwright.llm.llm import LLM

CHALLENGE = 32  # bytes
PROOF = 32  # bytes: of SHA-256
WELCOME = b"\1"
AGAIN_S = 0.5  # before the next accept, after a failed one
SILENT_S = 120.0  # routers ping each second

log = logging.getLogger(__name__)


def proof_of(secret: bytes, challenge: bytes) -> bytes:
    return hmac.digest(secret, b"tokenwright router " + challenge, "sha256")


class SharedPages:
    """Belongs to the engine thread."""

    def __init__(self) -> None:
        self._pages: dict[tuple[int, bytes], None] = {}
        self._readers: list[PageNews] = []

    def cached(self, group: int, page: CachedPage) -> None:
        self._pages[group, page.page_hash] = None
        for reader in self._readers:
            reader.cached(group, page)

    def evicted(self, group: int, page_hash: bytes) -> None:
        self._pages.pop((group, page_hash), None)
        for reader in self._readers:
            reader.evicted(group, page_hash)

    def join(self) -> PageNews:
        news = PageNews((group, page_hash, True) for group, page_hash in self._pages)
        self._readers.append(news)
        return news

    def leave(self, news: PageNews) -> None:
        self._readers.remove(news)


class ReplicaServer:
    """Serves an LLM at a free port of a host to routers that know the secret, until `close`."""

    def __init__(self, llm: LLM, secret: bytes, host: str) -> None:
        self._llm = llm
        self._secret = secret
        self._pages = SharedPages()
        self._closed = False
        llm.inspect(self._listen)
        self._listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.address: tuple[str, int] = host, self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="routers", daemon=True).start()

    def _listen(self, engine: Engine) -> None:
        engine.prefixes.secret = self._secret
        engine.pool.listen(self._pages)

    def close(self) -> None:
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if not self._closed:
                    log.warning("a router's connection could not be accepted: %s", error)
                    time.sleep(AGAIN_S)
                continue
            threading.Thread(target=self._serve, args=(connection,), name="router", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                if self._admitted(connection):
                    self._work(connection)
            except (OSError, ValueError) as error:  # ValueError: a malformed message
                log.info("the connection of a router has ended: %s", error)
            except TokenwrightError as error:  # the engine has failed
                log.warning("a router is not served: %s", error)

    def _admitted(self, connection: socket.socket) -> bool:
        connection.settimeout(SILENT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        challenge = token_bytes(CHALLENGE)
        connection.sendall(challenge)
        if not hmac.compare_digest(_received(connection, PROOF), proof_of(self._secret, challenge)):
            log.warning("a connection did not prove that it knows the secret, and is closed")
            return False
        connection.sendall(WELCOME)
        return True

    def _work(self, connection: socket.socket) -> None:
        outbox = Outbox(connection)
        pages = self._llm.inspect(lambda _: self._pages.join())
        worker = Worker(self._llm, pages, outbox.put)
        outbox.put(ReplicaOpened(worker.shape))
        self._llm.inspect(lambda _: worker.report_pages())
        try:
            for message in messages_of(connection):
                worker.do(message)
        finally:
            worker.close()
            outbox.close()
            with suppress(TokenwrightError):
                self._llm.inspect(lambda _: self._pages.leave(pages))


def _received(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size and (more := connection.recv(size - len(found))):
        found += more
    return found
