"""A model folder's config.json, with the description of quantised weights that ModelOpt writes beside it."""

from pathlib import Path
from typing import Any

from tokenwright.checkpoints.files.json_keys import read_json

MODELOPT = "hf_quant_config.json"


def read_settings(config: Path) -> dict[str, Any]:
    """The object in a config.json, with ModelOpt's description as its quantization_config. Raises CheckpointError."""
    settings = read_json(config)
    beside = config.with_name(MODELOPT)
    if settings.get("quantization_config") or not beside.exists():
        return settings
    described = read_json(beside).get("quantization")
    named = described if isinstance(described, dict) else {}
    return settings | {"quantization_config": {**named, "quant_method": "modelopt"}}
