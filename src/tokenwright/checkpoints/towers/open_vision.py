"""Opens a model's vision tower: its family, its tensors in the files, and its picture processor."""

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
from tokenwright.checkpoints.folder import Checkpoint, stamp
from tokenwright.checkpoints.gguf.tower_files import projector_beside, read_tower_file
from tokenwright.checkpoints.towers.families import FAMILIES, LACKING, NamedTower, Token
from tokenwright.config import ModelConfig
from tokenwright.errors import CheckpointError
from tokenwright.pictures.processors import Common
from tokenwright.text import Tokenizer

_LAYER = re.compile(r"^layers\.(\d+)\.")
_PREFIX = re.compile(r"^model\.|(?<=vision_tower)\.vision_model(?=\.)")


@dataclass(frozen=True)
class Vision:
    """A model's tower, not loaded yet, as a checkpoint whose graph is the tower."""

    sight: NamedTower
    processor: Common
    checkpoint: Checkpoint


def read_vision(checkpoint: Checkpoint, tokenizer: Tokenizer, mmproj: Path | None = None) -> Vision:
    """The tower of a model. mmproj: its GGUF file. Raises CheckpointError, with the reason, without one."""
    if checkpoint.packed is not None:
        raise CheckpointError(
            f"{checkpoint.path} has packed weights and no tower; give the model that it was made from"
        )
    if mmproj is None and checkpoint.path.is_dir():
        settings, config = read_settings(file := checkpoint.path / "config.json"), checkpoint.config
        sight = _described(settings, config, str(file), tokenizer.token_text, lambda: _processing(file.parent))
        about = str(sorted(map(str, settings["vision_config"].items())))
        stored: Mapping[str, Stored] = _tensors(file.parent)
    else:
        sight, stored, about = _in_file(checkpoint, tokenizer, mmproj)
    about = f"{sight.tower}{about}{sight.processor}"
    processor = replace(sight.processor, settings=sha256(about.encode()).digest())
    sources = _sources(sight)
    found = {}
    for ours, source in sources.items():
        one = stored.get(source.name)
        shape = source.stored(sight.tower.shapes[ours])
        if one is None or prod(one.shape) != prod(shape):
            told = "is missing" if one is None else f"has the shape {list(one.shape)}, and not {list(shape)}"
            raise CheckpointError(f"the tower's tensor {source.name} of {mmproj or checkpoint.path} {told}")
        found[source.name] = replace(one, shape=shape)
    changed: dict[str, Any] = {"graph": sight.tower, "sources": sources, "stored": found, "as_stored": {}}
    return Vision(sight, processor, replace(checkpoint, adapters=(), **changed))


def _described(
    settings: Mapping[str, Any], model: ModelConfig, where: str, token: Token, processing: Callable[[], JsonKeys]
) -> NamedTower:
    [kind, *_], vision = settings.get("architectures") or [""], settings.get("vision_config")
    if kind not in FAMILIES:
        lacks = f", which needs {LACKING[kind]}" if kind in LACKING else f"; {', '.join(FAMILIES)} do"
        raise CheckpointError(f"{kind or 'this model'} takes no images here{lacks}")
    if not isinstance(vision, Mapping):
        raise CheckpointError(f"{where} has no vision_config, so the model takes no pictures")
    outer = JsonKeys({name: one for name, one in settings.items() if name != "vision_config"}, where)
    return FAMILIES[kind](JsonKeys(vision, f"{where}, vision_config"), outer, model, processing(), token)


def _in_file(
    checkpoint: Checkpoint, tokenizer: Tokenizer, mmproj: Path | None
) -> tuple[NamedTower, Mapping[str, Stored], str]:
    file = mmproj or projector_beside(checkpoint.path)
    if file is None:
        raise CheckpointError(
            f"{checkpoint.path} holds a text model, and no mmproj file with its tower is beside it; put one there, or "
            "name it by mmproj",
            "mmproj",
        )
    found, where = read_tower_file(file), str(file)

    def token(number: int) -> str:
        of = found.tokens[number].split()
        known = next((one for one in of if len(tokenizer.encode(one, add_special=False)) == 1), None)
        if known is None:
            raise CheckpointError(f"{checkpoint.path} lacks the token {of[0]}, so {file.name} belongs to another model")
        return known

    keys = [JsonKeys(one, where) for one in (found.vision, found.outer, found.processing)]
    sight = FAMILIES[found.kind](keys[0], keys[1], checkpoint.config, keys[2], token)
    renamed = replace(sight, names=found.renamed(sight.tower, sight.names))
    return renamed, found.stored, str((file.name, stamp(file)))


def described_tower(settings: Mapping[str, Any], model: ModelConfig, where: str) -> NamedTower:
    """The tower of a config without its files. Raises CheckpointError where it describes none that we read."""
    folder = Path(where).parent
    there = (folder / "preprocessor_config.json").exists()
    return _described(settings, model, where, str, lambda: _processing(folder) if there else JsonKeys({}, where))


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
    return {
        _PREFIX.sub("", name): one
        for file in weight_files(folder)
        for name, one in read_header(file).items()
        if tower_of(name) is not None
    }


def _sources(sight: NamedTower) -> dict[str, TensorSource]:
    found = {}
    for name in sight.tower.shapes:
        base, kind = name.rsplit(".", 1)
        layer = _LAYER.match(base)
        source = sight.names[_LAYER.sub("layers.{i}.", base)]
        at = source.name.format(i=layer[1] if layer else "")
        found[name] = replace(source, name=at[:-1] if at.endswith("!") else f"{at}.{kind}")
    return found
