"""Download a model from the Hugging Face hub through huggingface_hub: only the files that Tokenwright reads.

The small files come first; a check on them can refuse the model before its weights are downloaded. All files come from
the commit that the revision named at the start. Offline (HF_HUB_OFFLINE=1, or no network), a complete snapshot in the
library's cache is enough. The module never downloads pickles and runs no code of a checkpoint.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenwright.checkpoints.strict import read_json
from tokenwright.errors import CheckpointError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
SMALL = (
    "config.json", "generation_config.json", INDEX, "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
)  # fmt: skip
_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
_REVISION = re.compile(r"\w[\w.+/-]*", re.ASCII)


def is_hub_name(text: str) -> bool:
    """Whether `text` has the form owner/name of a hub repository."""
    return _NAME.fullmatch(text) is not None


def download(name: str, revision: str | None, progress: bool, check: Callable[[Path], object]) -> Path:
    """Download a model and return its snapshot folder. `check` runs on the folder before the weights and may raise.

    Progress bars go to stderr. Raises CheckpointError with a remedy if the download fails.
    """
    if revision is not None and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise CheckpointError(f"{revision!r} is not a revision; give a branch, a tag or a commit")
    folder = _snapshot(name, revision, SMALL, progress)
    _config_in(folder, name)
    check(folder)
    commit = folder.name  # the library names a snapshot's folder after its commit
    files = shard_names(folder / INDEX) if (folder / INDEX).is_file() else [WEIGHTS]
    _snapshot(name, commit, files, progress)
    if not (folder / files[0]).is_file():
        raise CheckpointError(_no_weights(name, commit))
    return folder


def fetch_config(name: str) -> Path:
    """Download only the config.json of a model's newest commit. Raises CheckpointError if that fails."""
    return _config_in(_snapshot(name, None, ("config.json",), progress=False), name)


def _config_in(folder: Path, name: str) -> Path:
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{name} on the hub has no config.json: it is not a model that Tokenwright can run")
    return folder / "config.json"


def shard_names(index: Path) -> list[str]:
    """The shards that an index names. Raises CheckpointError for names outside the index's folder."""
    placed = read_json(index).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise CheckpointError(f"{index} has no weight_map; download it again")
    names = sorted({str(name) for name in placed.values()})
    for name in names:
        if not re.fullmatch(r"\w[\w.-]*\.safetensors", name, re.ASCII):
            raise CheckpointError(f"{index} names {name[:80]!r}, which is not a safetensors file beside it")
    return names


def _snapshot(name: str, revision: str | None, files: Sequence[str], progress: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import tqdm

    class Silent(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]

    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=list(files),
                tqdm_class=tqdm if progress else Silent,
                library_name="tokenwright",
            )
        )
    except Exception as error:  # each version of the network libraries raises its own types
        raise CheckpointError(_explained(error, name, revision)) from error


def _explained(error: Exception, name: str, revision: str | None) -> str:
    """The message for a failed download: the cause and a remedy."""
    from huggingface_hub import errors

    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, errors.HfHubHTTPError):
        error = error.__cause__  # the hub's own answer
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else 0
    if isinstance(error, errors.GatedRepoError):
        return f"{name} is gated: accept its terms on its page, then set HF_TOKEN to a token that may read it"
    if isinstance(error, errors.RepositoryNotFoundError) or status == 401:
        return (
            f"there is no model {name} on the hub, nor a folder of that name here. Check the spelling; if it "
            "is private, set HF_TOKEN to a token that may read it"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name} has no revision {revision!r} on the hub; give a branch, a tag or a commit"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return (
            f"{name} is not complete in the local cache, and the hub cannot be reached (HF_HUB_OFFLINE?). "
            "Fetch it once with a connection, or give a folder that has the files"
        )
    if status == 403:
        return f"the hub does not let you read {name}; set HF_TOKEN to a token that may"
    return f"cannot fetch {name} from the hub ({type(error).__name__}: {error}); try again"


def _no_weights(name: str, commit: str) -> str:
    """The message for a snapshot without weights, from the repository's list of files."""
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
