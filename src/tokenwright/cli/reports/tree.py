"""The tree of a beam search as lines of text: where beams fork, which were dropped, and which ended."""

from collections.abc import Callable, Sequence

from tokenwright.llm.outputs import TreeToken


def picture(tree: Sequence[TreeToken], text: Callable[[Sequence[int]], str], best: Sequence[int]) -> list[str]:
    """One line for tokens without a fork. best: the indices in `tree` of the returned texts' last tokens."""
    below: dict[int | None, list[int]] = {}
    for place, token in enumerate(tree):
        below.setdefault(token.parent, []).append(place)
    ranks = {place: rank for rank, place in enumerate(best, 1)}
    lines: list[str] = []
    stack = [(place, "", i == 0) for i, place in enumerate(reversed(below.get(None, [])))]
    while stack:
        place, indent, last = stack.pop()
        run = [place]
        while len(children := below.get(run[-1], [])) == 1:
            run += children
        end = tree[run[-1]]
        words = text([tree[one].token_id for one in run]).replace("\n", "⏎")
        note = f"{end.score:.2f}"
        if end.reason is not None:
            note += f"  {end.reason}"
        elif not children:
            note += "  left"
        if run[-1] in ranks:
            note += f"  #{ranks[run[-1]]}"
        lines.append(f"{indent}{'└─' if last else '├─'} {words!r} {note}")
        indent += "   " if last else "│  "
        stack += [(child, indent, i == 0) for i, child in enumerate(reversed(children))]
    return lines
