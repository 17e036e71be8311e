"""Listening sockets, opened before the server and its model are loaded, so that clients wait."""

import errno
import os
import resource
import socket
from collections.abc import Sequence
from contextlib import suppress

from tokenwright.errors import RequestError

BACKLOG = 4096
MOST_DESCRIPTORS = 2**20  # if the system's limit is infinite
OTHERS = 256  # descriptors of files, pipes and replicas
TAKEN_AT_ONCE = 16  # connections of each listener in one iteration of the event loop


def listen(host: str, ports: tuple[int, ...]) -> socket.socket:
    """A socket that listens on the first of `ports` that is free. Raises RequestError if none is."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    reason: object = None
    for port in ports:
        # asyncio sets TCP_NODELAY only if the protocol is given; else parts of a reply may wait 40 ms.
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
    raise RequestError(
        f"port {ports[0]} at {host} cannot be opened ({reason}); give --port another one, or 0 for a free one"
    )


def repeated(listeners: Sequence[socket.socket]) -> list[socket.socket]:
    """Each listener TAKEN_AT_ONCE times, since uvloop accepts one connection of each in an iteration."""
    return [one for first in listeners for one in (first, *(first.dup() for _ in range(TAKEN_AT_ONCE - 1)))]


def most_connections() -> int:
    """Raise the soft limit of descriptors to the hard one. Returns how many connections that allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    with suppress(ValueError, OSError):  # macOS allows less than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
        soft = max(soft, most)
    used = len(os.listdir("/dev/fd"))  # noqa: PTH208  (only their number is needed)
    taken = 2 * TAKEN_AT_ONCE  # accepted, and closed in the same iteration
    return max(soft // 8, soft - used - taken - min(OTHERS, soft // 4))
