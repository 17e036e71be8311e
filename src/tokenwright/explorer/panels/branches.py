"""Branches: a run continues from an earlier step of another one, on its pages."""

from dataclasses import dataclass
from typing import Annotated, Literal

from tokenwright.explorer.explorer import Explorer
from tokenwright.explorer.player import Player
from tokenwright.trace.schema import TokenCard
from tokenwright.trace.wire import COUNTED

LONGEST = 200  # characters of a branch's text


@dataclass(frozen=True, slots=True)
class Branch:
    run: str
    parent: str | None  # none: the root
    step: int | None  # of the parent, whose token is `token` here
    token: TokenCard | None
    text: str  # written since the fork
    state: Literal["paused", "running", "done", "failed", "expired"]
    steps: int
    pages: Annotated[int, COUNTED("pages", "pages", "pages in its page tables")]
    kv_bytes: Annotated[int, COUNTED("B", "K and V", "bytes of these pages")]
    shared: Annotated[int, COUNTED("pages", "shared", "of these, pages that other branches use too")]
    saved_bytes: Annotated[int, COUNTED("B", "saved", "bytes of the shared pages: not stored again")]
    reused: Annotated[int, COUNTED("tokens", "reused", "tokens whose K and V it found and did not compute")]


@dataclass(frozen=True, slots=True)
class Branches:
    branches: tuple[Branch, ...]
    kind: Literal["branches"] = "branches"


MESSAGES = (Branch, Branches)


def branches(explorer: Explorer, identity: str) -> Branches:
    return tree(explorer.runs.family(explorer.player(identity)))


def tree(family: list[tuple[str, Player]]) -> Branches:
    runs = [player.run for _, player in family]
    used = runs[0].pages(runs[1:])
    found = []
    for (identity, player), use in zip(family, used, strict=True):
        card = player.card
        text = "".join(frame.text for frame in list(player.run.frames))
        found.append(
            Branch(
                run=identity,
                parent=card.parent,
                step=None if card.parent is None else card.first_step - 1,
                token=None if card.parent is None else card.written[-1],
                text=text[:LONGEST],
                state=player.phase,
                steps=player.run.first_step + len(player.run.frames),
                pages=use.pages,
                kv_bytes=use.nbytes,
                shared=use.shared,
                saved_bytes=use.shared_bytes,
                reused=player.run.sequence.counts.reused,
            )
        )
    return Branches(tuple(found))
