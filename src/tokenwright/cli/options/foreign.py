"""Hints for options and commands of llama.cpp, vLLM, ollama and transformers that have other names here."""

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tokenwright.checks import read_table
from tokenwright.errors import TokenwrightError

ALIASES = {"new_tokens": "max_tokens", "adapter": "adapters"}  # a command's parameter -> the library's
_HINT = re.compile(r" \(([a-z_]+(?: or [a-z_]+)*)\)")
_SOME = ("pages", "kv_memory", "page_size", "token_budget", "lora", "adapters")  # that only some commands have
_ELSEWHERE = {"adapters": "serve --adapter"}  # that only another command has


def options_of(parameters: Sequence[Any], typed: Sequence[str] = ()) -> dict[str, str]:
    """Options by the library's names, in the form that was typed, else in their first long form."""
    found: dict[str, str] = {}
    given = {word.partition("=")[0] for word in typed}
    for parameter in parameters:
        flags = [flag for flag in parameter.opts if flag.startswith("-")]
        if flags:
            longest = [flag for flag in flags if flag.startswith("--")] or flags
            said = [flag for flag in flags if flag in given]
            found[ALIASES.get(parameter.name, parameter.name)] = (said or longest)[0]
    return found


def spoken(error: TokenwrightError, options: Mapping[str, str]) -> str:
    text = _HINT.sub(lambda hint: _hinted(hint, options), str(error))
    names = {*error.fields, *(name for name in options if "_" in name)}
    for name in sorted(names & options.keys(), key=len, reverse=True):
        text = re.sub(rf"(?<![\w'\"/.-]){name}(?![\w'\"/=-]|\.\w)", options[name], text)
    return text


def _hinted(hint: re.Match[str], options: Mapping[str, str]) -> str:
    names = hint[1].split(" or ")
    if not any(name in _SOME for name in names):
        return hint[0]
    known = [options[name] for name in names if name in options]
    known = known or [_ELSEWHERE[name] for name in names if name in _ELSEWHERE]
    return f" ({' or '.join(known)})" if known else ""


_TABLES = Path(__file__).with_suffix(".txt")
OPTIONS, COMMANDS = read_table("options", _TABLES), read_table("commands", _TABLES)


def hint_of_option(name: str, flags: Sequence[str]) -> str:
    ours = OPTIONS.get(name)
    if ours is not None and not ours.startswith("-"):
        return f": {ours}"
    if ours is not None:
        return f"; did you mean {ours}?" if ours in flags else f"; {ours} is an option of other commands"
    near = [flag for flag in flags if len(name) > 3 and flag.startswith(name)]
    near = near or sorted(get_close_matches(name, flags, 3))
    return f"; did you mean {', '.join(near)}?" if near else ""


def hint_of_command(name: str, commands: Sequence[str]) -> str:
    ours = COMMANDS.get(name)
    if ours is not None and ours not in commands:
        return f": {ours}"
    near = [ours] if ours is not None else get_close_matches(name, commands, 1)
    return f"; did you mean {near[0]}?" if near else ""


def short_foreign(words: Sequence[str]) -> str | None:
    for before, word in zip(("", *words), words, strict=False):
        if word == "--":
            return None
        if word in _LETTERS and not before.startswith("--"):
            return word  # read as several options
    return None


_LETTERS: Mapping[str, str] = {name: ours for name, ours in OPTIONS.items() if name[1] != "-" and len(name) > 2}
