"""The cache lab: a run's text, teacher-forced under another cache in a second engine, beside the full native one."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from tokenwright.arrays import Floats
from tokenwright.backends.runner import Cache, Model
from tokenwright.cache import layer_specs
from tokenwright.decode.logits_processors import log_softmax
from tokenwright.engine import SamplingParams
from tokenwright.errors import CapacityError, RequestError
from tokenwright.explorer.dataclass_reader import Between, Length
from tokenwright.explorer.explorer import Explorer
from tokenwright.llm.llm import LLM
from tokenwright.trace.schema import TokenCard
from tokenwright.trace.wire import COUNTED, DERIVED, READ

MOST_TOKENS = 1024
SLICE = 64  # tokens a pass


@dataclass(frozen=True, slots=True)
class Changed:
    """Another most probable next token."""

    position: int
    full: TokenCard  # guess with the full cache
    lab: TokenCard


@dataclass(frozen=True, slots=True)
class LabCard:
    kv: str
    window: int | None
    sinks: int
    page_size: int
    tokens: Annotated[int, COUNTED("tokens", "tokens computed", "of the text, with each of the two caches")]
    full_bytes: Annotated[int, DERIVED("B", "full cache", "K and V of these tokens, native, without a window")]
    kept_bytes: Annotated[int, DERIVED("B", "this cache", "K and V that are kept for the next token")]
    pages: Annotated[int, COUNTED("", "pages", "pages in its tables after the text, in the second engine")]
    page_bytes: Annotated[int, COUNTED("B", "in pages", "these pages, times their size")]
    mean_kl: Annotated[float, READ("nat", "mean KL", "KL(full || this), over the whole vocabulary, mean over the text")]
    max_kl: Annotated[float, READ("nat", "largest KL", "at one position")]
    mean_delta: Annotated[
        float, READ("nat", "mean change of log p", "of the text's tokens: this cache minus the full one")
    ]
    same: Annotated[int, COUNTED("", "same first guess", "positions with the same most probable token")]
    positions: int
    first: int  # position of the first predicted token
    kl: tuple[float, ...]  # at each prediction
    delta: tuple[float, ...]
    changed: tuple[Changed, ...]


MESSAGES = (Changed, LabCard)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lab:
    kv: Annotated[str, Length(0, 80)] = "native"
    window: Annotated[int, Between(1, 2**20)] | None = None
    sinks: Annotated[int, Between(0, 4096)] = 0
    page_size: Annotated[int, Between(1, 256)] = 16


def lab(explorer: Explorer, identity: str, body: Lab) -> Generator[LabCard | None, None, None]:
    """Raises RequestError for a text of one token, CapacityError during another comparison."""
    run = explorer.run(identity)
    if run.pictures:
        raise RequestError("the lab compares texts, and this prompt has pictures")
    tokens = run.tokens[:MOST_TOKENS]
    if len(tokens) < 2:
        raise RequestError("the text has one token, and nothing is predicted in it; make a step first")
    if not explorer.locks["lab"].acquire(blocking=False):
        raise CapacityError("another comparison is running on this server; try again when it has ended")
    try:
        yield from compare(explorer, tokens, body)
    finally:
        explorer.locks["lab"].release()


class _Sums:
    def __init__(self, explorer: Explorer) -> None:
        self.explorer = explorer
        self.kl: list[float] = []
        self.delta: list[float] = []
        self.changed: list[Changed] = []

    def add(self, full: Floats, lab: Floats, following: Sequence[int]) -> None:
        """Compare rows of logits [n, V]; `following`: the tokens that they predict."""
        wide, other = log_softmax(full), log_softmax(lab)
        self.kl += (np.exp(wide) * (wide - other)).sum(-1).clip(min=0).tolist()
        rows = range(len(following))
        self.delta += (other[rows, following] - wide[rows, following]).tolist()
        best = zip(wide.argmax(-1).tolist(), other.argmax(-1).tolist(), strict=True)
        first = len(self.kl) - len(following) + 1
        for row, (one, two) in enumerate(best):
            if one != two:
                self.changed.append(Changed(first + row, *self.explorer.looks([one, two])))


def compare(explorer: Explorer, tokens: Sequence[int], wanted: Lab) -> Generator[LabCard | None, None, None]:
    """Score `tokens` under both caches, part by part; the last item is the answer."""
    llm, count = explorer.llm, len(tokens) - 1
    known = [*tokens[:-1]]
    options: dict[str, Any] = {"kv": wanted.kv, "window": wanted.window, "sinks": wanted.sinks}
    pages = count // wanted.page_size + 2
    with LLM(llm.loaded, **options, page_size=wanted.page_size, pages=pages, max_sequences=1) as other:
        native = layer_specs(llm.graph, llm.dtype)
        models = Model(llm.loaded.decoder, native, llm.loaded.facts.device), other.model
        caches: list[Cache | None] = [None, None]
        sums = _Sums(explorer)
        for start in range(0, count, SLICE):
            part = known[start : start + SLICE]

            def forward(_: object, part: list[int] = part) -> list[Floats]:
                answers = [model(part, cache) for model, cache in zip(models, caches, strict=True)]
                caches[:] = [cache for _, cache in answers]
                return [logits for logits, _ in answers]

            full, kept = llm.inspect(forward)
            sums.add(full, kept, tokens[start + 1 : start + len(part) + 1])
            yield None
        used, page_bytes = llm.inspect(lambda _: _pages(other, known))
        yield LabCard(
            kv=other.kv_format,
            window=wanted.window,
            sinks=wanted.sinks,
            page_size=wanted.page_size,
            tokens=count,
            full_bytes=sum(spec.nbytes(count) for spec in native),
            kept_bytes=other.kv_bytes(count),
            pages=used,
            page_bytes=page_bytes,
            mean_kl=sum(sums.kl) / count,
            max_kl=max(sums.kl),
            mean_delta=sum(sums.delta) / count,
            same=count - len(sums.changed),
            positions=count,
            first=1,
            kl=tuple(round(value, 9) for value in sums.kl),
            delta=tuple(round(value, 9) for value in sums.delta),
            changed=tuple(sums.changed),
        )


def _pages(llm: LLM, tokens: list[int]) -> tuple[int, int]:
    inbox = llm.llm_engine.inbox()
    request = llm.prepare(tokens, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
    [handle] = llm.submit([request], inbox, paused=True)
    handle.let_write(1)
    inbox.get()  # its first token: the text is computed, and keeps its pages

    def count(engine: Any) -> tuple[int, int]:
        pairs = list(zip(engine.pool.groups, handle.sequence.tables, strict=True))
        return sum(len(table) for _, table in pairs), sum(len(table) * group.page_bytes for group, table in pairs)

    return llm.inspect(count)
