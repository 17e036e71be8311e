"""Checks of callers' values and names of options. Errors name the option and what it may be."""

import functools
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import ParamSpec, TypeGuard, TypeVar

from tokenwright.errors import RequestError

MAX_BYTES = 1 << 62
MAX_TOKENS = 1 << 31  # tokens, and counts of tokens: positions have 32 bits


def shown(value: object) -> str:
    """A value for a message. Python prints no integers of thousands of digits, and no very deep values."""
    try:
        return repr(value)[:80]
    except (ValueError, RecursionError):
        return "one of thousands of " + ("digits" if isinstance(value, int) else "digits or levels")


def json_word(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return "an object" if isinstance(value, dict) else "a list" if isinstance(value, list) else shown(value)


def is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def check_whole(name: str, value: object, least: int = 0, most: int = MAX_TOKENS) -> None:
    """Raises RequestError for anything but a whole number from `least` to `most`."""
    if not is_whole(value) or not least <= value <= most:
        raise RequestError(f"{name} must be a whole number from {least:,} to {most:,}, not {shown(value)}", name)


def check_bool(name: str, value: object) -> None:
    """Raises RequestError for anything but True and False: a string such as "no" would count as True."""
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be True or False, not {shown(value)}", name)


def check_device(name: str) -> None:
    """Raises RequestError for anything but a device's name, whether or not this machine has it."""
    if not re.fullmatch(r"auto|cpu|mps|(gpu|cuda)(:\d{1,3})?", name):
        raise RequestError(f"device {name!r} is not known; use auto, cpu, gpu, gpu:N, cuda, cuda:N or mps", "device")


def folders(name: str, value: object) -> tuple[str | Path, ...]:
    """An option's one or several folders. Raises RequestError."""
    found = value if isinstance(value, list | tuple) else (value,)
    if not all(isinstance(folder, str | Path) for folder in found):
        raise RequestError(f"{name} must be a folder, or a list of folders, not {shown(value)}", name)
    return tuple(found)


def check_folder(name: str, value: object) -> None:
    """Raises RequestError for a value that cannot be the name of a folder."""
    if not isinstance(value, str) or not value or "\0" in value:
        raise RequestError(f"{name} must be a folder, not {shown(value)}", name)


def escaped_byte(character: str) -> bool:
    """Whether this surrogate stands for a byte that is not UTF-8."""
    return "\udc80" <= character <= "\udcff"


_NAMES = Path(__file__).with_suffix(".txt")


@functools.cache
def read_table(section: str, file: Path = _NAMES) -> Mapping[str, str]:
    """Other programs' names, each with ours, or with a sentence. An entry of the file is ours and theirs."""
    table = file.read_text(encoding="utf-8").partition(f"[{section}]\n")[2].partition("\n[")[0]
    entries = re.findall(r"^(\S.*?): (.*(?:\n .*)*)", table, re.MULTILINE)
    return {theirs: ours for ours, names in entries for theirs in names.split()}


def no_attribute(what: str, name: str, section: str) -> AttributeError:
    """section: of the names of others."""
    ours = read_table(section).get(name)
    hint = "" if ours is None else f": {ours}" if len(ours.split()) > 4 else f"; did you mean {ours}?"
    return AttributeError(f"{what} has no attribute {name!r}{hint}")


_SECTIONS = {"LLM": "model", "embed": "embedding", "rerank": "embedding", "score": "embedding"}


def unknown_name(what: str, name: str, known: Collection[str], section: str) -> RequestError:
    """The error of an unknown keyword, with the one that was probably meant.

    >>> str(unknown_name("option of LLM", "n_threads", ["threads"], "model"))
    'n_threads is no option of LLM; did you mean threads?'
    """
    ours = read_table(section).get(name)
    if ours is not None and " " in ours and not ours.startswith("the method"):
        return RequestError(f"{name} is no {what}: {ours}", name)
    near = [ours] if ours is not None else get_close_matches(name, known, 1)
    return RequestError(f"{name} is no {what}" + (f"; did you mean {near[0]}?" if near else ""), name)


P = ParamSpec("P")
R = TypeVar("R")


def hinting(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function answer another library's keyword by a RequestError with ours."""
    name = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]
    parameters = inspect.signature(function).parameters
    known = [one for one in parameters if one != "self"]
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    section = _SECTIONS.get(name, "text")
    what = "sampling parameter" if section == "text" else f"option of {name}"

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for given in kwargs:
            if given not in parameters and (not takes_any or given in read_table(section)):
                raise unknown_name(what, given, known, section)
        return function(*args, **kwargs)

    return checked


def hinting_fields(cls: type[R]) -> type[R]:
    """A dataclass whose construction is `hinting`."""
    cls.__init__ = hinting(cls.__init__)  # type: ignore[method-assign]
    return cls
