"""Sockets that listen: made before the server and its model are loaded, so that clients wait instead of failing."""

import errno
import socket
from collections.abc import Sequence

from tokenwright.errors import RequestError

BACKLOG = 4096  # connections that the system keeps before the server takes them
TAKEN_AT_ONCE = 16  # connections of each listener in one turn of the event loop


def listen(host: str, ports: tuple[int, ...]) -> socket.socket:
    """A socket that listens on the first of `ports` that is free. Raises RequestError if none is."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    reason: object = None
    for port in ports:
        # With its protocol named, asyncio sends each part of an answer at once (TCP_NODELAY). Else a part waits until
        # the client confirms the one before: on a connection that is kept, 40 ms for each answer and piece of a stream.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(BACKLOG)  # a client may connect now, and waits until the server answers
        except OSError as error:
            listener.close()
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                raise RequestError(f"{host} is no address of this machine ({error.strerror})", "host") from error
            reason = error.strerror or error
        else:
            return listener
    raise RequestError(f"port {ports[0]} cannot be listened on at {host} ({reason}); give --port another one, or 0")


def repeated(listeners: Sequence[socket.socket]) -> list[socket.socket]:
    """The same listeners, TAKEN_AT_ONCE times each.

    uvloop takes one connection of each socket in a turn of the loop. A crowd would wait in the system's queue for as
    many turns as it has clients, /health among them, and those beyond the queue would be dropped and try again after
    a second.
    """
    return [one for first in listeners for one in (first, *(first.dup() for _ in range(TAKEN_AT_ONCE - 1)))]
