"""Sockets that listen: made before the server and its model are loaded, so that clients wait instead of failing."""

import errno
import os
import resource
import socket
from collections.abc import Sequence
from contextlib import suppress

from tokenwright.errors import RequestError

BACKLOG = 4096  # connections that the system keeps before the server takes them
MOST_DESCRIPTORS = 2**20  # that a server asks for; a system may call its limit infinite
OTHERS = 256  # descriptors that the server keeps for what is no connection: files, pipes, replicas
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
    """The same listeners, TAKEN_AT_ONCE times each: uvloop takes one connection of each socket in a turn of the loop.

    A crowd would wait for as many turns as it has clients, and those beyond the system's queue would be dropped.
    """
    return [one for first in listeners for one in (first, *(first.dup() for _ in range(TAKEN_AT_ONCE - 1)))]


def most_connections() -> int:
    """How many connections leave descriptors for everything else, once their soft limit is raised to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    with suppress(ValueError, OSError):  # macOS allows less than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
        soft = max(soft, most)
    used = len(os.listdir("/dev/fd"))  # noqa: PTH208  (only their number is needed)
    taken = 2 * TAKEN_AT_ONCE  # and closed again, or to be closed in this turn
    return max(soft // 8, soft - used - taken - min(OTHERS, soft // 4))
