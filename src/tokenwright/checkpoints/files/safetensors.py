"""Read safetensors headers as untrusted input: sizes are checked first, and the tensors cover the data exactly."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from tokenwright.checkpoints.files.json_keys import LFS_POINTER, shown
from tokenwright.errors import CheckpointError, fetch_again
from tokenwright.regular_file import open_regular

_LARGEST_HEADER = 100_000_000  # bytes, the format's own limit
_MOST_DIMENSIONS = 8
_MOST_SLICES = 1 << 16
_BYTES: Mapping[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stored:
    file: Path
    dtype: str  # safetensors' name, such as BF16
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the file
    nbytes: int
    scale: "Stored | None" = field(default=None, kw_only=True)  # fp32 factors, each of an equal number of rows


def slices(one: Stored) -> Iterator[Stored]:
    if not 0 < one.shape[0] <= _MOST_SLICES or not one.nbytes:
        raise CheckpointError(f"{one.file} has a tensor of {list(one.shape)}, which is no stack of experts")
    each = one.nbytes // one.shape[0]
    for at in range(one.shape[0]):
        yield Stored(one.file, one.dtype, one.shape[1:], one.start + at * each, each)


def read_header(file: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file by name. Raises CheckpointError if it is missing, unreadable or damaged."""
    return read_header_and_metadata(file)[0]


class _Damaged(Exception): ...


def read_header_and_metadata(file: Path, again: str | None = None) -> tuple[dict[str, Stored], dict[str, str]]:
    """The tensors of a safetensors file, and its `__metadata__`. again: how to replace a damaged file, in the error."""
    again = again or fetch_again(file)
    try:
        return _read(file)
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing; {again}") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror or error}") from error
    except _Damaged as damage:
        raise CheckpointError(f"{damage}; {again}") from damage


def _read(file: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    with open_regular(file) as stream:
        size = file.stat().st_size
        text = _header_text(stream, size, file)
    start = 8 + len(text)
    entries = _parse(text, file)
    about = entries.pop("__metadata__", None)
    metadata = about if isinstance(about, dict) else {}
    stored = {name: _entry(name, entry, file, start) for name, entry in entries.items()}
    _check_cover(stored, start, size, file)
    return stored, {key: value for key, value in metadata.items() if isinstance(value, str)}


def _header_text(stream: BinaryIO, size: int, file: Path) -> bytes:
    first = stream.read(64)
    length = int.from_bytes(first[:8], "little")
    if len(first) < 10 or length < 2 or length > min(size - 8, _LARGEST_HEADER) or first[8:9] != b"{":
        raise _not_safetensors(first, size, length, file)
    stream.seek(8)
    return stream.read(length)


def _not_safetensors(first: bytes, size: int, length: int, file: Path) -> Exception:
    """The error for a file of another kind. A sound header of 1,152 bytes begins as a pickle does."""
    if first.startswith(LFS_POINTER.encode()):
        return CheckpointError(f"{file} is a git-lfs pointer, not the weights; run `git lfs pull` in its folder")
    if first.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
        return CheckpointError(
            f"{file} is a pickle under a safetensors name. Pickles can run code when loaded, so Tokenwright "
            "never loads them; convert the model to safetensors"
        )
    if first.startswith(b"GGUF"):
        return CheckpointError(f"{file} is a GGUF file under a safetensors name; open it as a .gguf file")
    if len(first) < 10:
        return _Damaged(f"{file} has only {size} bytes, less than a safetensors file")
    return _Damaged(f"{file} ({size:,} bytes) does not begin with a safetensors header (of {length:,} bytes, it says)")


def _parse(text: bytes, file: Path) -> dict[str, Any]:
    def without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a name occurs twice")
        return found

    try:
        content: dict[str, Any] = json.loads(text.decode("utf-8"), object_pairs_hook=without_doubles)
    except (ValueError, RecursionError) as error:
        raise _Damaged(f"the header of {file} is damaged ({error})") from error
    return content


def _entry(name: str, entry: object, file: Path, start: int) -> Stored:
    if not isinstance(entry, dict):
        raise _Damaged(f"{shown(name)} in {file} has no description")
    dtype, shape, offsets = entry.get("dtype"), _sizes(entry.get("shape")), _sizes(entry.get("data_offsets"))
    if not isinstance(dtype, str) or dtype not in _BYTES:
        raise CheckpointError(f"{shown(name)} in {file} has the unknown dtype {shown(dtype)}")
    if shape is None or len(shape) > _MOST_DIMENSIONS:
        raise _Damaged(f"{shown(name)} in {file} has no valid shape")
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _Damaged(f"{shown(name)} in {file} has no valid data_offsets")
    nbytes = offsets[1] - offsets[0]
    expected = math.prod(shape) * _BYTES[dtype]
    if expected != nbytes:
        raise _Damaged(f"{shown(name)} in {file} is {dtype} {list(shape)}, so {expected:,} bytes, but has {nbytes:,}")
    return Stored(file, dtype, shape, start + offsets[0], nbytes)


def _sizes(value: object) -> tuple[int, ...] | None:
    if isinstance(value, list) and all(type(one) is int and 0 <= one < 1 << 62 for one in value):
        return tuple(value)
    return None


def _check_cover(stored: Mapping[str, Stored], start: int, size: int, file: Path) -> None:
    at = start
    for name, one in sorted(stored.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if one.start != at:
            kind = "overlaps the tensor before it" if one.start < at else "leaves a gap before it"
            raise _Damaged(f"{shown(name)} in {file} {kind}")
        at += one.nbytes
    if size < at:
        raise _Damaged(f"{file} is truncated: {at - size:,} of {at:,} bytes are missing")
    if size > at:
        raise _Damaged(f"{file} has {size - at:,} bytes after its last tensor")
