"""The page pool, as the page shows it: its pages, the sequences that use them, and a batch of prompts beside the run.

The page's types are generated from this module (typescript.py). It imports the standard library and `wire` alone.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from tokenwright.trace.wire import COUNTED, DERIVED, Wire

Whose = Literal["run", "batch", "other"]


@dataclass(frozen=True, slots=True)
class PoolPage:
    """A page that is not free. refcount 0: cached, so in no page table but found by its prefix."""

    page: int  # its number in the pool
    refcount: int
    filled: int  # token slots with K and V
    owners: tuple[int, ...]  # indices of the sequences in whose tables it stands
    place: int | None  # which page of the owners' text it is


@dataclass(frozen=True, slots=True)
class PoolGroup:
    """The pages of one group of layers: those that keep K and V alike."""

    layers: tuple[int, ...]
    window: int | None
    sinks: int
    pages: Annotated[int, Wire("Q", COUNTED, "", "pages", "pages of the pool, in this group of layers")]
    used: Annotated[int, Wire("Q", COUNTED, "", "in use", "pages that stand in the page table of a sequence")]
    shared: Annotated[int, Wire("Q", COUNTED, "", "shared", "pages that stand in two page tables or more")]
    cached: Annotated[
        int, Wire("Q", COUNTED, "", "cached", "pages of ended texts, found by their prefix; evicted when pages run out")
    ]
    free: Annotated[int, Wire("Q", COUNTED, "", "free", "pages with nothing to be found in them")]
    page_bytes: Annotated[int, Wire("Q", DERIVED, "B", "a page", "page size x bytes of a token in these layers")]
    saved_bytes: Annotated[
        int,
        Wire("Q", COUNTED, "B", "saved by sharing", "further entries in page tables, times a page's bytes"),
    ]
    listed: tuple[PoolPage, ...]  # those that are not free, by number
    left_out: int  # how many more there are


@dataclass(frozen=True, slots=True)
class PoolSequence:
    """A sequence of the engine. Sequences of other clients have no text."""

    whose: Whose
    place: int  # of a batch's prompt, from 0
    state: Literal["waiting", "running", "paused", "swapped", "finished"]
    prompt: str
    text: str  # what was written
    tokens: Annotated[int, Wire("Q", COUNTED, "tokens", "tokens", "prompt and written tokens")]
    computed: Annotated[int, Wire("Q", COUNTED, "tokens", "in the cache", "tokens whose K and V are in its pages")]
    forwarded: Annotated[int, Wire("Q", COUNTED, "tokens", "computed", "tokens sent through the layers for it")]
    reused: Annotated[
        int, Wire("Q", COUNTED, "tokens", "prefix hit", "tokens not computed, because their pages were found")
    ]
    pages: Annotated[int, Wire("Q", COUNTED, "", "pages", "pages in its tables")]
    preemptions: Annotated[int, Wire("Q", COUNTED, "", "preemptions", "how often its pages were taken for others")]


@dataclass(frozen=True, slots=True)
class PoolCard:
    """GET /pages: the page pool between two steps."""

    page_size: int  # tokens
    groups: tuple[PoolGroup, ...]
    sequences: tuple[PoolSequence, ...]


@dataclass(frozen=True, slots=True)
class BatchCard:
    """POST /batches: prompts that run beside the shown run. It ends when its id was not asked for in `lease_s`."""

    batch: str
    prompts: int
    lease_s: float


MESSAGES = (PoolPage, PoolGroup, PoolSequence, PoolCard, BatchCard)
