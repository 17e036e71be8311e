"""Patterns of JSON schemas that no grammar reads, written as patterns that one does: look-ahead, and complements.

A pattern is read as an expression with conjunction and complement, from which derivatives (Brzozowski, 1964; Owens,
Reppy and Turon, 2009) make an automaton, and the elimination of its states makes a pattern again. Classes are as in
ECMA 262: \\d and \\w are ASCII. It reads characters, classes, groups, alternatives, repetitions, ^ at the
beginning, $ at the end, and look-ahead outside of repetitions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import combinations, pairwise, product
from typing import Any

MOST_READ = 400  # characters of a pattern
MOST_REPEATED = 60  # times that a part is written out
MOST_STATES = 60  # of an automaton
MOST_WRITTEN = 4_000  # characters of the pattern made

Span = tuple[int, int]  # the first character, and the one behind the last
Node = tuple[Any, ...]

_ALL = 0x110000
_BEGIN, _END = _ALL, _ALL + 1  # "characters" around a text, which the anchors stand for
_DIGITS, _SPACES = ((48, 58),), ((9, 14), (32, 33), (160, 161), (0x2028, 0x202A), (0xFEFF, 0xFF00))
_WORDS = ((48, 58), (65, 91), (95, 96), (97, 123))
_CLASSES: dict[str, Sequence[Span]] = {"d": _DIGITS, "w": _WORDS, "s": _SPACES}
_CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "0": 0}
_REPEATED = re.compile(r"([*+?]|\{(\d+)(,?)(\d*)\})\??")
_CODE = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]+)\}")


class _Unread(Exception):
    """A pattern has a part that is not read here, or is too large."""


@lru_cache(maxsize=256)
def plain(pattern: str) -> str | None:
    """A pattern of the same strings without look-ahead; None: none is found."""
    return _rewritten(pattern, other=False)


@lru_cache(maxsize=256)
def others(pattern: str) -> str | None:
    """A pattern of the strings that a pattern does not find; None: there are none, or none is found."""
    return _rewritten(pattern, other=True)


@lru_cache(maxsize=1024)
def disjoint(one: str, other: str) -> bool:
    """Whether no string follows both patterns; False also where that is not found out."""
    try:
        return _combined([one, other], []) == ""
    except (_Unread, RecursionError):
        return False


@lru_cache(maxsize=256)
def parted(patterns: tuple[str, ...]) -> dict[str, list[str]] | None:
    """Patterns such that no string follows two, each with the given ones that its strings follow.

    None: they are so already, or none are found.
    """
    if all(disjoint(one, other) for one, other in combinations(patterns, 2)):
        return None
    found: dict[str, list[str]] = {}
    try:
        for chosen in product((True, False), repeat=len(patterns)):
            of = [one for one, taken in zip(patterns, chosen, strict=True) if taken]
            if of and (made := _combined(of, [one for one in patterns if one not in of])):
                found[made] = of
    except (_Unread, RecursionError):
        return None
    return found


def _rewritten(pattern: str, *, other: bool) -> str | None:
    try:
        return (_combined([], [pattern]) if other else _combined([pattern], [])) or None
    except (_Unread, RecursionError):
        return None


def _combined(wanted: Sequence[str], unwanted: Sequence[str]) -> str:
    """A pattern of the strings that follow these and not those; "": there are none. Raises _Unread."""
    trees = [_Reader(pattern).read() for pattern in (*wanted, *unwanted)]
    blocks = _blocks(trees)
    each = [_expression(tree, blocks) for tree in trees]
    parts = [one if n < len(wanted) else _other(one) for n, one in enumerate(each)]
    steps, ends = _automaton(blocks, _several("and", parts))
    return _written(blocks, steps, ends) if any(ends) else ""


class _Reader:
    """Reads one pattern as a tree of ("set", spans), ("cat", ...), ("or", ...), ("times", tree, least, most),
    ("look", tree, whether it must be there), ("begin",) and ("end",)."""

    def __init__(self, pattern: str) -> None:
        if len(pattern) > MOST_READ:
            raise _Unread
        self._text, self._at = pattern, 0

    def read(self) -> Node:
        tree = self._either()
        if self._at < len(self._text):
            raise _Unread
        return tree

    def _next(self, *expected: str) -> str:
        """The text expected that is next, if any; it is taken."""
        found = next((one for one in expected if self._text.startswith(one, self._at)), "")
        self._at += len(found)
        return found

    def _either(self) -> Node:
        ways = [self._row()]
        while self._next("|"):
            ways.append(self._row())
        return ways[0] if len(ways) == 1 else ("or", *ways)

    def _row(self) -> Node:
        row: list[Node] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            row.append(self._times(self._one()))
        return ("cat", *row)

    def _times(self, tree: Node) -> Node:
        while match := _REPEATED.match(self._text, self._at):
            self._at = match.end()
            bounds: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
            least, most = bounds.get(match[1]) or (int(match[2]), int(match[4]) if match[4] else None)
            if match[2] and not match[3]:
                most = least
            if max(least, most or 0) > MOST_REPEATED or (most is not None and most < least):
                raise _Unread
            tree = ("times", tree, least, most)
        return tree

    def _one(self) -> Node:
        letter = self._text[self._at]
        if letter == "(":
            return self._group()
        self._at += 1
        if letter in "^$":
            return ("begin",) if letter == "^" else ("end",)
        if letter == ".":
            return ("set", ((0, 10), (11, _ALL)))
        if letter == "[":
            return ("set", self._class())
        if letter == "\\":
            return ("set", self._escaped())
        if letter in "*+?{}":
            raise _Unread
        return ("set", ((ord(letter), ord(letter) + 1),))

    def _group(self) -> Node:
        kind = self._next("(?:", "(?=", "(?!", "(")
        if kind == "(" and self._next("?"):
            raise _Unread
        tree = self._either()
        if not self._next(")"):
            raise _Unread
        return ("look", tree, kind == "(?=") if kind in ("(?=", "(?!") else tree

    def _escaped(self) -> Sequence[Span]:
        letter = self._text[self._at : self._at + 1]
        if match := _CODE.match(self._text, self._at):
            self._at = match.end()
            code = int(match[1] or match[2] or match[3], 16)
            return ((code, code + 1),)
        self._at += 1
        if spans := _CLASSES.get(letter.lower()):
            return spans if letter.islower() else _without(spans)
        if not letter or (letter.isalnum() and letter not in _CONTROLS):
            raise _Unread  # such as a reference to a group, or the border of a word
        code = _CONTROLS.get(letter, ord(letter))
        return ((code, code + 1),)

    def _class(self) -> Sequence[Span]:
        inverted, spans = bool(self._next("^")), list[Span]()
        while not self._next("]"):
            first = self._member()
            if len(first) == 1 and first[0][1] - first[0][0] == 1 and self._ranges():
                self._at += 1
                last = self._member()
                if len(last) != 1 or last[0][1] <= first[0][0]:
                    raise _Unread
                first = ((first[0][0], last[0][1]),)
            spans += first
        return _without(spans) if inverted else tuple(spans)

    def _ranges(self) -> bool:
        return self._text[self._at : self._at + 1] == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", "")

    def _member(self) -> Sequence[Span]:
        letter = self._text[self._at : self._at + 1]
        self._at += 1
        if not letter or self._text[self._at - 1 : self._at + 1] in ("&&", "--", "~~", "[:"):
            raise _Unread
        return self._escaped() if letter == "\\" else ((ord(letter), ord(letter) + 1),)


def _without(spans: Iterable[Span]) -> Sequence[Span]:
    """The characters that are in none of the spans."""
    found, at = list[Span](), 0
    for first, behind in sorted(spans):
        if first > at:
            found.append((at, first))
        at = max(at, behind)
    return tuple(found + ([(at, _ALL)] if at < _ALL else []))


# Expressions: ("set", bits of blocks), ("cat", a, b), ("star", a), ("or", parts), ("and", parts), ("not", a).
_NOTHING: Node = ("set", 0)
_EMPTY: Node = ("star", _NOTHING)
_ANYTHING: Node = ("not", _NOTHING)


def _other(one: Node) -> Node:
    return one[1] if one[0] == "not" else ("not", one)


def _cat(one: Node, other: Node) -> Node:
    if _NOTHING in (one, other):
        return _NOTHING
    if _EMPTY in (one, other):
        return other if one == _EMPTY else one
    return ("cat", one[1], _cat(one[2], other)) if one[0] == "cat" else ("cat", one, other)


def _several(kind: str, parts: Iterable[Node]) -> Node:
    """The union ("or") or the conjunction ("and") of expressions."""
    idle, rules = (_NOTHING, _ANYTHING) if kind == "or" else (_ANYTHING, _NOTHING)
    found = {inner for one in parts for inner in (one[1] if one[0] == kind else (one,))} - {idle}
    if rules in found:
        return rules
    return idle if not found else next(iter(found)) if len(found) == 1 else (kind, frozenset(found))


def _blocks(trees: Iterable[Node]) -> list[Span]:
    """The characters, in blocks that no set of the patterns parts."""
    borders = {0, 0xD800, 0xE000, _ALL, _END, _END + 1} | {
        one for tree in trees for span in _spans(tree) for one in span
    }
    cuts = sorted(border for border in borders if border <= _END + 1 and not 0xD800 < border < 0xE000)
    return [span for span in pairwise(cuts) if span[0] != 0xD800]


def _expression(tree: Node, blocks: Sequence[Span]) -> Node:
    """The expression of the texts that a pattern finds, between their beginning and their end."""

    def of(spans: Sequence[Span]) -> Node:
        return ("set", sum(1 << n for n, (first, _) in enumerate(blocks) if any(a <= first < b for a, b in spans)))

    def built(tree: Node, after: Node, *, looped: bool = False, first: bool, last: bool) -> Node:
        """Texts of a tree and what comes after it. first, last: nothing of the pattern is before it, or behind it."""
        if tree[0] == "or":
            return _several("or", (built(one, after, looped=looped, first=first, last=last) for one in tree[1:]))
        if tree[0] == "cat":
            for n in range(len(tree) - 1, 0, -1):
                edges = {"first": first and n == 1, "last": last and n == len(tree) - 1}
                after = built(tree[n], after, looped=looped, **edges)
            return after
        if tree[0] == "set":
            return _cat(of(tree[1]), after)
        if tree[0] == "times":
            return _cat(repeated(*tree[1:]), after)
        if looped or (tree[0] == "begin" and not first) or (tree[0] == "end" and not last):
            raise _Unread
        if tree[0] == "look":
            ahead = built(tree[1], _ANYTHING, first=False, last=True)
            return _several("and", (ahead if tree[2] else _other(ahead), after))
        at = _BEGIN if tree[0] == "begin" else _END
        return _cat(of(((at, at + 1),)), after)

    def repeated(tree: Node, least: int, most: int | None) -> Node:
        one = built(tree, _EMPTY, looped=True, first=False, last=False)
        found = ("star", one) if most is None else _EMPTY
        for _ in range((most or least) - least):
            found = _several("or", (_EMPTY, _cat(one, found)))
        for _ in range(least):
            found = _cat(one, found)
        return found

    found = built(tree, _ANYTHING, first=True, last=True)
    return _cat(_ANYTHING, found)


def _spans(tree: Node) -> Iterable[Span]:
    if tree[0] == "set":
        yield from tree[1]
    else:
        for one in tree[1:]:
            if isinstance(one, tuple):
                yield from _spans(one)


def _nullable(one: Node) -> bool:
    match one[0]:
        case "set":
            return False
        case "star":
            return True
        case "not":
            return not _nullable(one[1])
        case "cat":
            return _nullable(one[1]) and _nullable(one[2])
    return any(map(_nullable, one[1])) if one[0] == "or" else all(map(_nullable, one[1]))


def _derived(one: Node, block: int) -> Node:
    """The texts that may follow a character of a block."""
    match one[0]:
        case "set":
            return _EMPTY if one[1] >> block & 1 else _NOTHING
        case "star":
            return _cat(_derived(one[1], block), one)
        case "not":
            return _other(_derived(one[1], block))
        case "cat":
            found = _cat(_derived(one[1], block), one[2])
            return _several("or", (found, _derived(one[2], block))) if _nullable(one[1]) else found
    return _several(one[0], (_derived(part, block) for part in one[1]))


def _automaton(blocks: Sequence[Span], made: Node) -> tuple[list[dict[int, int]], list[bool]]:
    """The states behind the beginning, as the state that each block leads to; and which of them may end."""
    begin, end = (next(n for n, span in enumerate(blocks) if span[0] == edge) for edge in (_BEGIN, _END))
    letters = [n for n in range(len(blocks)) if n not in (begin, end)]
    found = {_derived(made, begin): 0}
    states, steps = list(found), list[dict[int, int]]()
    for state in states:  # which grows
        step = {}
        for block in letters:
            if (after := _derived(state, block)) not in found:
                found[after] = len(states)
                states.append(after)
                if len(states) > MOST_STATES:
                    raise _Unread
            step[block] = found[after]
        steps.append(step)
    return _merged(steps, [_nullable(_derived(state, end)) for state in states])


def _merged(steps: list[dict[int, int]], ends: list[bool]) -> tuple[list[dict[int, int]], list[bool]]:
    """The same automaton with states that nothing tells apart as one; the first stays the first."""
    kinds, number = [int(one) for one in ends], 0
    while number != (number := len(set(kinds))):
        keys = [(kind, *(kinds[to] for to in step.values())) for kind, step in zip(kinds, steps, strict=True)]
        numbers = {key: n for n, key in enumerate(dict.fromkeys(keys))}
        kinds = [numbers[key] for key in keys]
    firsts = [kinds.index(kind) for kind in range(len(set(kinds)))]
    return [{block: kinds[to] for block, to in steps[one].items()} for one in firsts], [ends[one] for one in firsts]


def _written(blocks: Sequence[Span], steps: list[dict[int, int]], ends: list[bool]) -> str:
    """The pattern of an automaton's texts: its states are eliminated, those with the fewest ways through them first."""
    last = len(steps)
    edges: dict[tuple[int, int], str] = {(-1, 0): ""} | {(n, last): "" for n, ending in enumerate(ends) if ending}
    for n, step in enumerate(steps):
        for to in set(step.values()):
            edges[n, to] = _class_of([blocks[block] for block, after in step.items() if after == to])
    waiting = set(range(last))
    while waiting:
        into, out = ({n: [edge for edge in edges if edge[side] == n] for n in waiting} for side in (1, 0))
        state = min(waiting, key=lambda n: (len(into[n]) * len(out[n]), n))
        waiting.remove(state)
        loop = edges.pop((state, state), None)
        again = "" if loop is None else f"{_atom(loop)}*"
        before, behind = ({edge: edges.pop(edge) for edge in each[state] if edge in edges} for each in (into, out))
        for (start, _), head in before.items():
            for (_, stop), tail in behind.items():
                way = f"{head}{again}{tail}"
                edges[start, stop] = _either(edges[start, stop], way) if (start, stop) in edges else way
                if len(edges[start, stop]) > MOST_WRITTEN:
                    raise _Unread
    return f"^{_atom(edges[-1, last])}$"


def _either(one: str, other: str) -> str:
    """Alternatives, each a sequence. An empty one comes last."""
    return one if one == other else f"(?:{one}|{other})" if one else f"(?:{other}|{one})"


def _atom(text: str) -> str:
    return text if _SINGLE.fullmatch(text) else f"(?:{text})"


_SINGLE = re.compile(r"\[(?:\\.|[^\]\\])*\]|[^\\()\[\]{}|*+?]", re.DOTALL)


def _class_of(spans: Sequence[Span]) -> str:
    joined = list[list[int]]()
    for first, behind in sorted(spans):
        if joined and joined[-1][1] in (first, 0xD800) and first in (joined[-1][1], 0xE000):
            joined[-1][1] = behind
        else:
            joined.append([first, behind])
    if joined == [[0, _ALL]]:
        return r"[\s\S]"
    return f"[{''.join(_range(first, behind - 1) for first, behind in joined)}]"


def _range(first: int, last: int) -> str:
    one, other = (f"\\{chr(code)}" if chr(code) in "\\]^-[&~" else chr(code) for code in (first, last))
    return one if first == last else f"{one}-{other}"
