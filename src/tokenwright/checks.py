"""Checks of values that a caller gave. Their errors name the option and the values that it may have."""

from pathlib import Path
from typing import TypeGuard

from tokenwright.errors import RequestError

MAX_BYTES = 1 << 62  # of memory
MAX_TOKENS = 1 << 31  # tokens, and whatever is counted in them: positions have 32 bits


def shown(value: object) -> str:
    """A value for a message. Python prints no integers of thousands of digits, and nothing that is nested so deeply."""
    try:
        return repr(value)[:80]
    except (ValueError, RecursionError):
        return "one of thousands of " + ("digits" if isinstance(value, int) else "digits or levels")


def is_whole(value: object) -> TypeGuard[int]:
    """Whether it is an int; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_whole(name: str, value: object, least: int = 0, most: int = MAX_TOKENS) -> None:
    """Raises RequestError for anything but a whole number from `least` to `most`."""
    if not is_whole(value) or not least <= value <= most:
        raise RequestError(f"{name} must be a whole number from {least:,} to {most:,}, not {shown(value)}", name)


def check_bool(name: str, value: object) -> None:
    """Raises RequestError for anything but True and False: a string such as "no" would count as True."""
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be True or False, not {shown(value)}", name)


def folders(name: str, value: object) -> tuple[str | Path, ...]:
    """The folders of an option that takes one or a list of them. Raises RequestError for anything else."""
    found = value if isinstance(value, list | tuple) else (value,)
    if not all(isinstance(folder, str | Path) for folder in found):
        raise RequestError(f"{name} must be a folder, or a list of folders, not {shown(value)}", name)
    return tuple(found)


def check_folder(name: str, value: object) -> None:
    """Raise RequestError for a value that cannot be the name of a folder."""
    if not isinstance(value, str) or not value or "\0" in value:
        raise RequestError(f"{name} must be a folder, not {shown(value)}", name)


def escaped_byte(character: str) -> bool:
    """Whether Python put this surrogate in the place of a byte that is not UTF-8: in arguments, names and input."""
    return "\udc80" <= character <= "\udcff"
