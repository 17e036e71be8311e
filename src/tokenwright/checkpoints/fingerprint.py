"""A fingerprint of all that K and V depend on except tokens: engines with equal ones compute equal K and V."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from tokenwright.cache import LayerSpec
from tokenwright.checkpoints.files.hub_gguf import part_names
from tokenwright.checkpoints.files.pooling import FILES as POOLING_FILES
from tokenwright.checkpoints.folder import Checkpoint, locate, stamp
from tokenwright.errors import CheckpointError
from tokenwright.regular_file import open_regular, read_regular

_BLOCK = 1 << 22


def about(
    checkpoint: Checkpoint, form: Mapping[str, str], specs: tuple[LayerSpec, ...], page_size: int
) -> Mapping[str, str]:
    """Named strings, long ones as sha256. Raises CheckpointError if the weights' files changed."""
    return {
        "model": _digest(repr(checkpoint.graph)), "weights": _weights(checkpoint), "tokenizer": _tokenizer(checkpoint),
        **form, "kv format": _short(specs), "page size": str(page_size),
    }  # fmt: skip


def _short(specs: tuple[LayerSpec, ...]) -> str:
    """A short text of KV formats and attention windows, with a hash of the whole specs."""
    kinds = dict.fromkeys(
        "/".join(dict.fromkeys((spec.k.name, spec.v.name))) + " unbiased" * spec.unbiased for spec in specs
    )
    reaches = dict.fromkeys(
        "" if spec.window.size is None else f" window {spec.window.size} sinks {spec.window.sinks}" for spec in specs
    )
    return f"{', '.join(kinds)}{','.join(reaches)} #{_digest(repr(specs))[:8]}"


def _weights(checkpoint: Checkpoint) -> str:
    digest = sha256()
    try:
        if any(stamp(file) != before for file, before in checkpoint.stamps.items()):
            raise CheckpointError("the weights' files have changed since they were loaded; open the model again")
        for name in dict.fromkeys(source.name for source in checkpoint.sources.values()):
            one = checkpoint.stored[name]
            digest.update(f"{name} {one.dtype} {one.shape} ".encode())
            with open_regular(one.file) as file:
                file.seek(one.start)
                for at in range(0, one.nbytes, _BLOCK):
                    digest.update(file.read(min(_BLOCK, one.nbytes - at)))
    except OSError as error:
        why = f"the weights' files cannot be read again ({error.strerror}), and a saved cache must name them"
        raise CheckpointError(why) from error
    for adapter in checkpoint.adapters:
        digest.update(f"adapter {adapter.digest} ".encode())
    return digest.hexdigest()


def _tokenizer(checkpoint: Checkpoint) -> str:
    folder = checkpoint.path
    if folder.is_file():  # GGUF: the header has the tokenizer
        header = min((one.start for one in checkpoint.stored.values() if one.file == folder), default=-1)
        with open_regular(folder) as file:
            return sha256(file.read(header)).hexdigest()
    names = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json", "special_tokens_map.json")
    there = [name for name in (*names, "tokenizer.model", "added_tokens.json") if (folder / name).is_file()]
    return _digest(" ".join(f"{name} {sha256(read_regular(folder / name)).hexdigest()}" for name in there))


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


_READ = ("*.json", "*.jinja", "*.txt", "*.model", "*.safetensors", "additional_chat_templates/*.jinja", *POOLING_FILES)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's files, in folders or as GGUF parts; equal values mean the same model."""

    places: tuple[str, ...]
    digest: str  # of names, lengths and times

    @classmethod
    def found(cls, places: Iterable[str]) -> "ModelFiles":
        places = tuple(places)
        each = [f"{file} {_stamp(file)}" for place in places for file in _files(Path(place))]
        return cls(places, sha256("\n".join(each).encode()).hexdigest())

    def check(self) -> None:
        if self != ModelFiles.found(self.places):
            raise CheckpointError(f"the files in {self.places[0]} are no longer those that the model was opened from")


def pinned(name_or_path: str | Path, revision: str | None = None) -> Path:
    """The folder or GGUF file of a model's name, with symbolic links resolved. Raises CheckpointError."""
    place = locate(name_or_path, revision, progress=False)
    real = place.resolve()
    if place.is_dir() or _parts(real) == _parts(place):
        return real
    return place.parent.resolve() / place.name  # the hub's library names the file behind a link by its hash


def _parts(file: Path) -> tuple[str, int]:
    return file.suffix.lower(), len(part_names(file.name))


def _files(place: Path) -> list[Path]:
    if place.is_dir():
        return sorted({file for pattern in _READ for file in place.glob(pattern)})
    return [place.with_name(name) for name in part_names(place.name)]


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        return stamp(file)
    except OSError:
        return None
