"""Native attention and what it writes into the KV memory, for each instruction set of this processor."""

import ctypes
import random
from collections.abc import Iterable
from ctypes import byref
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.backends.native import KERNELS, each_isa, noise, threads
from tests.poison import poison
from tests.profiles import examples
from tests.tensors import address, kv_memory
from tokenwright.arrays import place_of
from tokenwright.backends.key_bias import KeyBias, block_rotations
from tokenwright.backends.native import structs
from tokenwright.backends.native.struct_builders import ChunkArray, kv_layer, point_to_rotations
from tokenwright.backends.protocol import Scored as Scoring
from tokenwright.backends.torch import kv_codec
from tokenwright.backends.torch.reference_kernels import ReferenceKernels
from tokenwright.cache import ChunkRows, Heads, KVStore, LayerSpec
from tokenwright.cache.codec import CODECS
from tokenwright.config import Latent, Rope, YarnScaling
from tokenwright.engine.layer_group import AttentionWindow, PageTable

REFERENCE = ReferenceKernels(wide=torch.float64)
CPU = torch.device("cpu")
QUANTISED = {"int8", "int4"}
YARN = YarnScaling(4.0, 64, attention_factor=1.25)  # it has all that a rotation can have: a ramp and a factor
each_format = pytest.mark.parametrize("form", CODECS)


def hard_rows(count: int, size: int, seed: int) -> torch.Tensor:
    """Rows [count, size] with numbers of every size, halves that may be rounded either way, and some not finite."""
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(count, size, generator=made)
    kinds = torch.randint(0, 10, (count, 1), generator=made)
    wild = torch.randint(0, 1 << 32, (count, size), generator=made).to(torch.uint32).view(torch.float32)
    bad = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0])[torch.randint(0, 4, (count, size), generator=made)]
    places = torch.rand(count, size, generator=made) < 0.05
    choices = (
        x * 0,
        x * 1e-8,
        x * 1e-41,
        x * 1e30,
        x * torch.exp(5 * x),
        torch.where(places, bad, x),
        wild,
        (x * 8).round() / 2,
        x.abs(),
    )
    for kind, choice in enumerate(choices):
        x = torch.where(kinds == kind, choice, x)
    return x


def same(ours: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors hold the same numbers, zeros of either sign and NaN of any kind alike."""
    if not ours.dtype.is_floating_point:
        return torch.equal(ours, right)
    return torch.allclose(ours.double(), right.double(), rtol=0, atol=0, equal_nan=True)


@each_isa
@each_format
@examples(40)
@given(size=st.integers(2, 130), seed=st.integers(0, 1 << 30))
def test_what_is_stored_is_what_the_codec_makes(isa: str, form: str, size: int, seed: int) -> None:
    spec = LayerSpec(Heads(3, size), AttentionWindow(), CODECS[form], CODECS[form], native=CODECS["float32"])
    store = KVStore([spec], 4, 3)
    poison(store)
    before = [tensor.clone() for tensor in kv_memory(store, 0)]
    slots = torch.tensor([7, 0, 8, 11, 2])
    k, v = (hard_rows(15, size, seed + i).view(5, 3, size) for i in range(2))
    KERNELS[isa].store(store.view(0), [slots], k, v)

    right = (*kv_codec.encode(form, k), *kv_codec.encode(form, v))
    others = torch.ones(15, dtype=torch.bool).index_fill(0, slots, False)
    for memory, was, codes in zip(kv_memory(store, 0), before, right, strict=True):
        assert same(memory[0].flatten(0, 1)[slots], codes)
        assert same(memory[0].flatten(0, 1)[others], was[0].flatten(0, 1)[others])


@dataclass(frozen=True)
class Case:
    """A text of `tokens` tokens, the last `rows` of which are computed."""

    size: int
    kv_heads: int
    shared: int  # query heads of each
    page_size: int
    tokens: int
    rows: int
    window: AttentionWindow
    first: int
    k: str
    v: str
    seed: int
    cap: float | None = None  # soft cap of scores
    rope: int = 0  # numbers of a key behind those that are its value; 0: values of their own
    bias: float = 0.0  # size of a bias that the keys are stored without

    @property
    def layout(self) -> Heads | Latent:
        return Latent(self.size - self.rope, self.rope) if self.rope else Heads(self.kv_heads, self.size)

    @property
    def start(self) -> int:
        return self.tokens - self.rows

    @property
    def exact(self) -> bool:
        """Whether nothing is rounded to codes on the way."""
        return not {self.k, self.v} & QUANTISED


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tokens = draw(st.integers(1, 300) | st.sampled_from([63, 64, 65, 128]))
    window = draw(st.none() | st.integers(1, 140))
    case = Case(
        size=draw(st.sampled_from([2, 3, 5, 16, 31, 34, 64, 65, 80, 128, 250, 256])),
        kv_heads=draw(st.integers(1, 3)),
        shared=draw(st.sampled_from([1, 2, 3, 4, 7, 9, 16])),
        page_size=draw(st.integers(1, 64)),
        tokens=tokens,
        rows=draw(st.integers(1, tokens)),
        window=AttentionWindow(window, draw(st.sampled_from([0, 1, 4, 70])) if window else 0),
        first=draw(st.sampled_from([0, 0, 3, 64, 70])),
        k=draw(st.sampled_from(list(CODECS))),
        v=draw(st.sampled_from(list(CODECS))),
        seed=draw(st.integers(0, 1 << 30)),
        cap=draw(st.sampled_from([None, None, 0.5, 3.0, 50.0])),
    )
    if draw(st.integers(0, 2)):
        plain = case.size % 2 == 0 and not case.window.sinks
        return replace(case, bias=draw(st.sampled_from([0.0, 0.0, 1.0, 4.0]))) if plain else case
    rank, rope = draw(st.sampled_from([32, 64, 96, 256])), draw(st.sampled_from([2, 8, 10, 32, 64]))
    return replace(case, size=rank + rope, rope=rope, kv_heads=1, shared=draw(st.sampled_from([1, 4, 9, 16])), v=case.k)


class Text:
    """The memory of a case in pages of its own order; what is not needed was never written, or has no page."""

    def __init__(self, case: Case, page_size: int | None = None) -> None:
        self.case, size = case, page_size or case.page_size
        k, v = CODECS[case.k], CODECS[case.v]
        native, unbiased = CODECS["bfloat16"], case.bias > 0
        self.spec = LayerSpec(case.layout, case.window, k, v, case.first, native=native, unbiased=unbiased)
        count = -(-case.tokens // size)
        pages = random.Random(case.seed).sample(range(count + 2), count)
        self.store = KVStore([self.spec], count + 2, size)
        poison(self.store)
        self.tables = [
            PageTable(
                {page: pages[page] for found in group.window.pages(case.start, case.tokens, size) for page in found}
            )
            for group in self.store.groups
        ]
        shape = (case.tokens, case.kv_heads, case.size)
        keys = noise(*shape, seed=case.seed)
        self.write(keys, keys[..., : -case.rope] if case.rope else noise(*shape, seed=case.seed + 1))
        self.q = noise(case.rows, case.kv_heads * case.shared, case.size, seed=case.seed + 2)
        self.sink_q = noise(*self.q.shape, seed=case.seed + 3) if case.window.sinks else None
        self.bias = None
        if case.bias:
            numbers = case.bias * noise(case.kv_heads, case.size, seed=case.seed + 4)
            self.bias = KeyBias(numbers.numpy(), block_rotations(Rope(scaling=YARN), case.size))
        self.scoring = Scoring(case.size**-0.5, case.cap, key_bias=self.bias)

    def write(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store K and V of the positions that are read."""
        for part in self.store.view(0).parts:
            table = self.tables[part.group]
            for span in part.window.spans(self.case.start, self.case.tokens):
                places = [
                    table[j // self.store.page_size] * self.store.page_size + j % self.store.page_size for j in span
                ]
                kv_codec.write(part.k, torch.tensor(places), k[span.start : span.stop])
                kv_codec.write(part.v, torch.tensor(places), v[span.start : span.stop])

    @property
    def chunk(self) -> ChunkRows:
        return self.store.chunk_rows([table.pages for table in self.tables], range(self.case.rows), self.case.start)

    def right(self) -> torch.Tensor:
        return REFERENCE.attention(self.q, self.store.view(0), [self.chunk], self.scoring, self.sink_q)

    def attend(self, isa: str, chunks: Iterable[range] | None = None, count: int = 1) -> torch.Tensor:
        """[rows, H, value size], the rows of each chunk in a call of their own."""
        pages = -(-self.case.tokens // self.store.page_size)
        tables = tuple(np.array([table.get(page, -1) for page in range(pages)], np.int32) for table in self.tables)
        found = chunks or [range(self.case.rows)]
        return self.attend_chunks(isa, [[(chunk, self.case.start + chunk.start, tables)] for chunk in found], count)

    def attend_chunks(self, isa: str, calls: Iterable[list[Any]], count: int = 1) -> torch.Tensor:
        """[rows, H, value size], from calls with some chunks each: their rows, first positions and page tables."""
        kernels, heads, width = KERNELS[isa], self.q.shape[1], self.q[0].numel()
        values = self.case.layout.value_size
        out = torch.full((*self.q.shape[:2], values), torch.nan)
        layer = kv_layer(self.store.view(0))
        blocks = numbers = None
        if self.bias is not None:
            blocks, numbers = self.bias.rotations.blocks(self.case.tokens), place_of(self.bias.numbers)
            point_to_rotations(layer, blocks, self.bias.rotations)
        sizes = (self.case.kv_heads, self.case.size, values)
        shape = structs.CHeads(heads, *sizes, self.scoring.scale, self.scoring.cap or 0, None, numbers)
        ends = (address(self.q), address(self.sink_q), address(out))
        queries = structs.CQueries(0, 0, 0, 0, *ends, width, width, heads * values)
        for chunks in calls:
            array = ChunkArray(chunks)
            kernels.compute(
                kernels.library.tw_attend,
                byref(layer),
                byref(shape),
                len(chunks),
                array.address,
                self.store.page_size,
                byref(queries),
                count,
            )
        return out


@each_isa
@examples(150)
@given(case=cases())
def test_attention_is_the_reference(isa: str, case: Case) -> None:
    text = Text(case)
    most = REFERENCE.values(text.store.view(0), text.chunk).abs().max()
    error = (text.attend(isa) - text.right()).abs().max() / most
    assert error < (1e-5 if case.exact else 5e-4)


@each_isa
@examples(100)
@given(case=cases(), other_size=st.integers(1, 64), data=st.data())
def test_a_row_is_the_same_in_any_chunk_and_page(isa: str, case: Case, other_size: int, data: st.DataObject) -> None:
    text, other = Text(case), Text(case, other_size)
    whole = text.attend(isa)
    cuts = sorted({0, case.rows, *data.draw(st.lists(st.integers(0, case.rows), max_size=6))})
    chunks = [range(start, stop) for start, stop in pairwise(cuts)]
    assert torch.equal(whole, other.attend(isa, chunks))
    row = data.draw(st.integers(0, case.rows - 1))
    assert torch.equal(whole[row], text.attend(isa, [range(row, row + 1)])[row])
    with threads(3):
        assert torch.equal(whole, text.attend(isa, count=3))


@each_isa
@examples(60)
@given(case=cases(), seed=st.integers(0, 1 << 30))
def test_a_row_is_the_same_beside_others_with_its_first_pages(isa: str, case: Case, seed: int) -> None:
    """Sequences that begin alike, nested and not, next to others and to chunks of several rows: each alone, by ==."""
    rng = random.Random(seed)
    case = replace(case, window=rng.choice([AttentionWindow()] * 4 + [case.window]))
    text = Text(replace(case, tokens=1, rows=1))  # for what is not of one sequence
    size, pages = case.page_size, iter(range(10**6))
    tables, ends = [[next(pages) for _ in range(-(-500 // size))]], [rng.randint(200, 500)]
    for _ in range(rng.randint(1, 11)):
        before, kept = rng.choice([tables[-1], rng.choice(tables)]), rng.choice([0, 64, 130, 200, 448]) // size
        ends.append(min(500, kept * size + rng.randint(1, rng.choice([30, 30, 300]))))
        tables.append([*before[:kept], *(next(pages) for _ in before[kept:])])
    count = next(pages)
    store, slots = KVStore([text.spec], count, size), count * size
    keys = noise(slots, case.kv_heads, case.size, seed=case.seed)
    for part in store.view(0).parts:
        kv_codec.write(part.k, torch.arange(slots), keys)
        kv_codec.write(part.v, torch.arange(slots), keys[..., : -case.rope] if case.rope else keys.flip(0))
    rows = [rng.choice([1, 1, 1, 1, min(3, end)]) for end in ends]
    first = np.cumsum([0, *rows])
    text.store, text.q = store, noise(sum(rows), case.kv_heads * case.shared, case.size, seed=case.seed + 2)
    text.sink_q = noise(*text.q.shape, seed=case.seed + 3) if case.window.sinks else None
    arrays = [np.array(table, np.int32) for table in tables]
    chunks = [
        (range(at, at + count), end - count, (table,) * len(store.groups))
        for at, count, end, table in zip(first.tolist(), rows, ends, arrays, strict=False)
    ]
    alone = text.attend_chunks(isa, [[chunk] for chunk in chunks])
    assert torch.equal(text.attend_chunks(isa, [chunks]), alone)
    with threads(3):
        assert torch.equal(text.attend_chunks(isa, [chunks], count=3), alone)


@pytest.mark.skipif(not KERNELS, reason="no native kernels were compiled")
def test_pages_that_neighbours_share_are_read_once_for_as_many_as_fit_together() -> None:
    """Positions that attention reads, counted by its own runs: of a prompt's forks, of nested prompts, of others."""

    def runs(*sequences: tuple[str, int], window: int | None = None) -> list[tuple[int, int]]:
        """Of texts [pages by letter and position], with 16 positions a page and 7 query heads of each KV head."""
        spec = LayerSpec(Heads(2, 64), AttentionWindow(window), CODECS["int8"], CODECS["int8"], native=CODECS["int8"])
        layer, shape = kv_layer(KVStore([spec], 1, 16).view(0)), structs.CHeads(14, 2, 64, 64, 1.0, 0, None)
        known: dict[tuple[str, int], int] = {}
        tables = [
            np.array([known.setdefault((text[: at + 1], at), len(known)) for at in range(len(text))], np.int32)
            for text, _ in sequences
        ]
        array = ChunkArray([(range(i, i + 1), end - 1, (tables[i],)) for i, (_, end) in enumerate(sequences)])
        found = (ctypes.c_int64 * (2 * len(tables)))()
        library = next(iter(KERNELS.values())).library
        count = library.tw_shared_runs(byref(layer), byref(shape), len(tables), array.address, 16, found)
        return [(found[2 * i], found[2 * i + 1]) for i in range(count)]

    forks = [("s" * 256 + "abcdefghijklmnop"[i], 4100) for i in range(16)]
    assert runs(*forks) == [(9, 4096), (7, 4096)]
    assert runs(*forks, window=64) == [(1, 0)] * 16
    assert runs(("s" * 5 + "a", 95), ("s" * 5 + "b", 95)) == [(2, 64)], "whole blocks of 64 positions"
    assert runs(("s" * 3 + "a", 60), ("s" * 3 + "b", 60)) == [(1, 0)] * 2
    assert runs(("s" * 8 + "a" * 20, 440), ("s" * 8 + "b" * 20, 440)) == [(1, 0)] * 2, "most of it is read alone"
    nested = [("s" * 64 + "t" * 32 + end, 96 * 16 + 1) for end in "abc"] + [("s" * 64 + "u" * 8, 72 * 16)] * 2
    assert runs(*nested) == [(3, 1536), (2, 1088)]


@each_isa
def test_a_head_is_the_same_whatever_its_neighbours(isa: str) -> None:
    """The same query stands in every place of a KV head's queries."""
    for form in CODECS:
        text = Text(Case(64, 2, 7, 16, 150, 9, AttentionWindow(), 0, form, form, 5))
        text.q[:] = text.q[:, :1]
        out = text.attend(isa).view(9, 2, 7, 64)
        assert torch.equal(out, out[:, :, :1].expand_as(out))


@each_isa
@each_format
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_reaches_those_that_read_it_and_nobody_else(isa: str, form: str, bad: float) -> None:
    case = Case(40, 2, 3, 16, 100, 100, AttentionWindow(20), 0, form, form, 9)
    text, sound = Text(case), Text(case).attend(isa)
    at = 37
    for side in range(2):
        kv = [noise(100, 2, 40, seed=9), noise(100, 2, 40, seed=10)]
        kv[side][at, 1, 2] = bad
        text.write(*kv)
        out = text.attend(isa).view(100, 2, 3, 40)
        reached = torch.zeros(100, dtype=torch.bool)
        reached[at : at + 20] = True
        right = sound.view(100, 2, 3, 40)
        assert torch.equal(out[:, 0], right[:, 0])
        assert torch.equal(out[~reached], right[~reached])
        spoilt = ~out[reached, 1].isfinite()
        if side == 0 and bad == torch.nan:
            assert spoilt.all()
        assert spoilt[..., 2].all() if side == 1 else spoilt.any()


@each_isa
@pytest.mark.parametrize("v", ["bfloat16", "int8", "int4"])
def test_a_block_of_scores_without_end_weighs_nothing(isa: str, v: str) -> None:
    """The second block's only position that is read has a key of -inf; what was read before stays."""
    case = Case(32, 1, 2, 16, 65, 1, AttentionWindow(), 0, "float32", v, 4)
    text = Text(case)
    text.q[:] = text.q.abs()
    k, values = noise(65, 1, 32, seed=4), noise(65, 1, 32, seed=5)
    k[64] = -torch.inf
    text.write(k, values)
    out = text.attend(isa)
    assert out.isfinite().all()
    assert (out - text.right()).abs().max() < 1e-3


@each_isa
def test_operations_alone_read_what_they_wrote(isa: str) -> None:
    """`NativeKernels.store` and `attention`, with slots instead of pages."""
    kernels = KERNELS[isa]
    case = Case(34, 2, 3, 7, 90, 20, AttentionWindow(30, 4), 10, "int8", "int4", 3)
    text = Text(case)
    right = text.attend(isa)
    poison(text.store)
    k, v = (noise(90, 2, 34, seed=3 + i) for i in range(2))
    table = PageTable(dict(enumerate(range(13))))
    slots = [text.store.slots(group, table.pages, range(90)) for group in range(2)]
    kernels.store(text.store.view(0), slots, k, v)
    chunk = text.store.chunk_rows([table.pages] * 2, range(20), case.start)
    assert torch.equal(kernels.attention(text.q, text.store.view(0), [chunk], text.scoring, text.sink_q), right)


@each_isa
def test_many_heads_share_a_kv_head(isa: str) -> None:
    """More of them than are taken together."""
    text = Text(Case(48, 1, 71, 16, 130, 2, AttentionWindow(), 0, "int8", "bfloat16", 1))
    assert (text.attend(isa) - text.right()).abs().max() < 1e-3
