"""Warm-ups compute prefixes while the engine is idle, so that a later request finds them cached.

A warm-up is a sequence outside the scheduler's queues, computed in small chunks. Between two chunks any request comes
first, while its pages are cached. It evicts only pages that were released before those of the text that it continues.
"""

from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field

from tokenwright.engine.kv_manager import KVManager
from tokenwright.engine.pictures import Spans, uncut
from tokenwright.engine.request import Sequence
from tokenwright.engine.step import Chunk, chunk_of

CHUNK = 32  # tokens: a request waits at most for one chunk
MOST_QUEUED = 16  # the oldest beyond these are dropped


@dataclass(frozen=True, slots=True)
class WarmRules:
    """A client's rules for a warm-up, which the engine's thread calls."""

    after: ListLike[int] = ()  # a text: only pages older than its pages are evicted
    allowed: Callable[[], bool] = lambda: True  # the warm-up goes on while this is true
    computed: Callable[[int, int], object] = lambda *_: None  # gets the tokens cached at first, and each chunk's
    spare: bool = False  # wait for idle processors, too


@dataclass(slots=True, eq=False)
class WarmUp:
    """A prefix to compute: all tokens of a sequence except the last, which stands for the text of the later request."""

    sequence: Sequence
    rules: WarmRules
    found: int = -1  # the tokens that were cached when it began; -1: not begun
    ages: list[int] = field(default_factory=list)  # of each group's last page of `rules.after`, as in GroupPool.cached


class Warming:
    """The queue of one engine's warm-ups, the oldest first. A chunk has at most `budget` tokens."""

    def __init__(self, kv: KVManager, budget: int = CHUNK) -> None:
        self._most = min(CHUNK, budget)
        self._kv = kv
        self.queue: deque[WarmUp] = deque()

    def __iter__(self) -> Iterator[Sequence]:
        return (one.sequence for one in self.queue)

    @property
    def due(self) -> bool:
        return bool(self.queue) and self.queue[0].rules.allowed()

    def add(self, sequence: Sequence, rules: WarmRules) -> None:
        self.queue.append(WarmUp(sequence, rules))
        if len(self.queue) > MOST_QUEUED:
            self.give_up()
            self.queue.popleft()

    def chunk(self, ready: Callable[[Spans, int, int], int]) -> Chunk | None:
        """The next chunk, with its pages reserved; None: no warm-up can go on. ready: `AwaitedPictures.ready_stop`."""
        while self.queue:
            first = self.queue[0]
            sequence = first.sequence
            if not sequence.computed:
                self._begin(first)
            start, most = sequence.computed, self._stop(sequence)
            stop = ready(sequence.request.pictures, start, most)
            if start == stop < most:
                return None
            if stop > start and self._reserve(first, stop):
                return chunk_of(sequence, stop - start)
            self.drop()
        return None

    def _stop(self, sequence: Sequence) -> int:
        """The end of the next chunk, which cuts no bidirectional picture, even if it is longer than a chunk."""
        spans, start = sequence.request.pictures, sequence.computed
        most = min(len(sequence.tokens) - 1, start + self._most)
        if (stop := uncut(spans, start, most)) > start:
            return stop
        return next((one.stop for one in spans if one.bidirectional and one.start <= start < one.stop), most)

    def _begin(self, one: WarmUp) -> None:
        kv, sequence = self._kv, one.sequence
        found = kv.cached_prefix(sequence)
        if one.found < 0:
            asked = sequence.request
            one.found, one.ages = found, kv.prefixes.ages(asked.salt, one.rules.after, asked.pictures)
        kv.prefixes.attach_prefix(sequence.tables, sequence.prefix_hashes, sequence.tokens, found)
        sequence.computed = found

    def _reserve(self, one: WarmUp, stop: int) -> bool:
        pool, tables, start = self._kv.pool, one.sequence.tables, one.sequence.computed
        needs = pool.needed(tables, start, stop)
        pairs = zip(pool.group_pools, one.ages, needs, strict=True)
        return all(group.has_older(age, need) for group, age, need in pairs) and pool.reserve(tables, start, stop, stop)

    def commit(self, chunk: Chunk) -> None:
        first, sequence, size = self.queue[0], chunk.sequence, self._kv.pool.page_size
        sequence.computed = chunk.stop
        if chunk.start // size != chunk.stop // size:
            self._kv.cache_pages(sequence, chunk.start, chunk.stop)
        self._kv.pool.trim(sequence.tables, chunk.stop)
        if chunk.stop == len(sequence.tokens) - 1:
            self.drop()
        first.rules.computed(first.found, chunk.stop - chunk.start)

    def give_up(self) -> None:
        """Leave the pages of the oldest warm-up to the prefix index; it goes on from there later."""
        if self.queue and (sequence := self.queue[0].sequence).pages:
            self._kv.cache_tail(sequence)
            self._kv.drop(sequence)

    def drop(self) -> None:
        self.give_up()
        self.queue.popleft()
