"""A text's K and V in a safetensors file, so that a long prompt is computed once.

A sha256 over the file, with its own digits as zeros, detects a flipped bit. `save` syncs a draft and renames it.
"""

import errno
import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tokenwright.arrays import DTYPES, Array, as_bytes
from tokenwright.errors import CacheFileError
from tokenwright.regular_file import draft_file, kind_of, open_regular, sweep

FORMAT, VERSION = "tokenwright-kv", "2"
Pages = Sequence[Sequence[int]]  # page numbers in the text, for each group
Contents = Sequence[Sequence[Array]]  # K and V of these pages, for each group

_DTYPES: Mapping[str, np.dtype[Any]] = {
    "F32": DTYPES["float32"], "F16": DTYPES["float16"], "BF16": DTYPES["bfloat16"], "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8), "I64": np.dtype(np.int64),
}  # fmt: skip
_NO_DIGEST = "0" * 64
_BEFORE_DIGEST = re.compile(rb'"sha256"\s*:\s*"')
_LARGEST_HEADER = 100_000_000  # bytes, safetensors' own limit


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The saved pages of a text: `pages[g]` are page numbers in group g, `contents[g]` their K and V."""

    tokens: tuple[int, ...]
    pages: Pages
    contents: Contents


def save(path: Path, snapshot: Snapshot, about: Mapping[str, str]) -> None:
    """Write a snapshot to `path`; only the owner may read it. Raises CacheFileError, leaving an old file as it is."""
    arrays = {f"{g}.{i}": one for g, parts in enumerate(snapshot.contents) for i, one in enumerate(parts)}
    arrays["tokens"] = np.array(snapshot.tokens, np.int64)
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "sha256": _NO_DIGEST,
        "about": json.dumps(dict(about), sort_keys=True),
        "pages": json.dumps([list(pages) for pages in snapshot.pages]),
    }
    check_place(path)
    sweep(path.parent, path.name)
    try:
        with draft_file(path) as draft, draft.open("wb") as file:
            draft.chmod(0o600)
            _write(file, arrays, metadata)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(path.parent)
    except OSError as error:
        reason = error.strerror or str(error)
        raise CacheFileError(f"the cache cannot be saved to {path}: {reason}; what was there is unchanged") from error


def load(path: Path, about: Mapping[str, str], shapes: Contents, page_size: int | None = None) -> Snapshot:
    """The snapshot at `path`. `about` must equal that of `save`; `shapes[g]` are the contents of one page of group g.

    page_size: in tokens; None: that of the first group's K and V. Raises CacheFileError, with the reason.
    """
    data = _read(path)
    metadata, place = _metadata(path, data)
    stored = metadata["sha256"]
    data[place : place + len(_NO_DIGEST)] = _NO_DIGEST.encode()
    if sha256(data).hexdigest() != stored:
        raise CacheFileError(f"{path} is damaged: its checksum is not that of its contents; delete it")
    try:
        _compare(path, json.loads(metadata["about"]), about)
        arrays = _arrays(data)
        pages = [[int(page) for page in row] for row in json.loads(metadata["pages"])]
        contents = [[arrays[f"{g}.{i}"] for i in range(len(parts))] for g, parts in enumerate(shapes)]
        tokens = arrays["tokens"]
        snapshot = Snapshot(tuple(tokens.tolist()), pages, contents)
    except (KeyError, IndexError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise _strange(path) from error
    if tokens.dtype != np.int64 or tokens.ndim != 1 or not _fits(snapshot, shapes, page_size or shapes[0][0].shape[2]):
        raise _strange(path)
    return snapshot


def _write(file: BinaryIO, arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> None:
    names = {kind: name for name, kind in _DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": metadata}
    start = 0
    for name, one in arrays.items():
        header[name] = {"dtype": names[one.dtype], "shape": one.shape, "data_offsets": [start, start + one.nbytes]}
        start += one.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    first = len(text).to_bytes(8, "little") + text
    contents = [as_bytes(np.ascontiguousarray(one)).data for one in arrays.values()]
    digest = sha256(first)
    for content in contents:
        digest.update(content)
    file.write(first.replace(_NO_DIGEST.encode(), digest.hexdigest().encode(), 1))
    file.writelines(contents)


def _arrays(data: bytearray) -> dict[str, Array]:
    """The arrays of a file whose length was checked. Raises KeyError, TypeError or ValueError for a bad header."""
    first = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:first])
    del header["__metadata__"]
    found = {}
    for name, about in header.items():
        start, end = about["data_offsets"]
        if not 0 <= start <= end:
            raise ValueError(f"the data of {name} end before they begin")
        memory = np.frombuffer(data, np.uint8, end - start, first + start)
        found[name] = memory.view(_DTYPES[about["dtype"]]).reshape(about["shape"])
    return found


def _strange(path: Path) -> CacheFileError:
    return CacheFileError(f"{path} is a cache file, but not one that Tokenwright wrote; delete it")


def _fits(snapshot: Snapshot, shapes: Contents, page_size: int) -> bool:
    if len(snapshot.pages) != len(shapes) or not all(0 <= token < 1 << 32 for token in snapshot.tokens):
        return False
    full, rest = divmod(len(snapshot.tokens), page_size)
    for pages, parts, wanted in zip(snapshot.pages, snapshot.contents, shapes, strict=True):
        if rest or list(pages) != sorted({page for page in pages if 0 <= page < full}):
            return False
        for part, one in zip(parts, wanted, strict=True):
            if part.dtype != one.dtype or list(part.shape) != [one.shape[0], len(pages), *one.shape[2:]]:
                return False
    return True


def check_place(path: Path) -> None:
    """Raise CacheFileError for a path that `save` cannot write to, so that callers can check before they compute."""
    if "\0" in str(path):
        raise CacheFileError("the name of a cache file cannot hold a NUL character")
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        _check_folder(path)
        return
    except OSError as error:
        raise CacheFileError(f"the cache cannot be saved to {path}: {error.strerror}") from error
    if not stat.S_ISREG(mode):
        raise CacheFileError(f"{path} is {kind_of(mode)}, not a file; give another name")


def _check_folder(path: Path) -> None:
    if not path.parent.is_dir():
        raise CacheFileError(f"the cache cannot be saved to {path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise CacheFileError(f"the cache cannot be saved to {path}: the folder {path.parent} cannot be written to")


def _sync_folder(folder: Path) -> None:
    place = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(place)
    finally:
        os.close(place)


def _read(path: Path) -> bytearray:
    try:
        with open_regular(path, links=False) as file:
            data = bytearray(os.fstat(file.fileno()).st_size)
            if file.readinto(data) != len(data):
                raise CacheFileError(f"{path} became shorter while it was read; try again")
    except OSError as error:
        words = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise CacheFileError(f"the cache file {path} cannot be read: {words}") from error
    except MemoryError as error:
        raise CacheFileError(f"the cache file {path} cannot be read: it is larger than the free memory") from error
    except ValueError as error:
        raise CacheFileError("the name of a cache file cannot hold a NUL character") from error
    return data


def _metadata(path: Path, data: bytearray) -> tuple[dict[str, str], int]:
    """The metadata of a file whose header claims our format, and the offset of its checksum."""
    foreign = CacheFileError(f"{path} is not a cache file of Tokenwright; give another name, or delete it")
    length = int.from_bytes(data[:8], "little")
    if len(data) < 10 or data[8:9] != b"{" or length > _LARGEST_HEADER:
        raise foreign
    header = data[8 : 8 + length]
    if len(header) < length:
        raise CacheFileError(f"{path} is truncated: it ends within its header; delete it")
    try:
        content = json.loads(header.decode("utf-8"))
        metadata = content["__metadata__"]
        end = max(one["data_offsets"][1] for name, one in content.items() if name != "__metadata__")
        missing = 8 + length + int(end) - len(data)
        known = metadata["format"] == FORMAT
    except (ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError) as error:
        raise foreign from error
    if not known:
        raise foreign
    if metadata.get("version") != VERSION:
        raise CacheFileError(
            f"{path} has version {metadata.get('version')!r} of the format, and this Tokenwright reads {VERSION}; "
            "delete it"
        )
    if missing > 0:
        raise CacheFileError(f"{path} is truncated: {missing:,} bytes are missing at its end; delete it")
    _check_words(path, metadata)
    if (found := _BEFORE_DIGEST.search(header)) is None:  # `save` spells its key so
        raise _strange(path)
    return metadata, 8 + found.end()


def _check_words(path: Path, metadata: Mapping[str, Any]) -> None:
    words = [metadata.get(name) for name in ("sha256", "about", "pages")]
    if not all(isinstance(word, str) for word in words) or len(str(words[0])) != len(_NO_DIGEST):
        raise _strange(path)


def _compare(path: Path, stored: object, about: Mapping[str, str]) -> None:
    """Raise CacheFileError, with the first field that differs, for a file saved with another `about`."""
    if not isinstance(stored, dict) or stored.keys() != about.keys():
        raise _strange(path)
    for name, value in about.items():
        if stored[name] != value:
            was, now = (f" ({shown})" if len(shown) < 60 else "" for shown in (str(stored[name]), value))
            raise CacheFileError(
                f"{path} was saved with another {name}{was}, and this engine has its own{now}; "
                "open the model as it was then, or give another name"
            )
