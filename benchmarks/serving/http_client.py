"""A small HTTP/1.1 client on asyncio streams for load generators: one connection for each request, times of each chunk.

It costs a fraction of what a full client costs, so that the generator does not measure itself. `Exchange` keeps sending
and reading apart, because a client that leaves, reads slowly or never reads is a case to test.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

Address = tuple[str, int]  # host, port
LIMIT = 2**20  # bytes of a line at most


@dataclass(frozen=True)
class Reply:
    """A whole reply. times: seconds from the request to the arrival of each chunk of the body that is not a ping."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    times: tuple[float, ...]

    def json(self) -> Any:
        """The body, parsed."""
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """The JSON objects of a body of server-sent events, without pings and the final [DONE]."""
        lines = (line.removeprefix(b"data: ") for line in self.body.split(b"\n") if line.startswith(b"data: "))
        return [json.loads(line) for line in lines if line != b"[DONE]"]


class Exchange:
    """A request that has been sent. Read it with `reply`; `close` ends the connection at once."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, began: float) -> None:
        self.reader = reader
        self._writer = writer
        self._began = began

    async def head(self) -> tuple[int, dict[str, str]]:
        """The status and the headers, with lower-case names. Raises ConnectionError if there are none."""
        line = await self.reader.readline()
        if not line.startswith(b"HTTP/1."):
            raise ConnectionError(f"the server closed the connection after {line!r}")
        headers = {}
        while (field := (await self.reader.readline()).decode("latin-1").strip()) != "":
            name, _, value = field.partition(":")
            headers[name.lower()] = value.strip()
        return int(line.split()[1]), headers

    async def reply(self) -> Reply:
        """The whole reply; closes the connection. Raises ConnectionError if it ends early."""
        try:
            status, headers = await self.head()
            parts, times = [], []
            async for part in self._body(headers):
                parts.append(part)
                if not part.startswith(b":"):  # a comment: servers send one every 15 s
                    times.append(time.perf_counter() - self._began)
        except asyncio.IncompleteReadError as error:
            raise ConnectionError("the reply ended early") from error
        finally:
            self.close()
        return Reply(status, headers, b"".join(parts), tuple(times))

    async def _body(self, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
        if "chunked" not in headers.get("transfer-encoding", ""):
            yield await self.reader.readexactly(int(headers.get("content-length", "0")))
            return
        while size := int((await self.reader.readuntil(b"\r\n")).split(b";")[0], 16):
            yield (await self.reader.readexactly(size + 2))[:-2]
        await self.reader.readuntil(b"\r\n")

    def write(self, data: bytes) -> None:
        """Send more bytes, without waiting for them to leave."""
        self._writer.write(data)

    def close(self) -> None:
        """Drop the connection; the server sees a client that has gone."""
        self._writer.transport.abort()


def packed(address: Address, path: str, body: Any, headers: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a POST of `body` as JSON (None: a GET)."""
    data = b"" if body is None else json.dumps(body).encode()
    lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", f"host: {address[0]}:{address[1]}"]
    lines += ["content-type: application/json", f"content-length: {len(data)}", "connection: close"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


async def send(address: Address, data: bytes, receive_buffer: int | None = None) -> Exchange:
    """Connect and send `data`. receive_buffer: bytes that the system keeps for this client unread."""
    began = time.perf_counter()
    sock = socket.socket()
    sock.setblocking(False)
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    try:
        await asyncio.get_running_loop().sock_connect(sock, address)
        limit = LIMIT if receive_buffer is None else receive_buffer
        reader, writer = await asyncio.open_connection(sock=sock, limit=limit)
    except BaseException:
        sock.close()
        raise
    writer.write(data)
    exchange = Exchange(reader, writer, began)
    try:
        await writer.drain()
    except BaseException:
        exchange.close()
        raise
    return exchange


async def ask(address: Address, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Reply:
    """Send a request and read the whole reply. Raises ConnectionError if it ends early."""
    return await (await send(address, packed(address, path, body, headers))).reply()
