"""Read a model's vision tower: its family, its tensors in the files, and its picture processor."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any

from tokenwright.checkpoints.families.family import TensorSource, tower_of
from tokenwright.checkpoints.files.json_keys import JsonKeys, read_json, read_settings
from tokenwright.checkpoints.files.local import weight_files
from tokenwright.checkpoints.files.safetensors import Stored, read_header
from tokenwright.checkpoints.folder import Checkpoint
from tokenwright.checkpoints.towers.families import FAMILIES, Sight
from tokenwright.config import ModelConfig
from tokenwright.errors import CheckpointError
from tokenwright.formats import DTYPE_BYTES
from tokenwright.pictures.processors import Common

_LAYER = re.compile(r"^layers\.(\d+)\.")
_PREFIX = re.compile(r"^model\.|(?<=vision_tower)\.vision_model(?=\.)")


@dataclass(frozen=True)
class Vision:
    """A model's tower, not loaded yet. checkpoint: one whose graph is the tower."""

    sight: Sight
    processor: Common
    checkpoint: Checkpoint


def read_vision(checkpoint: Checkpoint, token: Callable[[int], str]) -> Vision:
    """The tower of a model. token: an id's text. Raises CheckpointError, with the reason, without one."""
    folder = checkpoint.path
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is a GGUF file, and a tower in a file beside it (mmproj) is not read yet")
    where = str(folder / "config.json")
    settings = read_settings(folder / "config.json")
    [kind, *_] = settings.get("architectures") or [""]
    if kind not in FAMILIES:
        raise CheckpointError(f"{kind or 'this model'} takes no pictures here; {', '.join(FAMILIES)} do")
    if checkpoint.packed is not None:
        raise CheckpointError(f"{folder} has packed weights without a tower; give the model that it was made from")
    vision = settings.get("vision_config")
    if not isinstance(vision, dict):
        raise CheckpointError(f"{where} has no vision_config, so the model takes no pictures")
    outer = JsonKeys({name: one for name, one in settings.items() if name != "vision_config"}, where)
    processing = _processing(folder)
    sight = FAMILIES[kind](JsonKeys(vision, f"{where}, vision_config"), outer, checkpoint.config, processing, token)
    about = repr((sight.tower, sorted(map(str, vision.items())), sight.processor)).encode()
    processor = replace(sight.processor, settings=sha256(about).digest())
    stored = _tensors(folder)
    sources = _sources(sight)
    found = {}
    for ours, source in sources.items():
        one = stored.get(source.name)
        shape = source.stored(sight.tower.shapes[ours])
        if one is None or prod(one.shape) != prod(shape):
            told = "is missing" if one is None else f"has the shape {list(one.shape)}, and not {list(shape)}"
            raise CheckpointError(f"the tower's tensor {source.name} in {folder} {told}")
        found[source.name] = replace(one, shape=shape)
    changed: dict[str, Any] = {"graph": sight.tower, "sources": sources, "stored": found, "as_stored": {}}
    return Vision(sight, processor, replace(checkpoint, adapters=(), **changed))


def tower_bytes(settings: Mapping[str, Any], model: ModelConfig, where: str) -> int | None:
    """Bytes of a tower's weights in the model's dtype; None where the config describes none that we read."""
    [kind, *_], vision = settings.get("architectures") or [""], settings.get("vision_config")
    if kind not in FAMILIES or not isinstance(vision, Mapping):
        return None
    outer = {name: one for name, one in settings.items() if name != "vision_config"}
    try:
        sight = FAMILIES[kind](JsonKeys(vision, where), JsonKeys(outer, where), model, JsonKeys({}, where), str)
    except CheckpointError:
        return None
    return sight.tower.parameters * DTYPE_BYTES[model.dtype]


def _processing(folder: Path) -> JsonKeys:
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (file := folder / name).exists():
            found = read_json(file)
            inner = found.get("image_processor", found)
            return JsonKeys(inner if isinstance(inner, Mapping) else found, str(file))
    raise CheckpointError(
        f"{folder} has no preprocessor_config.json, which says how pictures are resized; put the model's own there"
    )


def _tensors(folder: Path) -> dict[str, Stored]:
    """The tensors outside the text model, by their names without prefixes."""
    return {
        _PREFIX.sub("", name): one
        for file in weight_files(folder)
        for name, one in read_header(file).items()
        if tower_of(name) is not None
    }


def _sources(sight: Sight) -> dict[str, TensorSource]:
    found = {}
    for name in sight.tower.shapes:
        base, kind = name.rsplit(".", 1)
        layer = _LAYER.match(base)
        source = sight.names[_LAYER.sub("layers.{i}.", base)]
        at = source.name.format(i=layer[1] if layer else "")
        found[name] = replace(source, name=at[:-1] if at.endswith("!") else f"{at}.{kind}")
    return found
