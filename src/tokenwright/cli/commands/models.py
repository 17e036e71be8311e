"""`tokenwright models`, `pull` and `rm`: list the models on this machine, add one from the hub, remove one.

Models from the hub are in huggingface_hub's cache, which other programs share; the others are the one inside the
package and those that `bench` made. A model "runs" if it passes the checks of loading before its weights are read.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from tokenwright.checkpoints import local_models as store
from tokenwright.cli.chat.input_reader import InputReader
from tokenwright.cli.options import shared as opt
from tokenwright.cli.terminal.output import remark, show_anything, write, write_json
from tokenwright.errors import CheckpointError, RequestError
from tokenwright.units import binary

HubName = Annotated[
    str,
    Argument(metavar="MODEL", help="owner/name on the Hugging Face hub, owner/name:FILE.gguf, or a page's address."),
]
Kind = Annotated[str, Argument(metavar="MODEL", help="A model as `tokenwright models` lists it.")]
Yes = Annotated[bool, Option("--yes", "-y", help="Do not ask.")]


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
    """Remove MODEL from this machine: all its revisions in the hub's cache, or one of them; or a model of `bench`."""
    made = _bench_model(model) if revision is None else None
    size, remove = made or store.removal(model, revision, tuple(_made()))
    if not (yes or InputReader().agrees(f"remove {model} ({binary(size)})?")):
        raise RequestError(f"{model} was not removed; add --yes to remove its {binary(size)}")
    try:
        remove()
    except OSError as error:
        raise CheckpointError(f"{model} cannot be removed: {error.strerror or error}") from error
    remark(f"removed {model}: {binary(size)}")


def _present() -> Iterator[store.Present]:
    from tokenwright.checkpoints.files.local import STORIES

    yield store.described("stories", "bundled", STORIES)
    yield from store.in_hub_cache()
    for name, folder in _made().items():
        yield store.described(name, "bench", folder)


def _bench_model(name: str) -> tuple[int, Callable[[], Any]] | None:
    """The bytes of a model that `bench` made, and a function that removes it; None for any other."""
    import shutil

    if name == "stories":
        raise RequestError("stories is part of the package and cannot be removed")
    folder = _made().get(name)
    return None if folder is None else (store.size_of(folder), lambda: shutil.rmtree(folder))


def _made() -> dict[str, Path]:
    from tokenwright.bench import shapes

    folders = {name: shapes.default_root() / name for name in shapes.SHAPES}
    return {name: folder for name, folder in folders.items() if folder.is_dir()}
