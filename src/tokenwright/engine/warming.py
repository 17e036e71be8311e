"""Warm-up: prefixes that are computed while the engine has nothing else to do, so that a later request finds them.

A warm-up is a sequence outside the scheduler's queues, which advances by small chunks between which any request comes
first: then its pages are cached as far as they are computed, and it goes on when the engine is idle again. It takes
free pages, and evicts cached ones only if they were released before the text of which it is the next turn.
"""

from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field

from tokenwright.engine.kv_manager import KVManager
from tokenwright.engine.request import Sequence
from tokenwright.engine.step import Chunk, chunk_of

CHUNK = 32  # tokens: a request waits at most for the computation of so many
MOST_QUEUED = 16  # warm-ups; of more, the oldest are left out


@dataclass(frozen=True, slots=True)
class WarmRules:
    """The wishes of the client of a warm-up, which the engine's thread calls.

    after: the text that ended last before it, by whose pages' age it may evict others. allowed: whether the machine is
    free for it at this moment. computed: told of each chunk, how many tokens were found
    when the warm-up began, and how many the chunk has.
    """

    after: ListLike[int] = ()
    allowed: Callable[[], bool] = lambda: True
    computed: Callable[[int, int], object] = lambda *_: None


@dataclass(slots=True, eq=False)
class WarmUp:
    """A prefix to be computed: all tokens of a sequence but the last, which stands for the text that is to come.

    found: the tokens that were cached when it began; -1: it has not. ages: for each group, the age of the last page of
    the text before it, as `GroupPool.cached` has it.
    """

    sequence: Sequence
    rules: WarmRules
    found: int = -1
    ages: list[int] = field(default_factory=list)


class Warming:
    """The warm-ups of one engine, the oldest first. budget: the most tokens of a step."""

    def __init__(self, kv: KVManager, budget: int = CHUNK) -> None:
        self._most = min(CHUNK, budget)
        self._kv = kv
        self._queue: deque[WarmUp] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Sequence]:
        return (one.sequence for one in self._queue)

    @property
    def due(self) -> bool:
        """Whether one is to be computed, if the engine has nothing else to do."""
        return bool(self._queue) and self._queue[0].rules.allowed()

    def add(self, sequence: Sequence, rules: WarmRules) -> None:
        self._queue.append(WarmUp(sequence, rules))
        if len(self._queue) > MOST_QUEUED:
            self.give_up()
            self._queue.popleft()

    def chunk(self) -> Chunk | None:
        """The next chunk, for which pages are reserved; None: no warm-up can go on."""
        while self._queue:
            first = self._queue[0]
            sequence = first.sequence
            if not sequence.computed:
                self._begin(first)
            stop = min(len(sequence.tokens) - 1, sequence.computed + self._most)
            if stop > sequence.computed and self._reserve(first, stop):
                return chunk_of(sequence, stop - sequence.computed)
            self.drop()
        return None

    def _begin(self, one: WarmUp) -> None:
        kv, sequence = self._kv, one.sequence
        found = kv.cached_prefix(sequence)
        if one.found < 0:
            one.found, one.ages = found, kv.prefixes.ages(sequence.request.salt, one.rules.after)
        kv.prefixes.attach_prefix(sequence.tables, sequence.prefix_hashes, sequence.tokens, found)
        sequence.computed = found

    def _reserve(self, one: WarmUp, stop: int) -> bool:
        pool, tables, start = self._kv.pool, one.sequence.tables, one.sequence.computed
        needs = pool.needed(tables, start, stop)
        pairs = zip(pool.group_pools, one.ages, needs, strict=True)
        return all(group.spare(age, need) for group, age, need in pairs) and pool.reserve(tables, start, stop, stop)

    def commit(self, chunk: Chunk) -> None:
        """Cache what was computed."""
        first, sequence, size = self._queue[0], chunk.sequence, self._kv.pool.page_size
        sequence.computed = chunk.stop
        first.rules.computed(first.found, chunk.stop - chunk.start)
        if chunk.start // size != chunk.stop // size:
            self._kv.cache_pages(sequence, chunk.start, chunk.stop)
        self._kv.pool.trim(sequence.tables, chunk.stop)
        if chunk.stop == len(sequence.tokens) - 1:
            self.drop()

    def give_up(self) -> None:
        """Leave all pages to the prefix index; the warm-up goes on from there later."""
        if self._queue and (sequence := self._queue[0].sequence).pages:
            self._kv.cache_tail(sequence)
            self._kv.drop(sequence)

    def drop(self) -> None:
        """End the first warm-up."""
        self.give_up()
        self._queue.popleft()
