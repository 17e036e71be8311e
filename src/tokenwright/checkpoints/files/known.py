"""Published models with a built-in config.json: the keys that decide shapes, context and dtype."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

KNOWN: Mapping[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
_ALSO = {full: config.pop("also", ()) for full, config in KNOWN.items()}  # other names, and models of equal shapes
_NAMES = {
    one.lower(): full
    for full, (owner, first) in {name: name.split("/") for name in KNOWN}.items()
    for name in (first, *_ALSO[full])
    for one in (name, f"{owner}/{name}")
}


def known_name(text: str) -> str | None:
    """The full name of a known model, from its name in any case, with or without the owner; or None."""
    return _NAMES.get(text.lower())
