"""Reads how a checkpoint makes an embedding or a score, from sentence-transformers' files in its folder.

  modules.json                         the modules in order, each with its type and its folder
  1_Pooling/config.json                which hidden states the embedding is made of
  1_LogitScore/config.json             the two ids of a reranker's answer
  config_sentence_transformers.json    prompts that are put before a query and a document

A checkpoint without these files gives the mean of all hidden states.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from tokenwright.checkpoints.files.json_keys import JsonKeys, read_json
from tokenwright.errors import CheckpointError, fetch_again

Pooling = Literal["mean", "last", "first"]  # of the hidden states after the final norm
POOLINGS = get_args(Pooling)
MODULES = "modules.json"
FILES = (MODULES, "config_sentence_transformers.json", "*_Pooling/config.json", "*_LogitScore/config.json")
_MODES: dict[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last", "pooling_mode_cls_token": "first",
}  # fmt: skip
_NAMES: dict[str, Pooling] = {"mean": "mean", "lasttoken": "last", "cls": "first"}


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    pooling: Pooling = "mean"
    normalize: bool = False  # embeddings have unit length
    lacking: str = ""  # a needed operation that is not supported
    prompts: Mapping[str, str] = field(default_factory=dict)
    answers: tuple[int, int] | None = None  # a reranker's ids for yes and no


def read_pooling(folder: Path) -> PoolingConfig:
    """The pooling of a checkpoint's folder; the default for a file. Raises CheckpointError."""
    if not (folder / MODULES).is_file():
        return PoolingConfig()
    pooling: Pooling = "mean"
    normalize, answers, lacking = False, None, ""
    for kind, path in _modules(folder / MODULES):
        match kind:
            case "Transformer":
                pass
            case "Pooling":
                pooling, lacking = _pooling(folder / path / "config.json")
            case "Normalize":
                normalize = True
            case "LogitScore":
                keys = JsonKeys(read_json(file := folder / path / "config.json"), str(file))
                answers = keys.whole("true_token_id", least=0), keys.whole("false_token_id", least=0)
            case _:
                lacking = f"the module {kind[:80]} of {MODULES}"
    return PoolingConfig(pooling, normalize, lacking, _prompts(folder), answers)


def _modules(file: Path) -> list[tuple[str, str]]:
    try:
        listed = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON ({error}); {fetch_again(file)}") from error
    found: list[tuple[str, str]] = []
    for one in listed if isinstance(listed, list) else [None]:
        kind, path = (one.get("type"), one.get("path")) if isinstance(one, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(path, str) or ".." in path or Path(path).is_absolute():
            raise CheckpointError(f"{file} is no list of modules with type and path; {fetch_again(file)}")
        found.append((kind.rpartition(".")[2], path))
    return found


def _pooling(file: Path) -> tuple[Pooling, str]:
    keys = JsonKeys(said := read_json(file), str(file))
    if isinstance(name := keys.raw("pooling_mode"), str):  # in newer files
        return (_NAMES[name], "") if name in _NAMES else ("mean", f"the pooling {name[:80]}")
    wanted = [mode for mode in sorted(said) if mode.startswith("pooling_mode_") and keys.flag(mode, False)]
    if len(wanted) == 1 and wanted[0] in _MODES:
        return _MODES[wanted[0]], ""
    return "mean", f"the pooling {', '.join(wanted) or 'of no mode'}"


def _prompts(folder: Path) -> dict[str, str]:
    file = folder / "config_sentence_transformers.json"
    given: Any = read_json(file).get("prompts") if file.is_file() else None
    if not isinstance(given, dict):
        return {}
    return {name: text for name, text in given.items() if isinstance(text, str)}
