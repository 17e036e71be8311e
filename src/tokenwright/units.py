"""Sizes as users write and read them: tokens (k = 1024), bytes (GB = 10^9, GiB = 2^30), bytes per second."""

import re
from collections.abc import Mapping

from tokenwright.checks import MAX_TOKENS, check_whole
from tokenwright.errors import RequestError

_TOKENS: Mapping[str, int] = {"": 1, "k": 1 << 10, "m": 1 << 20}
_BYTES: Mapping[str, int] = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", 1)},
}
LEAST_BARE = 1 << 20  # bytes: a smaller size without a unit is a slip, such as 24 for 24GB
_SIZE = re.compile(r"(\d{1,15}|\d{1,3}(?:,\d{3}){1,5})(\.\d{1,6})?\s*([a-zA-Z]*)", re.ASCII)


Size = int | float | str


def read_tokens(value: Size, name: str) -> int:
    """A count of tokens: 8192, "8192", "8,192", "8k". Raises RequestError, naming the option."""
    count = _count(value, _TOKENS)
    if not 1 <= count <= MAX_TOKENS:
        raise RequestError(
            f"{name} must be a number of tokens from 1 to 2^31, such as 8192, 8k or 128k (k = 1024), not {value!r}",
            name,
        )
    return count


def read_bytes(value: Size, name: str) -> int:
    """A count of bytes: 8000000000, "8GB" (10^9), "8GiB" (2^30). Raises RequestError, naming the option."""
    count = _count(value, _BYTES)
    if not 1 <= count <= 1 << 62:
        raise RequestError(
            f"{name} must be bytes, such as 24GB (10^9), 24GiB (2^30) or 24000000000, not {value!r}", name
        )
    if isinstance(value, str) and value.strip()[-1].isdigit() and count < LEAST_BARE:
        raise RequestError(f"{name} {value} has no unit; write {value}GB, {value}GiB, or {value}B for bytes", name)
    return count


def read_rate(value: Size, name: str) -> int:
    """Bytes per second: 30000000000 or "30GB/s". Raises RequestError, naming the option."""
    if isinstance(value, str):
        bare = value.strip().lower()
        count = _count(bare.removesuffix("/s"), _BYTES) if bare.endswith("/s") else 0
    else:
        count = _count(value, _BYTES)
    if not 1 <= count <= 1 << 62:
        raise RequestError(f"{name} must be bytes per second, such as 30GB/s, not {value!r}", name)
    return count


def binary(count: int, digits: int = 1) -> str:
    """A number of bytes in B, KiB, MiB or GiB (2^n).

    >>> binary(73728)
    '72.0 KiB'
    """
    return scaled(count, 1024, ("B", "KiB", "MiB", "GiB"), digits)


def decimal(count: int) -> str:
    return scaled(count, 1000, ("B", "kB", "MB", "GB"))


def scaled(size: float, base: int, units: tuple[str, ...], digits: int = 2) -> str:
    """A size in the largest of the units, each `base` times the one before, of which it is at least one."""
    unit, *larger = units
    if size >= base and larger:
        return scaled(size / base, base, tuple(larger), digits)
    return f"{size} B" if unit == "B" else f"{size:,.{digits}f} {unit}"


def enough(count: int) -> str:
    """`count` rounded up by at most a tenth, as `read_bytes` reads it.

    >>> enough(13194139533312)
    '12288GiB'
    """
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 10 * 1024**power:
            return f"{-(-count // 1024**power)}{unit}"
    return f"{count}B"


def read_count(value: int, name: str) -> int:
    """A number from 1 to MAX_TOKENS. Raises RequestError."""
    check_whole(name, value, 1)
    return value


def _count(value: object, units: Mapping[str, int]) -> int:
    """From a number or digits with a unit; 0 for any other value."""
    if isinstance(value, bool):
        return 0
    if isinstance(value, int | float):
        return int(value) if value == value // 1 else 0  # not equal for nan and infinity
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None or match[3].lower() not in units:
        return 0
    digits, part = match[1].replace(",", ""), (match[2] or ".0")[1:]
    count, rest = divmod(int(digits + part) * units[match[3].lower()], 10 ** len(part))
    return 0 if rest else count
