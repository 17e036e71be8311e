"""Suggests models for a mistyped name: from the package, the same folder, the hub's cache, and published ones."""

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from itertools import chain, islice
from pathlib import Path

from tokenwright.checkpoints.files.known import KNOWN

_ALIKE = 0.75  # the least similarity by difflib, from 0 to 1
_LONGEST = 200  # characters of a compared name
_MOST = 2_000  # entries of a folder that are read


def nearest(text: str) -> str | None:
    """The known name that is most like `text`, with or without its owner; None if none is, or if `text` is known."""
    return closest(text, _names(text))


def beginning_with(text: str) -> list[str]:
    return sorted({name for name in _names(text) if name.startswith(text)})


def closest(text: str, names: Iterable[str]) -> str | None:
    """The name that is most like `text`, both compared with their owner or without it; None as in `nearest`."""
    known: dict[str, str] = {}
    for name in names:
        known |= {name.lower(): name, name.partition("/")[2].lower() or name.lower(): name}
    if text in known.values() or len(text) > _LONGEST:  # the right name lacks a model, or the network
        return None
    found = get_close_matches(text.lower().rstrip("/"), known, 1, _ALIKE)
    return known[found[0]] if found else None


def meant(text: str) -> str:
    """The end of a message about an unknown name: "; did you mean NAME?", or nothing."""
    near = nearest(text)
    return "" if near is None else f"; did you mean {near}?"


def _names(text: str) -> Iterator[str]:
    return chain(_cached(), KNOWN, ("stories",), _beside(text))


def _beside(text: str) -> Iterator[str]:
    typed = text.rstrip("/")
    folder = typed[: typed.rfind("/") + 1]
    try:
        for one in islice(Path(folder).expanduser().iterdir(), _MOST):
            if one.suffix.lower() == ".gguf" or (one / "config.json").is_file():
                yield folder + one.name
    except (OSError, RuntimeError, ValueError):  # no such folder or user, or a NUL
        return


def _cached() -> Iterator[str]:
    from huggingface_hub import constants

    try:
        for one in islice(Path(constants.HF_HUB_CACHE).iterdir(), _MOST):
            if one.name.startswith("models--"):
                yield one.name.removeprefix("models--").replace("--", "/", 1)
    except OSError:
        return
