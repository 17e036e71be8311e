"""The messages of the panel of branches: the runs that forked from one text, and the pages that they share."""

from dataclasses import dataclass
from typing import Annotated, Literal

from tokenwright.trace.schema import TokenCard
from tokenwright.trace.wire import COUNTED, Wire


@dataclass(frozen=True, slots=True)
class Branch:
    """One run of a tree."""

    run: str
    parent: str | None  # none: the run that the others forked from
    step: int | None  # of the parent, whose token is `token` here
    token: TokenCard | None
    text: str  # what it has written since the fork
    state: Literal["paused", "running", "done", "failed", "expired"]
    steps: int  # the number of its next step
    pages: Annotated[int, Wire("Q", COUNTED, "pages", "pages", "pages in its page tables")]
    kv_bytes: Annotated[int, Wire("Q", COUNTED, "B", "K and V", "bytes of these pages")]
    shared: Annotated[int, Wire("Q", COUNTED, "pages", "shared", "of these, pages that other branches use too")]
    saved_bytes: Annotated[int, Wire("Q", COUNTED, "B", "saved", "bytes of the shared pages: not stored again")]
    reused: Annotated[int, Wire("Q", COUNTED, "tokens", "reused", "tokens whose K and V it found and did not compute")]


@dataclass(frozen=True, slots=True)
class Branches:
    """GET /runs/ID/branches: the tree that a run stands in, the oldest run first."""

    branches: tuple[Branch, ...]
    kind: Literal["branches"] = "branches"


MESSAGES = (Branch, Branches)
