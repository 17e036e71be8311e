"""Listening sockets, made before the server and its model are loaded: clients wait instead of failing."""

import errno
import os
import resource
import socket
from collections.abc import Sequence
from contextlib import suppress

from tokenwright.errors import RequestError

BACKLOG = 4096
MOST_DESCRIPTORS = 2**20  # a system may call its limit infinite
OTHERS = 256  # descriptors of files, pipes and replicas
TAKEN_AT_ONCE = 16  # connections of each listener in one turn of the event loop


def listen(host: str, ports: tuple[int, ...]) -> socket.socket:
    """A socket that listens on the first of `ports` that is free. Raises RequestError if none is."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    reason: object = None
    for port in ports:
        # Only with its protocol named does asyncio set TCP_NODELAY; else each part of an answer may wait 40 ms.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                raise RequestError(f"{host} is no address of this machine ({error.strerror})", "host") from error
            reason = error.strerror or error
        else:
            return listener
    raise RequestError(f"port {ports[0]} cannot be listened on at {host} ({reason}); give --port another one, or 0")


def repeated(listeners: Sequence[socket.socket]) -> list[socket.socket]:
    """Each listener TAKEN_AT_ONCE times: uvloop takes one connection of each in a turn, and a crowd would overflow."""
    return [one for first in listeners for one in (first, *(first.dup() for _ in range(TAKEN_AT_ONCE - 1)))]


def most_connections() -> int:
    """Raise the soft limit of descriptors to the hard one; returns how many connections it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    with suppress(ValueError, OSError):  # macOS allows less than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
        soft = max(soft, most)
    used = len(os.listdir("/dev/fd"))  # noqa: PTH208  (only their number is needed)
    taken = 2 * TAKEN_AT_ONCE  # and closed again, or to be closed in this turn
    return max(soft // 8, soft - used - taken - min(OTHERS, soft // 4))
