"""The router's choice: conversations stay, hot prefixes spread, and without shared prefixes the load is even."""

from collections import Counter

import pytest

from tokenwright.cluster.router import DECODE_WEIGHT, MISS_WEIGHT, ReplicaPages, RoutedReplica, Router, StoredPages
from tokenwright.engine import Group

SIZE = 4


class Cluster:
    def __init__(self, replicas, stored=None):
        self.router = Router(stored)
        self.replicas = [RoutedReplica(ReplicaPages([Group(1000)], SIZE, b"", b"")) for _ in range(replicas)]
        self.number = 0

    def take(self, tokens, most=10):
        """Route a text; returns its replica's place, its number and the tokens that were cached there."""
        self.number += 1
        hashes = self.replicas[0].pages.hashes(b"")
        replica, cached = self.router.choose(self.replicas, hashes, tokens)
        self.router.assign(replica, self.number, hashes, len(tokens), cached, most)
        return self.replicas.index(replica), self.number, cached

    def compute(self, place, tokens):
        """The replica reports the pages of a text."""
        replica = self.replicas[place]
        pages = [(0, page, True) for page in replica.pages.hashes(b"").extend(tokens)]
        replica.pages.apply(pages)
        if self.router.stored is not None:
            self.router.stored.add(pages)

    def end(self, place, number, tokens):
        self.compute(place, tokens)
        self.router.wrote(self.replicas[place], number, 1)
        self.router.ended(self.replicas[place], number, 10)


def text(seed, length):
    return [seed * 10_000 + at for at in range(length)]


def test_a_conversation_goes_where_its_pages_are():
    cluster = Cluster(3)
    homes = {}
    for turn in range(4):
        for chat in range(6):
            tokens = text(chat, 40 * (turn + 1))
            place, number, cached = cluster.take(tokens)
            assert homes.setdefault(chat, place) == place
            assert cached == 40 * turn // SIZE * SIZE
            cluster.end(place, number, tokens)
    assert sorted(Counter(homes.values()).values()) == [2, 2, 2]


def test_a_hot_prefix_spreads_when_the_queue_costs_more_than_the_prefix():
    cluster = Cluster(4)
    shared = text(1, 400)
    first, number, _ = cluster.take(shared)
    cluster.end(first, number, shared)
    places = [cluster.take([*shared, *text(2 + at, 40)], most=50)[0] for at in range(40)]
    assert places[:2] == [first] * 2
    counts = Counter(places)
    assert len(counts) == 4
    works = [replica.work for replica in cluster.replicas]
    assert max(works) - min(works) <= MISS_WEIGHT * 440 + 240, "no further behind than the prefix is worth"


@pytest.mark.parametrize(("stored", "stay"), [(None, 5), (StoredPages(), 1), (StoredPages(most=99), 5)])
def test_a_folder_of_all_replicas_makes_a_hot_prefix_spread_earlier(stored, stay):
    """Of 99 pages the first one is forgotten, so nothing can be read."""
    cluster = Cluster(2, stored)
    shared = text(1, 400)
    first, number, _ = cluster.take(shared)
    cluster.end(first, number, shared)
    places = [cluster.take([*shared, *text(2 + at, 4)], most=60)[0] for at in range(8)]
    assert places.index(1 - first) == stay


def test_pages_of_a_folder_in_use_are_forgotten_last():
    cluster, stored = Cluster(1), StoredPages(most=8)
    hashes = {seed: cluster.replicas[0].pages.hashes(b"") for seed in range(3)}
    for seed in (0, 1):
        stored.add([(0, page, True) for page in hashes[seed].extend(text(seed, 4 * SIZE))])
    assert stored.tokens(hashes[0], text(0, 5 * SIZE)) == 4 * SIZE
    stored.add([(0, page, True) for page in hashes[2].extend(text(2, 5 * SIZE))])
    found = [stored.tokens(hashes[seed], text(seed, 6 * SIZE)) // SIZE for seed in range(3)]
    assert found == [3, 0, 5]


def test_without_shared_prefixes_the_replica_with_the_least_work_takes_the_text():
    cluster = Cluster(3)
    lengths = [100, 10, 10, 20, 5, 300, 40]
    for at, length in enumerate(lengths):
        works = [replica.work for replica in cluster.replicas]
        place, _, cached = cluster.take(text(at, length))
        assert cached == 0
        assert works[place] == min(works)


def test_texts_of_other_routers_count_as_long_as_those_of_late():
    cluster = Cluster(3)
    cluster.replicas[0].others, cluster.replicas[1].others = 2, 1
    assert [cluster.take(text(at, 9), most=1000)[0] for at in range(5)] == [2, 1, 2, 0, 1]


def test_equal_costs_go_round():
    cluster = Cluster(3)
    places = []
    for at in range(6):
        place, number, _ = cluster.take(text(at, 9))
        cluster.router.ended(cluster.replicas[place], number, None)
        places.append(place)
    assert places == [0, 1, 2, 0, 1, 2]


def test_a_slow_replica_takes_less():
    """One ends a text while the other ends three."""
    cluster, running = Cluster(2), [[], []]
    counts = Counter()
    for at in range(80):
        place, number, _ = cluster.take(text(at, 100))
        counts[place] += 1
        running[place].append(number)
        for one, speed in ((0, 3), (1, 1)):
            for number in running[one][: speed if at % 3 == 2 else 0]:
                running[one].remove(number)
                cluster.end(one, number, [])
    assert counts[0] > 1.5 * counts[1]


def test_the_length_of_answers_is_learnt():
    cluster = Cluster(1)
    [replica] = cluster.replicas
    for at in range(200):
        _, number, _ = cluster.take(text(at, 50), most=1000)
        cluster.router.wrote(replica, number, 1)
        cluster.router.ended(replica, number, 300)
    assert cluster.router.written == pytest.approx(300, rel=0.05)
    assert replica.work == 0
    cluster.take(text(1, 50), most=1000)
    assert replica.work == pytest.approx(50 + DECODE_WEIGHT * 300, rel=0.05)


def test_a_replica_that_drains_takes_nothing():
    cluster = Cluster(2)
    cluster.replicas[0].taking = False
    assert {cluster.take(text(at, 9))[0] for at in range(5)} == {1}
    cluster.replicas[1].taking = False
    hashes = cluster.replicas[0].pages.hashes(b"")
    assert cluster.router.choose(cluster.replicas, hashes, [1, 2]) is None


def test_texts_that_come_together_share_what_the_first_computes():
    cluster = Cluster(3)
    shared = text(1, 200)
    places = {cluster.take([*shared, at])[0] for at in range(3)}
    assert len(places) == 1, "its pages are expected, though nothing is computed yet"
