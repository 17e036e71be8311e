"""A folder that keeps weights which were quantised here, so that the next load only reads them.

A file is named after what is in it: the contents of the checkpoint's files, the model's arithmetic, the format. Reading
gigabytes to find a name would take longer than quantising, so the digest of a file is remembered with its path, length,
time and inode; where one of these differs, the file is read again. Files appear whole or not at all, and each tensor is
checked as it is read: so processes can share a folder, and a damaged file is made again.
"""

import json
import logging
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from threading import get_ident
from typing import Any

from tokenwright.backends.layout import Weights, weight_bytes
from tokenwright.checkpoints.folder import Checkpoint, Report
from tokenwright.checkpoints.packed_file import VERSION, read_weights, write_weights
from tokenwright.config import Environment, WeightFormat
from tokenwright.errors import CheckpointError

log = logging.getLogger(__name__)

SMALLEST = 1 << 26  # bytes: less than this is quantised sooner than it is found
_PIECE = 1 << 24  # bytes digested at a time
_THREADS = 2  # that digest
_STALE = 86_400  # seconds after which nobody is still writing


@dataclass(frozen=True, slots=True)
class WeightCache:
    """Weights in the files of `folder`, which is made when needed. `smallest`: bytes of weights worth keeping."""

    folder: Path
    smallest: int = SMALLEST

    @classmethod
    def default(cls) -> "WeightCache":
        """In $TOKENWRIGHT_CACHE/weights, else in tokenwright/weights of the user's folder for caches."""
        return cls(Environment.read().cache_folder("weights"))

    def load(self, checkpoint: Checkpoint, form: WeightFormat, report: Report | None = None) -> Weights | None:
        """The checkpoint's weights in `form`; None where they are not there (a damaged file is told and removed)."""
        if not self.folder.is_dir() or weight_bytes(checkpoint.config, form) < self.smallest:
            return None
        file = self._file(checkpoint, form)
        if not file.is_file():
            return None
        try:
            return read_weights(file, checkpoint.config, form, report)
        except CheckpointError as error:
            log.warning("cached weights cannot be used and are made again: %s", error)
            _remove(file)
            return None

    def save(self, checkpoint: Checkpoint, form: WeightFormat, weights: Weights) -> None:
        """Keep weights, if they are large enough. A folder that cannot be written is told, and nothing is kept."""
        if weight_bytes(checkpoint.config, form) < self.smallest:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._sweep()
            write_weights(self._file(checkpoint, form), weights, form)
        except OSError as error:
            hint = "make room there, or set TOKENWRIGHT_CACHE to another folder"
            log.warning(
                "the quantised weights cannot be kept in %s (%s); %s", self.folder, error.strerror or error, hint
            )

    def _sweep(self) -> None:
        """Remove what processes that were killed while they wrote have left."""
        for file in self.folder.glob(".*"):
            if time.time() - file.stat().st_mtime > _STALE:
                _remove(file)

    @property
    def nbytes(self) -> int:
        """Bytes of all files that are kept."""
        return sum(file.stat().st_size for file in self.folder.glob("*.safetensors"))

    def _file(self, checkpoint: Checkpoint, form: WeightFormat) -> Path:
        digests = [self._digest(file) for file in sorted({one.file for one in checkpoint.stored.values()})]
        about = json.dumps([VERSION, str(form), repr(checkpoint.config), digests])
        return self.folder / f"{blake2b(about.encode(), digest_size=20).hexdigest()}.safetensors"

    def _digest(self, file: Path) -> str:
        """The digest of a file's bytes, from memory where the file is as it was then."""
        place = blake2b(str(file.resolve()).encode(), digest_size=20).hexdigest()
        memory, seen = self.folder / f"{place}.json", _stamp(file)
        known = _remembered(memory)
        if known.get("file") == seen and isinstance(known.get("digest"), str):
            return str(known["digest"])
        digest = digest_of(file)
        if self.folder.is_dir() and _stamp(file) == seen:
            _remember(memory, {"file": seen, "digest": digest})
        return digest


def digest_of(file: Path) -> str:
    """blake2b over the digests of a file's pieces, which several threads can take. Raises CheckpointError."""

    def piece(at: int) -> bytes:
        with file.open("rb") as stream:
            stream.seek(at)
            return blake2b(stream.read(_PIECE)).digest()

    try:
        with ThreadPoolExecutor(_THREADS, "tokenwright-digest") as pool:
            pieces = pool.map(piece, range(0, file.stat().st_size, _PIECE))
            return blake2b(b"".join(pieces), digest_size=20).hexdigest()
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror or error}") from error


def _stamp(file: Path) -> list[Any]:
    """What changes with a file's contents. Raises CheckpointError where the file has gone."""
    try:
        status = file.stat()
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror or error}") from error
    return [str(file.resolve()), status.st_size, status.st_mtime_ns, status.st_ino]


def _remembered(memory: Path) -> Mapping[str, Any]:
    try:
        known = json.loads(memory.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _remember(memory: Path, known: Mapping[str, Any]) -> None:
    """Written beside and put in place at once. What cannot be remembered is found out again."""
    beside = memory.with_name(f".{memory.name}.{os.getpid()}-{get_ident()}")
    try:
        beside.write_text(json.dumps(known), encoding="utf-8")
        beside.replace(memory)
    except OSError:
        _remove(beside)


def _remove(file: Path) -> None:
    try:
        file.unlink(missing_ok=True)
    except OSError:
        return
