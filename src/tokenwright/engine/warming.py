"""Warm-up: compute prefixes while the engine is idle, so that a later request finds them.

A warm-up is a sequence outside the scheduler's queues, in small chunks between which any request comes first; its pages
are cached then, and it goes on at idle. It evicts only pages released before the text of which it is the next turn.
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
    """A client's rules for a warm-up, which the engine's thread calls.

    after: the text that ended before it, by whose pages' age it may evict others. allowed: whether it may go on now.
    computed: called once a chunk is cached, with the tokens found at the start, and the chunk's. spare: the engine's
    owner adds to `allowed` that the machine is free.
    """

    after: ListLike[int] = ()
    allowed: Callable[[], bool] = lambda: True
    computed: Callable[[int, int], object] = lambda *_: None
    spare: bool = False


@dataclass(slots=True, eq=False)
class WarmUp:
    """A prefix to be computed: all tokens of a sequence but the last, which stands for the text that is to come.

    found: the tokens that were cached when it began; -1: not begun. ages: for each group, the age of the last page of
    the text before it, as in `GroupPool.cached`.
    """

    sequence: Sequence
    rules: WarmRules
    found: int = -1
    ages: list[int] = field(default_factory=list)


class Warming:
    """The warm-ups of one engine; queue: the oldest first. budget: the most tokens of a step."""

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
        """The next chunk, for which pages are reserved; None: no warm-up can go on.

        ready: where a chunk of these pictures from a start to a stop ends before one that is awaited.
        """
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
        """The end of the next chunk, which cuts no `whole` picture: one that is longer is computed at once."""
        spans, start = sequence.request.pictures, sequence.computed
        most = min(len(sequence.tokens) - 1, start + self._most)
        if (stop := uncut(spans, start, most)) > start:
            return stop
        return next((one.stop for one in spans if one.whole and one.start <= start < one.stop), most)

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
        return all(group.spare(age, need) for group, age, need in pairs) and pool.reserve(tables, start, stop, stop)

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
        """Leave all pages to the prefix index; the warm-up goes on from there later."""
        if self.queue and (sequence := self.queue[0].sequence).pages:
            self._kv.cache_tail(sequence)
            self._kv.drop(sequence)

    def drop(self) -> None:
        self.give_up()
        self.queue.popleft()
