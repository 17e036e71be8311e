"""Planted faults: each must turn the matrix red, else its green says little.

A fault is a wrapper made here around the runner, the kernels, the store or the scheduler; nothing in the engine knows
of it. The naive oracle runs without it. What is planted in the store, the scheduler or the pool is found with the
reference and with native kernels; a wrong operation with those that it is planted in.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.backends.native import needs_native
from tests.equality import ways
from tests.equality.harness import PROMPT, WAYS, Bench, Case, Seen
from tests.equality.kinds import KINDS
from tests.equality.test_matrix import BY_TURNS, NATIVE_PAIRS
from tests.oracle.test_faults import moved_by_one
from tests.profiles import some
from tokenwright.backends import Logits
from tokenwright.backends.native.program import NativeBackend
from tokenwright.backends.runner import ModelRunner
from tokenwright.backends.torch import kv_codec
from tokenwright.backends.torch.border import tensor
from tokenwright.backends.torch.reference_kernels import ReferenceKernels
from tokenwright.cache import ChunkRows, KVStore, KVView
from tokenwright.decode import sampler
from tokenwright.engine import Batch, Output, Scheduler, Step
from tokenwright.engine import Sequence as Text
from tokenwright.engine.kv_manager import KVManager
from tokenwright.engine.layer_group import AttentionWindow, PageTables
from tokenwright.engine.page_pool import GroupPool, PagePool
from tokenwright.engine.prefix_index import PrefixHashes, PrefixIndex
from tokenwright.errors import EngineError

assert ways.LATE  # imported for what it registers


class Exact(ReferenceKernels):
    def __init__(self) -> None:
        super().__init__(wide=torch.float64)


class NoMask(Exact):
    """A row reads what comes after it, as far as the chunk has it."""

    def weights(self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, start: int, *more: Any) -> Any:
        return super().weights(q, k, positions, start + len(positions), *more)


class NoWindow(Exact):
    """A row of a chunk reads all that the chunk's first row reads."""

    def weights(self, q: Any, k: Any, positions: Any, start: int, window: AttentionWindow, *more: Any) -> Any:
        return super().weights(q, k, positions, start, AttentionWindow(), *more)


class StalePage(Exact):
    """The second page keeps what was there before, once it holds something."""

    def store(self, view: KVView, slots: Sequence[torch.Tensor], k: torch.Tensor, v: torch.Tensor) -> None:
        for part in view.parts:
            written = tensor(part.k.memory[0])[slots[part.group]].isfinite().flatten(1).all(1)
            fresh = ~(written & (slots[part.group] // 16 == 1))
            kv_codec.write(part.k, slots[part.group][fresh], k[fresh])
            kv_codec.write(part.v, slots[part.group][fresh], v[fresh])


class WrongScale(Exact):
    """The scales of tokens that are written one by one are two percent too large."""

    def store(self, view: KVView, slots: Sequence[torch.Tensor], k: torch.Tensor, v: torch.Tensor) -> None:
        super().store(view, slots, k, v)
        for part in view.parts:
            if len(k) == 1 and len(part.k.memory) > 1:
                scales = tensor(part.k.memory[1])
                scales[slots[part.group]] *= 1.02


class SinksFarAway(Exact):
    """Sinks are met at their true distance."""

    def attention(
        self, q: Any, view: KVView, chunks: Sequence[ChunkRows], scale: float, sink_q: Any = None
    ) -> torch.Tensor:
        return super().attention(q, view, chunks, scale, None)


class NoCopy(KVStore):
    """A page that is copied before it is written to stays as it was."""

    def copy(self, group: int, source: int, target: int) -> None: ...


class OtherLayer(KVStore):
    """What is put into a page is the neighbouring layer's."""

    def write(self, group: int, pages: list[int], contents: Any) -> None:
        super().write(group, pages, tuple(np.roll(one, 1, 0) for one in contents))


class Forgetful(KVManager):
    """What was preempted still counts as computed."""

    def drop(self, sequence: Text) -> None:
        computed = sequence.computed
        super().drop(sequence)
        sequence.computed = computed

    def attach(self, sequence: Text, cached: int) -> None:
        computed = sequence.computed
        super().attach(sequence, cached)
        self.pool.reserve(sequence.tables, 0, computed or 1, len(sequence.tokens))
        sequence.computed = computed


class NoRollback(Scheduler):
    """A scheduler with such a manager."""

    def __init__(self, pool: PagePool, *more: Any, **options: Any) -> None:
        super().__init__(pool, *more, **options)
        self.kv = Forgetful(pool, self.kv.prefixes)

    def check(self) -> None: ...


def weak_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page is named after its own tokens alone, not after the whole text up to its end."""
    old = PrefixHashes.extend

    def extend(self: PrefixHashes, tokens: Sequence[int]) -> list[bytes]:
        old(self, tokens)
        size, pages = self.page_size, range(len(tokens) // self.page_size)
        self.hashes[:] = [repr(tokens[page * size : (page + 1) * size]).encode() for page in pages]
        return self.hashes

    monkeypatch.setattr(PrefixHashes, "extend", extend)


def no_window_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hit is believed without its last window: the pages that lie behind are not looked for."""

    def match_prefix(self: PrefixIndex, hashes: PrefixHashes, tokens: Sequence[int], limit: int | None = None) -> int:
        hashes.extend(tokens)
        return (len(tokens) - 1) // hashes.page_size * hashes.page_size

    monkeypatch.setattr(PrefixIndex, "match_prefix", match_prefix)


def sealed_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page is named as soon as it is begun, if its tokens are known."""
    old = PrefixIndex.cache_pages

    def cache_pages(
        self: PrefixIndex, tables: PageTables, hashes: PrefixHashes, tokens: Sequence[int], start: int, stop: int
    ) -> None:
        size = hashes.page_size
        end = min(-(-stop // size), len(tokens) // size) * size
        old(self, tables, hashes, tokens, start, max(stop, end))

    monkeypatch.setattr(PrefixIndex, "cache_pages", cache_pages)


def trimmed_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are let go while their last tokens are still in reach."""
    old = PagePool.trim
    monkeypatch.setattr(PagePool, "trim", lambda self, tables, computed: old(self, tables, computed + 6))


def sealed_are_blank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that was used up keeps its name: who looks for the old text finds the new one."""

    def allocate(self: GroupPool) -> int:
        page = self.free.pop() if self.free else self.cached.popitem(last=False)[0]
        self.refcounts[page] = 1
        return page

    monkeypatch.setattr(GroupPool, "allocate", allocate)
    monkeypatch.setattr(GroupPool, "check", lambda self, tables: None)


def held_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that was found is not held: somebody else takes it."""

    def attach_prefix(
        self: PrefixIndex, tables: PageTables, hashes: PrefixHashes, tokens: list[int], length: int
    ) -> None:
        for pool, table in zip(self.pool.group_pools, tables, strict=True):
            for span in pool.group.window.pages(length, length, hashes.page_size):
                table.update((page, pool.index[hashes.hash(tokens, page, length)]) for page in span)

    monkeypatch.setattr(PrefixIndex, "attach_prefix", attach_prefix)


def written_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork writes into the page that it shares."""
    old = PagePool.reserve

    def reserve(self: PagePool, tables: PageTables, start: int, stop: int, ahead: int) -> bool:
        refcounts = [dict(pool.refcounts) for pool in self.group_pools]
        for pool in self.group_pools:
            pool.refcounts.update(dict.fromkeys(pool.refcounts, 1))
        done = old(self, tables, start, stop, ahead)
        for pool, before in zip(self.group_pools, refcounts, strict=True):
            pool.refcounts.update(before)
        return done

    monkeypatch.setattr(PagePool, "reserve", reserve)


# ---- In the native step ----


def native(runner: ModelRunner) -> Any:
    assert isinstance(runner.backend, NativeBackend), "this fault is for native kernels"
    return runner.backend


def starts(batch: Batch) -> list[int]:
    return [start for _, _, start, _ in batch.each_chunk()]


def one_bit(when: Callable[[Batch], bool]) -> Callable[[ModelRunner], ModelRunner]:
    """The last logit of a step is the next larger number: no tolerance would see it."""

    def around(runner: ModelRunner) -> ModelRunner:
        backend = native(runner)
        program = backend.program

        def wrong(batch: Batch) -> Logits:
            logits: Logits = program(batch)
            if len(logits.rows) and when(batch):
                logits.rows[-1, -1] = np.nextafter(logits.rows[-1, -1], np.float32(np.inf))
            return logits

        backend.program = wrong
        return runner

    return around


def turned_late(runner: ModelRunner) -> ModelRunner:
    """What is computed from a cache is turned by the angles of the next position."""
    rotary = native(runner).program._rotary
    address = rotary.address

    def later(start: int, stop: int, *more: Any) -> int:
        return address(start + bool(start), stop + bool(start), *more)

    rotary.address = later
    return runner


def scaled_alone(runner: ModelRunner) -> ModelRunner:
    """As WrongScale: after each step of one token, its scales are made too large."""
    backend, store = native(runner), runner.store
    program, groups = backend.program, len(store.groups)

    def wrong(batch: Batch) -> Logits:
        logits: Logits = program(batch)
        single = [(index, start) for index, (_, rows, start, _) in enumerate(batch.each_chunk()) if rows == 1]
        for index, start in single:
            for layer in range(len(store.specs)):
                for part in store.view(layer).parts:
                    pages = batch.tables[index * groups + part.group]
                    part.k.memory[1][store.slots(part.group, pages, range(start, start + 1))] *= 1.02
        return logits

    backend.program = wrong
    return runner


class LeftBehind:
    """What a rejected draft has left in the cache stays there, as if it were that of the token in its place."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.drafted: set[tuple[int, int]] = set()  # sequences and positions

    def forward(self, step: Step) -> Output[torch.Tensor]:
        store, kept = self.runner.store, []
        for chunk in step.chunks:
            for position in range(chunk.start, chunk.stop):
                if (chunk.sequence.id, position) in self.drafted:
                    for group, table in enumerate(chunk.sequence.tables):
                        [slot] = store.slots(group, table.pages, range(position, position + 1))
                        kept += [(tensor[:, slot], tensor[:, slot].copy()) for tensor in store.arrays(group)]
        output = self.runner.forward(step)
        for slot, was in kept:
            slot[...] = was
        for chunk in step.chunks:
            drafts = range(chunk.stop - len(chunk.drafts), chunk.stop)
            self.drafted |= {(chunk.sequence.id, position) for position in drafts}
        return output


def kept_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text goes on from the state that a rejected draft has left."""
    monkeypatch.setattr(KVManager, "_restore_states", lambda self, sequence, start, stop: stop)


def own_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of drafts draw with numbers of their own."""
    verified, choose, rows = sampler._verified, sampler.choose, [0]

    def counting(*arguments: Any) -> Any:
        rows[0] = 1
        try:
            return verified(*arguments)
        finally:
            rows[0] = 0

    def own(logits: Any, chances: Any, seed: int | None, *where: Any) -> list[int]:
        if not rows[0]:
            return choose(logits, chances, seed, *where)
        rows[0] += 1
        return choose(logits, chances, seed if rows[0] == 2 or seed is None else seed + rows[0], *where)

    monkeypatch.setattr(sampler, "_verified", counting)
    monkeypatch.setattr(sampler, "choose", own)


def believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first draft is taken without being looked at."""
    picked = sampler._picked

    def first(chunk: Any, row: Any, text: Any, *more: Any) -> Any:
        [*picks] = picked(chunk, row, text, *more)
        if chunk.drafts and len(text.tokens) == len(chunk.sequence.tokens):
            picks[0].tokens = chunk.drafts[:1]
        return picks

    monkeypatch.setattr(sampler, "_picked", first)


Patch = Callable[[pytest.MonkeyPatch], None]
REFERENCE, NATIVE = ("reference",), ("bfloat16",)


@dataclass(frozen=True)
class Fault:
    """`way` is the one that must see it. `bench`: what replaces a part of the engine; `patch`: what is done to it.

    `on`: the formats of weights, or the reference, that it is planted with.
    """

    way: str
    kind: str = "GQA"
    kv: str = "native"
    sampling: str = "greedy"
    bench: dict[str, Any] = field(default_factory=dict)
    patch: Patch | None = None
    on: tuple[str, ...] = (*REFERENCE, *NATIVE)


FAULTS = {
    "position + 1": Fault(
        "pages of 1, 16 and 64", bench={"around": moved_by_one(lambda start: start > 0)}, on=REFERENCE
    ),
    "no mask": Fault("chunks of 1, 7 and the whole", bench={"kernels": NoMask}, on=REFERENCE),
    "no window within a chunk": Fault(
        "chunks of 1, 7 and the whole", "window", bench={"kernels": NoWindow}, on=REFERENCE
    ),
    "stale page": Fault("held and resumed", bench={"kernels": StalePage}, on=REFERENCE),
    "skipped rollback": Fault("held and resumed", bench={"scheduler": NoRollback}),
    "wrong scale, int8": Fault("pages of 1, 16 and 64", kv="int8", bench={"kernels": WrongScale}, on=REFERENCE),
    "wrong scale, int4": Fault("batch of 1, 2, 8 and 17", kv="int4", bench={"kernels": WrongScale}, on=REFERENCE),
    "one bit in company": Fault(
        "batch of 1, 2, 8 and 17", bench={"around": one_bit(lambda batch: len(starts(batch)) > 1)}, on=NATIVE
    ),
    "one bit in a chunk": Fault(
        "chunks of 1, 7 and the whole",
        bench={"around": one_bit(lambda batch: next(batch.each_chunk())[2] > 0)},
        on=NATIVE,
    ),
    "turned late": Fault("pages of 1, 16 and 64", bench={"around": turned_late}, on=NATIVE),
    "scaled alone, int8": Fault("pages of 1, 16 and 64", kv="int8", bench={"around": scaled_alone}, on=NATIVE),
    "sinks at their true distance": Fault(
        "pages of 1, 16 and 64", "window + sinks", bench={"kernels": SinksFarAway}, on=REFERENCE
    ),
    "a shared page is not copied": Fault("forked", bench={"store": NoCopy}),
    "a shared page is written in place": Fault("forked", patch=written_in_place),
    "a shared state is not copied": Fault("forked", "short convolutions", bench={"store": NoCopy}),
    "a shared state is written in place": Fault("forked", "delta rules", patch=written_in_place),
    "restored into another layer": Fault("saved and restored", bench={"store": OtherLayer}),
    "names of a page's own tokens": Fault("a prefix found, at every cut", patch=weak_names),
    "a hit without its window": Fault("a prefix found, at every cut", "window", patch=no_window_asked),
    "named before it is computed": Fault("after one that was given up half-way", patch=sealed_too_early),
    # Native kernels believe a page table: one without a page that is read has no meaning there.
    "let go too early": Fault("pages of 1, 16 and 64", "hybrid", patch=trimmed_too_early, on=REFERENCE),
    "used up but still named": Fault("held and resumed", patch=sealed_are_blank),
    "a rejected draft's K is left behind": Fault("with drafts that hold and fail", bench={"around": LeftBehind}),
    "a rejected draft's state is kept": Fault("with drafts that hold and fail", "delta rules", patch=kept_ahead),
    "drafts have draws of their own": Fault("with drafts that hold and fail", sampling="seeded", patch=own_draws),
    "a draft is believed": Fault("with drafts that hold and fail", patch=believed),
    "found but not held": Fault("a prefix found, at every cut", patch=held_by_nobody),
}


class Planted(Case):
    """A case whose benches have a fault, and whose oracle has none."""

    plant: dict[str, Any] = {}  # noqa: RUF012  (replaced whole, for each test)

    def bench(self, **options: Any) -> Bench:
        plant = {name: one() if name == "kernels" else one for name, one in self.plant.items()}
        return super().bench(**options, **plant)

    def naive(self, *args: Any, **options: Any) -> Seen:
        return Case(self.kind, self.kv, self.sampling, self.weights).naive(*args, **options)


def planted(name: str, weights: str) -> Any:
    return pytest.param(name, weights, marks=needs_native if weights in NATIVE else ())


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "weights"), [planted(name, one) for name in FAULTS for one in FAULTS[name].on])
def test_a_planted_fault_turns_the_matrix_red(
    name: str, weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = FAULTS[name]
    told = found(fault, Planted(fault.kind, fault.kv, fault.sampling, weights), tmp_path, monkeypatch)
    assert told
    print(f"{name}: {told:.120}")


def found(fault: Fault, case: Planted, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the matrix says with a fault planted in one of its cells; nothing where it stays green."""
    case.naive(), case.naive(case.naive().tokens[:-3])  # before the engine is made worse
    with monkeypatch.context() as patched:
        patched.setattr(Planted, "plant", fault.bench)
        if fault.patch is not None:
            fault.patch(patched)
        try:
            WAYS[fault.way](case, folder)
        except (AssertionError, KeyError, IndexError, EngineError) as error:
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(("name", "weights"), some([planted(name, one) for name in FAULTS for one in FAULTS[name].on]))
def test_the_pairs_of_the_matrix_find_it(
    name: str, weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cell that the matrix runs anyway sees it: of its way, and of its format, sampling or what a kind keeps."""
    fault = FAULTS[name]
    of = 0 if fault.sampling != "greedy" else 1 if fault.kv != "native" else 2
    keeps = KINDS[fault.kind].keeps
    cells = [
        (kind, kv, sampling, form)
        for kind, kv, way, sampling, form in (*((*row, "reference") for row in BY_TURNS), *NATIVE_PAIRS)
        if (form == "reference") == (weights == "reference") and way == fault.way
        if (sampling, kv, KINDS[kind].keeps)[of] == (fault.sampling, fault.kv, keeps)[of]
    ]
    cells.sort(key=lambda cell: cell[0] != fault.kind)
    assert any(found(fault, Planted(*cell), tmp_path, monkeypatch) for cell in cells)


WAYS_ASKED = sorted({(fault.way, weights) for fault in FAULTS.values() for weights in fault.on})


@pytest.mark.parametrize(("way", "weights"), some([planted(*one) for one in WAYS_ASKED]))
def test_a_bench_without_a_fault_is_green(way: str, weights: str, tmp_path: Path) -> None:
    """The same machinery, nothing planted."""
    WAYS[way](Planted("GQA", "native", "greedy", weights), tmp_path)
    assert PROMPT
