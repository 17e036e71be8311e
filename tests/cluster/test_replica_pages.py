"""What the router knows of a replica's pages is the replica's index, and it expects what is being computed."""

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from tests.engine.test_page_pool import PoolMachine, attention_windows
from tests.engines import until
from tests.profiles import examples
from tokenwright import LLM, SamplingParams
from tokenwright.cluster.replica import PageNews, Worker
from tokenwright.cluster.replica_messages import Report, Warmed, WarmOrder, orders_of
from tokenwright.cluster.router import ReplicaPages
from tokenwright.engine import Group, Request


class ReportedPool(PoolMachine):
    @initialize(
        attention_windows=st.lists(attention_windows, min_size=1, max_size=3),
        pages=st.lists(st.integers(2, 20), min_size=3, max_size=3),
        page_size=st.integers(1, 5),
    )
    def build(self, attention_windows, pages, page_size):
        super().build(attention_windows, pages, page_size)
        self.news = PageNews()
        self.prefixes.secret = b"the router's"
        self.pool.listen(self.news)
        self.pages = ReplicaPages(self.groups, page_size, b"", b"the router's")

    @rule()
    def report(self):
        """The router finds of every text as much in full pages as the replica does."""
        self.pages.apply(self.news.take())
        full = [pool.index.keys() - pool.tail_of.keys() for pool in self.pool.group_pools]
        assert self.pages.reported == full
        for text in self.texts:
            known = self.pages.cached(self.pages.hashes(text.salt), text.tokens)
            assert known == self.prefixes.match_prefix(text.hashes, text.tokens, tails=False)


ReportedPool.TestCase.settings = examples(60, stateful_step_count=20)
TestReportedPool = ReportedPool.TestCase


def pages_of_two():
    return ReplicaPages([Group(8)], 2, b"", b"secret")


def test_pages_that_are_being_computed_count_as_cached_until_they_are_settled():
    pages = pages_of_two()
    text = [1, 2, 3, 4, 5]
    first, second = pages.hashes(b"").extend(text)
    pages.expect([first, second])
    pages.expect([first])
    assert pages.cached(pages.hashes(b""), text) == 4
    assert pages.cached(pages.hashes(b"another"), text) == 0
    pages.apply([(0, second, True)])
    pages.settle([first, second])
    assert pages.cached(pages.hashes(b""), text) == 4, "another text expects the first one still"
    pages.settle([first])
    assert pages.cached(pages.hashes(b""), text) == 0
    pages.apply([(0, first, True)])
    assert pages.cached(pages.hashes(b""), text) == 4, "the second one was reported"


def test_an_evicted_page_that_is_computed_again_is_expected():
    pages = pages_of_two()
    text = [1, 2, 3]
    [first] = pages.hashes(b"").extend(text)
    pages.apply([(0, first, True)])
    pages.expect([first])
    pages.apply([(0, first, False)])
    assert pages.cached(pages.hashes(b""), text) == 2
    pages.settle([first])
    assert pages.cached(pages.hashes(b""), text) == 0


def test_pages_of_a_warm_up_are_known_before_its_next_turn_may_come():
    """Else a turn that only begins as others' do goes to another replica, which computes it again."""
    sent, pages, text = [], PageNews(), tuple(range(5, 105))
    with LLM("stories", kv_memory="16MB") as llm:
        llm.inspect(lambda engine: engine.pool.listen(pages))
        [order] = orders_of(Request((*text, 0), SamplingParams(max_tokens=0)), [])
        worker = Worker(llm, pages, sent.append)
        worker.do(WarmOrder(0, order, (), False))
        until(lambda: sum(one.tokens for one in sent if isinstance(one, Warmed)) == len(text))
        worker.close()
        size = llm.engine.pool.page_size
    assert len({one[1] for told in sent if isinstance(told, Report) for one in told.pages}) == len(text) // size
