"""Read the header of a GGUF file (versions 2 and 3), and only the header, as untrusted input.

A file is "GGUF", version, counts, metadata (key, type, value), tensors (name, sizes, type, offset), padding and data.
Counts are checked before memory is allocated, and the tensors cover the data in order.
"""

import math
import re
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy

from tokenwright.checkpoints.files.hub_gguf import part_names
from tokenwright.checkpoints.files.json_keys import LFS_POINTER, JsonKeys, shown
from tokenwright.checkpoints.files.safetensors import Stored
from tokenwright.errors import CheckpointError, fetch_again
from tokenwright.regular_file import open_regular

SUFFIX = ".gguf"
ALIGNMENT = "general.alignment"
_LARGEST_HEADER = 1 << 28  # bytes; a vocabulary of 256,000 tokens with its merges takes some 15 MiB
_READ_AHEAD = 1 << 20  # bytes, of strings in a list
_LONGEST_KEY = 1 << 16  # bytes, the format's own limit
_MOST_DIMENSIONS = 4
_MOST_ALIGNMENT = 1 << 16

# Block types by their number: name, numbers of a block, bytes of a block.
_TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 20: ("IQ4_NL", 32, 18), 23: ("IQ4_XS", 256, 136), 39: ("MXFP4", 32, 17),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 22: ("IQ2_S", 256, 82), 18: ("IQ3_XXS", 256, 98),
    21: ("IQ3_S", 256, 110), 19: ("IQ1_S", 256, 50), 29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66), 36: ("I2_S", 128, 32), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18), 42: ("Q2_0", 64, 18),
}  # fmt: skip
# PrismML's files have blocks of 128 numbers under the same number.
_TAIL = 32  # bytes of a tensor of I2_S (bitnet.cpp) after its blocks: its scale, and padding
_SIZES = {name: (count, nbytes) for name, count, nbytes in _TYPES.values()} | {"Q2_0_g128": (128, 34)}
# Types of other programs, and those that ggml no longer has.
_OTHERS: Mapping[int, str] = {
    4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8",
    37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8, or TL1 of bitnet.cpp", **dict.fromkeys(range(97, 400), "of ik_llama.cpp"),
}  # fmt: skip

_STRING, _ARRAY = 8, 9
_NUMBERS: Mapping[int, str] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip


_BEFORE_GGUF: Mapping[bytes, str] = {b"lmgg": "GGML", b"fmgg": "GGMF", b"tjgg": "GGJT", b"algg": "GGLA"}


BLOCKS: Mapping[str, int] = {name: count for name, (count, _) in _SIZES.items() if count > 1}  # numbers of a block


def block_bytes(dtype: str, count: int) -> int:
    each, nbytes = _SIZES[dtype]
    return count // each * nbytes


@dataclass(frozen=True, slots=True)
class Header:
    metadata: Mapping[str, Any]  # numbers, strings, and arrays of them as lists
    tensors: Mapping[str, Stored]  # shapes are [out, in]
    data: int  # bytes from the beginning of the file
    listed: Mapping[str, Stored] = field(default_factory=dict)  # the metadata's lists of float32


class _DamagedHeader(Exception):
    pass


class _Reader:
    """Reads from front to back, never beyond the file's end or the largest header."""

    def __init__(self, stream: BinaryIO, size: int) -> None:
        self._stream = stream
        self._end = min(size, _LARGEST_HEADER)
        self.at = 0

    def take(self, count: int, what: str) -> bytes:
        if count > self._end - self.at:
            raise _DamagedHeader(f"{what} at byte {self.at:,} has {count:,} bytes, and {self._end - self.at:,} remain")
        self.at += count
        raw = self._stream.read(count)
        if len(raw) != count:
            raise _DamagedHeader("it became shorter while it was read")
        return raw

    def number(self, kind: str, what: str) -> Any:
        return struct.unpack("<" + kind, self.take(struct.calcsize("<" + kind), what))[0]

    def count(self, least: int, what: str) -> int:
        count: int = self.number("Q", f"the count of {what}")
        if count * least > self._end - self.at:
            raise _DamagedHeader(f"it has {count:,} {what}, it says, but only {self._end - self.at:,} bytes remain")
        return count

    def text(self, what: str, longest: int = _LARGEST_HEADER) -> str:
        length = self.number("Q", f"the length of {what}")
        if length > longest:
            raise _DamagedHeader(f"{what} has {length:,} bytes, more than {longest:,}")
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError:
            raise _DamagedHeader(f"{what} at byte {self.at - length:,} is not UTF-8") from None

    def texts(self, count: int, what: str) -> list[str]:
        found: list[str] = []
        while len(found) < count:
            raw = self._stream.read(min(_READ_AHEAD, self._end - self.at))
            strings = _strings(raw, min(count - len(found), len(raw) // 8))
            decoded = _decoded(strings)
            if decoded:
                self.at += 8 * len(strings) + sum(map(len, strings))
                found += decoded
            self._stream.seek(self.at)
            if not decoded:  # one is longer than that, or damaged, which `text` reports
                found += [self.text(what) for _ in strings or (b"",)]
        return found


def _strings(raw: bytes, most: int) -> list[bytes]:
    """At most `most` strings at the beginning of `raw`; a vocabulary has 100,000, so the loop calls no function."""
    found, end, last = [b""] * most, 0, len(raw)
    for at in range(most):
        start = end + 8
        if start > last or raw[end + 3 : start] != b"\0\0\0\0\0":
            return found[:at]
        end = start + (raw[start - 8] | raw[start - 7] << 8 | raw[start - 6] << 16)
        if end > last:
            return found[:at]
        found[at] = raw[start:end]
    return found


def _decoded(strings: list[bytes]) -> list[str]:
    """Decode strings in one call, joined by a byte that UTF-8 lacks; [] if one is not UTF-8."""
    text = b"\xff".join(strings).decode("utf-8", "surrogateescape")
    found = text.split("\udcff")
    damaged = len(found) != len(strings) or re.search("[\udc80-\udcff]", "".join(found))
    return [] if damaged else found


def read_gguf(file: Path) -> Header:
    """The header of a GGUF file. Raises CheckpointError if it is missing, unreadable, damaged or of another kind."""
    try:
        with open_regular(file) as stream:
            return _read(stream, file.stat().st_size, file)
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing; give the GGUF file of a model") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror or error}") from error
    except _DamagedHeader as damage:
        raise CheckpointError(f"{file} is damaged: {damage}; {fetch_again(file)}") from damage


def _read(stream: BinaryIO, size: int, file: Path) -> Header:
    reader = _Reader(stream, size)
    _check_kind(reader.take(min(size, 8), "the beginning"), file)
    tensors, keys = reader.count(0, "tensors"), reader.count(13, "keys")
    metadata: dict[str, Any] = {}
    listed: dict[str, Stored] = {}
    for _ in range(keys):
        key = reader.text("a key", _LONGEST_KEY)
        if key in metadata:
            raise _DamagedHeader(f"the key {shown(key)} occurs twice")
        kind, start = reader.number("I", "a type"), reader.at + 12  # of a list's items: behind their type and number
        value = metadata[key] = _value(reader, kind, key)
        if isinstance(value, list) and value and isinstance(value[0], float) and reader.at - start == 4 * len(value):
            listed[key] = Stored(file, "F32", (len(value),), start, 4 * len(value))
    alignment = _alignment(metadata)
    described = _tensors(reader, tensors, file)
    data = -(-reader.at // alignment) * alignment
    return Header(metadata, _placed(described, data, alignment, size), data, listed)


def _check_kind(first: bytes, file: Path) -> None:
    if LFS_POINTER.encode().startswith(first) and first:
        raise CheckpointError(f"{file} is a git-lfs pointer, not the model; run `git lfs pull` in its folder")
    if (older := _BEFORE_GGUF.get(first[:4])) is not None:
        raise CheckpointError(f"{file} is a {older} file, a format before GGUF; convert the original model to GGUF")
    if len(first) < 8 or first[:4] != b"GGUF":
        raise CheckpointError(f"{file} is no GGUF file: it does not begin with GGUF and a version; {fetch_again(file)}")
    version = int.from_bytes(first[4:], "little")
    if version & 0xFFFF == 0:
        raise CheckpointError(f"{file} is a GGUF file of big-endian numbers; Tokenwright reads little-endian ones")
    if version not in (2, 3):
        raise CheckpointError(f"{file} is GGUF of version {version}; Tokenwright reads versions 2 and 3")


def _value(reader: _Reader, kind: int, key: str) -> Any:
    what = f"the value of {shown(key)}"
    if kind == _STRING:
        return reader.text(what)
    if kind in _NUMBERS:
        return _flag(reader.take(1, what), what) if _NUMBERS[kind] == "?" else reader.number(_NUMBERS[kind], what)
    if kind != _ARRAY:
        raise _DamagedHeader(f"{what} has the unknown type {kind}")
    inner = reader.number("I", what)
    if inner == _STRING:
        return reader.texts(reader.count(8, f"strings in {shown(key)}"), what)
    if inner not in _NUMBERS:
        raise _DamagedHeader(f"{what} is an array of the type {inner}, which Tokenwright does not read")
    form = _NUMBERS[inner]
    width = struct.calcsize("<" + form)
    raw = reader.take(width * reader.count(width, f"numbers in {shown(key)}"), what)
    if form == "?":
        return [_flag(raw[at : at + 1], what) for at in range(len(raw))]
    return numpy.frombuffer(raw, dtype=numpy.dtype(form).newbyteorder("<")).tolist()


def _flag(raw: bytes, what: str) -> bool:
    if raw not in (b"\0", b"\1"):
        raise _DamagedHeader(f"{what} is neither true nor false")
    return raw == b"\1"


def _alignment(metadata: Mapping[str, Any]) -> int:
    alignment = metadata.get(ALIGNMENT, 32)
    if type(alignment) is not int or not 8 <= alignment <= _MOST_ALIGNMENT or alignment & (alignment - 1):
        raise _DamagedHeader(f"{ALIGNMENT} = {shown(alignment)} is no power of two from 8 to {_MOST_ALIGNMENT:,}")
    return alignment


def _tensors(reader: _Reader, count: int, file: Path) -> dict[str, Stored]:
    found: dict[str, Stored] = {}
    for _ in range(count):
        name = reader.text("a tensor's name", _LONGEST_KEY)
        what = f"the tensor {shown(name)}"
        if name in found:
            raise _DamagedHeader(f"{what} occurs twice")
        dimensions = reader.number("I", what)
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise _DamagedHeader(f"{what} has {dimensions:,} dimensions")
        sizes = [reader.number("Q", what) for _ in range(dimensions)]
        kind, offset = reader.number("I", what), reader.number("Q", what)
        if kind not in _TYPES:
            raise CheckpointError(f"{what} in {file} has the type {_type_name(kind)}, which Tokenwright does not read")
        dtype, numbers, nbytes = _TYPES[kind]
        if not all(1 <= size < 1 << 40 for size in sizes) or sizes[0] % numbers:
            raise _DamagedHeader(f"{what} has the sizes {sizes}, which are none of {dtype}")
        found[name] = Stored(file, dtype, tuple(reversed(sizes)), offset, math.prod(sizes) // numbers * nbytes)
    return found


def _type_name(kind: int) -> str:
    from gguf import GGMLQuantizationType

    known = kind in GGMLQuantizationType.__members__.values()
    name = GGMLQuantizationType(kind).name if known else _OTHERS.get(kind)
    return f"{name} ({kind})" if name else str(kind)


def _placed(described: Mapping[str, Stored], data: int, alignment: int, size: int) -> dict[str, Stored]:
    try:
        return _placed_as(described, data, alignment, size)
    except _DamagedHeader:
        larger = {name: _of_128(one) for name, one in described.items()}
        with suppress(_DamagedHeader):
            return _placed_as(larger, data, alignment, size)
        raise


def _of_128(one: Stored) -> Stored:
    if one.dtype != "Q2_0" or one.shape[-1] % 128:
        return one
    return replace(one, dtype="Q2_0_g128", nbytes=block_bytes("Q2_0_g128", math.prod(one.shape)))


def _placed_as(described: Mapping[str, Stored], data: int, alignment: int, size: int) -> dict[str, Stored]:
    found, offset, end = {}, 0, data
    for name, one in described.items():
        if one.start != offset:
            raise _DamagedHeader(f"the tensor {shown(name)} is at offset {one.start:,} of the data, not at {offset:,}")
        start = data + offset
        end = start + one.nbytes + (_TAIL if one.dtype == "I2_S" else 0)
        scale = Stored(one.file, "F32", (1,), end - _TAIL, 4) if one.dtype == "I2_S" else None
        if end > size:
            raise _DamagedHeader(f"it is truncated: {shown(name)} ends at byte {end:,}, the file at {size:,}")
        found[name] = Stored(one.file, one.dtype, one.shape, start, one.nbytes, scale=scale)
        offset = -(-(end - data) // alignment) * alignment
    return found


class SplitModel(NamedTuple):
    """A model in several files, `NAME-00001-of-00003.gguf`: the first has the metadata."""

    files: tuple[Path, ...]
    header: Header


def read_whole_gguf(file: Path) -> SplitModel:
    """The model that a file holds or is a part of. Raises CheckpointError, also for parts that do not fit together."""
    header = read_gguf(file)
    count = _number(header, "split.count", file, 1)
    names = part_names(file.name)
    if count <= 1 and len(names) == 1:
        return SplitModel((file,), header)
    if count != len(names):
        raise CheckpointError(
            f"{file} is one of {count:,} files by its metadata, and its name stands for {len(names):,}; give all of "
            "them the names that they were published with, such as model-00001-of-00003.gguf"
        )
    files = tuple(file.with_name(name) for name in names)
    missing = [one.name for one in files if not one.is_file()]
    if missing:
        more = ", ..." if len(missing) > 3 else ""
        raise CheckpointError(
            f"{file.parent} lacks {len(missing)} of the model's {count} files ({', '.join(missing[:3])}{more}); "
            f"{fetch_again(file)}"
        )
    return _joined(files, [header if one == file else read_gguf(one) for one in files])


def _joined(files: tuple[Path, ...], headers: list[Header]) -> SplitModel:
    tensors: dict[str, Stored] = {}
    first = headers[0]
    total = _number(first, "split.tensors.count", files[0])
    for at, (file, header) in enumerate(zip(files, headers, strict=True)):
        for key, expected in (("split.no", at), ("split.count", len(files)), ("split.tensors.count", total)):
            if (found := _number(header, key, file)) != expected:
                raise _unfit(file, f"its {key} is {found:,}, not {expected:,}")
        for name, one in header.tensors.items():
            if name in tensors:
                raise _unfit(file, f"the tensor {shown(name)} is in {tensors[name].file.name} too")
            tensors[name] = one
    if len(tensors) != total:
        raise _unfit(files[0], f"its split.tensors.count is {total:,}, and the files have {len(tensors):,} tensors")
    return SplitModel(files, replace(first, tensors=tensors))


def _number(header: Header, key: str, file: Path, default: int | None = None) -> int:
    return JsonKeys(header.metadata, str(file)).whole(key, default, least=0)


def _unfit(file: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{file} does not belong to the files beside it: {why}; {fetch_again(file)}")
