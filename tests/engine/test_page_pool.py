"""The page pool, and its prefix index: tables grow, share, fork and go in any order.

The oracle is the text of every table: each position that a later token reads must hold its token, whatever happened to
the others. Which pages are free, shared or forgotten is counted anew from the tables every time.
"""

from dataclasses import dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.engine.hand import is_read_from, kept_pages
from tests.engine.invariants import check_pool, writable
from tests.profiles import examples
from tokenwright.engine import AttentionWindow, Group, PagePool, PrefixIndex
from tokenwright.engine.layer_group import PageTables, StateWindow
from tokenwright.engine.page_pool import NullMemory
from tokenwright.engine.prefix_index import PrefixHashes

COMMON = [[(step * place) % 5 for place in range(40)] for step in (1, 2)]
SALTS = (b"", b"salt")


class Slots:
    """A memory of tokens."""

    def __init__(self, groups, page_size):
        self.pages = [[[None] * page_size for _ in range(group.pages)] for group in groups]

    def copy(self, group, source, target):
        self.pages[group][target] = list(self.pages[group][source])

    def read(self, group, pages):
        return [list(self.pages[group][page]) for page in pages]

    def write(self, group, pages, contents):
        for page, content in zip(pages, contents, strict=True):
            self.pages[group][page] = list(content)


@dataclass(eq=False)
class Text:
    """A sequence as far as the pool knows it."""

    tokens: list[int]
    salt: bytes
    tables: PageTables
    hashes: PrefixHashes
    computed: int = 0


attention_windows = st.one_of(
    st.builds(AttentionWindow),
    st.builds(AttentionWindow, size=st.integers(2, 9)),
    st.builds(AttentionWindow, size=st.integers(2, 9), sinks=st.integers(1, 6)),
    st.builds(AttentionWindow, stop=st.integers(1, 15)),
    st.builds(AttentionWindow, size=st.none() | st.integers(2, 9), start=st.integers(1, 15)),
)
turns = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "begin",
                "begin",
                "go",
                "go",
                "go",
                "fork",
                "fork_and_end",
                "fork_and_end",
                "release",
                "rewind",
                "save",
                "load",
            ]
        ),
        st.integers(0, 9),  # whose turn it is
        st.integers(1, 12),  # tokens
        st.sampled_from([None, 0, 1]),  # how a text goes on
    ),
    min_size=1,
    max_size=12,
)


class PoolMachine(RuleBasedStateMachine):
    @initialize(
        attention_windows=st.lists(attention_windows, min_size=1, max_size=3),
        pages=st.lists(st.integers(2, 20), min_size=3, max_size=3),
        page_size=st.integers(1, 5),
    )
    def build(self, attention_windows, pages, page_size):
        self.groups = [
            Group(count, window, page_bytes=1) for count, window in zip(pages, attention_windows, strict=False)
        ]
        self.memory = Slots(self.groups, page_size)
        self.size = page_size
        self.pool = PagePool(self.groups, page_size, self.memory)
        self.prefixes = PrefixIndex(self.pool)
        self.texts: list[Text] = []
        self.saved: list[tuple[Text, int, list[list[int]], list]] = []
        self.meaning: dict[bytes, tuple[bytes, tuple[int, ...]]] = {}  # of hashes
        self.named: list[dict[tuple[bytes, tuple[int, ...]], int]] = [{} for _ in self.groups]  # before this turn
        self.let_go: list[dict[int, tuple[int, int]]] = [{} for _ in self.groups]  # page: when, and in which order
        self.clock = 0

    @rule(turns=turns)
    def turn(self, turns):
        for name, who, tokens, way in turns:
            self.clock += 1
            before = [dict(pages) for pages in self.let_go]
            if name == "begin" and len(self.texts) < 6:
                self.begin(who, tokens, way)
            elif name != "begin" and self.texts:
                getattr(self, name)(self.texts[who % len(self.texts)], tokens, way)
            self.check_names(before)
            self.books_balance()

    def begin(self, who, length, way):
        tokens = COMMON[way or 0][: 3 * length] + [who] * (length % 3)
        salt = SALTS[way is None]
        text = Text(tokens, salt, self.pool.tables(), self.prefixes.hashes(salt))
        self.texts.append(text)
        self.find(text)

    def find(self, text):
        """The longest beginning of which all that a later row reads has a name, and no more."""
        cut = self.prefixes.match_prefix(text.hashes, text.tokens)
        assert cut == self.longest(text, len(text.tokens) - 1, tails=True)
        held = [self.held(number) for number in range(len(self.groups))]
        self.prefixes.attach_prefix(text.tables, text.hashes, text.tokens, cut)
        for number, (group, table) in enumerate(zip(self.groups, text.tables, strict=True)):
            assert table.keys() == kept_pages(group.window, cut, self.size)
            assert all(page in held[number] or page in self.let_go[number] for page in table.values())
        text.computed = cut

    def longest(self, text, most, *, tails):
        """The longest beginning of which all is there that a row behind it reads, by trying."""
        lengths = {len(left) for named in self.named for left in self.tails_of(text, named)} if tails else set()
        cuts = [at for at in range(most + 1) if at % self.size == 0 or at in lengths]
        return next(at for at in reversed(cuts) if self.is_there(text, at))

    def tails_of(self, text, named):
        """What named texts left behind full pages that the text has, too. A row there may read nothing of it."""
        for salt, left in named:
            before = (len(left) - 1) // self.size * self.size
            if salt == text.salt and list(left[:before]) == text.tokens[:before]:
                yield left

    def is_there(self, text, at):
        return all(
            self.name(text, page, at) in named
            for group, named in zip(self.groups, self.named, strict=True)
            for page in kept_pages(group.window, at, self.size)
        )

    def name(self, text, page, at=1000):
        return text.salt, tuple(text.tokens[: min((page + 1) * self.size, at)])

    def held(self, number):
        """Pages of a group that stand in a table."""
        return {page for text in self.texts for page in text.tables[number].values()}

    def go(self, text, tokens, way):
        """Compute some tokens more, and name the pages that they fill, or do not."""
        if text.computed == len(text.tokens):
            text.tokens += COMMON[way or 0][:tokens]
        stop = min(text.computed + tokens, len(text.tokens))
        ahead = len(text.tokens) if way else stop
        fits, before = self.fits(text, stop, ahead), [dict(table) for table in text.tables]
        assert self.pool.reserve(text.tables, text.computed, stop, ahead) is fits
        if not fits:
            assert text.tables == before, "all or nothing"
            return
        self.check_need()
        for number, (old, table) in enumerate(zip(before, text.tables, strict=True)):
            for place in [place for place in old if table[place] != old[place]]:  # copied, the first ones first
                if old[place] not in self.held(number):
                    self.let_go[number][old[place]] = (self.clock, place - 1000)  # before any that is trimmed
        self.write(text, stop)
        if way is not None:
            self.cache_pages(text, stop)
        text.computed = stop
        before = [dict(table) for table in text.tables]
        self.pool.trim(text.tables, stop)
        self.gone(before, text.tables, 1)
        for group, table in zip(self.groups, text.tables, strict=True):
            assert group.window.size is None or table.keys() == kept_pages(group.window, stop, self.size)

    def cache_pages(self, text, stop):
        self.prefixes.cache_pages(text.tables, text.hashes, text.tokens, text.computed, stop)
        for place in range(text.computed // self.size, stop // self.size):
            name, meaning = text.hashes.hashes[place], self.name(text, place)
            assert self.meaning.setdefault(name, meaning) == meaning, "one name for two texts"
            for pool, table in zip(self.pool.group_pools, text.tables, strict=True):
                assert place not in table or table[place] == pool.index[name], "there is one page of a name"

    def fits(self, text, stop, ahead):
        """Whether there are pages for all that is read or written, and for a copy of each that others hold too."""
        for number, (group, table) in enumerate(zip(self.groups, text.tables, strict=True)):
            end = stop if group.window.size is not None else ahead
            read = kept_pages(group.window, text.computed, self.size, end)
            others = {page for one in self.texts if one is not text for page in one.tables[number].values()}
            written = {position // self.size for position in range(text.computed, stop)}
            copied = [place for place in written if table.get(place) in others]
            if len(read - table.keys()) + len(copied) > group.pages - len(self.held(number)):
                return False
        return True

    def write(self, text, stop):
        for number, (group, table) in enumerate(zip(self.groups, text.tables, strict=True)):
            for position in range(text.computed, stop):
                if is_read_from(group.window, position, text.computed):
                    page = table[position // self.size]
                    users = [one for one in self.texts if page in one.tables[number].values()]
                    assert users == [text], "others hold what is written to"
                    assert page not in self.pool.group_pools[number].hashes, "others may find what is written to"
                    self.memory.pages[number][page][position % self.size] = text.tokens[position]

    def gone(self, before, after, order):
        """Note when pages were let go, if nobody holds them now: later ones in a text first, or last."""
        for number, (old, new) in enumerate(zip(before, after, strict=True)):
            for place in old.keys() - new.keys():
                if old[place] not in self.held(number):
                    self.let_go[number][old[place]] = (self.clock, order * place)

    def fork(self, text, tokens, way):
        """Fork a text where it is, or at an earlier place whose pages it still has."""
        cut = max(0, text.computed - tokens)
        if len(self.texts) >= 6:
            return
        if way != 0 and self.pool.covers(text.tables, cut):
            own = [*text.tokens[:cut], tokens, *COMMON[way or 0][:tokens]]
            tables = self.pool.fork(text.tables, cut)
            self.texts.append(Text(own, text.salt, tables, self.prefixes.hashes(text.salt), cut))
        else:
            tables, hashes = self.pool.fork(text.tables), text.hashes.fork()
            child = Text(list(text.tokens), text.salt, tables, hashes, text.computed)
            held = max((page + 1 for table in tables for page in table), default=0)
            del child.tokens[max(text.computed, held * self.size, 1) :]  # they part here
            del child.hashes.hashes[len(child.tokens) // self.size :]
            child.tokens += COMMON[way or 0][:tokens]
            self.texts.append(child)

    def fork_and_end(self, text, tokens, way):
        """A fork that ends before it has computed anything, as does any text: its tail is cached."""
        texts = list(self.texts)
        self.fork(text, tokens, way)
        for child in self.texts[len(texts) :]:
            self.release(child, tokens, None)

    def release(self, text, tokens, way):
        """It ends; or it falls back, and looks for what it left itself."""
        before = [dict(table) for table in text.tables]
        if way != 0:
            self.cache_tail(text)
            before = [dict(table) for table in text.tables]
        self.pool.release(text.tables)
        assert not any(text.tables)
        self.gone(before, text.tables, -1)
        if way is None:
            self.texts.remove(text)
        else:
            self.find(text)

    def cache_tail(self, text):
        page, length = divmod(text.computed, self.size)
        before = [dict(table) for table in text.tables]
        self.prefixes.cache_tail(text.tables, text.hashes, text.tokens, text.computed)
        if length:
            name = text.hashes.hash(text.tokens, page, text.computed)
            meaning = self.name(text, page, text.computed)
            assert self.meaning.setdefault(name, meaning) == meaning, "one name for two texts"
            for pool, old, table, named in zip(self.pool.group_pools, before, text.tables, self.named, strict=True):
                names = [other for other, page_of in named.items() if page_of == old.get(page)]
                if names not in ([], [meaning]):
                    assert table[page] == old[page], "a page keeps the name that it has"
                elif page in table:
                    assert table[page] == pool.index[name], "there is one page of a name"
                    named[meaning] = table[page]

    def rewind(self, text, tokens, way):
        before = [dict(table) for table in text.tables]
        self.pool.rewind(text.tables)
        self.gone(before, text.tables, -1)
        text.computed = 0
        for group, old, new in zip(self.groups, before, text.tables, strict=True):
            assert new == (old if group.window.size is None else {})

    def save(self, text, tokens, way):
        """Read the cached pages of a text, in use or not, and leave them where they are."""
        cut, tables = self.prefixes.find_pages(text.hashes, text.tokens)
        assert cut == self.longest(text, len(text.tokens), tails=False)
        for named, table in zip(self.named, tables, strict=True):
            there = {page: named.get(self.name(text, page)) for page in range(cut // self.size)}
            assert table == {place: page for place, page in there.items() if page is not None}
        contents = [self.memory.read(number, list(table.values())) for number, table in enumerate(tables)]
        self.saved.append(
            (Text(text.tokens[:cut], text.salt, [], PrefixHashes(b"", self.size)), cut, [*map(list, tables)], contents)
        )

    def load(self, text, tokens, way):
        """Bring in what was taken out before and is not there any more: all of it, or as much as a row reads."""
        if not self.saved:
            return
        text, cut, pages, contents = self.saved[tokens % len(self.saved)]
        text.hashes = self.prefixes.hashes(text.salt)
        rows = self.prefixes.missing_pages(text.hashes, text.tokens, pages)
        assert rows == self.fresh(text, cut, pages)
        if rows is not None:
            lists = [dict(zip(have, one, strict=True)) for have, one in zip(pages, contents, strict=True)]
            chosen = [[one[page] for page in row] for one, row in zip(lists, rows, strict=True)]
            present = [self.present(number, text, cut) for number in range(len(self.groups))]
            self.prefixes.insert_pages(text.hashes, text.tokens, rows, chosen)
            assert self.prefixes.match_prefix(text.hashes, text.tokens, cut, tails=False) == cut, "all that a row reads"
            lists = zip(present, rows, self.pool.group_pools, strict=True)
            found = [old | {page: pool.index[text.hashes.hashes[page]] for page in row} for old, row, pool in lists]
            self.gone(found, self.pool.tables(), -1)

    def present(self, number, text, cut):
        """The pages that a row behind `cut` reads and that are there, held or not."""
        read = kept_pages(self.groups[number].window, cut, self.size)
        names = {page: self.name(text, page) for page in read}
        return {page: self.named[number][name] for page, name in names.items() if name in self.named[number]}

    def fresh(self, text, cut, pages):
        rows = []
        for number, (group, row, named) in enumerate(zip(self.groups, pages, self.named, strict=True)):
            fresh = [page for page in row if self.name(text, page) not in named]
            present = self.present(number, text, cut)
            free = group.pages - len(self.held(number) | set(present.values()))
            if len(fresh) > free:
                fresh = [page for page in fresh if page in kept_pages(group.window, cut, self.size)]
            if len(fresh) > free:
                return None
            rows.append(fresh)
        return rows

    @rule(data=st.data(), length=st.integers(1, 40), chunk=st.integers(1, 12))
    def ask_for_room(self, data, length, chunk):
        """Whether a text has room, if some tables were given up for it: by doing so in the head."""
        spare = [one for one in self.texts if data.draw(st.booleans())]
        others = [one for one in self.texts if one not in spare]
        text = Text(COMMON[0][:length], b"", self.pool.tables(), self.prefixes.hashes())
        cut = self.prefixes.match_prefix(text.hashes, text.tokens)
        fits = True
        for number, group in enumerate(self.groups):
            held = {page for one in others for page in one.tables[number].values()}
            found = {
                self.named[number][self.name(text, page, cut)] for page in kept_pages(group.window, cut, self.size)
            }
            most = group.window.max_pages(length, chunk, self.size)
            fits &= most - len(found & held) <= group.pages - len(held)
        needs, tables = self.pool.max_pages(length, chunk), [one.tables for one in spare]
        assert self.prefixes.can_admit(text.hashes, text.tokens, cut, needs, tables) is fits

    def check_need(self):
        """A page stays cached as long as there are free ones to allocate instead."""
        for pool, named in zip(self.pool.group_pools, self.named, strict=True):
            assert not pool.free or {self.meaning[name] for name in pool.index} == named.keys()

    def check_names(self, before):
        """What has lost its name was let go before all that have kept theirs."""
        for number, (pool, let_go, old) in enumerate(zip(self.pool.group_pools, self.let_go, before, strict=True)):
            named = {self.meaning[name]: page for name, page in pool.index.items()}
            lost = {page for text, page in self.named[number].items() if named.get(text) != page}
            left = [when for page, when in old.items() if page in pool.cached and let_go[page] == when]
            assert all(old[page] < when for page in lost for when in left), "what was let go last was used up first"
            for page in [page for page in let_go if page in self.held(number) or page not in pool.hashes]:
                del let_go[page]
            assert sorted(let_go, key=let_go.get) == list(pool.cached)
            self.named[number] = named

    @invariant()
    def books_balance(self):
        if not hasattr(self, "pool"):
            return
        check_pool(self.pool, [text.tables for text in self.texts])
        for number, group in enumerate(self.groups):
            for text in self.texts:
                self.check_text(number, group, text)
            for (_, tokens), page in self.named[number].items():
                start = (len(tokens) - 1) // self.size * self.size
                slots = enumerate(self.memory.pages[number][page][: len(tokens) - start], start)
                there = range(max(start, group.window.start), min(len(tokens), group.window.stop or len(tokens)))
                assert all(token == tokens[place] for place, token in slots if place in there)

    def check_text(self, number, group, text):
        for position in range(text.computed):
            if is_read_from(group.window, position, text.computed):
                page = text.tables[number][position // self.size]
                assert self.memory.pages[number][page][position % self.size] == text.tokens[position]


PoolMachine.TestCase.settings = examples(200, stateful_step_count=12)
TestPoolMachine = PoolMachine.TestCase


TOKEN = st.integers(0, 2**32 - 1)
SIZE = 3


def hashes_of(tokens, seed=b"", salt=b""):
    return PrefixIndex(PagePool([Group(1)], SIZE), seed).hashes(salt).extend(tokens)


@given(st.lists(TOKEN, min_size=SIZE, max_size=20), st.data())
def test_another_token_changes_the_name_of_its_page_and_all_later_ones(tokens, data):
    place, token = data.draw(st.integers(0, len(tokens) - 1)), data.draw(TOKEN)
    other = [*tokens[:place], token, *tokens[place + 1 :]]
    same = len(tokens) // SIZE if other == tokens else place // SIZE
    assert [one == two for one, two in zip(hashes_of(tokens), hashes_of(other), strict=True)] == [
        page < same for page in range(len(tokens) // SIZE)
    ]


@given(st.lists(TOKEN, min_size=SIZE, max_size=20), st.randoms())
def test_the_order_counts(one, random):
    other = list(one)
    random.shuffle(other)
    for page, (name, another) in enumerate(zip(hashes_of(one), hashes_of(other), strict=True), 1):
        assert (name == another) is (one[: page * SIZE] == other[: page * SIZE])


@given(st.binary(max_size=12), st.integers(0, 12), st.integers(0, 12))
@example(b"ab", 0, 1)
def test_seed_and_salt_are_framed(both, cut, another):
    """What reads alike when it is put together is not alike."""
    one, other = hashes_of([1] * 6, both[:cut], both[cut:]), hashes_of([1] * 6, both[:another], both[another:])
    same = both[:cut] == both[:another]
    assert (one == other) is same
    assert same or not set(one) & set(other)


@given(st.lists(TOKEN, max_size=30), st.lists(st.integers(0, 30), max_size=5))
def test_names_given_bit_by_bit_are_those_given_at_once(tokens, cuts):
    hashes = PrefixIndex(PagePool([Group(1)], SIZE)).hashes()
    for cut in sorted(cuts):
        hashes.extend(tokens[:cut])
    fork = hashes.fork()
    assert hashes.extend(tokens) == fork.extend(tokens) == hashes_of(tokens)
    assert hashes.hashes is not fork.hashes


TAKEN_BACK = {
    "fork": lambda pool, tables: pool.fork(tables),
    "rewind": lambda pool, tables: pool.rewind(tables),
    "release": lambda pool, tables: pool.release(tables),
    "cache_pages": lambda pool, tables: cache(pool, tables, range(8), 0, 8),
}


def cache(pool, tables, tokens, start, stop):
    prefixes = PrefixIndex(pool)
    prefixes.cache_pages(tables, prefixes.hashes(), tokens, start, stop)


@pytest.mark.parametrize("what", TAKEN_BACK)
def test_pages_are_reserved_up_to_their_end_until_others_may_have_them(what):
    """A step within them asks nothing of the pool; after a fork, a fall back, or under another hash, it does again."""
    pool = PagePool([Group(9)], 4)
    tables = pool.tables()
    assert pool.reserve(tables, 0, 6, 6)
    assert tables[0].reserved == 8 and writable(pool, tables, 0)
    TAKEN_BACK[what](pool, tables)
    assert tables[0].reserved == 0


def test_a_long_chunk_reserves_states_for_no_shorter_one():
    """It writes its last state alone; one that ends before that, as when drafts are dropped, asks for its own."""
    pool = PagePool([Group(9, StateWindow(every=8))], 1)
    tables = pool.tables()
    for stop in (5, 1, 2):
        assert pool.reserve(tables, stop - 1 if stop < 5 else 0, stop, stop)
        assert stop - 1 in tables[0] and writable(pool, tables, stop - 1)
    assert set(tables[0]) == {0, 1, 4}


def test_a_pool_without_a_memory_counts_pages():
    pool = PagePool([Group(3, page_bytes=1)], 2)
    tables = pool.tables()
    assert isinstance(pool.memory, NullMemory)
    assert pool.reserve(tables, 0, 4, 4)
    fork = pool.fork(tables)
    assert pool.reserve(fork, 3, 4, 4) and pool.available == 0
    assert not pool.reserve(tables, 2, 5, 5)
    check_pool(pool, [tables, fork])


def leave(pool, tokens, salt=b""):
    """Compute a text and let it go, its last page named though it is not full."""
    tables, prefixes = pool.tables(), PrefixIndex(pool)
    hashes = prefixes.hashes(salt)
    assert pool.reserve(tables, 0, len(tokens), len(tokens))
    for number, table in enumerate(tables):
        for position, token in enumerate(tokens):
            pool.memory.pages[number][table[position // SIZE]][position % SIZE] = token
    prefixes.cache_pages(tables, hashes, tokens, 0, len(tokens))
    prefixes.cache_tail(tables, hashes, tokens, len(tokens))
    pool.release(tables)
    check_pool(pool, [])


def tailed(*attention_windows, pages=9):
    groups = [Group(pages, window) for window in attention_windows or [AttentionWindow()]]
    return PagePool(groups, SIZE, Slots(groups, SIZE))


def found(pool, tokens, most=None, salt=b"", tails=True):
    prefixes = PrefixIndex(pool)
    return prefixes.match_prefix(prefixes.hashes(salt), tokens, most, tails=tails)


LEFT = [7, 8, 9, 4, 5]  # a full page and a tail of two


@pytest.mark.parametrize("room", [0, 1])
def test_who_goes_on_behind_a_tail_writes_to_a_copy_while_there_is_room_for_one(room):
    pool = tailed(pages=2 + room)
    leave(pool, LEFT)
    tokens, prefixes, tables = [*LEFT, 6], PrefixIndex(pool), pool.tables()
    hashes = prefixes.hashes()
    prefixes.attach_prefix(tables, hashes, tokens, prefixes.match_prefix(hashes, tokens))
    tail = tables[0][1]
    assert pool.reserve(tables, 5, 6, 6)
    assert (tables[0][1] == tail) is (room == 0)
    pool.memory.pages[0][tables[0][1]][2] = 6
    assert pool.memory.pages[0][tables[0][1]] == [4, 5, 6]
    assert found(pool, [*LEFT, 1]) == (5 if room else SIZE), "what was written over is not found"
    prefixes.cache_pages(tables, hashes, tokens, 5, 6)
    assert found(pool, [*tokens, 1]) == 6
    check_pool(pool, [tables])


def test_texts_share_for_good_the_full_pages_of_what_they_have_in_common_but_not_a_windows():
    pool = tailed(
        AttentionWindow(), AttentionWindow(size=3, sinks=2), AttentionWindow(start=4), AttentionWindow(stop=4)
    )
    assert [pool.shareable_pages(tokens) for tokens in (2, 3, 5, 6, 9)] == [
        [0, 0, 0, 0],
        [1, 0, 0, 1],
        [1, 0, 0, 1],
        [2, 0, 1, 2],
        [3, 0, 2, 2],
    ]


class Broken(Slots):
    """A memory that fails where it is told to."""

    fails = None
    error = RuntimeError

    def copy(self, group, source, target):
        self._fail("copy")
        super().copy(group, source, target)

    def read(self, group, pages):
        self._fail("read")
        return super().read(group, pages)

    def write(self, group, pages, contents):
        self._fail("write")
        super().write(group, pages, contents)

    def _fail(self, name):
        if self.fails == name:
            raise self.error


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_no_page_is_lost_when_the_memory_fails(error):
    groups = [Group(6, page_bytes=1), Group(6, page_bytes=1)]
    memory = Broken(groups, 2)
    memory.error = error
    pool = PagePool(groups, 2, memory)
    prefixes, tables = PrefixIndex(pool), pool.tables()
    assert pool.reserve(tables, 0, 3, 3)
    fork = pool.fork(tables)

    def fails(name, call):
        memory.fails = name
        with pytest.raises(error):
            call()
        memory.fails = None
        check_pool(pool, [tables, fork])

    fails("copy", lambda: pool.reserve(fork, 3, 4, 4))
    assert fork == tables
    fails("write", lambda: prefixes.insert_pages(prefixes.hashes(), [1, 2], [[0], [0]], [[[1, 2]], [[1, 2]]]))
    assert pool.cached == 0


@pytest.mark.parametrize("wrong", ["lost", "twice", "stranger", "index", "free", "no hash"])
def test_the_check_finds_what_is_wrong(wrong):
    pool = PagePool([Group(4)], 1)
    tables = pool.tables()
    assert pool.reserve(tables, 0, 2, 2)
    cache(pool, tables, [5, 6], 0, 1)
    check_pool(pool, [tables])
    (one,) = pool.group_pools
    match wrong:
        case "lost":
            one.free.pop()
        case "twice":
            one.free.append(tables[0][1])
        case "stranger":
            tables[0][7] = 3
        case "index":
            one.index.clear()
        case "free":
            one.hashes[one.free[0]] = b"hash"
            one.index[b"hash"] = one.free[0]
        case "no hash":
            one.cached[one.free.pop()] = None
    with pytest.raises(AssertionError):
        check_pool(pool, [tables])
