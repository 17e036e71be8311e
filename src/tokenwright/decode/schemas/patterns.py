"""Patterns of JSON schemas (ECMA 262) as llguidance reads them (Rust's dialect). Nothing here runs a pattern.

To a class with control characters and not both a quote and a backslash, llguidance adds these two; so such a class
loses the control characters, or the pattern is not read.
"""

import re
from typing import Any

_TOKEN = re.compile(r"\\u(?:\{[0-9a-fA-F]*\}|[0-9a-fA-F]{4})|\\x[0-9a-fA-F]{2}|\\.|\(\?<?[=!]|\[\^?|.", re.DOTALL)
_ESCAPES = frozenset("btnfr")  # of control characters that JSON writes with one letter
_OTHERS = r"\x00-\x07\x0b\x0e-\x1f"


def readable(pattern: Any) -> Any:
    """A pattern for llguidance; None for one with look-around, references to groups, or classes as above."""
    if not isinstance(pattern, str):
        return pattern  # which is a mistake
    found: list[str] = []
    opened = ""  # how the open class begins
    for token in _TOKEN.findall(pattern):
        before = found[-1] if found else ""
        if not opened:
            if token.startswith("(?") or (token[0] == "\\" and token[1:2] in "123456789"):
                return None
            opened = token if token[0] == "[" else ""
            found.append(token)
        elif token == "]":
            if before == "[":
                return None
            found.append((_OTHERS if opened == "[^" else "") + token)
            opened = ""
        else:
            if opened == "[" and (_is_control(token) or (token == "-" and before[1:] in _ESCAPES)):
                return None
            found.append(f"\\{token}" if token[0] in "[&~" or token == before == "-" else token)
    return "".join(found)


def _is_control(token: str) -> bool:
    """Whether a part of a class is a control character without an escape of one letter."""
    if token[:2] in ("\\x", "\\u"):
        digits = token[2:].strip("{}")
        return digits != "" and int(digits, 16) < 32
    return token[:2] in ("\\0", "\\c", "\\v") or token < " "
