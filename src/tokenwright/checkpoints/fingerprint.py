"""What the K and V of a text depend on beside its tokens, in words: engines that agree in all of it agree in them."""

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from tokenwright.cache import LayerSpec
from tokenwright.checkpoints.folder import Checkpoint, stamp
from tokenwright.errors import CheckpointError

_BLOCK = 1 << 22  # bytes read at a time


def about(
    checkpoint: Checkpoint, form: Mapping[str, str], specs: tuple[LayerSpec, ...], page_size: int
) -> Mapping[str, str]:
    """Named parts, each as text; those that are long are told by their sha256. `form`: what more there is to name.

    Raises CheckpointError if the model's files are gone.
    """
    return {
        "model": _digest(repr(checkpoint.config)),
        "weights": _weights(checkpoint),
        "tokenizer": _tokenizer(checkpoint.path),
        **form,
        "kv format": _short(specs),
        "page size": str(page_size),
    }


def _short(specs: tuple[LayerSpec, ...]) -> str:
    """The specs' formats in a few words, and all they say as a hash."""
    kinds = dict.fromkeys("/".join(dict.fromkeys((spec.k.name, spec.v.name))) for spec in specs)
    reaches = dict.fromkeys(
        "" if spec.window.size is None else f" window {spec.window.size} sinks {spec.window.sinks}" for spec in specs
    )
    return f"{', '.join(kinds)}{','.join(reaches)} #{_digest(repr(specs))[:8]}"


def _weights(checkpoint: Checkpoint) -> str:
    """Every byte of every tensor that the model has."""
    digest = sha256()
    try:
        if any(stamp(file) != before for file, before in checkpoint.stamps.items()):
            raise CheckpointError("the weights' files have changed since they were loaded; open the model again")
        for name in dict.fromkeys(source.name for source in checkpoint.sources.values()):
            one = checkpoint.stored[name]
            digest.update(f"{name} {one.dtype} {one.shape} ".encode())
            with one.file.open("rb") as file:
                file.seek(one.start)
                for at in range(0, one.nbytes, _BLOCK):
                    digest.update(file.read(min(_BLOCK, one.nbytes - at)))
    except OSError as error:
        raise CheckpointError(
            f"the weights' files cannot be read again ({error.strerror}), and a saved cache must name them"
        ) from error
    return digest.hexdigest()


def _tokenizer(folder: Path) -> str:
    names = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json", "special_tokens_map.json")
    there = [name for name in names if (folder / name).is_file()]
    return _digest(" ".join(f"{name} {sha256((folder / name).read_bytes()).hexdigest()}" for name in there))


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()
