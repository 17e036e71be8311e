"""Shared by the tests of the engine: a scripted model that is watched, and the definitions it is held against.

Nothing here is taken from the engine but its plain data: what a row reads is found by asking every position.
"""

from functools import cache
from random import Random

from tests.engine.invariants import check_invariants
from tests.engine.scripted import ScriptedModel
from tokenwright.engine import (
    AttentionWindow,
    Engine,
    Failed,
    Group,
    NoStopChecker,
    PagePool,
    Pick,
    PrefixIndex,
    Request,
    SamplingParams,
    Scheduler,
    Sequence,
)
from tokenwright.engine.layer_group import StateWindow
from tokenwright.engine.prefix_index import PrefixHashes
from tokenwright.engine.request import group_for


class Planted(Exception):
    """A fault that a test has put there."""


FULL = AttentionWindow()
RUBBISH = -1  # what a step that fails leaves where it has written


def is_read(window, position, row):
    """The definition: whether the row reads the position."""
    if not window.start <= position <= row or (window.stop is not None and position >= window.stop):
        return False
    return window.size is None or row - position < window.size or position < window.sinks


def is_read_from(window, position, row):
    """Whether some row from `row` on reads the position: the nearest one that is not before it does, or none."""
    return is_read(window, position, max(row, position))


@cache
def kept_pages(window, computed, page_size, end=None):
    """The pages of a text that rows behind `computed` tokens read: of these tokens, or of the first `end`."""
    end = computed if end is None else end
    return frozenset(position // page_size for position in range(end) if is_read_from(window, position, computed))


def seen(window, text):
    """The tokens that the last row of a text reads."""
    return [token for position, token in enumerate(text) if is_read(window, position, len(text) - 1)]


def mixed(text):
    """A next token that every token in reach and its place have a say in."""
    return sum((place + 1) * token for place, token in enumerate(text)) % 97


def naive(request, window=FULL, context=1000):
    """The text that a request must come to, by the definition alone."""
    text = list(request.prompt)
    while len(text) < min(context, len(request.prompt) + request.params.max_tokens):
        text.append(mixed(seen(window, text)))
    return text


class Watched(ScriptedModel):
    """Compares what every chunk could read, in every group, with the texts as they were asked for and chosen."""

    def __init__(self, script, groups, page_size):
        super().__init__(script, groups, page_size)
        self.texts = {}
        self.steps = []  # those that did not fail
        self.breaks = False  # the whole step
        self.faulty = set()  # sequences of which it computes rubbish, and says so
        self.copies = []
        self.moved = 0  # pages read out or written back

    def forward(self, step):
        if self.breaks:
            for chunk in step.chunks:
                self._spoil(chunk)
            raise Planted
        output = super().forward(step)
        for chunk in step.chunks:
            if chunk.sequence.id in self.faulty:
                self._spoil(chunk)
        for chunk in step.chunks:
            if chunk.sequence.id not in self.faulty:
                self._compare(chunk)
        self.steps.append(step)
        return output

    def pick(self, output, step):
        results = [result for result in super().pick(output, step) if result.sequence not in self.faulty]
        results += [Failed(chunk.sequence.id, Planted()) for chunk in step.chunks if chunk.sequence.id in self.faulty]
        for result in results:
            if isinstance(result, Pick):
                self.texts[result.sequence] += result.tokens
        return results

    def copy(self, group, source, target):
        before = self.moved
        super().copy(group, source, target)
        self.moved = before
        self.copies.append((group, source, target))

    def read(self, group, pages):
        self.moved += len(pages)
        return super().read(group, pages)

    def write(self, group, pages, contents):
        self.moved += len(pages)
        super().write(group, pages, contents)

    def _spoil(self, chunk):
        for position in range(chunk.start, chunk.stop):
            for group, slots, table in zip(self.groups, self.slots, chunk.sequence.tables, strict=True):
                if position // self.page_size in table:
                    state = isinstance(group.window, StateWindow)
                    slots[self._slot(table, position - position % self.page_size if state else position)] = RUBBISH

    def _compare(self, chunk):
        text = self.texts.setdefault(chunk.sequence.id, list(chunk.request.prompt))
        if chunk.drafts:
            text = [*text, *chunk.drafts]
            assert chunk.stop == len(text), "drafts stand behind the text"
        assert list(chunk.tokens) == text[chunk.start : chunk.stop], "a chunk of another text"
        for group, slots, table in zip(self.groups, self.slots, chunk.sequence.tables, strict=True):
            if isinstance(group.window, StateWindow):
                state = slots[table[(chunk.stop - 1) // self.page_size] * self.page_size]
                assert state == tuple(text[: chunk.stop]), "a state of another text"
                continue
            for position in range(chunk.stop):
                if is_read_from(group.window, position, chunk.start):
                    there = slots[self._slot(table, position)]
                    assert there == text[position], f"{there} stands where {text[position]} was computed"


class ScriptedTier:
    """A page tier in a dictionary. It reads a few pages at a time, loses some, and takes only some, drawn by the seed.

    looked: how often it was asked whether to read, or to read a page. lossless: it keeps and reads all pages.
    """

    def __init__(self, seed, *, lossless=False):
        self.draw = Random(seed)
        self.lossless = lossless
        self.pages = {}
        self.looked = 0
        self.touched = []

    def held(self, group, hashes):
        return [(group, one) in self.pages for one in hashes]

    def wanted(self, group, hashes):
        lacking = [index for index, one in enumerate(hashes) if (group, one) not in self.pages]
        return [index for index in lacking if self.lossless or self.draw.random() < 0.9]

    def write(self, group, hashes, contents):
        self.pages.update(((group, one), list(content)) for one, content in zip(hashes, contents, strict=True))

    def worth_reading(self, tokens, nbytes):
        assert tokens > 0 and nbytes > 0, "it is asked about what there is to read"
        self.looked += 1
        return self.lossless or self.draw.random() < 0.9

    def read(self, group, hashes, memory, pages):
        good = []
        for index, one in enumerate(hashes[: self.draw.randint(1, len(hashes))]):
            self.looked += 1
            content = self.pages.get((group, one))
            if not self.lossless and self.draw.random() < 0.1:
                self.pages.pop((group, one), None)
            elif content is not None:
                memory.write(group, [pages[index]], [content])
                good.append(index)
        return good

    def used(self, group, hashes):
        self.touched.append((group, list(hashes)))


class Guesses:
    """A proposer whose drafts hold for a while and then fail, or hold to the last, or fail at once."""

    MOST = 6

    def __init__(self, window, seed, script=mixed):
        self.window = window
        self.seed = seed
        self.script = script

    def propose(self, sequences, most, step):
        return [self._drafts(*each) for each in zip(sequences, most, strict=True)]

    def end(self, sequence): ...

    def _drafts(self, sequence, most):
        """Drawn by the sequence and its length, so that equal calls have equal answers."""
        draw = Random(f"{self.seed} {sequence.id} {len(sequence.tokens)}")
        count = draw.randint(0, min(most, self.MOST))
        held, text = draw.randint(0, count), list(sequence.tokens)
        for place in range(count):
            token = self.script(seen(self.window, text))
            text.append(token if place < held else (token + 1) % 97)
        return text[len(sequence.tokens) :]


def build(
    *groups,
    page_size=4,
    token_budget=16,
    max_sequences=8,
    context=1000,
    seed=b"",
    script=mixed,
    model=Watched,
    proposer=None,
    tier=None,
):
    """An engine over a watched model, and the model. A number of pages stands for a group without a window."""
    groups = [Group(group, page_bytes=1) if isinstance(group, int) else group for group in groups]
    memory = model(script, groups, page_size)
    pool = PagePool(groups, page_size, memory)
    prefixes = PrefixIndex(pool, seed, tier=tier)
    scheduler = Scheduler(pool, token_budget, max_sequences, prefixes, proposer)
    return Engine(memory, memory, scheduler, context), memory


def running(engine):
    """The sequences that run, in the order of their groups."""
    return [sequence for group in engine.scheduler.running for sequence in group.sequences]


def request(*prompt, most=4, **options):
    return Request(tuple(prompt), SamplingParams(max_tokens=most), **options)


def sequence_of(*tokens, identity=0, asked=None, limit=1000, tables=(), choices=(0,), stop_checker=None):
    """A sequence outside any engine, for chunks made by hand; `asked`: its request."""
    checker, hashes = stop_checker or NoStopChecker(), PrefixHashes(b"", 1)
    request = asked or Request(tokens)
    sequence = Sequence(identity, request, list(tokens), tables, hashes, checker, choices, group_for(request, limit))
    sequence.group.add(sequence)
    return sequence


def drain(engine):
    """Step until nothing is left to do. What the model finds wrong is an error here, not a request that failed."""
    events = []
    while engine.busy:
        events += heard(engine.step())
        check_invariants(engine.scheduler)
    return events


def heard(events):
    for event in events:
        if isinstance(event, Failed) and not isinstance(event.error, Planted):
            raise event.error
    return events


def run(engine, *requests):
    """Serve requests side by side, to their ends."""
    sequences = [engine.submit(one) for one in requests]
    drain(engine)
    return sequences
