"""KV events: what a subscriber makes of them is the pool's index, whatever was lost, and whoever came late."""

import socket
import time

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from tests.cluster.reading import Subscriber, unpack
from tests.engine.test_page_pool import PoolMachine, attention_windows
from tests.profiles import examples
from tokenwright import LLM
from tokenwright.cluster.publisher import EventLog, KVPublisher, PageChanges, binds, check_address, pack, short
from tokenwright.engine import Group, PagePool, PrefixIndex
from tokenwright.engine.page_events import CachedPage
from tokenwright.errors import RequestError

values = st.recursive(
    st.none()
    | st.integers(0, 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=300)
    | st.binary(max_size=300),
    lambda inner: st.lists(inner, max_size=20),
    max_leaves=30,
)


@given(values)
def test_messagepack_comes_back(value):
    assert unpack(pack(value)) == value


@pytest.mark.parametrize("length", [0, 15, 16, 31, 32, 255, 256, 65_535, 65_536])
def test_messagepack_of_every_length_comes_back(length):
    for value in ("x" * length, b"x" * length, [1] * length):
        assert unpack(pack(value)) == value


def index_of(pool):
    """What a subscriber must know of a pool: its full pages, by group."""
    return {
        (number, short(page_hash))
        for number, group in enumerate(pool.group_pools)
        for page_hash in group.index.keys() - group.tail_of.keys()
    }


class PublishedPool(PoolMachine):
    """A pool of which a subscriber hears only a part of the batches, and none for a while."""

    @initialize(
        attention_windows=st.lists(attention_windows, min_size=1, max_size=3),
        pages=st.lists(st.integers(2, 20), min_size=3, max_size=3),
        page_size=st.integers(1, 5),
        kept=st.sampled_from([1, 3, 1000]),
    )
    def build(self, attention_windows, pages, page_size, kept):
        self.shape = attention_windows, pages, page_size
        self.kept, self.number = kept, 0
        self.subscriber = Subscriber(lambda number: self.log.replay(number))
        self.restart()

    @rule()
    def restart(self):
        """A new engine at the same address; the subscriber misses that."""
        super().build(*self.shape)
        self.changes = PageChanges()
        self.pool.listen(self.changes)
        self.log = EventLog(self.size, self.prefixes.hashes().root, len(self.groups), self.kept, self.number + 1)
        self.number, _ = self.log.begin()

    @rule(lost=st.booleans(), batches=st.integers(1, 3))
    def publish(self, lost, batches):
        """What has changed, in several batches of which a subscriber misses some; then one that it receives."""
        changes = self.waiting()
        size = max(1, -(-len(changes) // batches))
        for at in range(0, len(changes), size):
            self.number, payload = self.log.add(changes[at : at + size])
            if not lost:
                self.subscriber.receive(self.number, payload)
        self.number, payload = self.log.add([])
        self.subscriber.receive(self.number, payload)
        assert self.subscriber.blocks.keys() == index_of(self.pool)
        self.check_blocks()

    def check_blocks(self):
        """Each block has the tokens of a text, and its parent is the page before it."""
        texts = {short(name): meaning for name, meaning in self.meaning.items()}
        for (_, name), (parent, tokens, extra) in self.subscriber.blocks.items():
            if name in texts:
                salt, text = texts[name]
                assert tokens == text[-self.size :]
                assert (parent is None) is (len(text) == self.size)
                assert parent is None or parent not in texts or texts[parent][1] == text[: -self.size]
                assert (extra is not None) is (parent is None and salt != b"")

    def waiting(self):
        self.changes.evicted(-1, b"end")
        *found, last = self.changes.take()
        assert last == (-1, b"end")
        return found


PublishedPool.TestCase.settings = examples(60, stateful_step_count=20)
TestPublishedPool = PublishedPool.TestCase


def page(at, before=b"root", first=False):
    return CachedPage(bytes((at,)) * 32, before, first, (at, at))


def test_pages_of_one_text_are_one_event_and_a_salt_is_named():
    log = EventLog(2, b"root", first=7)
    one, two = page(1, first=True), page(2, bytes((1,)) * 32)
    number, payload = log.add([(0, one), (0, two), (0, page(3, b"salted" * 5, first=True)), (0, one.page_hash)])
    assert number == 7
    ones, twos, threes = (int.from_bytes(bytes((at,)) * 8, "big") for at in (1, 2, 3))
    root = (b"salted" * 5).hex()[:16]
    assert unpack(payload)[1] == [
        ["BlockStored", [ones, twos], None, [1, 1, 2, 2], 2, None, "GPU", None],
        ["BlockStored", [threes], None, [3, 3], 2, None, "GPU", None, [[root]]],
        ["BlockRemoved", [ones], "GPU"],
    ]


def test_batches_that_are_not_kept_are_replayed_as_one_with_all_pages():
    log = EventLog(2, b"root", kept=2, first=1)
    log.begin()
    one, two = page(1, first=True), page(2, bytes((1,)) * 32)
    log.add([(0, one)])
    log.add([(0, two)])
    number, _ = log.add([(0, one.page_hash)])
    assert [at for at, _ in log.replay(3)] == [3, 4]
    [(at, payload)] = log.replay(2)
    assert at == number == 4
    twos, ones = (int.from_bytes(bytes((at,)) * 8, "big") for at in (2, 1))
    assert unpack(payload)[1] == [
        ["AllBlocksCleared"],
        ["BlockStored", [twos], ones, [2, 2], 2, None, "GPU", None],
    ]


def test_numbers_rise_over_restarts():
    before, _ = EventLog(2, b"root").begin()
    time.sleep(0.001)
    after, payload = EventLog(2, b"root").begin()
    assert after > before
    assert unpack(payload)[1] == [["AllBlocksCleared"]]


def test_a_pool_that_has_pages_cannot_be_listened_to():
    pool = PagePool([Group(4)], 2)
    prefixes, tables = PrefixIndex(pool), pool.tables()
    pool.reserve(tables, 0, 2, 2)
    prefixes.cache_pages(tables, prefixes.hashes(), [1, 2], 0, 2)
    with pytest.raises(AssertionError, match="from the first on"):
        pool.listen(PageChanges())


@pytest.mark.parametrize(
    "address", ["", "tcp://*", "udp://*:5557", "tcp://*:0", "tcp://*:65535", "tcp://a/b:1", "*:5557"]
)
def test_other_addresses_are_refused(address):
    with pytest.raises(RequestError, match="tcp://\\*:5557"):
        check_address(address)


def test_it_listens_at_own_addresses_and_connects_to_others():
    hosts = ["*", "0.0.0.0", "[::]", "127.0.0.1", "[::1]", "localhost", "collector", "10.0.0.7"]
    assert [host for host in hosts if not binds(host)] == ["collector", "10.0.0.7"]


def test_a_port_that_is_taken_is_named(llm, free_ports):
    with zmq.Context() as context, context.socket(zmq.PUB) as other:
        other.bind(f"tcp://127.0.0.1:{free_ports + 1}")
        with pytest.raises(RequestError, match="must both be free"):
            KVPublisher(llm, f"tcp://127.0.0.1:{free_ports}")


def test_replays_for_a_collector_are_not_offered_to_all(llm, free_ports):
    """Events hold the token ids of all texts."""
    publisher = KVPublisher(llm, f"tcp://10.255.255.1:{free_ports}")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", free_ports + 1), 60).close()
    publisher.close()


@pytest.fixture
def llm():
    with LLM("stories", page_size=4, pages=64) as opened:
        yield opened


@pytest.fixture
def free_ports():
    """A port that is free, and the next, too."""
    with zmq.Context() as context:
        while True:
            one, two = context.socket(zmq.PUB), context.socket(zmq.PUB)
            with one, two:
                port = one.bind_to_random_port("tcp://127.0.0.1")
                try:
                    two.bind(f"tcp://127.0.0.1:{port + 1}")
                except zmq.ZMQError:
                    continue
                break
    return port


class Wire:
    """A subscriber's sockets."""

    def __init__(self, context, port):
        self.live = context.socket(zmq.SUB)
        self.live.connect(f"tcp://127.0.0.1:{port}")
        self.live.subscribe(b"kv@")
        self.replay = context.socket(zmq.DEALER)
        self.replay.connect(f"tcp://127.0.0.1:{port + 1}")
        self.subscriber = Subscriber(self.ask)

    def ask(self, number):
        self.replay.send_multipart((b"", number.to_bytes(8, "big")))
        while True:
            _, at, payload = self.replay.recv_multipart()
            if at == b"\xff" * 8:
                return
            yield int.from_bytes(at, "big"), payload

    def read(self, until):
        """Receive batches until the blocks are those."""
        while self.subscriber.blocks.keys() != until():
            topic, number, payload = self.live.recv_multipart()
            assert topic == b"kv@here@stories"
            self.subscriber.receive(int.from_bytes(number, "big"), payload)

    def close(self):
        self.live.close(linger=0)
        self.replay.close(linger=0)


def test_subscribers_on_sockets_know_the_index(llm, free_ports):
    """One from the start, and one that comes late and goes for a while; the pool evicts pages meanwhile."""
    publisher = KVPublisher(llm, f"tcp://127.0.0.1:{free_ports}", "kv@here@stories")

    def index():
        return llm.inspect(lambda engine: index_of(engine.pool))

    with zmq.Context() as context:
        early = Wire(context, free_ports)
        time.sleep(0.2)  # ZeroMQ drops what is published before the connection
        llm.generate(["Once upon a time there was", "The dog"], max_tokens=40, seed=1)
        early.read(index)
        late = Wire(context, free_ports)
        time.sleep(0.2)
        llm.generate([f"{name} went to the park and" for name in ("Tom", "Lily", "Sue")], max_tokens=60, seed=2)
        for wire in (early, late):
            wire.read(index)
        assert early.subscriber.replays <= 1, "nothing was lost"
        assert late.subscriber.replays == 1
        for wire in (early, late):
            wire.close()
    publisher.close()
