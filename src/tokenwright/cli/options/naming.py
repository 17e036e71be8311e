"""Error messages in the words of the command line: the option that was typed in place of a Python parameter.

The library's errors name parameters (`max_tokens`, `n`), each in its `fields`. A hint in parentheses at parameters that
the command lacks is left out, or names the command that has one.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenwright.errors import TokenwrightError

ALIASES = {"new_tokens": "max_tokens", "adapter": "adapters"}  # a command's parameter -> the library's
_HINT = re.compile(r" \(([a-z_]+(?: or [a-z_]+)*)\)")
# The library's, of which some commands have options.
_SOME = ("pages", "kv_memory", "page_size", "token_budget", "lora", "adapters")
_ELSEWHERE = {"adapters": "serve --adapter"}  # those that only another command has


def options_of(parameters: Sequence[Any], typed: Sequence[str] = ()) -> dict[str, str]:
    """Options by the library's names: as `typed` if they were, else in their first long form."""
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
