"""A step as one native call against the same kernels called part by part: equal to the bit, in logits and in memory."""

import math
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_float
from dataclasses import fields, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.backends.native import KERNELS, each_isa, needs_native, noise, threads
from tests.engine.hand import sequence_of
from tests.models.fixtures import VOCAB, make_checkpoint
from tests.oracle.harness import prompt_of
from tests.poison import poison
from tests.profiles import examples
from tests.tensors import kv_memory, op_by_op, tensor_decoder
from tokenwright.backends import Logits, Scored
from tokenwright.backends.adapters import Update, beside, not_beside
from tokenwright.backends.adapters import packed as packed_weight
from tokenwright.backends.native import program
from tokenwright.backends.native.program import NativeBackend, NativeDecoder, RotaryCache
from tokenwright.backends.observation import Observed, Watched
from tokenwright.backends.runner import backend_over
from tokenwright.backends.torch import observe
from tokenwright.backends.torch.backend import TorchBackend
from tokenwright.backends.torch.border import tensor
from tokenwright.backends.torch.decoder import Decoder
from tokenwright.backends.torch.reference_kernels import ReferenceKernels
from tokenwright.cache import ChunkRows, KVStore, KVView, layer_specs
from tokenwright.checkpoints.folder import Checkpoint
from tokenwright.checkpoints.packing.packer import load_packed
from tokenwright.config import DynamicScaling, Latent, Rope
from tokenwright.engine import Chunk, LogitsNeeded, Request, Step, flatten
from tokenwright.engine.layer_group import PageTable
from tokenwright.formats import KVFormat, WeightFormat
from tokenwright.models.graph import Graph
from tokenwright.models.rotary import RotaryTable
from tokenwright.models.taps import Site, ignore

KINDS = (
    "gpt2",
    "llama3",
    "dynamic",
    "mistral",
    "qwen2",
    "qwen2-window",
    "qwen3",
    "smollm3",
    "granite",
    "olmo2",
    "starcoder2",
    "mixtral",
    "gpt-oss",
    "qwen2-moe",
    "qwen3-moe",
    "gemma2",
    "gemma3",
    "gemma3n",
    "cohere",
    "neox",
    "glm4",
    "deepseek2",
    "deepseek3",
)
WEIGHTS = ("float32", "bfloat16", "float16", "int8", "int8:32", "int4", "int4:64")
KEPT = (  # how K and V are kept, the window, the sinks
    ("native", None, 0),
    ("native", 20, 4),
    ("int8", None, 0),
    ("int4", 20, 4),
    ("fp8,first=3", 9, 1),
    ("k=int8,v=int4,first=10,native=-1", None, 0),
)
MLP, WHOLE = 96, 192  # widths of MLPs: one that is no multiple of 64 and one that is, whose middle AMX fuses

pytestmark = needs_native


@cache
def checkpoint(kind: str, vocab: int = VOCAB, mlp: int = MLP) -> tuple[Checkpoint, TemporaryDirectory[str]]:
    """A checkpoint, and the folder that holds it as long as it is used."""
    folder = TemporaryDirectory()
    width = {"n_inner": mlp} if kind == "gpt2" else {"intermediate_size": mlp}
    path, _ = make_checkpoint(Path(folder.name) / "model", kind, changes={"vocab_size": vocab, **width})
    return Checkpoint.open(path), folder


@cache
def decoder(kind: str, weights: str, isa: str, vocab: int = VOCAB, mlp: int = MLP) -> NativeDecoder:
    opened, _ = checkpoint(kind, vocab, mlp)
    packed = load_packed(opened, WeightFormat.parse(weights), "float32")
    beside_it = beside(opened.graph, adapters(opened.graph), packed_weight)
    return NativeDecoder(opened.graph, KERNELS[isa].native, packed, beside_it)


def adapters(graph: Graph) -> dict[int, dict[str, Update]]:
    """Three adapters of different ranks: of all linear layers that can have one, of every third, and of one."""
    every = [(part, out, m.inner) for op in graph.blocks for m in op.matrices for part, out in m.parts]
    unable = not_beside(graph, {part: Update(noise(1, 1), noise(1, 1), 1.0) for part, _, _ in every})
    able = [one for one in every if one[0] not in unable]
    return {
        number: {part: Update(noise(rank, inner, seed=number), noise(out, rank), 0.02) for part, out, inner in some}
        for number, rank, some in ((1, 3, able), (2, 17, able[::3]), (3, 1, able[1:2]))
    }


def in_tensors(logits: Logits) -> Any:
    """A step's result with tensors in the place of arrays."""
    return replace(logits, rows=tensor(logits.rows), hidden=None if logits.hidden is None else tensor(logits.hidden))


class Bench:
    """A decoder over a store of its own, full of what was never written. Texts have tables of scattered pages."""

    PAGES = 24

    def __init__(self, made: Decoder, kept: tuple[str, int | None, int], page_size: int = 16) -> None:
        kv, window, sinks = kept
        if any(isinstance(layer.layout, Latent) for layer in made.graph.kv):
            kv = kv.replace("k=int8,v=int4", "int8")  # a latent has one format
        self.store = KVStore(
            layer_specs(made.graph, "float32", KVFormat.parse(kv), window, sinks), self.PAGES, page_size
        )
        poison(self.store)
        self.backend = backend_over(made, self.store)
        self.free = torch.randperm(self.PAGES, generator=torch.Generator().manual_seed(1)).tolist()
        self.tables: dict[int, list[PageTable]] = {}

    def chunk(
        self,
        text: int,
        tokens: Sequence[int],
        start: int,
        stop: int,
        logits_needed: LogitsNeeded = LogitsNeeded.ALL,
        adapter: int = 0,
    ) -> Chunk:
        tables = self.tables.setdefault(text, [PageTable() for _ in self.store.groups])
        for page in range(-(-stop // self.store.page_size)):
            if page not in tables[0]:
                taken = self.free.pop()
                for table in tables:
                    table[page] = taken
        asked = Request(tuple(tokens), adapter=adapter)
        return Chunk(sequence_of(*tokens, asked=asked, limit=len(tokens), tables=tables), start, stop, logits_needed)

    def whole(self, chunks: Sequence[Chunk]) -> Logits:
        """In one native call."""
        return in_tensors(self.backend(flatten(Step(tuple(chunks)))))

    def by_parts(self, chunks: Sequence[Chunk]) -> Logits:
        """Operation by operation, as for one who looks."""
        seen: list[Site] = []
        logits = op_by_op(self.backend, flatten(Step(tuple(chunks))), lambda site, layer, x: seen.append(site))
        assert seen, "who looks is told"
        return in_tensors(logits)

    def observed(self, chunks: Sequence[Chunk], watched: Sequence[Watched], *, whole: bool) -> tuple[Logits, Observed]:
        """In one native call or operation by operation, with the facts of the step."""
        assert isinstance(self.backend, NativeBackend)
        by_op = TorchBackend(tensor_decoder(self.backend.decoder), self.store)
        logits, told = (self.backend if whole else by_op).observe(flatten(Step(tuple(chunks))), watched)
        return in_tensors(logits), told

    def memory(self) -> list[torch.Tensor]:
        """All that is kept, but for the scratch page, as bytes: NaN is no equal of itself."""
        groups = range(len(self.store.groups))
        return [one[:, :-1].contiguous().view(torch.uint8) for group in groups for one in kv_memory(self.store, group)]


def steps(
    bench: Bench,
    texts: Sequence[Sequence[int]],
    cuts: Sequence[int],
    logits_needed: LogitsNeeded,
    chosen: Sequence[int] = (0, 0, 0, 0),
) -> list[list[Chunk]]:
    """All texts side by side, each with its adapter, cut at the same places."""
    edges = [0, *cuts, max(map(len, texts))]
    return [
        [
            bench.chunk(i, text, start, min(stop, len(text)), logits_needed, chosen[i])
            for i, text in enumerate(texts)
            if start < len(text)
        ]
        for start, stop in pairwise(edges)
    ]


@each_isa
@examples(60)
@given(
    kind=st.sampled_from(KINDS),
    weights=st.sampled_from(WEIGHTS),
    mlp=st.sampled_from([MLP, WHOLE]),
    kept=st.sampled_from(KEPT),
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=4),
    cuts=st.sets(st.integers(1, 69), max_size=4),
    logits_needed=st.sampled_from(LogitsNeeded),
    page_size=st.sampled_from([16, 64]),
    team=st.sampled_from([1, 2, 3, 8]),
    chosen=st.sampled_from([(0, 0, 0, 0), (1, 0, 2, 1), (0, 2, 3, 1), (3, 0, 0, 2)]),
)
def test_the_whole_step_is_its_parts(
    isa: str,
    kind: str,
    weights: str,
    mlp: int,
    kept: tuple[str, int | None, int],
    lengths: list[int],
    cuts: set[int],
    logits_needed: LogitsNeeded,
    page_size: int,
    team: int,
    chosen: tuple[int, ...],
) -> None:
    assume(not kept[2] or kind not in ("gpt2", "dynamic"))  # sinks need angles that do not depend on the length
    texts = [prompt_of(length, seed) for seed, length in enumerate(lengths)]
    made = decoder(kind, weights, isa, mlp=mlp)
    one, other = (Bench(made, kept, page_size) for _ in range(2))
    edges = sorted(cut for cut in cuts if cut < max(lengths))
    for ours, theirs in zip(
        *(steps(bench, texts, edges, logits_needed, chosen) for bench in (one, other)), strict=True
    ):
        tokens = sum(len(chunk.tokens) for chunk in ours)
        wanted = {LogitsNeeded.LAST: len(ours), LogitsNeeded.ALL: tokens}.get(logits_needed, 0)
        with threads(team):
            logits = one.whole(ours)
        right = other.by_parts(theirs)
        assert torch.equal(logits.rows, right.rows)
        assert logits.rows.shape == (wanted, VOCAB)
        if logits_needed is LogitsNeeded.HIDDEN:
            assert logits.hidden is not None and right.hidden is not None
            assert torch.equal(logits.hidden, right.hidden) and len(right.hidden) == tokens
        assert all(map(torch.equal, one.memory(), other.memory()))
        assert logits.best == tuple(right.rows.argmax(-1).tolist())
        torch.testing.assert_close(
            torch.tensor(logits.log_totals, dtype=torch.float64),
            right.rows.double().logsumexp(-1),
            rtol=1e-6,
            atol=1e-6,
        )


def score_rounding(
    view: KVView, chunk: ChunkRows, query: torch.Tensor, sink_query: torch.Tensor | None, group: int, scoring: Scored
) -> float:
    """By how much a score of a query can differ in the native kernels, where K is quantised to codes with scales.

    They round the query to 16-bit codes with a scale for each 32 numbers (`encode_group` of queries.h), the ops in
    torch do not. A number is off by half a unit at most, and 0.004 of one for the fp32 arithmetic of its code; a score
    by the sum of these times the key's magnitudes.
    """
    if view.spec.k.name not in ("int8", "int4"):
        return 0.0
    keys, _ = ReferenceKernels().keys(view.head(group), chunk)  # [t, 1, D]
    off = 0.0
    for one in (query,) if sink_query is None else (query, sink_query):
        unit = torch.stack([some.abs().max() for some in (one * scoring.scale).split(32)]) / 32767
        lengths = torch.stack([some.abs().sum(-1) for some in keys[:, 0].split(32, -1)], -1)  # [t, D / 32]
        off = max(off, float((lengths @ unit).max()) * 0.504)
    return off


@contextmanager
def query_roundings() -> Iterator[list[float]]:
    """The `score_rounding` of each row that the ops in torch weigh meanwhile."""
    found: list[float] = []
    original = observe.attention_row

    def noted(*row: Any) -> torch.Tensor:
        found.append(score_rounding(*row))
        return original(*row)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(observe, "attention_row", noted)
        yield found


@each_isa
@examples(40)
@given(
    kind=st.sampled_from(KINDS),
    weights=st.sampled_from(WEIGHTS),
    mlp=st.sampled_from([MLP, WHOLE]),
    kept=st.sampled_from(KEPT),
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=4),
    cuts=st.sets(st.integers(1, 69), max_size=3),
    logits_needed=st.sampled_from(LogitsNeeded),
    team=st.sampled_from([1, 2, 3]),
    chosen=st.sampled_from([(0, 0, 0, 0), (1, 0, 2, 1)]),
    data=st.data(),
)
def test_an_observed_step_tells_what_its_parts_tell(
    isa: str,
    kind: str,
    weights: str,
    mlp: int,
    kept: tuple[str, int | None, int],
    lengths: list[int],
    cuts: set[int],
    logits_needed: LogitsNeeded,
    team: int,
    chosen: tuple[int, ...],
    data: st.DataObject,
) -> None:
    """Every count, what heads read, times in their order; and the logits are those of a step unobserved."""
    assume(not kept[2] or kind not in ("gpt2", "dynamic"))
    texts = [prompt_of(length, seed) for seed, length in enumerate(lengths)]
    made, heads = decoder(kind, weights, isa, mlp=mlp), checkpoint(kind, mlp=mlp)[0].config.heads
    benches = one, other, plain = [Bench(made, kept) for _ in range(3)]
    edges = sorted(cut for cut in cuts if cut < max(lengths))
    for ours, theirs, same in zip(
        *(steps(bench, texts, edges, logits_needed, chosen) for bench in benches), strict=True
    ):
        tokens = sum(len(chunk.tokens) for chunk in ours)
        logits_rows = flatten(Step(tuple(ours))).logits_rows.tolist()
        places = st.tuples(st.integers(0, made.graph.layers - 1), st.integers(0, heads - 1), st.integers(0, tokens - 1))
        asked = data.draw(st.lists(places, max_size=3))
        mine, right = ([Watched(*place) for place in asked] for _ in range(2))
        with threads(team):
            logits, told = one.observed(ours, mine, whole=True)
        with query_roundings() as roundings:
            _, known = other.observed(theirs, right, whole=False)
        assert torch.equal(logits.rows, plain.whole(same).rows)
        for fact in fields(Observed):
            if fact.name not in ("ends", "looking_s"):
                mine_of, theirs_of = getattr(told, fact.name), getattr(known, fact.name)
                assert mine_of == theirs_of or list(mine_of) == list(theirs_of), fact.name
        assert told.weight_bytes > 0 and all(told.kv_written)
        assert len(told.ends) == len(known.ends) == 2 * made.graph.layers + 2
        assert list(told.ends) == sorted(told.ends) and 0 < told.ends[0] < told.ends[-1]
        for got, wanted, rounding in zip(mine, right, roundings, strict=True):
            assert got.weights is not None and wanted.weights is not None
            rtol = 2e-4 + math.expm1(2 * rounding)  # a weight is exp(score) over a sum of such
            torch.testing.assert_close(tensor(got.weights), tensor(wanted.weights), rtol=rtol, atol=2e-5)
            assert list(got.highest) == list(wanted.highest)
            assert (got.entropy is None) == (wanted.entropy is None) == (got.row not in logits_rows)
            if got.entropy is not None:
                assert got.entropy == pytest.approx(wanted.entropy, abs=1e-4)


def emptied(tables: dict[int, list[PageTable]]) -> None:
    """As when the sequences have ended."""
    for table in (table for tables_of_text in tables.values() for table in tables_of_text):
        table.clear()


@pytest.mark.parametrize("kept", [KEPT[0], KEPT[1], KEPT[5]])
@pytest.mark.parametrize("tapped", [False, True])
def test_a_batch_from_elsewhere_is_the_batch(kept: tuple[str, int | None, int], tapped: bool) -> None:
    """Pickled, its sequences gone, and computed by another backend over another store: logits and memory alike."""
    made = decoder("qwen2-window", "int8", next(iter(KERNELS)))
    here, there = (Bench(made, kept) for _ in range(2))
    texts = [prompt_of(length, length) for length in (50, 1, 33)]
    for chunks in steps(here, texts, [30, 31], LogitsNeeded.ALL):
        batch = flatten(Step(tuple(chunks)))
        sent = pickle.dumps(batch)
        right = here.backend(batch)
        got = pickle.loads(sent)
        logits = op_by_op(there.backend, got, ignore) if tapped else there.backend(got)
        assert np.array_equal(logits.rows, right.rows)
        assert (logits.best, logits.log_totals) == (right.best, right.log_totals)
        assert all(map(torch.equal, here.memory(), there.memory()))
    last = pickle.loads(sent)
    emptied(here.tables)
    assert np.array_equal(there.backend(last).rows, right.rows)


@each_isa
@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_reference_over_the_same_weights_is_near(isa: str, weights: str) -> None:
    """Nothing of the step is left out: activations in int8 move the logits little, floats by rounding alone."""
    opened, _ = checkpoint("qwen3")
    tokens = prompt_of(60)
    packed = load_packed(opened, WeightFormat.parse(weights), "float32")
    native = Bench(decoder("qwen3", weights, isa), KEPT[0])
    plain = Bench(Decoder(opened.graph, ReferenceKernels(torch.float64), packed), KEPT[0])
    ours = native.whole([native.chunk(0, tokens, 0, 60)]).rows
    right = plain.by_parts([plain.chunk(0, tokens, 0, 60)]).rows
    error = (ours - right).pow(2).mean().sqrt() / right.std()
    exact = "int" not in weights and not (isa == "amx" and weights == "bfloat16")
    assert error < (1e-5 if exact else 0.05)
    assert exact or error > 1e-4, "the activations were quantised"


@each_isa
@pytest.mark.parametrize("vocab", [2047, 2048, 2049, 6000, 40000])
def test_totals_over_large_vocabularies(isa: str, vocab: int) -> None:
    """Logits are summed up by 2,048 at a time: of many, each piece when it has been made."""
    made = decoder("llama2", "bfloat16", isa, vocab)
    bench, tokens = Bench(made, KEPT[0]), prompt_of(5)
    logits = bench.whole([bench.chunk(0, tokens, 0, 5)])
    assert logits.best == tuple(logits.rows.argmax(-1).tolist())
    assert logits.log_totals == pytest.approx(logits.rows.double().logsumexp(-1).tolist(), rel=1e-6)


@each_isa
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_row_is_told_and_stays_alone(isa: str, bad: float) -> None:
    """One text's embedding is not finite: its total is NaN, and its neighbour's logits are what they were."""
    opened, _ = checkpoint("mistral")
    packed: dict[str, Any] = load_packed(opened, WeightFormat("float32"), "float32")
    texts = [[7] * 9, prompt_of(9)]
    rows = []
    for broken in (False, True):
        if broken:
            packed["embed"].pack_rows(7, np.full((1, packed["embed"].inner), bad, np.float32))
        bench = Bench(NativeDecoder(opened.graph, KERNELS[isa].native, dict(packed)), KEPT[0])
        last = LogitsNeeded.LAST
        rows.append(bench.whole([bench.chunk(i, text, 0, 9, last) for i, text in enumerate(texts)]))
    sound, ours = rows
    assert all(map(math.isfinite, sound.log_totals))
    assert math.isnan(ours.log_totals[0])
    assert ours.log_totals[1] == sound.log_totals[1]
    assert torch.equal(ours.rows[1], sound.rows[1])


def test_layer_tokens_are_counted_in_both() -> None:
    isa = next(iter(KERNELS))
    made = decoder("gpt2", "int8", isa)
    bench, tokens = Bench(made, KEPT[0]), prompt_of(20)
    for run in (bench.whole, bench.by_parts):
        before = made.layer_tokens
        run([bench.chunk(0, tokens, 0, 20)])
        assert made.layer_tokens == before + 20 * made.graph.layers


def test_threads_meet_five_times_a_layer_in_a_step_of_one_row() -> None:
    """Behind its four linears and its attention: what one thread does in between, the last one to come does at once."""
    isa, tokens = next(iter(KERNELS)), prompt_of(9)
    made = decoder("llama3", "int8", isa, 6000)
    bench, library = Bench(made, KEPT[0]), KERNELS[isa].library
    with threads(2):
        bench.whole([bench.chunk(0, tokens, 0, 8)])
        bench.whole([bench.chunk(0, tokens, 8, 9)])
        assert library.tw_last_team() == 2
        assert made.graph.layers < library.tw_last_barriers() <= 5 * made.graph.layers + 3


def rows_at(address: int, count: int, size: int) -> torch.Tensor:
    """fp32 numbers [count, size] in memory."""
    return torch.tensor((c_float * (count * size)).from_address(address)[:]).view(count, size)


def test_the_rotary_cache_keeps_the_rows_of_streams_with_different_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """With dynamic scaling each limit has rows of its own: made once while all of them fit, and right in any case."""
    rope = checkpoint("dynamic")[0].graph.positions
    assert isinstance(rope, Rope) and isinstance(rope.scaling, DynamicScaling)
    monkeypatch.setattr(program, "ROTARY_POSITIONS", 4 * 1024)
    size, table = 16, RotaryTable(rope, 16)
    rotary = RotaryCache({rope: size})
    made: list[int] = []
    rows = rotary._rows
    monkeypatch.setattr(rotary, "_rows", lambda start, stop, limit: made.append(limit) or rows(start, stop, limit))
    for limits, times in (((200, 300, 400), 3), (range(500, 510), 2)):
        for _ in range(times):
            alive: list[object] = []
            places = [(limit, rotary.address(3, 90, limit, alive)) for limit in limits]
            for limit, address in places:  # as a step reads them: after all of them were asked for
                right = table.rows(np.arange(3, 90), limit)
                expected = torch.from_numpy(np.concatenate((right.cos[:, : size // 2], right.sin[:, : size // 2]), 1))
                assert torch.equal(rows_at(address, 87, size), expected), limit
        assert rotary._other_rows == sum(map(len, rotary._others.values())) <= 4 * 1024
    assert made == [200, 300, 400, *range(500, 510), *range(500, 510)], "ten do not fit, and so are made again"
