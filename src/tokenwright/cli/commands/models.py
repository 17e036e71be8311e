"""`tokenwright models`, `pull` and `rm`: the models on this machine, one more from the hub, one less.

Models from the hub are in huggingface_hub's own cache, which other programs share; the others are the one inside the
package and those that `bench` made. A model "runs" if its config, weights and tokenizer pass every check that loading
makes before it reads the weights.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from tokenwright.cli.chat.input_reader import InputReader
from tokenwright.cli.commands.cache import Kept
from tokenwright.cli.options import shared as opt
from tokenwright.cli.terminal.output import remark, show_anything, write, write_json
from tokenwright.errors import CheckpointError, RequestError, TokenwrightError
from tokenwright.units import binary

if TYPE_CHECKING:
    from huggingface_hub import CachedRevisionInfo

HubName = Annotated[
    str,
    Argument(metavar="MODEL", help="owner/name on the Hugging Face hub, owner/name:FILE.gguf, or a page's address."),
]
Kind = Annotated[str, Argument(metavar="MODEL", help="A model as `tokenwright models` lists it.")]
Yes = Annotated[bool, Option("--yes", "-y", help="Do not ask.")]

_FORMS = "give owner/name, owner/name:FILE.gguf, or a page's address"


@dataclass(frozen=True, slots=True)
class Present:
    """A model on this machine. about: its architecture, or why it does not run. source: bundled, hub or bench."""

    name: str
    source: str
    folder: str
    bytes: int
    runs: bool
    about: str
    revision: str | None = None


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
    """Download MODEL from the Hugging Face hub, the files that are needed alone, and check that it runs."""
    from tokenwright.checkpoints.files import hub
    from tokenwright.checkpoints.files.hub_gguf import download_gguf, read_gguf_name
    from tokenwright.checkpoints.files.suggest import nearest

    if not (read_gguf_name(model) or hub.is_hub_name(model)):
        near = nearest(model)
        hint = f"did you mean {near}?" if near is not None and hub.is_hub_name(near) else _FORMS
        raise RequestError(f"{model[:200]} is not a model on the hub; {hint}")
    from tokenwright.checkpoints.folder import Checkpoint, check_config

    if read_gguf_name(model):
        file = download_gguf(model, revision, sys.stderr.isatty(), again=True)
        write(f"{model}: {binary(Checkpoint.open(file).nbytes)}, {_checked(file)}, in {file}\n")
        return
    folder = hub.download(model, revision, sys.stderr.isatty(), check_config, again=True)
    about = _checked(folder)
    write(f"{model}: {binary(Kept.at(folder, '').bytes)}, {about}, in {folder}\n")


def rm(model: Kind, revision: opt.Revision = None, yes: Yes = False) -> None:
    """Remove MODEL from this machine: all its revisions in the hub's cache, or one of them; or a model of `bench`."""
    made = _bench_model(model) if revision is None else None
    size, remove = made or _hub_model(model, revision)
    if not (yes or InputReader().agrees(f"remove {model} ({binary(size)})?")):
        raise RequestError(f"{model} was not removed; add --yes to remove its {binary(size)}")
    try:
        remove()
    except OSError as error:
        raise CheckpointError(f"{model} cannot be removed: {error.strerror or error}") from error
    remark(f"removed {model}: {binary(size)}")


def _present() -> Iterator[Present]:
    from tokenwright.checkpoints.files.local import STORIES

    yield _described("stories", "bundled", STORIES)
    for name, cached in sorted(_cached().items()):
        for one in sorted(cached, key=lambda one: -one.last_modified):
            yield from _of_hub(name, one)
    for name, folder in _made().items():
        yield _described(name, "bench", folder)


def _of_hub(name: str, one: CachedRevisionInfo) -> Iterator[Present]:
    """A revision of a repository: one model, or several GGUF files."""
    from tokenwright.checkpoints.files.hub_gguf import model_files

    models = {} if (one.snapshot_path / "config.json").exists() else model_files(one.snapshot_path)
    if not models:
        yield _described(name, "hub", one.snapshot_path, one.size_on_disk, one.commit_hash)
    for first, files in models.items():
        size = sum(file.stat().st_size for file in files)
        yield _described(f"{name}:{first}", "hub", one.snapshot_path / first, size, one.commit_hash)


def _described(name: str, source: str, folder: Path, nbytes: int | None = None, revision: str | None = None) -> Present:
    size = Kept.at(folder, "").bytes if nbytes is None else nbytes
    try:
        return Present(name, source, str(folder), size, True, _checked(folder), revision)
    except TokenwrightError as error:
        return Present(name, source, str(folder), size, False, str(error), revision)


def _checked(folder: Path) -> str:
    """The architecture and the size of a model that runs. Raises CheckpointError for one that does not."""
    from tokenwright.backends.torch.ops import lacking
    from tokenwright.checkpoints.folder import Checkpoint

    checkpoint = Checkpoint.open(folder)
    if missing := lacking(checkpoint.graph):
        raise CheckpointError(f"{checkpoint.graph.architecture} needs {', '.join(missing)}, which we do not have")
    checkpoint.tokenizer()
    form = checkpoint.packed or checkpoint.config.dtype
    return f"{checkpoint.graph.architecture}, {checkpoint.parameters / 1e6:,.0f} M parameters, {form}"


def _cached() -> dict[str, list[CachedRevisionInfo]]:
    """The revisions of models in the hub's cache, by the model's name."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        info = scan_cache_dir(constants.HF_HUB_CACHE)
    except (CacheNotFound, ValueError):
        return {}
    return {repo.repo_id: list(repo.revisions) for repo in info.repos if repo.repo_type == "model"}


def _of_revision(cached: list[CachedRevisionInfo], asked: str | None) -> list[CachedRevisionInfo]:
    return [one for one in cached if asked is None or one.commit_hash.startswith(asked) or asked in one.refs]


def _hub_model(text: str, revision: str | None) -> tuple[int, Callable[[], Any]]:
    """The bytes of a model in the hub's cache, and what removes it. Raises RequestError if it is not there."""
    from huggingface_hub import constants, scan_cache_dir

    from tokenwright.checkpoints.files import hub
    from tokenwright.checkpoints.files.hub_gguf import read_gguf_name
    from tokenwright.checkpoints.files.suggest import closest

    if (gguf := read_gguf_name(text)) is not None:
        return _hub_file(gguf.repository, gguf.file, revision)
    named, present = hub.read_name(text), _cached()
    cached = present.get(named.name, []) if named is not None else []
    asked = revision or (named and named.revision)
    chosen = _of_revision(cached, asked)
    if not chosen:
        which = f"revision {asked} of {text}" if cached else text
        near = None if cached else closest(text, (*present, *_made()))
        hint = f"did you mean {near}?" if near is not None else "`tokenwright models` lists what there is"
        raise RequestError(f"there is no {which[:200]} to remove; {hint}")
    deletion = scan_cache_dir(constants.HF_HUB_CACHE).delete_revisions(*(one.commit_hash for one in chosen))
    return deletion.expected_freed_size, deletion.execute


def _hub_file(repository: str, file: str, revision: str | None) -> tuple[int, Callable[[], Any]]:
    """The same for a GGUF file of a repository; the last one takes the repository with it.

    Files and revisions with equal bytes share them: those stay while one of them does.
    """
    from tokenwright.checkpoints.files import hub
    from tokenwright.checkpoints.files.hub_gguf import model_files

    named = hub.read_name(repository)
    cached = _cached().get(named.name, []) if named is not None else []
    models = [model_files(one.snapshot_path) for one in _of_revision(cached, revision)]
    files = [one for found in models for one in found.get(file, [])]
    if not files:
        raise RequestError(f"there is no {repository}:{file} to remove; `tokenwright models` lists what there is")
    if all(found.keys() <= {file} for found in models):
        return _hub_model(repository, revision)
    others = (one for kept in cached for one in kept.snapshot_path.rglob("*") if one not in files)
    blobs = {one.resolve() for one in files} - {one.resolve() for one in others}

    def remove() -> None:
        for one in (*files, *blobs):
            one.unlink(missing_ok=True)

    return sum(one.stat().st_size for one in blobs), remove


def _bench_model(name: str) -> tuple[int, Callable[[], Any]] | None:
    """The bytes of a model that `bench` made, and what removes it; None if it is none."""
    import shutil

    if name == "stories":
        raise RequestError("stories is part of the package and cannot be removed")
    folder = _made().get(name)
    return None if folder is None else (Kept.at(folder, "").bytes, lambda: shutil.rmtree(folder))


def _made() -> dict[str, Path]:
    """The folders of the models that `bench` made, by name."""
    from tokenwright.bench import shapes

    folders = {name: shapes.default_root() / name for name in shapes.SHAPES}
    return {name: folder for name, folder in folders.items() if folder.is_dir()}
