"""The load generators' HTTP client: what it counts as the beginning of a streamed reply."""

import asyncio

from http_client import ask

PIECES = (b": ping\r\n\r\n", b'data: {"a": 1}\n\n', b"data: [DONE]\n\n")


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    for piece in PIECES:
        writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        await writer.drain()
    writer.write(b"0\r\n\r\n")


async def asked() -> tuple[int, list[object]]:
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        reply = await ask(server.sockets[0].getsockname(), "/")
    return len(reply.times), reply.events()


def test_a_ping_is_not_the_first_token():
    assert asyncio.run(asked()) == (2, [{"a": 1}])
