"""Branches: a run goes on from an earlier step of another one, on the pages of that."""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI

from tokenwright.explorer.messages.branches import Branch, Branches
from tokenwright.serve.explorer.explorer import HIDDEN, Explorer, NewFork
from tokenwright.serve.explorer.player import Player
from tokenwright.serve.http.api import reads
from tokenwright.trace.schema import RunCard

LONGEST = 200  # characters of a branch's text


def add(app: FastAPI, explorer: Explorer) -> None:
    """Add the routes."""

    @app.post("/runs/{identity}/fork", **HIDDEN, status_code=201)
    def fork(identity: str, body: Annotated[NewFork, reads(NewFork)]) -> RunCard:
        return explorer.fork(identity, body)

    @app.get("/runs/{identity}/branches", **HIDDEN)
    def branches(identity: str) -> Branches:
        return tree(explorer.runs.family(explorer.player(identity)))


def tree(family: list[tuple[str, Player]]) -> Branches:
    """The branches of a tree, with their pages as they are between two steps."""
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
