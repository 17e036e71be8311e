"""Messages to ranks: a length, then JSON. Reading one runs no code, and makes only values of the classes below."""

import json
import socket
from array import array
from base64 import b64decode, b64encode
from dataclasses import fields, is_dataclass
from typing import Any

from tokenwright import config
from tokenwright.cache import spec
from tokenwright.cache.codec import CODECS, NATIVE, Codec
from tokenwright.engine import batch, layer_group
from tokenwright.models import combined, experts, graph, latent, op, recurrent, residual_streams

_LENGTH = 8
_MODULES = (config, spec, batch, layer_group, combined, experts, graph, latent, op, recurrent, residual_streams)
_CLASSES: dict[str, Any] = {
    name: one for module in _MODULES for name, one in vars(module).items() if is_dataclass(one) and one is not Codec
}


def register(*classes: type) -> None:
    _CLASSES.update({one.__name__: one for one in classes})


def send(connection: socket.socket, message: bytes) -> None:
    connection.sendall(len(message).to_bytes(_LENGTH, "little") + message)


def receive(connection: socket.socket) -> Any:
    return unpacked(_read(connection, int.from_bytes(_read(connection, _LENGTH), "little")))


def _read(connection: socket.socket, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        some = connection.recv(count - len(found))
        if not some:
            raise EOFError
        found += some
    return bytes(found)


def packed(message: object) -> bytes:
    return json.dumps(_plain(message), separators=(",", ":")).encode()


def unpacked(message: bytes) -> Any:
    return _made(json.loads(message))


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    if isinstance(value, array):
        return {"array": value.typecode, "of": b64encode(value.tobytes()).decode()}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    if isinstance(value, Codec):
        return {"codec": value.name, "native": NATIVE.get(value.name) == value}
    name = type(value).__name__
    assert _CLASSES.get(name) is type(value), f"{name} is no class of messages"
    return {"is": name, "of": {one.name: _plain(getattr(value, one.name)) for one in fields(value)}}


def _made(value: Any) -> Any:
    """Undo `_plain`, with tuples for lists."""
    if isinstance(value, list):
        return tuple(map(_made, value))
    if not isinstance(value, dict):
        return value
    if "array" in value:
        return array(value["array"], b64decode(value["of"]))
    if "range" in value:
        return range(*value["range"])
    if "codec" in value:
        return (NATIVE if value["native"] else CODECS)[value["codec"]]
    return _CLASSES[value["is"]](**{name: _made(one) for name, one in value["of"].items()})
