"""The way to a replica, over a socket: to a process that was started here, or to one that listens elsewhere."""

import asyncio
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from tokenwright.cluster.replica_messages import LENGTH, End, framed, unframed
from tokenwright.cluster.served_replica import CHALLENGE, WELCOME, proof_of

UNSENT = 2**28  # bytes that a replica may leave unread; then it hangs


class ProcessLink:
    """`messages` ends when the process does."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @property
    def name(self) -> str:
        return str(self._process.pid)

    def send(self, message: object) -> None:
        _send(self._writer, message, self.kill)

    def messages(self) -> AsyncIterator[Any]:
        return _messages(self._reader)

    def kill(self) -> None:
        self._process.kill()

    async def close(self) -> None:
        self.kill()
        self._writer.close()
        await asyncio.to_thread(self._process.wait)


class RemoteLink:
    """The way to a replica that others start. forget: to be called when it is closed."""

    def __init__(
        self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, forget: Callable[[], object]
    ) -> None:
        self.name = name
        self._reader = reader
        self._writer = writer
        self._forget = forget

    def send(self, message: object) -> None:
        _send(self._writer, message, self.kill)

    def messages(self) -> AsyncIterator[Any]:
        return _messages(self._reader)

    def kill(self) -> None:
        """Ask it to end, and read no more from it."""
        if not self._writer.is_closing():
            self._writer.write(framed([End()]))
            self._writer.close()
        self._reader.feed_eof()

    async def close(self) -> None:
        """Leave it: it may have other routers."""
        self._writer.close()
        self._forget()


async def linked(address: tuple[str, int], secret: bytes, forget: Callable[[], object]) -> RemoteLink | None:
    """The way to a replica that listens; None: it does not know the secret. Raises OSError, EOFError."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        challenge = await reader.readexactly(CHALLENGE)
        writer.write(proof_of(secret, challenge))
        welcome = await reader.read(len(WELCOME))
    except BaseException:
        writer.close()
        raise
    if welcome != WELCOME:
        writer.close()
        return None
    return RemoteLink(f"{address[0]}:{address[1]}", reader, writer, forget)


def _send(writer: asyncio.StreamWriter, message: object, kill: Callable[[], None]) -> None:
    if writer.transport.is_closing():  # it has died, which its messages will tell; uvloop raises on a write
        return
    if writer.transport.get_write_buffer_size() > UNSENT:
        kill()
    writer.write(framed([message]))


async def _messages(reader: asyncio.StreamReader) -> AsyncIterator[Any]:
    with suppress(asyncio.IncompleteReadError, OSError):  # a network may also time out, or have no way there
        while True:
            size = int.from_bytes(await reader.readexactly(LENGTH), "little")
            yield unframed(await reader.readexactly(size))
