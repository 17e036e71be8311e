"""A model in several GGUF files, `NAME-00001-of-00003.gguf`: any of them opens all; the first has the metadata."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from tokenwright.checkpoints.files.hub_gguf import part_names
from tokenwright.checkpoints.files.json_keys import JsonKeys, shown
from tokenwright.checkpoints.files.safetensors import Stored
from tokenwright.checkpoints.gguf.header import Header, read_gguf
from tokenwright.errors import CheckpointError, fetch_again


class Whole(NamedTuple):
    files: tuple[Path, ...]
    header: Header


def read_whole_gguf(file: Path) -> Whole:
    """The model that a file is, or is a part of. Raises CheckpointError, also for parts that do not fit together."""
    header = read_gguf(file)
    count = _number(header, "split.count", file, 1)
    names = part_names(file.name)
    if count <= 1 and len(names) == 1:
        return Whole((file,), header)
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


def _joined(files: tuple[Path, ...], headers: list[Header]) -> Whole:
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
    return Whole(files, replace(first, tensors=tensors))


def _number(header: Header, key: str, file: Path, default: int | None = None) -> int:
    return JsonKeys(header.metadata, str(file)).whole(key, default, least=0)


def _unfit(file: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{file} does not belong to the files beside it: {why}; {fetch_again(file)}")
