"""The pages that one replica can find, as the router knows them: those that it reported, and those that it will have.

The replica's own prefix index, over a pool whose index is filled from reports, answers how much of a text is cached.
"""

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace

from tokenwright.engine import Group, PagePool, PrefixIndex
from tokenwright.engine.page_events import EvictionLog
from tokenwright.engine.prefix_index import PrefixHashes

_SOMEWHERE = 0  # the number of the page is the replica's own affair


class ReplicaPages:
    """seed, secret: of the replica's prefix index. evictions: where what it evicts is noted, for all replicas."""

    def __init__(
        self,
        groups: Sequence[Group],
        page_size: int,
        seed: bytes,
        secret: bytes,
        evictions: EvictionLog | None = None,
    ) -> None:
        self._evictions = evictions
        self._pool = PagePool([replace(group, pages=1) for group in groups], page_size)
        self._prefixes = PrefixIndex(self._pool, seed, secret)
        self._whole = all(pool.whole for pool in self._pool.group_pools)  # a text's last row reads every page
        self.reported: list[set[bytes]] = [set() for _ in groups]  # each group's pages, as far as the replica said
        self._expected: Counter[bytes] = Counter()

    def apply(self, changes: Iterable[tuple[int, bytes, bool]]) -> None:
        for group, page_hash, cached in changes:
            reported, index = self.reported[group], self._pool.group_pools[group].index
            if cached:
                reported.add(page_hash)
                index[page_hash] = _SOMEWHERE
            else:
                reported.discard(page_hash)
                if self._evictions is not None:
                    self._evictions.add(page_hash)
                if page_hash not in self._expected:
                    index.pop(page_hash, None)

    def expect(self, hashes: Iterable[bytes]) -> None:
        """Count pages as cached that the replica is about to compute, until `settle`."""
        for page_hash in hashes:
            self._expected[page_hash] += 1
            for pool in self._pool.group_pools:
                pool.index[page_hash] = _SOMEWHERE

    def settle(self, hashes: Iterable[bytes]) -> None:
        """Stop expecting pages: those that were computed are reported by now."""
        for page_hash in hashes:
            self._expected[page_hash] -= 1
            if self._expected[page_hash] <= 0:
                del self._expected[page_hash]
                for pool, reported in zip(self._pool.group_pools, self.reported, strict=True):
                    if page_hash not in reported:
                        pool.index.pop(page_hash, None)

    def hashes(self, salt: bytes) -> PrefixHashes:
        """The hashes of a text without full pages, equal for all replicas of a model."""
        return self._prefixes.hashes(salt)

    def cached(self, hashes: PrefixHashes, tokens: Sequence[int]) -> int:
        """The first tokens of a text that the replica need not compute, in full pages."""
        if not self._whole:
            return self._prefixes.match_prefix(hashes, tokens, tails=False)
        size = self._pool.page_size  # nearly always, and many times quicker
        found = hashes.extend(tokens)[: (len(tokens) - 1) // size]
        runs = [run_of(found, pool.index) for pool in self._pool.group_pools]
        return min(runs) * size


def run_of(hashes: Sequence[bytes], index: Container[bytes]) -> int:
    """This counts the first hashes that are in the index, without a gap."""
    for at, page_hash in enumerate(hashes):
        if page_hash not in index:
            return at
    return len(hashes)
