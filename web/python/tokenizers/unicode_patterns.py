r"""The patterns of tokenizers, which name Unicode's categories, as patterns of Python's `re`, which does not know them.

`\p{L}`, `\p{Lu}`, `\p{Han}` and `\s` become classes of ranges of code points, as do classes with these in them, with
classes in them, and intersections (`[\p{L}&&[^\p{Han}]]`). The categories are those of `unicodedata`. Patterns come
from model files; nothing here reads one of a client.
"""

import re
import unicodedata
from functools import cache
from itertools import groupby

from tokenwright.errors import CheckpointError

Ranges = tuple[tuple[int, int], ...]  # code points, the last ones included, in order and apart

_LAST = 0x10FFFF
_ASSIGNED = (range(0x40000), range(0xE0000, 0xE0200))  # beyond are only private characters
_SPACES: Ranges = (
    (9, 13), (32, 32), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
    (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000),
)  # fmt: skip
_HAN: Ranges = (  # the script, which unicodedata does not tell
    (0x2E80, 0x2E99), (0x2E9B, 0x2EF3), (0x2F00, 0x2FD5), (0x3005, 0x3005), (0x3007, 0x3007), (0x3021, 0x3029),
    (0x3038, 0x303B), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFA6D), (0xFA70, 0xFAD9), (0x16FE2, 0x16FE3),
    (0x16FF0, 0x16FF1), (0x20000, 0x2A6DF), (0x2A700, 0x2B739), (0x2B740, 0x2B81D), (0x2B820, 0x2CEA1),
    (0x2CEB0, 0x2EBE0), (0x2EBF0, 0x2EE5D), (0x2F800, 0x2FA1D), (0x30000, 0x3134A), (0x31350, 0x323AF),
)  # fmt: skip
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a", "e": "\x1b"}
_NAMED = re.compile(r"\{(\^?)(\w+)\}")
_CODE = re.compile(r"u([0-9A-Fa-f]{4})|x([0-9A-Fa-f]{2})|x\{([0-9A-Fa-f]{1,6})\}")

SPACE = "".join(chr(at) for first, last in _SPACES for at in range(first, last + 1))


@cache
def compiled(pattern: str) -> "re.Pattern[str]":
    """A pattern for `re`. Raises CheckpointError for one that is not understood."""
    found, at = [], 0
    try:
        while at < len(pattern):
            if pattern[at] == "[":
                ranges, at = _class(pattern, at + 1)
                found.append(_written(ranges))
            elif pattern[at] == "\\" and pattern[at + 1] in "pPsSdDwW":
                ranges, at = _escape(pattern, at + 1)
                found.append(_written(ranges))
            else:
                length = 2 if pattern[at] == "\\" else 1
                found.append(pattern[at : at + length])
                at += length
        return re.compile("".join(found))
    except (IndexError, ValueError, KeyError, re.error) as error:
        raise CheckpointError(f"the tokenizer's pattern {pattern[:60]!r} is not understood ({error})") from error


def _class(pattern: str, at: int) -> tuple[Ranges, int]:
    """The code points of a class, and the place after it. at: after its bracket."""
    if negated := pattern[at] == "^":
        at += 1
    whole: Ranges | None = None
    found: Ranges = ()
    first = at
    while pattern[at] != "]" or at == first:
        if pattern.startswith("&&", at):
            whole = found if whole is None else _both(whole, found)
            found, at = (), at + 2
            continue
        if pattern[at] == "[":
            part, at = _class(pattern, at + 1)
        elif pattern[at] == "\\":
            part, at = _escape(pattern, at + 1)
        else:
            part, at = ((ord(pattern[at]),) * 2,), at + 1
        if len(part) == 1 and part[0][0] == part[0][1] and pattern[at] == "-" and pattern[at + 1] != "]":
            end, at = _escape(pattern, at + 2) if pattern[at + 1] == "\\" else (((ord(pattern[at + 1]),) * 2,), at + 2)
            part = ((part[0][0], end[0][1]),)
        found = _either(found, part)
    whole = found if whole is None else _both(whole, found)
    return _others(whole) if negated else whole, at + 1


def _escape(pattern: str, at: int) -> tuple[Ranges, int]:
    """The code points of what a backslash begins, and the place after it. at: after the backslash."""
    letter = pattern[at]
    if letter in "pP":
        match = _NAMED.match(pattern, at + 1)
        if match is None:
            raise ValueError("a property without a name")
        named = _category(match[2])
        return _others(named) if (letter == "P") != bool(match[1]) else named, match.end()
    if letter in "sSdDwW":
        ranges = _SPACES if letter in "sS" else _category("Nd")
        if letter in "wW":
            for name in ("L", "M", "Pc"):
                ranges = _either(ranges, _category(name))
        return _others(ranges) if letter.isupper() else ranges, at + 1
    if code := _CODE.match(pattern, at):
        return ((int(code[1] or code[2] or code[3], 16),) * 2,), code.end()
    if letter.isalnum() and letter not in _CONTROLS:
        raise ValueError(f"\\{letter}")
    return ((ord(_CONTROLS.get(letter, letter)),) * 2,), at + 1


@cache
def _category(name: str) -> Ranges:
    """A general category, or several of one letter. Raises ValueError for what is none."""
    if name == "Han":
        return _HAN
    found = [ranges for own, ranges in _categories().items() if own.startswith(name)]
    if not found:
        raise ValueError(f"\\p{{{name}}}")
    return _either(*found)


@cache
def _categories() -> dict[str, Ranges]:
    found: dict[str, list[tuple[int, int]]] = {}
    for block in _ASSIGNED:
        at = block.start
        for name, run in groupby(map(unicodedata.category, map(chr, block))):
            length = sum(1 for _ in run)
            found.setdefault(name, []).append((at, at + length - 1))
            at += length
    return {name: tuple(ranges) for name, ranges in found.items()}


def _either(*sets: Ranges) -> Ranges:
    found: list[tuple[int, int]] = []
    for first, last in sorted(one for ranges in sets for one in ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        else:
            found.append((first, last))
    return tuple(found)


def _others(ranges: Ranges) -> Ranges:
    ends = [-1, *(last for _, last in ranges)]
    starts = [*(first for first, _ in ranges), _LAST + 1]
    return tuple((end + 1, start - 1) for end, start in zip(ends, starts, strict=True) if end + 1 < start)


def _both(one: Ranges, other: Ranges) -> Ranges:
    return _others(_either(_others(one), _others(other)))


def _written(ranges: Ranges) -> str:
    return "[" + "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in ranges) + "]"
