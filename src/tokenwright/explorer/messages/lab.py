"""The cache lab: a text scored under another cache. The page's types are generated from this module (typescript.py)."""

from dataclasses import dataclass
from typing import Annotated

from tokenwright.trace.schema import TokenCard
from tokenwright.trace.wire import COUNTED, DERIVED, READ, Wire


@dataclass(frozen=True, slots=True)
class Changed:
    """A place where the most probable next token is another one."""

    position: int  # of the token that is predicted
    full: TokenCard  # the guess with the full cache
    lab: TokenCard


@dataclass(frozen=True, slots=True)
class LabCard:
    """POST /runs/ID/lab: the text of a run, teacher-forced under another cache and under the full native one."""

    kv: str
    window: int | None
    sinks: int
    page_size: int
    tokens: Annotated[int, Wire("Q", COUNTED, "tokens", "tokens computed", "of the text, with each of the two caches")]
    full_bytes: Annotated[
        int, Wire("Q", DERIVED, "B", "full cache", "K and V of these tokens, native, without a window")
    ]
    kept_bytes: Annotated[int, Wire("Q", DERIVED, "B", "this cache", "K and V that are kept for the next token")]
    pages: Annotated[int, Wire("Q", COUNTED, "", "pages", "pages in its tables after the text, in the second engine")]
    page_bytes: Annotated[int, Wire("Q", COUNTED, "B", "in pages", "these pages, times their size")]
    mean_kl: Annotated[
        float, Wire("d", READ, "nat", "mean KL", "KL(full || this), over the whole vocabulary, mean over the text")
    ]
    max_kl: Annotated[float, Wire("d", READ, "nat", "largest KL", "at one position")]
    mean_delta: Annotated[
        float,
        Wire("d", READ, "nat", "mean change of log p", "of the text's tokens: this cache minus the full one"),
    ]
    same: Annotated[int, Wire("Q", COUNTED, "", "same first guess", "positions with the same most probable token")]
    positions: int  # predictions that were compared
    first: int  # position of the first token that is predicted
    kl: tuple[float, ...]  # at each prediction
    delta: tuple[float, ...]
    changed: tuple[Changed, ...]


MESSAGES = (Changed, LabCard)
