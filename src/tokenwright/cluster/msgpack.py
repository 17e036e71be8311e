"""MessagePack (https://msgpack.org, spec of 2013), as far as KV events need it: written here, never read."""

from collections.abc import Sequence
from struct import pack as packed

Value = int | float | str | bytes | None | Sequence["Value"]


def pack(value: Value) -> bytes:
    """A value as MessagePack. Integers are from 0 to 2**64 - 1; every sequence is an array."""
    match value:
        case None:
            return b"\xc0"
        case int():
            return _whole(value)
        case float():
            return packed(">Bd", 0xCB, value)
        case str():
            data = value.encode()
            return _head(len(data), 0xA0, 32, (0xD9, 0xDA, 0xDB)) + data
        case bytes():
            return _head(len(value), 0, 0, (0xC4, 0xC5, 0xC6)) + value
        case _:
            return _head(len(value), 0x90, 16, (None, 0xDC, 0xDD)) + b"".join(map(pack, value))


def _whole(value: int) -> bytes:
    assert 0 <= value < 1 << 64, "KV events have no other integers"
    if value < 0x80:
        return bytes((value,))
    if value < 1 << 8:
        return packed(">BB", 0xCC, value)
    if value < 1 << 16:
        return packed(">BH", 0xCD, value)
    return packed(">BI", 0xCE, value) if value < 1 << 32 else packed(">BQ", 0xCF, value)


def _head(length: int, short: int, fits: int, marks: tuple[int | None, int, int]) -> bytes:
    """The type and length of a text, bytes or an array: in one byte below `fits`, else a mark with 1, 2 or 4 bytes."""
    if length < fits:
        return bytes((short | length,))
    if marks[0] is not None and length < 1 << 8:
        return packed(">BB", marks[0], length)
    return packed(">BH", marks[1], length) if length < 1 << 16 else packed(">BI", marks[2], length)
