"""The tree of a beam search as lines of text: where beams fork, which were dropped, and which ended."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tokenwright.llm.outputs import TreeToken


@dataclass(slots=True)
class TreeLine:
    tokens: list[TreeToken] = field(default_factory=list)  # consecutive ones without a fork
    below: "list[TreeLine]" = field(default_factory=list)


def runs(tree: Sequence[TreeToken]) -> list[TreeLine]:
    roots: list[TreeLine] = []
    at: list[TreeLine] = []  # the run of each token
    last: set[int] = set(range(len(tree))) - {token.parent for token in tree if token.parent is not None}
    children: dict[int | None, int] = {}
    for token in tree:
        children[token.parent] = children.get(token.parent, 0) + 1
    for token in tree:
        parent = token.parent
        if parent is not None and children[parent] == 1 and parent not in last:
            at.append(at[parent])
        else:
            run = TreeLine()
            (roots if parent is None else at[parent].below).append(run)
            at.append(run)
        at[-1].tokens.append(token)
    return roots


def picture(tree: Sequence[TreeToken], text: Callable[[Sequence[int]], str], best: Sequence[int]) -> list[str]:
    """One line per run. best: the indices in `tree` of the returned texts' last tokens."""
    ranks = {id(tree[place]): rank for rank, place in enumerate(best, 1)}
    lines: list[str] = []
    stack = [(run, "", place == 0) for place, run in enumerate(reversed(runs(tree)))]
    while stack:
        run, indent, last = stack.pop()
        end = run.tokens[-1]
        words = text([token.token_id for token in run.tokens]).replace("\n", "⏎")
        note = f"{end.score:.2f}"
        if end.reason is not None:
            note += f"  {end.reason}"
        elif not run.below:
            note += "  left"
        if id(end) in ranks:
            note += f"  #{ranks[id(end)]}"
        lines.append(f"{indent}{'└─' if last else '├─'} {words!r} {note}")
        below = indent + ("   " if last else "│  ")
        stack += [(child, below, place == 0) for place, child in enumerate(reversed(run.below))]
    return lines
