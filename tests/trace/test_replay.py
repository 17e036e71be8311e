"""Rows of attention of a past step: from the cache, from a cache made anew, and by the definition."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.backends.test_runner import KEPT
from tests.models.fixtures import make_checkpoint
from tests.oracle.harness import Subject, make_subject, prompt_of
from tests.poison import poison
from tests.tensors import tensor_decoder
from tests.trace.definition import defined_row
from tokenwright import LLM
from tokenwright.arrays import Floats
from tokenwright.backends.kv_sizing import memory_of
from tokenwright.backends.native.library import find
from tokenwright.backends.torch.backend import OpByOp
from tokenwright.backends.torch.border import tensor
from tokenwright.backends.torch.ops import TorchAttention
from tokenwright.backends.torch.reference_kernels import ReferenceKernels
from tokenwright.backends.torch.tensor_batch import Batcher
from tokenwright.cache import KVStore, LayerSpec
from tokenwright.engine import one_chunk
from tokenwright.engine.layer_group import PageTable
from tokenwright.models.taps import Site, ignore
from tokenwright.trace.replay import AttentionReplay, ReplayedText

WIDE = ReferenceKernels(torch.float64)
SIZE = 4  # of a page


def looker_of(subject: Subject, specs: Sequence[LayerSpec]) -> AttentionReplay:
    return AttentionReplay(subject.config, subject.decoder(WIDE), specs)


def text_of(replay: AttentionReplay, tokens: tuple[int, ...], cuts: Sequence[int]) -> ReplayedText:
    """A text that was computed in pieces, on pages in any order, those that are not read any more taken away."""
    pages = -(-len(tokens) // SIZE)
    store = KVStore(replay.specs, pages, SIZE, memory_of(replay.device))
    poison(store)
    random = torch.Generator().manual_seed(7)
    tables = [PageTable(dict(enumerate(torch.randperm(pages, generator=random).tolist()))) for _ in store.groups]
    batcher = Batcher(replay.decoder.graph, store)
    for start, stop in pairwise([0, *cuts, len(tokens)]):
        batch = one_chunk(tokens[start:stop], start, tables, len(tokens))
        replay.decoder.forward(batcher(batch), store, ignore)
    last = len(tokens) - 1
    for group, table in zip(store.groups, tables, strict=True):
        needed = {page for span in group.window.pages(last, last + 1, SIZE) for page in span}
        for page in table.keys() - needed:
            del table[page]
    return ReplayedText(tokens, len(tokens), store, tables)


@pytest.mark.parametrize(("kv", "window", "sinks"), [("native", None, 0), ("int8,first=500", None, 0), *KEPT])
@pytest.mark.parametrize("kind", ["llama2", "qwen2-window", "smollm3"])
def test_a_row_is_its_definition(kind: str, kv: str, window: int | None, sinks: int) -> None:
    """From the engine's pages, from a cache of its own, and from the tokens alone."""
    subject = make_subject(kind)
    replay = looker_of(subject, subject.specs(kv, window, sinks))
    for length in (1, 3, 19, 70):
        tokens = prompt_of(length, 2)
        text = text_of(replay, tokens, [cut for cut in (5, 6, 40) if cut < length])
        for layer, head in ((0, 0), (1, 3), (2, 1)):
            spec = replay.specs[layer]
            right = torch.tensor(defined_row(replay, tokens, length, layer, head), dtype=torch.float64)
            row = tensor(replay.row(text, length - 1, layer, head))
            rebuilt = tensor(replay.row(replay.rebuilt(tokens, length), length - 1, layer, head))
            assert row.shape == right.shape == (length,)
            assert row.dtype == torch.float32
            for one in (row, rebuilt):
                assert (one - right).abs().max() <= 2e-6
                assert abs(float(one.sum()) - 1) <= 1e-5
            read = {p for span in spec.window.spans(length - 1, length) for p in span}
            behind = [p for p in range(length) if p not in read]
            assert not row[behind].any() and not right[behind].any()


def test_an_earlier_row_needs_its_pages() -> None:
    """Behind a window they go; a text says so, and a cache made anew has them."""
    subject = make_subject("llama2")
    replay, tokens = looker_of(subject, subject.specs("native", 9, 2)), prompt_of(60, 2)
    text = text_of(replay, tokens, [])
    assert [text.holds(position) for position in (59, 57, 56, 55, 40, 9)] == [True, True, True, False, False, False]
    assert text.holds(0), "the first page, which has the sinks, is all that it reads"
    with pytest.raises(KeyError):
        replay.row(text, 40, 0, 0)
    rebuilt = replay.rebuilt(tokens, 60)
    right = torch.tensor(defined_row(replay, tokens[:41], 60, 0, 0), dtype=torch.float64)
    assert rebuilt.holds(40)
    assert (tensor(replay.row(rebuilt, 40, 0, 0)) - right).abs().max() <= 2e-6
    assert replay.rebuilt(tokens[:30], 60) is rebuilt, "it is kept for the next question"
    assert replay.rebuilt(tokens[1:], 60) is not rebuilt


@pytest.mark.parametrize(("kv", "window", "sinks"), KEPT)
def test_looking_changes_no_page(kv: str, window: int | None, sinks: int) -> None:
    subject = make_subject("qwen2-window")
    replay, tokens = looker_of(subject, subject.specs(kv, window, sinks)), prompt_of(30, 2)
    text = text_of(replay, tokens, [])
    pages = range(8)

    def held() -> list[bytes]:
        groups = range(len(text.store.groups))
        return [part.tobytes() for g in groups for part in text.store.read(g, pages)]

    before = held()
    replay.row(text, 29, 2, 1)
    assert held() == before


def test_queries_of_sinks_are_a_site_of_their_own() -> None:
    """Of the layers that turn and have sinks: not those without a window, nor those without positions."""
    for kind, layers in (("qwen2-window", [2, 3]), ("smollm3", [0, 1, 3])):
        subject = make_subject(kind)
        seen: list[int] = []

        def tap(site: Site, layer: int, value: torch.Tensor, seen: list[int] = seen) -> None:
            if site is Site.SINK_QUERY:
                assert value.shape == (10, 4, 16)
                seen.append(layer)

        window = None if kind == "qwen2-window" else 9
        looker_of(subject, subject.specs("native", window, 2)).computed(prompt_of(10), 10, tap)
        assert seen == layers


@pytest.mark.parametrize("wrong", ["window", "sinks", "codec", "second query"])
def test_the_definition_tells_faults_apart(wrong: str) -> None:
    """A row that was read in another way is not what `reference` says: else agreeing would mean little."""
    subject, tokens = make_subject("llama2"), prompt_of(60, 2)
    right = looker_of(subject, subject.specs("int4,first=3", 20, 4))
    other = {"window": ("int4,first=3", 19, 4), "sinks": ("int4,first=3", 20, 3), "codec": ("int8,first=3", 20, 4)}
    if wrong == "second query":
        replay = right
        attention = replay.decoder.blocks[2]
        assert isinstance(attention, TorchAttention)
        attention._rotated_for_sinks = lambda *_: None  # type: ignore[method-assign]
    else:
        replay = looker_of(subject, subject.specs(*other[wrong]))
    row = tensor(replay.row(text_of(replay, tokens, []), 59, 1, 1))
    expected = defined_row(looker_of(subject, subject.specs("int4,first=3", 20, 4)), tokens, 60, 1, 1)
    assert (row - torch.tensor(expected)).abs().max() > 1e-3


@pytest.mark.skipif(find() is None, reason="without kernels torch computes")
@pytest.mark.parametrize(
    ("kind", "kv", "window"),
    [
        ("qwen3", "k=int8,v=fp8", {}),
        ("qwen3", "int4,first=3", {"window": 20, "sinks": 2}),
        ("gpt-oss", "native", {}),
        ("deepseek2", "int8", {}),
    ],
)
def test_native_passes_are_those_of_torch(tmp_path: Path, kind: str, kv: str, window: dict[str, Any]) -> None:
    """To the bit at every tap and in the logits; what NumPy computes of the cache, up to a rounding."""
    tokens = list(prompt_of(70, 2))
    with LLM(make_checkpoint(tmp_path / "model", kind).path, pages=64, kv=kv, **window) as llm:
        engine, last = llm.llm_engine, len(tokens) - 1
        decoder = engine.loaded.decoder
        native, other = (AttentionReplay(llm.config, decoder, engine.specs) for _ in range(2))
        other.__dict__["passes"] = OpByOp(tensor_decoder(decoder))
        seen: list[dict[tuple[Site, int], Floats]] = [{}, {}]
        texts = []
        for replay, into in zip((native, other), seen, strict=True):

            def tap(site: Site, layer: int, value: Floats, into: dict[tuple[Site, int], Floats] = into) -> None:
                into[site, layer] = np.array(value)

            texts.append(replay.computed(tokens, len(tokens), tap))
        assert seen[0].keys() == seen[1].keys()
        assert all(np.array_equal(value, seen[1][place]) for place, value in seen[0].items())
        streams = np.ascontiguousarray(seen[0][Site.MLP, 0])
        assert np.array_equal(native.passes.logits(streams), other.passes.logits(streams))
        rows = [replay.rows(text, last) for replay, text in zip((native, other), texts, strict=True)]
        assert np.abs(rows[0] - rows[1]).max() <= 1e-6
        assert np.abs(rows[0].sum(-1) - 1).max() <= (1 if kind == "gpt-oss" else 1e-5)  # learned sinks take a share
        for layer in range(llm.config.layers):
            chunk = texts[0].store.chunk_rows([table.pages for table in texts[0].tables], range(1), last)
            both = [
                replay.passes.cached(text.store.view(layer), chunk, 0)
                for replay, text in zip((native, other), texts, strict=True)
            ]
            for ours, right in zip(*both, strict=True):
                assert np.abs(ours - right).max() <= 1e-6 * np.abs(right).max()  # int4 turns back 32 numbers at once
            expected = [defined_row(replay, tokens, len(tokens), layer, 1) for replay in (native, other)]
            assert np.abs(np.subtract(*expected)).max() <= 1e-6
            assert np.abs(expected[0] - rows[0][layer, 1]).max() <= 2e-6
