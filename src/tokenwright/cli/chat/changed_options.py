"""Sampling options that change within a conversation: `/set temperature 0.7`, with the names of the command line."""

import shlex
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, get_args, get_origin

from tokenwright.cli.options.foreign import OPTIONS
from tokenwright.cli.options.sampling import COMMON, chosen_from
from tokenwright.errors import RequestError
from tokenwright.sampling_params import Grammar

FORMATS = ("json_schema", "regex", "lark", "choice")  # options that set the field `grammar`


def _names(key: str) -> list[str]:
    option = get_args(COMMON[key])[1]
    words = [str(word) for word in (option.default, *(option.param_decls or ()))]  # typer keeps the first as a default
    return [word.removeprefix("--") for word in words if word.startswith("--")] or [key.replace("_", "-")]


NAMES: Mapping[str, str] = {_names(key)[0]: key for key in COMMON}  # as typed -> key of COMMON
ALIASES: Mapping[str, str] = {name: _names(key)[0] for key in COMMON for name in _names(key)}

SPOKEN: Mapping[str, str] = {key: f"/set {name}" for name, key in NAMES.items()}  # for error messages


def changed(chosen: Mapping[str, Any], text: str) -> tuple[dict[str, Any], str]:
    """The chosen fields of SamplingParams after `/set TEXT`, and a line that confirms it.

    TEXT is a name, and a value (several for options that may be repeated) or "default". Raises RequestError for an
    unknown name or value; the range of a value is not checked.
    """
    try:
        name, *values = shlex.split(text)
    except ValueError as error:
        raise RequestError(f"/set {text[:80]} cannot be read: {error}; quote a value that has quotes") from None
    if name == "parameter" and values:  # ollama's word before the name
        name, *values = values
    name = name.lstrip("-").replace("_", "-")
    name = ALIASES.get(name, name)
    if name not in NAMES:
        raise RequestError(f"there is no option {name[:40]!r}{_meant(name)}; /set shows them")
    key = NAMES[name]
    field = "grammar" if key in FORMATS else key
    if not values:
        return dict(chosen), f"{name} is {_shown(chosen[field]) if field in chosen else 'at its default'}"
    if values == ["default"]:
        return {one: value for one, value in chosen.items() if one != field}, f"{name} is at its default"
    given: dict[str, Any] = {**dict.fromkeys(COMMON), key: _value(key, name, values)}
    value = chosen_from(given)[field]
    return {**chosen, field: value}, f"{name} is {_shown(value)}"


def _meant(name: str) -> str:
    """Another program's name for an option of ours, else the nearest."""
    if name == "system":
        return " (/system TEXT sets the system message)"
    ours = OPTIONS.get(f"--{name}", "")
    ours = "max-tokens" if ours == "-n" else ours.removeprefix("--")
    near = [ours] if ours in ALIASES else get_close_matches(name, ALIASES, 1)
    return f", but {near[0]}" if near else ""


def listed(chosen: Mapping[str, Any]) -> str:
    set_ = [f"{name} {_shown(chosen[key])}" for name, key in NAMES.items() if key in chosen]
    if "grammar" in chosen:
        set_.append(f"{chosen['grammar'].kind.replace('_', '-')} {_shown(chosen['grammar'])}")
    return f"set: {', '.join(set_) or 'nothing'}\noptions: {', '.join(NAMES)}\n/set NAME default undoes one"


def _value(key: str, name: str, values: list[str]) -> Any:
    kind = next(one for one in (*get_args(get_args(COMMON[key])[0]), get_args(COMMON[key])[0]) if one is not type(None))
    if get_origin(kind) is list:
        [item] = get_args(kind)
        return [_converted(item, name, value) for value in values]
    if len(values) > 1:
        raise RequestError(f"/set {name} takes one value; put quotes around one with spaces")
    return _converted(kind, name, values[0])


def _converted(kind: type, name: str, value: str) -> Any:
    if kind is bool:
        if value not in ("on", "off"):
            raise RequestError(f"/set {name} takes on or off, not {value!r}")
        return value == "on"
    try:
        return kind(value)
    except ValueError:
        words = {int: "a whole number", float: "a number"}[kind]
        raise RequestError(f"/set {name} takes {words}, not {value!r}") from None


def _shown(value: object) -> str:
    if isinstance(value, Grammar):
        return value.text
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
