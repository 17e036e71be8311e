"""From a name to a blueprint: the model inside, a folder, a config.json, a known model, or a name on the hub."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenwright.checkpoints import hub
from tokenwright.checkpoints.families import parse_config
from tokenwright.checkpoints.folder import STORIES
from tokenwright.checkpoints.packed_file import own_quantisation
from tokenwright.checkpoints.strict import read_json
from tokenwright.errors import CheckpointError
from tokenwright.planner.blueprint import Blueprint, of_config
from tokenwright.planner.known import KNOWN, known_name
from tokenwright.planner.others import planned_only


def find(model: str | Path) -> tuple[str, Blueprint]:
    """The model's name, as it is shown, and its blueprint. What lies here goes before what is known by name.

    Only config.json is read, and only that is fetched from the hub. Raises CheckpointError.
    """
    name = str(model)
    file = _local(name)
    if file is None and isinstance(model, str):
        known = known_name(name)
        if known is not None:
            return known, _drawn(KNOWN[known], known)
        if hub.is_hub_name(name):
            file = hub.fetch_config(name)
    if file is None:
        raise CheckpointError(
            f"there is no file or folder {name[:200]}, and it is no known model; give a folder, a config.json, "
            f"owner/name on the Hugging Face hub, or one of: stories, {', '.join(one.split('/')[1] for one in KNOWN)}"
        )
    return name, _drawn(read_json(file), str(file))


def _local(name: str) -> Path | None:
    """The config.json that a name means on this machine, or None."""
    try:
        path = STORIES if name == "stories" else Path(name).expanduser()
        return path / "config.json" if path.is_dir() else path if path.exists() else None
    except (OSError, RuntimeError) as error:  # RuntimeError: the home of an unknown user
        raise CheckpointError(f"cannot look at {name[:200]} ({str(error)[:80]})") from error


def _drawn(config: Mapping[str, Any], where: str) -> Blueprint:
    settings = dict(config)
    own = own_quantisation(settings, where)
    blueprint = planned_only(settings, where)
    if blueprint is not None:
        return blueprint
    parsed = parse_config(settings, where)[1]
    if own is not None:
        return of_config(replace(parsed, dtype=own[1]), own[0])
    named = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    assumed = () if named == parsed.dtype else ("config.json names no dtype that we know: float32 is assumed",)
    return of_config(parsed, remarks=assumed)
