"""Patterns of JSON schemas that no grammar reads, written as patterns that one does: look-ahead, and complements.

A pattern is read as an expression with conjunction and complement, from which derivatives (Brzozowski, 1964; Owens,
Reppy and Turon, 2009) make an automaton, and the elimination of its states makes a pattern again. Look-ahead is
read outside of repetitions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import combinations, pairwise, product

from tokenwright.decode.schemas.pattern_reader import ALL, MOST_READ, Node, PatternReader, Span, UnreadError, without

MOST_STATES = 60  # of an automaton
MOST_WRITTEN = 4_000  # characters of the pattern made

_BEGIN, _END = ALL, ALL + 1  # "characters" around a text, which the anchors stand for


@lru_cache(maxsize=256)
def plain(pattern: str) -> str | None:
    """A pattern of the same strings without look-ahead; None: none is found."""
    return _rewritten(pattern, other=False)


@lru_cache(maxsize=256)
def others(pattern: str) -> str | None:
    """A pattern of the strings that a pattern does not find; None: there are none, or none is found."""
    return _rewritten(pattern, other=True)


def with_written_classes(pattern: str) -> str:
    """A pattern for llguidance, which reads sets of sets in a class, where ECMA 262 has only characters."""
    found, at = "", 0
    while (start := _BEFORE_CLASS.match(pattern, at)) and start.end() < len(pattern):
        try:
            spans, length = PatternReader(pattern[start.end() :][:MOST_READ]).read_class()
        except UnreadError:
            break
        behind = start.end() + length
        text, writable = pattern[start.end() : behind], _writable(spans)
        changed = writable != spans or any(sign in text[1:] for sign in ("[", "&&", "--", "~~"))
        found += start[0] + (_class_of(writable) if changed and writable else text)
        at = behind
    return found + pattern[at:]


_BEFORE_CLASS = re.compile(r"(?:[^\\\[]|\\.)*", re.DOTALL)


def _writable(spans: Sequence[Span]) -> Sequence[Span]:
    """What JSON can write of a class by an escape of one letter, or as it is.

    For a class that has more of the control characters, llguidance takes a quote and a backslash, too.
    """
    if all(any(first <= code < behind for first, behind in spans) for code in (ord('"'), ord("\\"))):
        return spans
    parts = ((max(one, first), min(two, behind)) for one, two in _WRITABLE for first, behind in spans)
    cut = sorted((first, behind) for first, behind in parts if first < behind)
    return spans if without(without(cut)) == without(without(spans)) else cut


_WRITABLE = ((8, 11), (12, 14), (32, ALL))


@lru_cache(maxsize=1024)
def disjoint(one: str, other: str) -> bool:
    """Whether no string follows both patterns; False also where that is not found out."""
    try:
        return _combined([one, other], []) == ""
    except (UnreadError, RecursionError):
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
    except (UnreadError, RecursionError):
        return None
    return found


def listed(pattern: str, most: int) -> list[str]:
    """The strings of a pattern of one character between anchors; none, if there are more than `most`."""
    try:
        tree = PatternReader(pattern).read()
    except (UnreadError, RecursionError):
        return []
    if tree[0] != "cat" or [part[0] for part in tree[1:]] != ["begin", "set", "end"]:
        return []
    spans = tree[2][1]
    few = sum(behind - first for first, behind in spans) <= most
    return [chr(code) for span in spans for code in range(*span)] if few else []


def _rewritten(pattern: str, *, other: bool) -> str | None:
    try:
        return (_combined([], [pattern]) if other else _combined([pattern], [])) or None
    except (UnreadError, RecursionError):
        return None


def _combined(wanted: Sequence[str], unwanted: Sequence[str]) -> str:
    """A pattern of the strings that follow these and not those; "": there are none. Raises UnreadError."""
    trees = [PatternReader(pattern).read() for pattern in (*wanted, *unwanted)]
    blocks = _blocks(trees)
    each = [_expression(tree, blocks) for tree in trees]
    parts = [one if n < len(wanted) else _other(one) for n, one in enumerate(each)]
    steps, ends = _automaton(blocks, _several("and", parts))
    return _written(blocks, steps, ends) if any(ends) else ""


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
    borders = {0, 0xD800, 0xE000, ALL, _END, _END + 1} | {
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
            raise UnreadError
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
                    raise UnreadError
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
                    raise UnreadError
    return f"^{_atom(edges[-1, last])}$"


def _either(one: str, other: str) -> str:
    """Alternatives, each a sequence. An empty one comes last."""
    return one if one == other else f"(?:{one}|{other})" if one else f"(?:{other}|{one})"


def _atom(text: str) -> str:
    return text if _SINGLE.fullmatch(text) else f"(?:{text})"


_SINGLE = re.compile(r"\[(?:\\.|[^\]\\])*\]|[^\\()\[\]{}|*+?]", re.DOTALL)


def _class_of(spans: Sequence[Span]) -> str:
    joined = list[list[int]]()
    for first, behind in sorted(_writable(spans) or spans):
        if joined and joined[-1][1] in (first, 0xD800) and first in (joined[-1][1], 0xE000):
            joined[-1][1] = behind
        else:
            joined.append([first, behind])
    if joined == [[0, ALL]]:
        return r"[\s\S]"
    return f"[{''.join(_range(first, behind - 1) for first, behind in joined)}]"


def _range(first: int, last: int) -> str:
    one, other = (f"\\{chr(code)}" if chr(code) in "\\]^-[&~" else chr(code) for code in (first, last))
    return one if first == last else f"{one}-{other}"
