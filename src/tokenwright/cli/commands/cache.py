"""`tokenwright cache`: the files that Tokenwright keeps on disk by itself, and how to remove them.

It knows its files by their names, and touches no others: TOKENWRIGHT_CACHE may be a folder that has more in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated

from typer import Option

from tokenwright.cli.options import shared as opt
from tokenwright.cli.terminal.output import show_anything, write, write_json
from tokenwright.environment import Environment
from tokenwright.errors import CheckpointError
from tokenwright.units import binary

Clear = Annotated[bool, Option("--clear", help="Remove all of it. It is made again when it is needed.")]


@dataclass(frozen=True, slots=True)
class Kept:
    what: str
    path: str
    bytes: int
    written: float

    @classmethod
    def at(cls, path: Path, what: str) -> Kept:
        files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        return cls(what, str(path), sum(file.stat().st_size for file in files), path.stat().st_mtime)


def cache(clear: Clear = False, json_: opt.Json = False) -> None:
    """List what is kept on disk: quantised weights, models made for `bench`, and what killed writers have left.

    A file that is being written is neither listed nor removed.
    """
    from tokenwright.regular_file import remove

    folder, kept = Environment.read().cache_folder(""), list(_kept())
    failed = [one.path for one in kept if not remove(Path(one.path))] if clear else []
    if json_:
        removed = {"removed": len(kept) - len(failed)} if clear else {}
        write_json({"folder": str(folder), "kept": [asdict(one) for one in kept], **removed}, indent=2)
    else:
        show_anything()
        write(_page(folder, kept, clear) + "\n")
    if failed:
        raise CheckpointError(f"cannot remove {failed[0]}" + (f" and {len(failed) - 1} more" if failed[1:] else ""))


def _kept() -> Iterator[Kept]:
    from tokenwright.bench import shapes
    from tokenwright.checkpoints.packing.weight_cache import WeightCache
    from tokenwright.regular_file import abandoned

    weights, models = WeightCache.default(), shapes.default_root()
    for file in weights.files():
        yield Kept.at(file, f"{_form(file)} weights")
    for file in weights.records():
        yield Kept.at(file, "digest of a model file")
    for name in shapes.SHAPES:
        if (models / name).is_dir():
            yield Kept.at(models / name, f"benchmark model {name}")
    for draft in (*weights.drafts(), *abandoned(models)):
        yield Kept.at(draft, "unfinished, its writer was killed")


def _form(file: Path) -> str:
    from tokenwright.checkpoints.files.safetensors import read_header_and_metadata

    try:
        return str(read_header_and_metadata(file)[1].get("weights", "unknown"))
    except CheckpointError:
        return "damaged"


def _page(folder: Path, kept: list[Kept], cleared: bool) -> str:
    total = binary(sum(one.bytes for one in kept))
    if not kept:
        return f"{folder}: nothing is kept"
    lines = [f"{folder}: {total}{' removed' if cleared else ''}"]
    lines += [f"{binary(one.bytes):>10}  {_day(one.written)}  {one.what}  {Path(one.path).name}" for one in kept]
    return "\n".join([*lines, *([] if cleared else ["`tokenwright cache --clear` removes all of it"])])


def _day(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d")
