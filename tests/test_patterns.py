"""Every regular expression in the rooms that clients' texts reach takes time in proportion to the text.

Python's `re` tries again where it fails, and holds the interpreter's lock: one pattern that tries each start, or each
way through a repetition, stops the server. For each pattern texts are made of its own parts: a beginning that it takes,
one of its repetitions many times, and an end that it refuses.
"""

import ast
import importlib
import re
import time
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import tokenwright

SOURCE = Path(tokenwright.__file__).parent
ROOMS = ("serve", "decode", "text", "llm")
LONG = 2**16  # characters of the longest texts
SEARCHING = ("search", "sub", "subn", "split", "findall", "finditer")
SHORT = {"tokenwright.serve.ollama.bodies._PART": 64}  # characters that reach a pattern, where its module bounds them
METHODS = (*SEARCHING, "match", "fullmatch")
SPOILERS = ("", "\0", "!", "\n", "x", '"', " ", "é")
READ = re._parser  # type: ignore[attr-defined]  # the parser of `re`, which has no public name


class Found(NamedTuple):
    """A pattern of a module, and the methods by which it is used there."""

    place: str
    pattern: re.Pattern[Any]
    methods: frozenset[str]


def modules() -> Iterator[tuple[str, Path]]:
    for room in ROOMS:
        for path in sorted((SOURCE / room).rglob("*.py")):
            name = ".".join(("tokenwright", *path.relative_to(SOURCE).with_suffix("").parts))
            yield name.removesuffix(".__init__"), path


def uses() -> dict[str, set[str]]:
    """The methods of patterns that are used of each name anywhere in the package, such as {"_WORD": {"match"}}."""
    found: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for name, method in re.findall(rf"(\w+)\.({'|'.join(METHODS)})\b", path.read_text(encoding="utf-8")):
            found.setdefault(name, set()).add(method)
    return found


def named(name: str, used: dict[str, set[str]]) -> Iterator[Found]:
    """The patterns that a module keeps under names of its own, its classes' among them."""
    module = importlib.import_module(name)
    owners = [module, *(one for one in vars(module).values() if isinstance(one, type) and one.__module__ == name)]
    for owner in owners:
        for key, value in vars(owner).items():
            each = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
            for one in each:
                if isinstance(one, re.Pattern):
                    methods = used.get(key, set()) if one is value else set()
                    yield Found(f"{name}.{key}", one, frozenset(methods or {"match", "search"}))


def written(name: str, path: Path) -> Iterator[Found]:
    """The patterns that stand in calls, such as re.sub("a", ...)."""
    text = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)) if "re." in text else ():
        if not isinstance(node, ast.Call) or not node.args or not isinstance(node.func, ast.Attribute):
            continue
        owner, method, first = node.func.value, node.func.attr, node.args[0]
        constant = isinstance(first, ast.Constant) and isinstance(first.value, str | bytes)
        if isinstance(owner, ast.Name) and owner.id == "re" and constant and method in METHODS:
            yield Found(f"{name}:{node.lineno}", re.compile(first.value), frozenset({method}))  # type: ignore[attr-defined]


@cache
def patterns() -> list[Found]:
    used = uses()
    found = {}
    for name, path in modules():
        for one in (*named(name, used), *written(name, path)):
            found.setdefault((one.pattern.pattern, one.pattern.flags, one.methods), one)
    return list(found.values())


def letters(members: list[tuple[Any, Any]]) -> list[str]:
    """Characters of a class: one of each part, or others where the class is negated."""
    kind = {"LITERAL": lambda of: chr(of), "RANGE": lambda of: chr(of[0])}
    categories = {"CATEGORY_DIGIT": "0", "CATEGORY_SPACE": " ", "CATEGORY_WORD": "a", "CATEGORY_NOT_SPACE": "a"}
    found = [kind[str(op)](of) if str(op) in kind else categories.get(str(of), "-") for op, of in members if op]
    if str(members[0][0]) != "NEGATE":
        return found
    return [one for one in ("a", "-", " ", "0", '"', "\\", "\n", "<") if one not in found[1:]][:3]


def sample(tree: Any, pick: int = 0) -> str:
    """A short text that a part of a pattern takes. pick: the number of the alternative, or of the letter of a class."""
    text = ""
    for op, of in tree:
        name = str(op)
        if name == "LITERAL":
            text += chr(of)
        elif name == "NOT_LITERAL":
            text += "b" if of == ord("a") else "a"
        elif name == "ANY":
            text += "a"
        elif name == "IN":
            choices = letters(of) or ["a"]
            text += choices[pick % len(choices)]
        elif name == "BRANCH":
            text += sample(of[1][pick % len(of[1])], pick)
        elif name == "SUBPATTERN":
            text += sample(of[-1], pick)
        elif name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            text += sample(of[2], pick) * max(1, of[0])
        elif name == "ATOMIC_GROUP":
            text += sample(of, pick)
    return text


def repetitions(tree: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """The parts of a pattern that may be taken often, each with a text that may stand before it."""
    for op, of in tree:
        name = str(op)
        if name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            if int(of[1]) > 64:
                yield before, of[2]
            yield from repetitions(of[2], before)
        elif name == "BRANCH":
            for one in of[1]:
                yield from repetitions(one, before)
        elif name in ("SUBPATTERN", "ATOMIC_GROUP", "ASSERT", "ASSERT_NOT"):
            yield from repetitions(of if name == "ATOMIC_GROUP" else of[-1], before)
        before += sample([(op, of)])


def hostile(pattern: re.Pattern[Any]) -> Iterator[tuple[str, str, str]]:
    """Beginnings, what to repeat behind them, and ends."""
    written = pattern.pattern if isinstance(pattern.pattern, str) else pattern.pattern.decode("latin-1")
    tree = READ.parse(written, pattern.flags)
    parts: dict[tuple[str, str], None] = {}
    for before, body in repetitions(tree):
        each = [sample(body, pick) for pick in range(4)]
        for one in (*each, each[0] + each[-1]):
            parts[before, one] = None
    whole = sample(tree)
    for one in {*whole, whole}:
        parts["", one] = None
    for before, body in parts:
        if body:
            yield from ((before, body, end) for end in SPOILERS)


def took(found: Found, method: str, text: str) -> float:
    given: Any = text if isinstance(found.pattern.pattern, str) else text.encode("latin-1")
    begun = time.process_time()
    if method in SEARCHING:
        for _ in found.pattern.finditer(given):
            pass
    else:
        getattr(found.pattern, method)(given)
    return time.process_time() - begun


ALLOWED_S = 30 * took(Found("", re.compile(r"\w"), frozenset()), "finditer", "a" * LONG)  # some 10 us a character


def slow(found: Found) -> str:
    """A text for which a pattern takes far longer than a plain one takes for its length; "": there is none.

    The texts grow: what is exponential shows by 24 repetitions, what is cubic with 2,000 characters. They grow no
    further once the longest would not take too long even if the time grew with the square of the length.
    """
    longest = SHORT.get(found.place, LONG)
    for (before, body, end), method in product(hostile(found.pattern), found.methods):
        for repeated in (*range(10, 25, 2), *(max(1, 2**power // len(body)) for power in range(8, 17))):
            length = len(body) * repeated
            if length > longest:
                continue
            seconds = took(found, method, before + body * repeated + end)
            if seconds > ALLOWED_S:
                return f"{method} of {before!r}, {body!r} {repeated} times, {end!r}"
            if repeated > 24 and seconds * (longest / length) ** 2 < ALLOWED_S:
                break
    return ""


@pytest.mark.parametrize("found", patterns(), ids=lambda found: found.place)
def test_a_pattern_takes_time_in_proportion_to_its_text(found: Found) -> None:
    assert not slow(found), found.pattern.pattern


@pytest.mark.parametrize("pattern", [r"(a+)+$", r"\s+$", r"(?:(\d+h)?(\d+m)?)*x", r"<.*?>"])
def test_patterns_that_try_again_are_found(pattern: str) -> None:
    assert slow(Found("planted", re.compile(pattern), frozenset({"search"})))


def test_patterns_are_found() -> None:
    """In each room, named and in calls."""
    places = [found.place.split(".")[1] for found in patterns()]
    assert {*places} == {*ROOMS}
    assert len(places) > 30
    assert any(":" in found.place for found in patterns())
