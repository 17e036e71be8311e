"""The memory of answered prompts: tokens, page hashes and parts, by key, in bounded bytes; the oldest are dropped.

A prompt is kept with its answer, as the next prompt of a conversation begins with both. A text and its prefix share
arrays. Prompts of one owner (an API key) are never compared with another owner's.
"""

import sys
import time
from array import array
from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from threading import RLock
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokenwright.engine.pictures import Spans, first_difference
from tokenwright.engine.prefix_index import PrefixHashes
from tokenwright.llm.prompts.kept import KeptHashes
from tokenwright.llm.prompts.provenance import PromptPart
from tokenwright.llm.prompts.report import PROMPT_MEMORY, CacheReport

MOST_TRIED = 16  # prompts that a new one is compared with, the newest first
MOST_LOOKED_AT = 1024  # prompts of an owner that are searched for its session
MOST_WORK = 4096  # requests whose counts of tokens are remembered, to explain evictions
SHORT = 8  # bytes kept of a page's hash: two pages of one owner are equal by chance once in 2**64
RECORD_BYTES, PART_BYTES, PICTURE_BYTES = 1024, 160, 512  # the sizes of Python's objects, about

Ids = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class PromptTerms:
    """The terms of a request. Only prompts of the same owner are compared."""

    owner: str = ""
    salt: str = ""
    model: str = ""  # everything that K and V depend on, except tokens and salt
    session: str = ""  # the client's name of the conversation
    shared: bool = False  # other conversations may have that name: it is a cache key, or a user's name
    previous: str = ""  # the client's name of the answer to compare with
    settings: str = ""  # everything else that changes a template's text, such as the effort
    edited: bool = False  # parts of the conversation were left out
    pinned_s: float = 0.0  # seconds for which its pages are pinned, as far as pins were granted


@dataclass(slots=True, eq=False)
class PromptRecord:
    name: str  # the client's name of the answer
    asked: PromptTerms
    ids: Ids  # of the prompt and of the answer
    prompt: int  # tokens of the prompt
    parts: tuple[PromptPart, ...]
    root: bytes
    hashes: bytes | memoryview  # of its full pages, SHORT bytes each
    page_size: int
    pictures: Spans = ()  # without their pixels
    thoughts: tuple[str, str] | None = None  # the tags between which the answer may reason
    cut: bool = False  # it ended with a stop string, which the client has not received
    report: CacheReport | None = None
    kept: int = sys.maxsize  # how many of its first tokens others may find in the cache
    before: str = ""  # name of the answer that it was compared with
    ended: float = field(default_factory=time.monotonic)  # monotonic seconds
    shared: bool = False  # its arrays are the beginning of another record's
    beginnings: "list[PromptRecord]" = field(default_factory=list)  # records whose arrays begin this one's
    warmed: tuple[int, int] = (0, 0)  # (found, computed) tokens of the next prompt, by a warm-up
    over: bool = False  # `warmed` is already counted as used or lost

    @property
    def computed(self) -> int:
        """The tokens whose K and V were computed: all but the last."""
        return max(0, len(self.ids) - 1)

    @property
    def conversation(self) -> bool:
        return bool(self.parts) and self.parts[0].kind != "prompt"

    @property
    def nbytes(self) -> int:
        arrays = 0 if self.shared else self.ids.nbytes + len(self.hashes)
        return RECORD_BYTES + PART_BYTES * len(self.parts) + PICTURE_BYTES * len(self.pictures) + arrays


class Work(NamedTuple):
    at: float
    owner: str
    session: str
    tokens: int


class PromptMemory:
    """The last answered prompts, in at most `most` bytes. Thread-safe."""

    def __init__(self, most: int = PROMPT_MEMORY) -> None:
        self.most = most
        self.hashes = KeptHashes()
        self.resumes = True  # later prompts go on from the ids of these answers (`written.py`)
        self.warmed = self.used = self.wasted = 0  # tokens computed ahead of prompts; found by them; lost
        self.sizes: Counter[str] = Counter()  # bytes of each owner's records
        self._records: dict[str, OrderedDict[int, PromptRecord]] = {}  # by owner; the oldest first
        self._names: dict[tuple[str, str], PromptRecord] = {}
        self._work: deque[Work] = deque(maxlen=MOST_WORK)
        self._lock = RLock()

    @property
    def nbytes(self) -> int:
        return self.sizes.total()

    def __len__(self) -> int:
        return sum(map(len, self._records.values()))

    def named(self, owner: str, name: str) -> PromptRecord | None:
        return self._names.get((owner, name))

    def recent(self, asked: PromptTerms, most: int = MOST_TRIED, before: float = float("inf")) -> list[PromptRecord]:
        """The owner's last prompts that ended `before` a time, the newest first; only the session's if it has some."""
        with self._lock:
            newest = islice(reversed(self._records.get(asked.owner, OrderedDict()).values()), MOST_LOOKED_AT)
            every = [one for one in newest if one.ended <= before]
        same = [one for one in every if asked.session and one.asked.session == asked.session]
        return (same or every)[:most]

    def add(self, record: PromptRecord, extends: PromptRecord | None = None) -> None:
        """Keep a prompt. extends: a record whose whole text is its prefix."""
        asked = record.asked
        with self._lock:
            records = self._records.setdefault(asked.owner, OrderedDict())
            records[id(record)] = record
            self.sizes[asked.owner] += record.nbytes
            self._names[asked.owner, record.name] = record
            if extends is not None and id(extends) in records and not extends.shared:
                self._share(record, extends)
            while self.nbytes > self.most and self._records:
                self._drop_oldest()

    def warm(self, record: PromptRecord, found: int, tokens: int) -> None:
        """Count the tokens of a record's next prompt that a warm-up has computed, after the first `found`."""
        with self._lock:
            self.warmed += tokens
            self.wasted += tokens if record.over else 0
            record.warmed = found, record.warmed[1] + tokens

    def close(self, record: PromptRecord, reused: int = 0) -> int:
        """The tokens of a record's warm-up that its next prompt found, given those it reused; counted once."""
        with self._lock:
            found, tokens = record.warmed
            used = 0 if record.over else min(max(0, reused - found), tokens)
            self.used += used
            self.wasted += 0 if record.over else tokens - used
            record.over = True
            return used

    def _share(self, record: PromptRecord, extends: PromptRecord) -> None:
        """Let `extends`, and the records that begin it, use the arrays of `record`, which continues it."""
        self.sizes[record.asked.owner] -= extends.nbytes
        extends.shared = True
        self.sizes[record.asked.owner] += extends.nbytes
        record.beginnings = [one for one in (*extends.beginnings, extends) if len(one.ids)]
        extends.beginnings = []
        for one in record.beginnings:
            one.ids, one.hashes = record.ids[: len(one.ids)], memoryview(record.hashes)[: len(one.hashes)]

    def _drop_oldest(self) -> None:
        [(owner, _)] = self.sizes.most_common(1)
        records = self._records[owner]
        _, gone = records.popitem(last=False)
        self.close(gone)
        self.sizes[owner] -= gone.nbytes
        gone.parts, gone.pictures = (), ()  # another record may still refer to it
        gone.ids, gone.hashes = gone.ids[:0].copy(), b""
        if self._names.get((owner, gone.name)) is gone:
            del self._names[owner, gone.name]
        if not records:
            del self._records[owner], self.sizes[owner]

    def records(self, owner: str) -> list[PromptRecord]:
        with self._lock:
            return list(reversed(self._records.get(owner, OrderedDict()).values()))

    def worked(self, asked: PromptTerms, tokens: int) -> None:
        self._work.append(Work(time.monotonic(), asked.owner, asked.session, tokens))

    def since(self, then: float, asked: PromptTerms) -> tuple[int, int]:
        """The numbers of tokens computed since a time by the session, and by all others."""
        own = others = 0
        for at, owner, session, tokens in reversed(list(self._work)):
            if at <= then:
                break
            if owner == asked.owner and session == asked.session and session:
                own += tokens
            else:
                others += tokens
        return own, others


def short_hashes(hashes: PrefixHashes) -> bytes:
    return b"".join(one[:SHORT] for one in hashes.hashes)


def common_tokens(record: PromptRecord, ids: Sequence[int], hashes: PrefixHashes) -> int:
    """How many first tokens a prompt and a record share; full pages of one root are compared by hash."""
    size, pages, found = record.page_size, 0, hashes.hashes
    if hashes.root == record.root:
        both = range(min(len(found), len(record.hashes) // SHORT))
        pages = bisect_left(
            both, True, key=lambda at: found[at][:SHORT] != record.hashes[SHORT * at : SHORT * (at + 1)]
        )
    at, stop, step = pages * size, min(len(ids), len(record.ids)), 512
    pictures = hashes.pictures or record.pictures
    if pictures and (differ := first_difference(hashes.pictures, record.pictures)) is not None:
        stop = max(at, min(stop, differ))
    while at < stop:
        mine, theirs = list(ids[at : at + step]), record.ids[at : min(stop, at + step)].tolist()
        if mine[: len(theirs)] != theirs:
            return at + next(n for n, (one, other) in enumerate(zip(mine, theirs, strict=False)) if one != other)
        at += len(theirs)
    return stop


def kept_ids(ids: Sequence[int], common: int, before: PromptRecord | None) -> Ids:
    """Ids as an array. The first `common` are shared with the record `before`."""
    new = np.frombuffer(array("I", ids if before is None else ids[common:]), np.uint32)  # half the time of np.array
    return new if before is None else np.concatenate([before.ids[:common], new])
