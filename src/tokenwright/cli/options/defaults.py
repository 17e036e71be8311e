"""Defaults of common options, from a settings file and TOKENWRIGHT_* variables. Typed options win over both.

The file's key kv-memory is --kv-memory; TOKENWRIGHT_KV_MEMORY wins over it. Its table [serve] is the server's.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from tokenwright.environment import Environment
from tokenwright.errors import RequestError
from tokenwright.regular_file import open_regular
from tokenwright.serve.settings import Settings

SERVE = "serve"
COMMON: Mapping[str, type] = {
    "model": str, "device": str, "dtype": str, "weights": str, "kv": str, "kv-memory": str, "kv-disk": str,
    "kv-disk-size": str, "window": int, "sinks": int, "page-size": int, "token-budget": int, "speculate": str,
    "draft": str, "draft-weights": str, "threads": int, "tensor-parallel": int, "expert-memory": str, "gpu-layers": str,
    "max-tokens": int, "temperature": float, "top-k": int, "top-p": float, "min-p": float, "seed": int, "quiet": bool,
}  # fmt: skip
SAMPLING = ("max-tokens", "temperature", "top-k", "top-p", "min-p", "seed")  # merged by `sampling.sampled`
DEFAULTS = tuple(name for name in COMMON if name not in SAMPLING)  # of the same options in any command
OTHER = (  # variables of the environment and of `serve`
    *("settings", "debug", "cache", "kernels", "isa"),
    *(one.name.replace("_", "-") for one in fields(Settings)),
)


def read(environment: Environment | None = None) -> dict[str, Any]:
    """The defaults by option name. Raises RequestError that names the file or variable."""
    environment = environment or Environment.read()
    return _of_file(environment) | _of_variables(environment.defaults)


def of_serve(environment: Environment | None = None) -> Mapping[str, Any]:
    environment = environment or Environment.read()
    found = _content(environment).get(SERVE, {})
    if not isinstance(found, dict):
        raise RequestError(f"serve in {environment.settings} must be a table, [serve], not {found!r}")
    return found


def _content(environment: Environment) -> dict[str, Any]:
    file = environment.settings
    try:
        with open_regular(file.expanduser()) as stream:
            return tomllib.load(stream)
    except (FileNotFoundError, NotADirectoryError, RuntimeError) as error:  # RuntimeError: the home is unknown
        if environment.settings_named:
            raise RequestError(f"TOKENWRIGHT_SETTINGS names {file}, which does not exist") from error
        return {}
    except OSError as error:
        raise RequestError(f"the settings in {file} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the settings in {file} are not TOML: {error}") from error


def _of_file(environment: Environment) -> dict[str, Any]:
    file, found = environment.settings, {}
    for key, value in _content(environment).items():
        if key == SERVE:
            continue
        name = key.replace("_", "-")
        if name not in COMMON:
            raise RequestError(f"{file} sets {key!r}, which is no setting{_near(name, COMMON)}")
        if not _fits(value, COMMON[name]):
            raise RequestError(f"{key} in {file} must be {_KINDS[COMMON[name]]}, not {value!r}")
        found[name] = value
    return found


def _of_variables(variables: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for variable, text in variables.items():
        name = variable.lower().replace("_", "-")
        if name in COMMON:
            found[name] = _parsed(variable, text, COMMON[name])
        elif name not in OTHER and (near := _near(name, (*COMMON, *OTHER), variable=True)):
            raise RequestError(f"the variable TOKENWRIGHT_{variable} is not known{near}")
    return found


def _parsed(variable: str, text: str, kind: type) -> Any:
    try:
        if kind is bool:
            return {"0": False, "1": True}[text]
        return kind(text)
    except (ValueError, KeyError):
        wanted = "0 or 1" if kind is bool else _KINDS[kind]
        raise RequestError(f"TOKENWRIGHT_{variable} must be {wanted}, not {text[:80]!r}") from None


_KINDS = {str: "text in quotes", int: "a whole number", float: "a number", bool: "true or false"}


def _fits(value: object, kind: type) -> bool:
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def _near(name: str, names: Any, *, variable: bool = False) -> str:
    found = get_close_matches(name, list(names), 1, 0.75)
    if found:
        return f"; did you mean {'TOKENWRIGHT_' + found[0].upper().replace('-', '_') if variable else found[0]}?"
    return "" if variable else f"; the settings are {', '.join(names)}"
