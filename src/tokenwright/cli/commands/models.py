"""`tokenwright models`, `pull` and `rm`: list this machine's models, add one from the hub, remove one."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from tokenwright.checkpoints import local_models as store
from tokenwright.cli.chat.input_reader import InputReader
from tokenwright.cli.options import shared as opt
from tokenwright.cli.terminal.output import remark, show_anything, write, write_json
from tokenwright.environment import Environment
from tokenwright.errors import CheckpointError, RequestError
from tokenwright.units import binary

HubName = Annotated[
    str,
    Argument(
        metavar="MODEL", help="owner/name on the Hugging Face hub, owner/name:FILE.gguf, or the address of its page."
    ),
]
Kind = Annotated[str, Argument(metavar="MODEL", help="A model's name in `tokenwright models`.")]
Yes = Annotated[bool, Option("--yes", "-y", help="Remove it without asking.")]


def models(json_: opt.Json = False) -> None:
    """List the models on this machine, with their sizes and whether they run."""
    found = list(_present())
    if json_:
        write_json({"models": [asdict(one) for one in found]}, indent=2)
        return
    show_anything()
    names = [one.name if one.revision is None else f"{one.name} ({one.revision[:8]})" for one in found]
    width = max(map(len, names))
    for name, one in zip(names, found, strict=True):
        does = one.about if one.runs else f"does not run: {one.about}"
        write(f"{name:<{width}}  {binary(one.bytes):>10}  {one.source:<7}  {does}\n")


def pull(model: HubName, revision: opt.Revision = None) -> None:
    """Download MODEL from the Hugging Face hub, only the files that are needed, and check that it runs."""
    found = store.fetch(model, revision, progress=sys.stderr.isatty())
    write(f"{model}: {binary(found.bytes)}, {found.about}, in {found.folder}\n")


def rm(model: Kind, revision: opt.Revision = None, yes: Yes = False) -> None:
    """Remove MODEL from this machine: all its revisions in the hub's cache, or --revision; or a model of `bench`."""
    made = _bench_model(model) if revision is None else None
    size, remove = made or store.removal(model, revision, tuple(_made()))
    if not (yes or InputReader().agrees(f"remove {model} ({binary(size)})?")):
        raise RequestError(f"{model} was not removed; add --yes to remove its {binary(size)}")
    try:
        remove()
    except OSError as error:
        raise CheckpointError(f"{model} cannot be removed: {error.strerror or error}") from error
    remark(f"removed {model}: {binary(size)}")


def _present() -> Iterator[store.LocalModel]:
    from tokenwright.checkpoints.files.local import STORIES

    yield store.described("stories", "bundled", STORIES)
    yield from store.in_hub_cache()
    for name, folder in _made().items():
        yield store.described(name, "bench", folder)


def _bench_model(name: str) -> tuple[int, Callable[[], Any]] | None:
    """The bytes of a model that `bench` made, and a function that removes it."""
    import shutil

    if name == "stories":
        raise RequestError("stories is part of the package and cannot be removed")
    folder = _made().get(name)
    return None if folder is None else (store.size_of(folder), lambda: shutil.rmtree(folder))


def _made() -> dict[str, Path]:
    from tokenwright.bench import shapes

    folders = {name: shapes.default_root() / name for name in shapes.SHAPES}
    return {name: folder for name, folder in folders.items() if folder.is_dir()}


Clear = Annotated[bool, Option("--clear", help="Remove all of it; it is made again on demand.")]


@dataclass(frozen=True, slots=True)
class CachedFile:
    what: str
    path: str
    bytes: int
    written: float

    @classmethod
    def at(cls, path: Path, what: str) -> "CachedFile":
        files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        return cls(what, str(path), sum(file.stat().st_size for file in files), path.stat().st_mtime)


def cache(clear: Clear = False, json_: opt.Json = False) -> None:
    """List the cache on disk: quantised weights, models made for `bench`, and unfinished files of killed processes.

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


def _kept() -> Iterator[CachedFile]:
    from tokenwright.bench import shapes
    from tokenwright.checkpoints.packing.weight_cache import WeightCache
    from tokenwright.regular_file import abandoned

    weights, models = WeightCache.default(), shapes.default_root()
    for file in weights.files():
        yield CachedFile.at(file, f"{_form(file)} weights")
    for file in weights.records():
        yield CachedFile.at(file, "digest of a model file")
    for name in shapes.SHAPES:
        if (models / name).is_dir():
            yield CachedFile.at(models / name, f"benchmark model {name}")
    for draft in (*abandoned(weights.folder), *abandoned(models)):
        yield CachedFile.at(draft, "unfinished, its writer was killed")


def _form(file: Path) -> str:
    from tokenwright.checkpoints.files.safetensors import read_header_and_metadata

    try:
        return str(read_header_and_metadata(file)[1].get("weights", "unknown"))
    except CheckpointError:
        return "damaged"


def _page(folder: Path, kept: list[CachedFile], cleared: bool) -> str:
    total = binary(sum(one.bytes for one in kept))
    if not kept:
        return f"{folder}: nothing is kept"
    lines = [f"{folder}: {total}{' removed' if cleared else ''}"]
    for one in kept:
        day = datetime.fromtimestamp(one.written)
        lines.append(f"{binary(one.bytes):>10}  {day:%Y-%m-%d}  {one.what}  {Path(one.path).name}")
    return "\n".join([*lines, *([] if cleared else ["`tokenwright cache --clear` removes all of it"])])
