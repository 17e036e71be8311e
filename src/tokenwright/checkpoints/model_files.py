"""The files that a model is opened from: where its name leads now, and whether other files lie there later.

Two processes that find the same names, lengths and times have read the same model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from tokenwright.checkpoints.files.hub_gguf import part_names
from tokenwright.checkpoints.files.pooling import FILES as POOLING_FILES
from tokenwright.checkpoints.folder import locate, stamp
from tokenwright.errors import CheckpointError

_READ = ("*.json", "*.jinja", "*.txt", "*.model", "*.safetensors", "additional_chat_templates/*.jinja", *POOLING_FILES)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files in folders, or GGUF files with their other parts. digest: of their names, lengths and times."""

    places: tuple[str, ...]
    digest: str

    @classmethod
    def found(cls, places: Iterable[str]) -> ModelFiles:
        places = tuple(places)
        each = [f"{file} {_stamp(file)}" for place in places for file in _files(Path(place))]
        return cls(places, sha256("\n".join(each).encode()).hexdigest())

    def check(self) -> None:
        """Raises CheckpointError if other files lie there now."""
        if self != ModelFiles.found(self.places):
            raise CheckpointError(f"the files in {self.places[0]} are no longer those that the model was opened from")


def pinned(name_or_path: str | Path, revision: str | None = None) -> Path:
    """The folder or GGUF file to which a model's name leads now, without symbolic links. Raises CheckpointError."""
    place = locate(name_or_path, revision, progress=False)
    real = place.resolve()
    if place.is_dir() or _parts(real) == _parts(place):
        return real
    return place.parent.resolve() / place.name  # the hub's library calls the file behind a link by its hash


def _parts(file: Path) -> tuple[str, int]:
    return file.suffix.lower(), len(part_names(file.name))


def _files(place: Path) -> list[Path]:
    if place.is_dir():
        return sorted({file for pattern in _READ for file in place.glob(pattern)})
    return [place.with_name(name) for name in part_names(place.name)]


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        return stamp(file)
    except OSError:  # it is gone
        return None
