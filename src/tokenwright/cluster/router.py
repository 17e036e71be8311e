"""The router: chooses the replica for each text. It knows no sockets, processes or clock.

    cost of a replica = its work + MISS_WEIGHT x tokens of this text that it has to compute
                                 + READ_WEIGHT x tokens that it can read from the shared folder

Work counts the prompt tokens that are left, and DECODE_WEIGHT for each token to be generated, estimated from recent
texts. A replica attracts texts whose pages it has until its work exceeds others' by MISS_WEIGHT times their cached
prefix. At equal costs fewer texts win, then the replica chosen longest ago.
"""

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace

from tokenwright.engine import Group, PagePool, PrefixIndex
from tokenwright.engine.page_events import EvictionLog
from tokenwright.engine.prefix_index import PrefixHashes

_ANY_PAGE = 0  # page numbers do not matter


class ReplicaPages:
    """The pages that a replica has cached. seed, secret: of its prefix index. evictions: the log of all replicas."""

    def __init__(
        self, groups: Sequence[Group], page_size: int, seed: bytes, secret: bytes, evictions: EvictionLog | None = None
    ) -> None:
        self._evictions = evictions
        self._pool = PagePool([replace(group, pages=1) for group in groups], page_size)
        self._prefixes = PrefixIndex(self._pool, seed, secret)
        self._whole = all(pool.reads_all for pool in self._pool.group_pools)  # a text's last row reads every page
        self.reported: list[set[bytes]] = [set() for _ in groups]  # each group's pages
        self._expected: Counter[bytes] = Counter()

    def apply(self, changes: Iterable[tuple[int, bytes, bool]]) -> None:
        for group, page_hash, cached in changes:
            reported, index = self.reported[group], self._pool.group_pools[group].index
            if cached:
                reported.add(page_hash)
                index[page_hash] = _ANY_PAGE
            else:
                reported.discard(page_hash)
                if self._evictions is not None:
                    self._evictions.add(page_hash)
                if page_hash not in self._expected:
                    index.pop(page_hash, None)

    def expect(self, hashes: Iterable[bytes]) -> None:
        """Treat pages that the replica will compute as cached, until `settle`."""
        for page_hash in hashes:
            self._expected[page_hash] += 1
            for pool in self._pool.group_pools:
                pool.index[page_hash] = _ANY_PAGE

    def settle(self, hashes: Iterable[bytes]) -> None:
        """Stop expecting pages: the replica has reported the computed ones by now."""
        for page_hash in hashes:
            self._expected[page_hash] -= 1
            if self._expected[page_hash] <= 0:
                del self._expected[page_hash]
                for pool, reported in zip(self._pool.group_pools, self.reported, strict=True):
                    if page_hash not in reported:
                        pool.index.pop(page_hash, None)

    def hashes(self, salt: bytes) -> PrefixHashes:
        return self._prefixes.hashes(salt)

    def cached(self, hashes: PrefixHashes, tokens: Sequence[int]) -> int:
        """The number of first tokens, in full pages, that the replica has cached."""
        if not self._whole:
            return self._prefixes.match_prefix(hashes, tokens, tails=False)
        size = self._pool.page_size  # the common case, many times faster
        found = hashes.extend(tokens)[: (len(tokens) - 1) // size]
        return min(run_of(found, pool.index) for pool in self._pool.group_pools) * size


def run_of(hashes: Sequence[bytes], index: Container[bytes]) -> int:
    """The length of the longest prefix of hashes that is in the index."""
    for at, page_hash in enumerate(hashes):
        if page_hash not in index:
            return at
    return len(hashes)


DECODE_WEIGHT = 4.0  # of a token to write, in prompt tokens: a batch writes many in one step
READ_WEIGHT = 0.5  # of a token read from disk
MISS_WEIGHT = 3.0  # of a token computed though it may be cached elsewhere
MOST_STORED = 1 << 20  # pages of the folder
SMOOTH = 0.05  # weight of a finished text in the mean length


@dataclass(slots=True, eq=False)
class RoutedText:
    prefill: int  # prompt tokens still to be computed, as expected
    decode: int  # tokens still to be generated, as expected
    hashes: Sequence[bytes]


@dataclass(slots=True, eq=False)
class RoutedReplica:
    pages: ReplicaPages
    taking: bool = True  # new texts may go to it
    texts: dict[int, RoutedText] = field(default_factory=dict)
    prefill: int = 0  # sum over `texts`
    decode: int = 0
    others: int = 0  # texts of other routers
    chosen: int = 0
    place: int = 0
    name: str = ""

    @property
    def work(self) -> float:
        return self.prefill + DECODE_WEIGHT * self.decode


class StoredPages:
    """The last `most` pages that any replica stored in the shared folder."""

    def __init__(self, most: int = MOST_STORED) -> None:
        self._hashes: dict[bytes, None] = {}
        self._most = most

    def add(self, changes: Iterable[tuple[int, bytes, bool]]) -> None:
        """Add cached pages; those that leave a replica's memory stay in the folder."""
        for group, page_hash, cached in changes:
            if cached and not group:  # a text's pages of all groups are stored together
                self._hashes.pop(page_hash, None)
                self._hashes[page_hash] = None
        while len(self._hashes) > self._most:
            del self._hashes[next(iter(self._hashes))]

    def tokens(self, hashes: PrefixHashes, tokens: Sequence[int]) -> int:
        """The number of first tokens, in full pages, that the folder has."""
        found = hashes.extend(tokens)[: (len(tokens) - 1) // hashes.page_size]
        count = run_of(found, self._hashes)
        for page_hash in reversed(found[:count]):  # least recently used are dropped, later pages first
            self._hashes[page_hash] = self._hashes.pop(page_hash)
        return count * hashes.page_size


class Router:
    def __init__(self, stored: StoredPages | None = None) -> None:
        self.stored = stored
        self.written = 100.0  # mean tokens of a finished text
        self._choices = 0

    def choose(
        self, replicas: Iterable[RoutedReplica], hashes: PrefixHashes, tokens: Sequence[int]
    ) -> tuple[RoutedReplica, int] | None:
        """The chosen replica and its number of cached first tokens; None if no replica takes texts."""
        best: tuple[tuple[float, int, int], RoutedReplica, int] | None = None
        stored = self.stored.tokens(hashes, tokens) if self.stored is not None else 0
        for replica in replicas:
            if replica.taking:
                cached = replica.pages.cached(hashes, tokens)
                read = max(0, stored - cached)
                work = replica.work + DECODE_WEIGHT * self.written * replica.others
                cost = work + MISS_WEIGHT * (len(tokens) - cached - read) + READ_WEIGHT * read
                order = cost, len(replica.texts), replica.chosen
                if best is None or order < best[0]:
                    best = order, replica, cached
        return None if best is None else best[1:]

    def assign(
        self, replica: RoutedReplica, number: int, hashes: PrefixHashes, tokens: int, cached: int, most: int
    ) -> None:
        self._choices += 1
        replica.chosen = self._choices
        text = RoutedText(tokens - cached, min(most, round(self.written)), list(hashes.hashes))
        replica.pages.expect(text.hashes)
        replica.prefill += text.prefill
        replica.decode += text.decode
        replica.texts[number] = text

    def wrote(self, replica: RoutedReplica, number: int, tokens: int) -> None:
        text = replica.texts[number]
        if text.prefill:
            self._computed(replica, text)
        left = max(1, text.decode - tokens)
        replica.decode += left - text.decode
        text.decode = left

    def ended(self, replica: RoutedReplica, number: int, written: int | None) -> None:
        """written: the tokens at the text's end; None if it was cancelled or moved."""
        text = replica.texts.pop(number)
        replica.decode -= text.decode
        self._computed(replica, text)
        if written is not None:
            self.written += SMOOTH * (written - self.written)

    def _computed(self, replica: RoutedReplica, text: RoutedText) -> None:
        replica.pages.settle(text.hashes)
        replica.prefill -= text.prefill
        text.prefill, text.hashes = 0, ()
