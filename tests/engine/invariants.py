"""The invariants of an engine between two steps: of its sequences and groups, their pages, and the pins."""

from collections import Counter
from collections.abc import Iterable

from tokenwright.engine import PagePool, Scheduler, State
from tokenwright.engine.layer_group import PageTable, PageTables
from tokenwright.engine.page_pool import GroupPool
from tokenwright.engine.pins import Pins


def check_invariants(scheduler: Scheduler) -> None:
    kv = scheduler.kv
    owners = [*scheduler.sequences.values(), *scheduler.warming]
    check_pins(kv.pins)
    pinned = [pin.tables for pin in kv.pins]
    check_pool(kv.pool, [*(sequence.tables for sequence in owners), *kv.saved_states.values(), *pinned])
    for sequence in owners:
        assert kv.pool.covers(sequence.tables, sequence.computed), "computed tokens that are read have pages"
        assert writable(kv.pool, sequence.tables, sequence.computed), "a page to be written has one user"
    groups = (*scheduler.running, *scheduler.waiting)
    grouped = [sequence for group in groups for sequence in group.sequences]
    assert sorted(one.id for one in grouped) == sorted(scheduler.sequences), "each sequence is in one group"
    for group in groups:
        state = State.RUNNING if group in scheduler.running else State.WAITING
        assert all(one.group is group and one.state is state for one in group.sequences), "a group has one state"
    for sequence in scheduler.sequences.values():
        assert sequence.computed <= len(sequence.tokens) <= sequence.limit, "a sequence is within its limit"
        if sequence.state is State.WAITING:
            assert not (sequence.pages or sequence.computed), "a waiting sequence has no pages"


def check_pool(pool: PagePool, tables: Iterable[PageTables]) -> None:
    columns = list(tables)
    for number, group in enumerate(pool.group_pools):
        check_group(group, [one[number] for one in columns])


def check_group(pool: GroupPool, tables: Iterable[PageTable]) -> None:
    used = Counter(page for table in tables for page in table.values())
    assert used == pool.refcounts, f"page tables and refcounts differ: {used} and {pool.refcounts}"
    seen = sorted([*pool.free, *pool.cached, *used])
    assert seen == list(range(pool.group.pages)), f"each page is free, cached or in use: {seen}"
    assert {known: page for page, known in pool.hashes.items()} == pool.index, "the index is not the hashes' inverse"
    assert not pool.hashes.keys() & set(pool.free), "a free page has a hash"
    assert pool.cached.keys() <= pool.hashes.keys(), "a cached page has no hash"
    assert pool.tail_of.keys() <= pool.index.keys(), "a tail is not in the index"
    lengths = {before: Counter(n for b, n in pool.tail_of.values() if b == before) for before in pool.tails}
    assert lengths == pool.tails, "tails are counted wrong"


def check_pins(pins: Pins) -> None:
    for owner in {pin.owner for pin in pins} | pins._pinned.keys():
        for number in range(len(pins._most)):
            pages = Counter(page for pin in pins if pin.owner == owner for page in pin.tables[number].values())
            assert pages == pins._pinned[owner][number], "pinned pages are counted wrong"
    assert all(pages <= most for pages, most in zip(pins.pages(), pins._most, strict=True)), "pins have too much"


def writable(pool: PagePool, tables: PageTables, computed: int) -> bool:
    """Whether no other sequence reads the pages that are reserved after `computed` tokens, and no hash finds them."""
    for group, table in zip(pool.group_pools, tables, strict=True):
        for page in range(computed // pool.page_size, -(-table.reserved // pool.page_size)):
            found = table.get(page)
            if found is None or group.refcounts[found] != 1 or found in group.hashes:
                return False
    return True
