"""Finds a model on this machine: inside the package, in a folder, or in a GGUF file."""

import re
from pathlib import Path

from tokenwright.checkpoints.files import hub
from tokenwright.checkpoints.files.hub_gguf import part_names, read_gguf_name
from tokenwright.checkpoints.files.known import KNOWN, known_name
from tokenwright.errors import CheckpointError, fetch_again

_FORMS = (
    "give a model's folder, a GGUF file, owner/name on the Hugging Face hub (such as openai-community/gpt2), or "
    "stories for the model that ships inside"
)
STORIES = Path(__file__).parents[2] / "stories"


def local_folder(name_or_path: str | Path, revision: str | None = None) -> Path | None:
    """A model's folder or GGUF file; None for a name on the hub. Raises CheckpointError if it is not there."""
    given: object = name_or_path
    if not isinstance(given, str | Path):
        raise CheckpointError(f"the name of the model is {type(given).__name__}, not text; {_FORMS}")
    text = str(name_or_path)
    if not text:
        raise CheckpointError(f"the name of the model is empty; {_FORMS}")
    try:
        folder = STORIES if text == "stories" else Path(text).expanduser()
        is_folder, exists = folder.is_dir(), folder.exists()
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: the home of an unknown user; ValueError: a NUL
        raise CheckpointError(f"cannot look at {text[:200]!r} ({str(error)[:80]})") from error
    if is_folder or (exists and folder.suffix.lower() == ".gguf"):
        if revision is not None:
            kind = "folder" if is_folder else "file"
            raise CheckpointError(
                f"{text} is a {kind} here, which has no revision {revision!r}; leave it out", "revision"
            )
        if is_folder and (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
            adapter = f"{text} is an adapter, not a model"
            raise CheckpointError(f"{adapter}; give the model that it was trained on, and the adapter as lora")
        if is_folder and not (folder / "config.json").exists():
            _check_form(folder, "config.json")
        return folder
    if exists:
        raise CheckpointError(f"{text} is a file; give a GGUF file, or the folder that has config.json and the weights")
    if isinstance(name_or_path, str) and (hub.is_hub_name(text) or read_gguf_name(text)):
        return None
    from tokenwright.checkpoints.files.suggest import meant

    if hint := meant(text):
        raise CheckpointError(f"there is no folder {text[:200]}{hint}")
    raise CheckpointError(f"there is no folder {text[:200]}; {_FORMS}")


def local_config(model: str | Path) -> Path | None:
    """The config.json or GGUF file of a model to plan; None for a known name, or one on the hub."""
    name = str(model)
    try:
        path = STORIES if name == "stories" else Path(name).expanduser()
        if path.exists():
            if path.is_dir() and not (path / "config.json").exists():
                _check_form(path, "config.json")
            return path / "config.json" if path.is_dir() else path
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"cannot look at {name[:200]} ({str(error)[:80]})") from error
    if isinstance(model, str) and (known_name(name) or hub.is_hub_name(name) or read_gguf_name(name)):
        return None
    from tokenwright.checkpoints.files.suggest import meant

    known = ", ".join(one.split("/")[1] for one in KNOWN)
    some = f"; give a folder, a config.json, owner/name on the Hugging Face hub, or one of: stories, {known}"
    raise CheckpointError(f"there is no file or folder {name[:200]}, and it is no known model{meant(name) or some}")


def _check_form(folder: Path, lacks: str) -> None:
    """Raises CheckpointError for a folder with a model in another form."""
    files = sorted({part_names(one.name)[0] for one in folder.glob("*.gguf") if "mmproj" not in one.name.lower()})
    if not files and (folder / "params.json").exists():
        raise CheckpointError(f"{folder} has no {lacks}, but params.json: it is in Mistral's own format; give another")
    if files:
        which = "that file itself" if len(files) == 1 else "one of these files"
        raise CheckpointError(f"{folder} has no {lacks}, but {', '.join(files)}; give {which}")


def weight_files(folder: Path) -> list[Path]:
    """The single weight file, the shards that the index names, or all weight files. Raises CheckpointError."""
    if (folder / hub.WEIGHTS).exists() or (folder / hub.WEIGHTS).is_symlink():
        return [folder / hub.WEIGHTS]
    if (folder / hub.INDEX).exists():
        files = [folder / name for name in hub.shard_names(folder / hub.INDEX)]
        missing = [file.name for file in files if not file.exists()]
        if missing:
            few = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
            raise CheckpointError(
                f"{folder} lacks {len(missing)} of {len(files)} shards ({few}); {fetch_again(folder)}"
            )
        return files
    others = [file for file in sorted(folder.glob("*.safetensors")) if not file.name.startswith("adapter_")]
    if files := [file for file in others if not file.name.startswith("consolidated")] or others:
        if (said := re.search(r"-of-(\d+)\.", files[0].name)) and len(files) != int(said[1]):
            there = f"{folder} has {len(files)} shards, the last of them {files[-1].name}"
            raise CheckpointError(f"{there}; {fetch_again(folder)}")
        return files
    if any(file.suffix in hub.PICKLES for file in folder.glob("*")):
        raise CheckpointError(hub.only_pickles(str(folder)))
    _check_form(folder, hub.WEIGHTS)
    raise CheckpointError(f"{folder} has no {hub.WEIGHTS} and no {hub.INDEX}; {fetch_again(folder)}")
