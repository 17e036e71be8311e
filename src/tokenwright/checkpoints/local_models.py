"""Lists models in the hub's cache on this machine. One "runs" if it passes all checks before weights are read."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenwright.errors import CheckpointError, RequestError, TokenwrightError

if TYPE_CHECKING:
    from huggingface_hub import CachedRevisionInfo

FORMS = "give owner/name, owner/name:FILE.gguf, or a page's address"


@dataclass(frozen=True, slots=True)
class LocalModel:
    name: str
    source: str  # bundled, hub or bench
    folder: str
    bytes: int
    runs: bool
    about: str  # its architecture, or why it does not run
    revision: str | None = None


def fetch(name: str, revision: str | None = None, *, progress: bool = False) -> LocalModel:
    """Download the needed files of a model and check that it runs. Raises RequestError, CheckpointError."""
    from tokenwright.checkpoints.files import hub
    from tokenwright.checkpoints.files.hub_gguf import download_gguf, read_gguf_name
    from tokenwright.checkpoints.files.suggest import nearest

    if not (read_gguf_name(name) or hub.is_hub_name(name)):
        near = nearest(name)
        hint = f"did you mean {near}?" if near is not None and hub.is_hub_name(near) else FORMS
        raise RequestError(f"{name[:200]} is not a model on the hub; {hint}")
    from tokenwright.checkpoints.folder import Checkpoint, check_config

    if read_gguf_name(name):
        place = download_gguf(name, revision, progress, again=True)
        return LocalModel(name, "hub", str(place), Checkpoint.open(place).nbytes, True, checked(place))
    place = hub.download(name, revision, progress, check_config, again=True)
    return LocalModel(name, "hub", str(place), size_of(place), True, checked(place))


def in_hub_cache() -> Iterator[LocalModel]:
    for name, cached in sorted(revisions().items()):
        for one in sorted(cached, key=lambda one: -one.last_modified):
            yield from _of_hub(name, one)


def _of_hub(name: str, one: "CachedRevisionInfo") -> Iterator[LocalModel]:
    from tokenwright.checkpoints.files.hub_gguf import model_files

    models = {} if (one.snapshot_path / "config.json").exists() else model_files(one.snapshot_path)
    if not models:
        yield described(name, "hub", one.snapshot_path, one.size_on_disk, one.commit_hash)
    for first, files in models.items():
        size = sum(file.stat().st_size for file in files)
        yield described(f"{name}:{first}", "hub", one.snapshot_path / first, size, one.commit_hash)


def described(
    name: str, source: str, folder: Path, nbytes: int | None = None, revision: str | None = None
) -> LocalModel:
    size = size_of(folder) if nbytes is None else nbytes
    try:
        return LocalModel(name, source, str(folder), size, True, checked(folder), revision)
    except TokenwrightError as error:
        return LocalModel(name, source, str(folder), size, False, str(error), revision)


def checked(folder: Path) -> str:
    """The architecture and the size of a model. Raises CheckpointError if it does not run."""
    from tokenwright.backends.native.compile import lacking
    from tokenwright.checkpoints.folder import Checkpoint

    checkpoint = Checkpoint.open(folder)
    if missing := lacking(checkpoint.graph):
        raise CheckpointError(f"{checkpoint.graph.architecture} needs {', '.join(missing)}, which we do not have")
    checkpoint.tokenizer()
    form = checkpoint.packed or checkpoint.config.dtype
    return f"{checkpoint.graph.architecture}, {checkpoint.parameters / 1e6:,.0f} M parameters, {form}"


def size_of(place: Path) -> int:
    files = [place] if place.is_file() else [file for file in place.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def revisions() -> "dict[str, list[CachedRevisionInfo]]":
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        info = scan_cache_dir(constants.HF_HUB_CACHE)
    except (CacheNotFound, ValueError):
        return {}
    return {repo.repo_id: list(repo.revisions) for repo in info.repos if repo.repo_type == "model"}


def removal(text: str, revision: str | None = None, others: tuple[str, ...] = ()) -> tuple[int, Callable[[], Any]]:
    """The bytes of a model in the hub's cache, and a function that removes it. Raises RequestError."""
    from huggingface_hub import constants, scan_cache_dir

    from tokenwright.checkpoints.files import hub
    from tokenwright.checkpoints.files.hub_gguf import read_gguf_name
    from tokenwright.checkpoints.files.suggest import closest

    if (gguf := read_gguf_name(text)) is not None:
        return _removal_of_file(gguf.repository, gguf.file, revision)
    named, present = hub.read_name(text), revisions()
    cached = present.get(named.name, []) if named is not None else []
    asked = revision or (named and named.revision)
    chosen = _of_revision(cached, asked)
    if not chosen:
        which = f"revision {asked} of {text}" if cached else text
        near = None if cached else closest(text, (*present, *others))
        hint = f"did you mean {near}?" if near is not None else "`tokenwright models` lists what there is"
        raise RequestError(f"there is no {which[:200]} to remove; {hint}")
    deletion = scan_cache_dir(constants.HF_HUB_CACHE).delete_revisions(*(one.commit_hash for one in chosen))
    return deletion.expected_freed_size, deletion.execute


def _removal_of_file(repository: str, file: str, revision: str | None) -> tuple[int, Callable[[], Any]]:
    """The removal of a GGUF file, and of its repository if no other is left. Blobs that other files share stay."""
    from tokenwright.checkpoints.files import hub
    from tokenwright.checkpoints.files.hub_gguf import model_files

    named = hub.read_name(repository)
    cached = revisions().get(named.name, []) if named is not None else []
    models = [model_files(one.snapshot_path) for one in _of_revision(cached, revision)]
    files = [one for found in models for one in found.get(file, [])]
    if not files:
        raise RequestError(f"there is no {repository}:{file} to remove; `tokenwright models` lists what there is")
    if all(found.keys() <= {file} for found in models):
        return removal(repository, revision)
    others = (one for kept in cached for one in kept.snapshot_path.rglob("*") if one not in files)
    blobs = {one.resolve() for one in files} - {one.resolve() for one in others}

    def remove() -> None:
        for one in (*files, *blobs):
            one.unlink(missing_ok=True)

    return sum(one.stat().st_size for one in blobs), remove


def _of_revision(cached: "list[CachedRevisionInfo]", asked: str | None) -> "list[CachedRevisionInfo]":
    return [one for one in cached if asked is None or one.commit_hash.startswith(asked) or asked in one.refs]
