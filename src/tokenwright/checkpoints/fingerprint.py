"""A fingerprint of everything but the tokens that K and V depend on: engines with equal ones compute equal K and V."""

from collections.abc import Mapping
from hashlib import sha256

from tokenwright.cache import LayerSpec
from tokenwright.checkpoints.folder import Checkpoint, stamp
from tokenwright.errors import CheckpointError
from tokenwright.regular_file import open_regular, read_regular

_BLOCK = 1 << 22  # bytes read at a time


def about(
    checkpoint: Checkpoint, form: Mapping[str, str], specs: tuple[LayerSpec, ...], page_size: int
) -> Mapping[str, str]:
    """The fingerprint as named strings, long ones as sha256. Raises CheckpointError if the weights' files changed."""
    return {
        "model": _digest(repr(checkpoint.graph)),
        "weights": _weights(checkpoint),
        "tokenizer": _tokenizer(checkpoint),
        **form,
        "kv format": _short(specs),
        "page size": str(page_size),
    }


def _short(specs: tuple[LayerSpec, ...]) -> str:
    """The specs' KV formats and attention windows in a few words, then a hash of the whole specs."""
    kinds = dict.fromkeys("/".join(dict.fromkeys((spec.k.name, spec.v.name))) for spec in specs)
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
    there = [name for name in names if (folder / name).is_file()]
    return _digest(" ".join(f"{name} {sha256(read_regular(folder / name)).hexdigest()}" for name in there))


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()
