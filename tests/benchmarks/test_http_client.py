"""The load generators' HTTP client: what it counts as the beginning of a streamed reply."""

import asyncio
import socket
from threading import Thread

from http_client import ask

PIECES = (b": ping\r\n\r\n", b'data: {"a": 1}\n\n', b"data: [DONE]\n\n")


def answer(listener: socket.socket) -> None:
    with listener.accept()[0] as connection:
        connection.recv(65_536)
        chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in PIECES)
        connection.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")
        connection.recv(1)  # the client is done


def test_a_ping_is_not_the_first_token():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = Thread(target=answer, args=(listener,), daemon=True)
        server.start()
        reply = asyncio.run(ask(listener.getsockname(), "/"))
        server.join()
    assert len(reply.times) == 2
    assert reply.events() == [{"a": 1}]
