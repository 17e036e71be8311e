"""Panel Pages: the page pool, the sequences that use its pages, and a batch of prompts beside the run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from tokenwright.cache import LayerGroup, group_layers
from tokenwright.engine import Engine, SamplingParams
from tokenwright.engine.page_pool import GroupPool
from tokenwright.engine.request import Sequence as EngineSequence
from tokenwright.engine.request import State
from tokenwright.explorer.batches import Known, PromptBatch, Whose
from tokenwright.explorer.dataclass_reader import Between, Length
from tokenwright.explorer.explorer import Explorer, gone
from tokenwright.trace.wire import COUNTED, DERIVED

MOST_WRITTEN = 256  # tokens of one text
MOST_LISTED = 2048  # pages
Prompt = Annotated[str, Length(1, 4000)]
Tokens = Annotated[int, Between(1, MOST_WRITTEN)]


@dataclass(frozen=True, slots=True)
class PoolPage:
    """A page that is not free."""

    page: int
    refcount: int  # 0: cached, so only its prefix finds it
    filled: int  # token slots with K and V
    owners: tuple[int, ...]  # indices of the sequences in whose tables it stands
    place: int | None  # index in the owners' text


@dataclass(frozen=True, slots=True)
class PoolGroup:
    layers: tuple[int, ...]  # these keep K and V alike
    window: int | None
    sinks: int
    pages: Annotated[int, COUNTED("", "pages", "pages of the pool, in this group of layers")]
    used: Annotated[int, COUNTED("", "in use", "pages that stand in the page table of a sequence")]
    shared: Annotated[int, COUNTED("", "shared", "pages that stand in two page tables or more")]
    cached: Annotated[
        int, COUNTED("", "cached", "pages of ended texts, found by their prefix; evicted when pages run out")
    ]
    free: Annotated[int, COUNTED("", "free", "pages with nothing to be found in them")]
    page_bytes: Annotated[int, DERIVED("B", "a page", "page size x bytes of a token in these layers")]
    saved_bytes: Annotated[
        int, COUNTED("B", "saved by sharing", "further entries in page tables, times a page's bytes")
    ]
    listed: tuple[PoolPage, ...]
    left_out: int


@dataclass(frozen=True, slots=True)
class PoolSequence:
    whose: Whose
    place: int  # of a batch's prompt, from 0
    state: Literal["waiting", "running", "paused", "finished"]
    prompt: str
    text: str  # what was written; empty for other clients' sequences
    tokens: Annotated[int, COUNTED("tokens", "tokens", "prompt and written tokens")]
    computed: Annotated[int, COUNTED("tokens", "in the cache", "tokens whose K and V are in its pages")]
    forwarded: Annotated[int, COUNTED("tokens", "computed", "tokens sent through the layers for it")]
    reused: Annotated[int, COUNTED("tokens", "prefix hit", "tokens not computed, because their pages were found")]
    pages: Annotated[int, COUNTED("", "pages", "pages in its tables")]
    preemptions: Annotated[int, COUNTED("", "preemptions", "how often its pages were taken for others")]


@dataclass(frozen=True, slots=True)
class PoolCard:
    page_size: int
    groups: tuple[PoolGroup, ...]
    sequences: tuple[PoolSequence, ...]


@dataclass(frozen=True, slots=True)
class BatchCard:
    batch: str
    prompts: int
    lease_s: float  # after the last request with its id


MESSAGES = (PoolPage, PoolGroup, PoolSequence, PoolCard, BatchCard)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewBatch:
    prompts: Annotated[list[Prompt], Length(1, 6)]
    max_tokens: Tokens = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    tokens: Tokens = 1


def pages(explorer: Explorer, run: str | None = None, batch: str | None = None) -> PoolCard:
    known: list[Known] = []
    if run is not None:
        known.append(Known(explorer.run(run).sequence, "run", prompt=explorer.player(run).card.prompt))
    if batch is not None:
        known += _batch(explorer, batch).known()
    llm = explorer.llm
    layers = group_layers(llm.specs)
    return llm.inspect(lambda engine: snapshot(engine, layers, known))


def begin(explorer: Explorer, body: NewBatch, salt: str) -> BatchCard:
    """Start a batch, which writes nothing yet. Raises RequestError, CapacityError."""
    params, llm = SamplingParams(temperature=0.0, max_tokens=body.max_tokens), explorer.llm
    requests = [llm.prepare(prompt, params, salt=salt) for prompt in body.prompts]
    identity = explorer.batches.begin(llm, body.prompts, requests)
    return BatchCard(identity, len(requests), explorer.batches.lease_s)


def write(explorer: Explorer, identity: str, body: Write) -> None:
    _batch(explorer, identity).write(body.tokens)


def end(explorer: Explorer, identity: str) -> None:
    if not explorer.batches.remove(identity):
        raise gone()


def _batch(explorer: Explorer, identity: str) -> PromptBatch:
    if (batch := explorer.batches.get(identity)) is None:
        raise gone()
    return batch


def snapshot(engine: Engine, layers: Sequence[LayerGroup], known: Sequence[Known]) -> PoolCard:
    """The pool, the `known` sequences, ended ones too, and every other one of the engine, without its text."""
    mine = {one.sequence.id for one in known}
    others = [Known(one, "other") for one in engine.scheduler.sequences.values() if one.id not in mine]
    everyone = [*known, *others]
    size = engine.pool.page_size
    pairs = zip(engine.pool.group_pools, layers, strict=True)
    groups = [
        _group(pool, group.layers, size, {n: one.sequence for n, one in enumerate(everyone)}, number)
        for number, (pool, group) in enumerate(pairs)
    ]
    return PoolCard(size, tuple(groups), tuple(_sequence(one) for one in everyone))


def _sequence(known: Known) -> PoolSequence:
    sequence = known.sequence
    return PoolSequence(
        whose=known.whose,
        place=known.place,
        state=_state(sequence),
        prompt=known.prompt,
        text=known.text,
        tokens=len(sequence.tokens),
        computed=sequence.computed if sequence.pages else 0,
        forwarded=sequence.counts.forwarded,
        reused=sequence.counts.reused,
        pages=sequence.pages,
        preemptions=sequence.counts.preemptions,
    )


def _state(sequence: EngineSequence) -> Literal["waiting", "running", "paused", "finished"]:
    if sequence.state is State.FINISHED:
        return "finished"
    if sequence.paused:
        return "paused"
    return "running" if sequence.state is State.RUNNING else "waiting"


def _group(
    pool: GroupPool, layers: tuple[int, ...], size: int, sequences: Mapping[int, EngineSequence], number: int
) -> PoolGroup:
    found: dict[int, tuple[list[int], int, int]] = {}  # page -> owners, its place in their text, filled slots
    for index, sequence in sequences.items():
        for place, page in sequence.tables[number].items():
            owners, _, filled = found.setdefault(page, ([], place, 0))
            owners.append(index)
            here = min(size, max(0, sequence.computed - place * size))
            found[page] = owners, place, max(filled, here)
    listed = [
        PoolPage(page, pool.refcounts[page], filled, tuple(owners), place)
        for page, (owners, place, filled) in found.items()
    ]
    for page in pool.cached:
        before = pool.tail_of.get(pool.hashes[page])
        listed.append(PoolPage(page, 0, size if before is None else before[1], (), None))
    listed.sort(key=lambda one: one.page)
    window = pool.group.window
    more = sum(count - 1 for count in pool.refcounts.values())
    return PoolGroup(
        layers=layers,
        window=window.size,
        sinks=window.sinks,
        pages=pool.group.pages,
        used=len(pool.refcounts),
        shared=sum(count > 1 for count in pool.refcounts.values()),
        cached=len(pool.cached),
        free=len(pool.free),
        page_bytes=pool.group.page_bytes,
        saved_bytes=more * pool.group.page_bytes,
        listed=tuple(listed[:MOST_LISTED]),
        left_out=max(0, len(listed) - MOST_LISTED),
    )
