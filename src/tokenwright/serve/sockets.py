"""Sockets that listen: made before the server and its model are loaded, so that clients wait instead of failing."""

import socket

from tokenwright.errors import RequestError

BACKLOG = 2048  # connections that the system keeps before the server takes them


def listen(host: str, ports: tuple[int, ...]) -> socket.socket:
    """A socket that listens on the first of `ports` that is free. Raises RequestError if none is."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    reason: object = None
    for port in ports:
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(BACKLOG)  # a client may connect now, and waits until the server answers
        except OSError as error:
            listener.close()
            reason = error.strerror or error
        else:
            return listener
    raise RequestError(f"port {ports[0]} cannot be listened on at {host} ({reason}); give --port another one, or 0")
