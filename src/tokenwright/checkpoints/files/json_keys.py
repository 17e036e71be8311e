"""Strict reading of the JSON files in a model folder; null counts as absent."""

import json
import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tokenwright.checks import MAX_TOKENS, is_whole
from tokenwright.errors import CheckpointError, fetch_again
from tokenwright.regular_file import read_regular_text

LFS_POINTER = "version https://git-lfs"  # the first bytes of a pointer file
# Files that describe quantised weights beside a config.json, and their methods.
BESIDE = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
_LARGEST_JSON = 64 << 20  # bytes; an index over thousands of shards has a few MiB


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError, with the file's name, if it holds none."""
    try:
        size = file.stat().st_size
        if size > _LARGEST_JSON:
            many = f"{file} has {size:,} bytes, too many for a JSON file of a model"
            raise CheckpointError(f"{many}; {fetch_again(file)}")
        text = read_regular_text(file).removeprefix("\ufeff")
        if text.startswith(LFS_POINTER):
            raise CheckpointError(f"{file} is a git-lfs pointer, not the file; run `git lfs pull` in its folder")
        content = json.loads(text)
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing; a model folder needs {file.name}") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid JSON ({error}); {fetch_again(file)}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds a {type(content).__name__}, not an object; {fetch_again(file)}")
    return content


def read_settings(config: Path) -> dict[str, Any]:
    """A config.json, with the description in a file of BESIDE as its quantization_config. Raises CheckpointError."""
    settings = read_json(config)
    beside = next((one for name in BESIDE if (one := config.with_name(name)).exists()), None)
    if settings.get("quantization_config") or beside is None:
        return settings
    described = read_json(beside)
    named = described.get("quantization", {} if "producer" in described else described)
    found = named if isinstance(named, dict) else {}
    return settings | {"quantization_config": {**found, "quant_method": BESIDE[beside.name]}}


class JsonKeys:
    """One JSON object, read key by key; null counts as absent. where: its name in messages. Raises CheckpointError."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.where = where
        self._values = {key: value for key, value in values.items() if value is not None}
        self._null = values.keys() - self._values.keys()
        self._read: set[str] = set()
        self._names: Mapping[str, str] = {}

    def rename(self, names: Mapping[str, str]) -> None:
        self._names = names

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {message}")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._values)

    def raw(self, key: str) -> Any:
        key = self._names.get(key, key)
        self._read.add(key)
        return self._values.get(key)

    def skip(self, *keys: str) -> None:
        self._read.update(keys)

    def is_null(self, key: str) -> bool:
        """Whether the key is present with the value null, for keys where absence has another meaning."""
        return key in self._null

    def whole(self, key: str, default: int | None = None, *, least: int = 1, most: int = MAX_TOKENS) -> int:
        """An integer from `least` to `most`; required if there is no default."""
        key = self._names.get(key, key)
        value = self._required(key, default)
        if not is_whole(value):
            raise self.error(f"{key} must be a whole number, not {shown(value)}")
        if not least <= value <= most:
            raise self.error(f"{key} must be from {least:,} to {most:,}, not {shown(value)}")
        return value

    def number(
        self, key: str, default: float | None = None, *, above: float = 0.0, least: float | None = None
    ) -> float:
        """A finite number greater than `above`, or of at least `least` if given; required if there is no default."""
        key = self._names.get(key, key)
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(f"{key} must be a number, not {shown(value)}")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not (math.isfinite(number) and (number > above if least is None else number >= least)):
            bound = f"above {above:g}" if least is None else f"of at least {least:g}"
            raise self.error(f"{key} must be a finite number {bound}, not {shown(value)}")
        return number

    def flag(self, key: str, default: bool) -> bool:
        value = self._required(key, default)
        if not isinstance(value, bool):
            raise self.error(f"{key} must be true or false, not {shown(value)}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        key = self._names.get(key, key)
        value = self._required(key, default)
        if not isinstance(value, str):
            raise self.error(f"{key} must be a text, not {shown(value)}")
        return value

    def only(self, key: str, *allowed: object, why: str, advice: str = "") -> None:
        """Refuse values of `key` but these (and null). With a neutral one among them, or none, neutral values pass."""
        value = self.raw(key)
        harmless = neutral(value) and (not allowed or any(map(neutral, allowed)))
        same = any(value == one and isinstance(value, bool) is isinstance(one, bool) for one in allowed)  # as in JSON
        if value is not None and not harmless and not same:
            raise self.error(f"{key} = {shown(value)} asks for {why}, which Tokenwright does not have{advice}")

    def was_read(self, key: str) -> bool:
        return key in self._read

    def finish(self, inert: Collection[str], advice: str) -> None:
        """Refuse unread keys, unless their value is neutral or they are `inert`: without effect on the arithmetic."""
        unread = self._values.keys() - self._read - set(inert)
        unknown = [key for key in unread if not neutral(self._values[key])]
        if unknown:
            named = ", ".join(f"{key} = {shown(self._values[key])}" for key in sorted(unknown)[:5])
            more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
            raise self.error(f"unknown {'keys' if len(unknown) > 1 else 'key'} {named}{more}; {advice}")

    def _required(self, key: str, default: object) -> Any:
        value = self.raw(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(f"{key} is missing")
        return value


def neutral(value: object) -> bool:
    """Whether a value enables nothing: null, false, 0, or an empty text, list or object."""
    return value is None or (isinstance(value, bool | int | float | str | list | dict) and not value)


def shown(value: object) -> str:
    large = (isinstance(value, int) and value.bit_length() > 256) or (isinstance(value, dict | list) and len(value) > 8)
    text = re.sub(r"[^\x20-\x7e]", "?", type(value).__name__ if large else json.dumps(value))
    return text if len(text) <= 60 else text[:57] + "..."
