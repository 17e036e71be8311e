"""An on-disk cache of quantised weights, named by a digest of the checkpoint's files, adapters, config and format.

A file's digest is kept with its path, length, mtime and inode.
"""

import json
import logging
import re
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenwright.backends.layout import Formats, Weights, weight_bytes
from tokenwright.checkpoints.folder import Checkpoint, Report
from tokenwright.checkpoints.packed_file import VERSION, entries_of, read_weights, write_in_parts, write_weights
from tokenwright.environment import Environment
from tokenwright.errors import CheckpointError
from tokenwright.formats import WeightFormat
from tokenwright.regular_file import abandoned, discard, draft_file, open_regular, read_regular, remove, why_not_private

log = logging.getLogger(__name__)

SMALLEST = 1 << 26  # bytes: quantising less than this is faster than the lookup
_PIECE = 1 << 24
_THREADS = 2
_DIGEST = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class WeightCache:
    """A cache in `folder`, which `save` creates. smallest: the fewest bytes of weights worth caching."""

    folder: Path
    smallest: int = SMALLEST

    @classmethod
    def default(cls) -> "WeightCache":
        """The cache in $TOKENWRIGHT_CACHE/weights, else in tokenwright/weights of the user's cache folder."""
        return cls(Environment.read().cache_folder("weights"))

    def load(
        self,
        checkpoint: Checkpoint,
        form: WeightFormat,
        report: Report | None = None,
        kept: Formats = MappingProxyType({}),
        paged: Collection[str] = (),
    ) -> Weights | None:
        """The weights in `form`; None if they are not cached. Removes a damaged file. Raises CheckpointError."""
        small = not paged and weight_bytes(checkpoint.graph, form) < self.smallest
        if not self.folder.is_dir() or small:
            return None
        if why := why_not_private(self.folder.resolve()):
            log.warning("the quantised weights in %s are not used: %s", self.folder, why)
            return None
        file = self._file(checkpoint, form, kept)
        if not file.is_file():
            return None
        try:
            return read_weights(file, checkpoint.graph, form, report, kept, paged)
        except CheckpointError as error:
            log.warning("cached weights cannot be used and are made again: %s", str(error).partition(";")[0])
            remove(file)
            return None

    def save(self, checkpoint: Checkpoint, form: WeightFormat, weights: Weights) -> None:
        """Cache large enough weights; log a warning if the folder cannot be written. Raises CheckpointError."""
        if weight_bytes(checkpoint.graph, form) < self.smallest:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.sweep()
            write_weights(self._file(checkpoint, form), weights, form)
        except OSError as error:
            hint = "make room there, or set TOKENWRIGHT_CACHE to another folder"
            log.warning(
                "the quantised weights cannot be kept in %s (%s); %s", self.folder, error.strerror or error, hint
            )

    def make(self, checkpoint: Checkpoint, form: WeightFormat, kept: Formats, parts: Iterable[Weights]) -> None:
        """Cache weights that memory may not hold, by `write_in_parts`. Raises CheckpointError."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.sweep()
            file = self._file(checkpoint, form, kept)
            log.warning("the weights are written to %s once, so that experts can be read from there", file)
            write_in_parts(file, entries_of(checkpoint.graph, form, kept), form, parts)
        except OSError as error:
            raise CheckpointError(
                f"the weights cannot be written to {self.folder} ({error.strerror or error}); make room there, set "
                "TOKENWRIGHT_CACHE to another folder, or leave expert_memory out",
                "expert_memory",
            ) from error

    def sweep(self) -> None:
        for draft in abandoned(self.folder):
            discard(draft)

    def files(self) -> list[Path]:
        return sorted(file for file in self.folder.glob("*.safetensors") if _DIGEST.fullmatch(file.stem))

    def records(self) -> list[Path]:
        return sorted(file for file in self.folder.glob("*.json") if _DIGEST.fullmatch(file.stem))

    @property
    def nbytes(self) -> int:
        return sum(file.stat().st_size for file in self.files())

    def _file(self, checkpoint: Checkpoint, form: WeightFormat, kept: Formats = MappingProxyType({})) -> Path:
        digests = [self._digest(file) for file in sorted({one.file for one in checkpoint.stored.values()})]
        merged = [adapter.digest for adapter in checkpoint.adapters]
        merged += [f"{part} {own}" for part, own in sorted(kept.items())]
        about = json.dumps([VERSION, str(form), repr(checkpoint.config), digests, *merged])
        return self.folder / f"{blake2b(about.encode(), digest_size=20).hexdigest()}.safetensors"

    def _digest(self, file: Path) -> str:
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
    def piece(at: int) -> bytes:
        with open_regular(file) as stream:
            stream.seek(at)
            return blake2b(stream.read(_PIECE)).digest()

    try:
        with ThreadPoolExecutor(_THREADS, "tokenwright-digest") as pool:
            pieces = pool.map(piece, range(0, file.stat().st_size, _PIECE))
            return blake2b(b"".join(pieces), digest_size=20).hexdigest()
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror or error}") from error


def _stamp(file: Path) -> list[Any]:
    try:
        status = file.stat()
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror or error}") from error
    return [str(file.resolve()), status.st_size, status.st_mtime_ns, status.st_ino]


def _remembered(memory: Path) -> Mapping[str, Any]:
    try:
        known = json.loads(read_regular(memory))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _remember(memory: Path, known: Mapping[str, Any]) -> None:
    with suppress(OSError), draft_file(memory) as draft:
        draft.write_text(json.dumps(known), encoding="utf-8")
