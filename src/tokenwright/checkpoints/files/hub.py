"""Download a model's files from the Hugging Face hub, all of one commit; offline, a complete snapshot is enough."""

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tokenwright.checkpoints.files.json_keys import BESIDE, read_json
from tokenwright.checkpoints.files.pooling import FILES as POOLING_FILES
from tokenwright.errors import CheckpointError, fetch_again

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
SMALL = (
    "config.json", *BESIDE, "generation_config.json", INDEX, "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model",
    "chat_template.jinja", "chat_template.json",
    "additional_chat_templates/*.jinja", "preprocessor_config.json", "processor_config.json",
    *POOLING_FILES,
)  # fmt: skip
WISHED = "HF_HUB_OFFLINE is set"
_PATIENCE = 10.0  # seconds for the hub's first answer
_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
_REVISION = re.compile(r"\w[\w.+/-]*", re.ASCII)
_URL = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<name>[^/?#]+/[^/?#]+)"
    r"(?:/(?:tree|blob|resolve)/(?P<revision>[^/?#]+))?(?P<rest>/[^?#]*)?(?:[?#].*)?",
    re.IGNORECASE,
)
_NO_OWNERS = ("huggingface.co", "www.huggingface.co", "hf.co", "datasets", "spaces")

log = logging.getLogger(__name__)


class HubName(NamedTuple):
    name: str
    revision: str | None


def read_name(text: str) -> HubName | None:
    """A model's name on the hub, from owner/name or the address of one of its pages; None if it is neither.

    >>> read_name("https://huggingface.co/Qwen/Qwen3-0.6B/tree/main")
    HubName(name='Qwen/Qwen3-0.6B', revision='main')
    """
    url = _URL.fullmatch(text)
    name = text if url is None else url["name"]
    if not _NAME.fullmatch(name) or name.partition("/")[0].lower() in _NO_OWNERS:
        return None
    return HubName(name, url and url["revision"])


def is_hub_name(text: str) -> bool:
    return read_name(text) is not None


def download(
    name: str, revision: str | None, progress: bool, check: Callable[[Path], object], *, again: bool = False
) -> Path:
    """Download a model (owner/name or its page's address) and return its snapshot folder.

    check: runs on the folder before the weights and may raise. again: a cached snapshot is not enough. Raises
    CheckpointError with a remedy if the download fails.
    """
    name, revision = named(name, revision)
    offline = unreachable(name, revision, refuse=again)
    folder = snapshot(name, revision, SMALL, progress, offline)
    _config_in(folder, name)
    check(folder)
    commit = folder.name  # the library names a snapshot's folder after its commit
    files = shard_names(folder / INDEX) if (folder / INDEX).is_file() else [WEIGHTS]
    if not all((folder / file).is_file() for file in files):
        snapshot(name, commit, files, progress, offline)
    if not (folder / files[0]).is_file():
        raise CheckpointError(incomplete(name, offline) if offline else _no_weights(name, commit))
    warn(offline, name)
    return folder


def fetch_config(name: str) -> Path:
    """Download only the config.json of a model's newest commit."""
    name, revision = named(name, None)
    offline = unreachable(name, revision)
    file = _config_in(snapshot(name, revision, ("config.json",), False, offline), name)
    warn(offline, name)
    return file


def named(text: str, revision: str | None) -> tuple[str, str | None]:
    """The repository's name, and its revision, given or from an address."""
    found = read_name(text)
    if found is None:
        raise CheckpointError(f"{text[:200]} is no owner/name on the Hugging Face hub, nor an address of one")
    if revision is not None and found.revision is not None and found.revision != revision:
        raise CheckpointError(
            f"{text} names the revision {found.revision}, and revision is {revision}; give one", "revision"
        )
    revision = found.revision if revision is None else revision
    if revision is not None and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise CheckpointError(f"{revision!r} is not a revision; give a branch, a tag or a commit")
    return found.name, revision


def unreachable(name: str, revision: str | None, *, refuse: bool = False) -> str:
    """Why only cached files can be used (as a CheckpointError if `refuse`); '' if the hub answers. It asks once."""
    from huggingface_hub import HfApi, errors

    try:
        HfApi(library_name="tokenwright").model_info(name, revision=revision or "main", timeout=_PATIENCE)
    except errors.HfHubHTTPError:
        return ""  # the download will report it
    except Exception as error:  # each version of the network libraries raises its own types
        reason = WISHED if isinstance(error, errors.OfflineModeIsEnabled) else _cause(error)
        if refuse:
            cannot = f"{name} cannot be fetched: the hub cannot be reached ({reason}){_meant(name)}"
            raise CheckpointError(cannot) from error
        return reason
    return ""


def warn(offline: str, name: str) -> None:
    if offline not in ("", WISHED):
        log.warning("the hub cannot be reached (%s): %s is taken from the local cache", offline, name)


def listing(name: str, revision: str | None) -> list[str]:
    from huggingface_hub import HfApi

    try:
        found = HfApi(library_name="tokenwright").model_info(name, revision=revision or "main", timeout=_PATIENCE)
    except Exception as error:
        raise CheckpointError(_explained(error, name, revision, "")) from error
    return [one.rfilename for one in found.siblings or []]


def _cause(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:120] if lines else type(error).__name__


def _config_in(folder: Path, name: str) -> Path:
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{name} on the hub has no config.json: it is not a model that Tokenwright can run")
    return folder / "config.json"


def shard_names(index: Path) -> list[str]:
    """The shards that an index names. Raises CheckpointError for names outside the index's folder."""
    placed = read_json(index).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise CheckpointError(f"{index} has no weight_map; {fetch_again(index)}")
    names = sorted({str(name) for name in placed.values()})
    for name in names:
        if not re.fullmatch(r"\w[\w.-]*\.safetensors", name, re.ASCII):
            raise CheckpointError(f"{index} names {name[:80]!r}, which is not a safetensors file beside it")
    return names


def snapshot(name: str, revision: str | None, files: Sequence[str], progress: bool, offline: str) -> Path:
    """A snapshot's folder with these files; downloaded unless `offline` says why not. Raises CheckpointError."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import tqdm

    class Silent(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]

    options: dict[str, Any] = {"tqdm_class": tqdm if progress else Silent, "library_name": "tokenwright"}
    options |= {"allow_patterns": list(files), "local_files_only": bool(offline)}
    try:
        with _quietly():
            return Path(snapshot_download(name, revision=revision, **options))
    except Exception as error:
        raise CheckpointError(_explained(error, name, revision, offline)) from error


@contextmanager
def _quietly() -> Iterator[None]:
    logger = logging.getLogger("huggingface_hub")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _explained(error: Exception, name: str, revision: str | None, offline: str) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, errors.HfHubHTTPError):
        error = error.__cause__  # the hub's own answer
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else 0
    if isinstance(error, errors.GatedRepoError):
        return f"{name} is gated: accept its terms on its page, then set HF_TOKEN to a token that may read it"
    if isinstance(error, errors.RepositoryNotFoundError) or status == 401:
        return (
            f"there is no model {name} on the hub, nor a folder of that name here{_meant(name) or '; check its name.'} "
            "If it is private, set HF_TOKEN to a token that may read it"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name} has no revision {revision!r} on the hub; give a branch, a tag or a commit"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return incomplete(name, offline)
    if status == 403:
        return f"the hub does not let you read {name}; set HF_TOKEN to a token that may"
    return f"{name} cannot be fetched from the hub ({_cause(error)}); try again"


def _meant(name: str) -> str:
    from tokenwright.checkpoints.files.suggest import meant  # the command line imports this file at its start

    return meant(name)


def incomplete(name: str, offline: str) -> str:
    near = _meant(name)
    return (
        f"{name} is not complete in the local cache, and the hub cannot be reached ({offline or 'it did not answer'})"
        f"{f'{near} Or fetch' if near else '; fetch'} it once with a connection, or give a folder that has the files"
    )


def _no_weights(name: str, commit: str) -> str:
    from huggingface_hub import HfApi

    try:
        files = HfApi(library_name="tokenwright").list_repo_files(name, revision=commit)
    except Exception:  # only the message depends on it
        files = []
    if any(file.endswith(PICKLES) for file in files):
        return only_pickles(f"{name} on the hub")
    return f"{name} on the hub has no {WEIGHTS}; choose a repository with safetensors files"


def only_pickles(where: str) -> str:
    return (
        f"{where} has its weights only as pickles ({', '.join(PICKLES)}), which can run code when loaded; "
        "Tokenwright reads safetensors. Use a repository that has them, or convert the model"
    )
