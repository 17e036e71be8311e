"""The KV memory: where a row goes and comes back from, its bytes, and pages that are copied, taken out and put back."""

import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.cache.test_spec import SPECS
from tests.models.fixtures import make_config
from tests.poison import poison
from tests.tensors import decode, encode, kv_memory
from tokenwright.backends.torch import kv_codec
from tokenwright.backends.torch.border import tensor as tensor_of
from tokenwright.cache import KVStore, LayerSpec, layer_specs
from tokenwright.checkpoints.families.registry import parse_config
from tokenwright.engine.layer_group import PageTable
from tokenwright.errors import CapacityError
from tokenwright.formats import KVFormat

CPU = torch.device("cpu")
KVS = ["native", "bfloat16", "int8", "int4", "fp8", "k=int8,v=int4,first=5,native=1"]


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def specs_of(kv: str, kind: str = "qwen2-window") -> tuple[LayerSpec, ...]:
    return layer_specs(parse_config(make_config(kind)).graph, "float32", KVFormat.parse(kv))


def written(specs: tuple[LayerSpec, ...], pages: int = 3, page_size: int = 4) -> KVStore:
    """A store with other numbers in every slot of every layer and side."""
    store = KVStore(specs, pages, page_size)
    seed = 0
    for layer, spec in enumerate(specs):
        for part in store.view(layer).parts:
            for side in (part.k, part.v):
                slots = torch.arange((pages + 1) * page_size)
                kv_codec.write(side, slots, noise(len(slots), spec.layout.kv_heads, spec.layout.head_size, seed=seed))
                seed += 1
    return store


def contents(store: KVStore) -> list[torch.Tensor]:
    return [tensor.clone() for group in range(len(store.groups)) for tensor in kv_memory(store, group)]


def same(first: Any, second: Any) -> bool:
    """To the bit, NaN included."""
    one, other = tensor_of(first), tensor_of(second)
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@given(specs=st.lists(SPECS, min_size=1, max_size=4), page_size=st.integers(1, 20), data=st.data())
def test_bytes_are_those_of_the_tensors(specs: list[LayerSpec], page_size: int, data: st.DataObject) -> None:
    store = KVStore(specs, 2, page_size)
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=len(store.groups), max_size=len(store.groups)))
    store = KVStore(specs, sizes, page_size)
    assert store.pages == tuple(sizes)
    totals = [sum(tensor.nbytes for tensor in kv_memory(store, group)) for group in range(len(sizes))]
    each = zip(store.groups, sizes, strict=True)
    assert totals == [group.page_bytes(page_size) * (count + 1) for group, count in each]
    assert store.nbytes == sum(totals)


def test_memory_that_is_not_there_is_told_in_bytes() -> None:
    with pytest.raises(CapacityError, match=r"4000000000000000 pages needs \d+ bytes, which cpu does not have"):
        KVStore(specs_of("native", "llama2"), 4 * 10**15, 16)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="counts the resident pages of Linux")
def test_memory_is_taken_as_it_is_written() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before, count = resident(), 2**15
    store = KVStore(specs_of("native", "llama2"), count, 16)
    assert store.nbytes > 200 * 2**20
    assert resident() - before < store.nbytes / 10
    contents = store.read(0, [0, count // 2, count])
    assert not any(part.any() for part in contents), "no old memory comes into a cache file"
    half = range(count // 2)
    for tensor in kv_memory(store, 0):
        tensor[:, : len(half)] = 1
    assert resident() - before > store.nbytes / 3


@pytest.mark.parametrize("kv", KVS)
def test_a_row_comes_back_from_where_it_was_put(kv: str) -> None:
    """And from nowhere else: every layer, side and slot has its own memory."""
    specs = specs_of(kv)
    store = KVStore(specs, 3, 4)
    poison(store)
    slots, x = torch.tensor([9, 2, 15]), noise(3, 2, 16)
    for layer in range(len(specs)):
        for index, part in enumerate(store.view(layer).parts):
            for side in (part.k, part.v):
                before = contents(store)
                kv_codec.write(side, slots, x)
                exact = decode(side.codec, encode(side.codec, x), 16, torch.float64)
                assert torch.equal(kv_codec.read(side, slots, torch.float64), exact)
                assert kv_codec.read(side, slots, torch.float32).dtype == torch.float32
                others = torch.tensor([s for s in range(16) if s not in slots])
                assert kv_codec.read(side, others, torch.float32).isnan().all()
                changed = [not same(*pair) for pair in zip(before, contents(store), strict=True)]
                assert sum(changed) == len(side.memory)
                one = store.view(layer).head(1).parts[index]
                alone = one.k if side is part.k else one.v
                assert torch.equal(kv_codec.read(alone, slots, torch.float64), exact[:, 1:])
                poison(store)


def test_what_is_read_is_not_the_memory_itself() -> None:
    store = written(specs_of("native"))
    before = contents(store)
    kv_codec.read(store.view(0).parts[0].k, torch.arange(8), torch.float32).zero_()
    assert all(map(torch.equal, before, contents(store)))


def test_pages_of_a_layer_are_pages_of_its_group() -> None:
    """Slot s is token slot s % page_size of page s // page_size, in the layer's place of the group's tensors."""
    specs = specs_of("k=int8,v=int4,first=5,native=1")
    store = written(specs)
    for layer in range(len(specs)):
        for part, spec_part in zip(store.view(layer).parts, specs[layer].parts, strict=True):
            group = store.groups[part.group]
            assert (group.part, part.window) == (spec_part, spec_part.window)
            assert part.bytes_per_token == spec_part.bytes_per_token
            place = group.layers.index(layer)
            memories = (*part.k.memory, *part.v.memory)
            for tensor, memory in zip(kv_memory(store, part.group), map(torch.from_numpy, memories), strict=True):
                assert torch.equal(tensor[place, 2, 3], memory[2 * 4 + 3])
                assert tensor.shape[:3] == (len(group.layers), 4, 4)


@pytest.mark.parametrize("kv", KVS)
def test_a_page_is_copied_within_its_group(kv: str) -> None:
    store = written(specs_of(kv))
    for group in range(len(store.groups)):
        before = contents(store)
        expected = [tensor.clone() for tensor in kv_memory(store, group)]
        for tensor in expected:
            tensor[:, 0] = tensor[:, 2]
        store.copy(group, 2, 0)
        assert all(map(same, kv_memory(store, group), expected))
        touched = {tensor.data_ptr() for tensor in kv_memory(store, group)}
        tensors = [tensor for number in range(len(store.groups)) for tensor in kv_memory(store, number)]
        assert all(same(*pair) for pair in zip(before, tensors, strict=True) if pair[1].data_ptr() not in touched)


@pytest.mark.parametrize("kv", KVS)
def test_pages_go_out_and_come_back(kv: str) -> None:
    """Into other pages of another store, in the order they were taken."""
    specs = specs_of(kv)
    one, other = written(specs), KVStore(specs, 5, 4)
    poison(other)
    for group in range(len(one.groups)):
        taken = one.read(group, [2, 0])
        before = [part.copy() for part in taken]
        one.copy(group, 1, 2)
        assert all(map(same, taken, before)), "what was taken is a copy"
        other.write(group, [1, 4], taken)
        for tensor, part in zip(kv_memory(other, group), before, strict=True):
            assert same(tensor[:, 1], part[:, 0]) and same(tensor[:, 4], part[:, 1])
        assert sum(part.nbytes for part in taken) == 2 * one.groups[group].page_bytes(4)
        assert all(map(same, other.read(group, [1, 4]), before))
        rest = other.read(group, [0, 2, 3])
        floats = [part for part in map(tensor_of, rest) if part.is_floating_point()]
        assert all(part.isnan().all() for part in floats)


def test_a_larger_store_takes_all_pages_over() -> None:
    specs = specs_of("int4,first=5")
    small, large = written(specs), KVStore(specs, 7, 4)
    large.take(small)
    for group in range(len(small.groups)):
        assert all(map(same, large.read(group, [0, 1, 2]), small.read(group, [0, 1, 2])))


def test_slots_of_positions() -> None:
    """Of the group that keeps [0, 5), of the one that keeps [5, ...): the other's rows go to the scratch page."""
    store = KVStore(specs_of("int8,first=5", "llama2"), [2, 9], 4)
    assert [store.scratch(group) for group in (0, 1)] == [8, 36]
    assert store.slots(0, PageTable({0: 1, 1: 0}).pages, range(3, 8)).tolist() == [7, 0, 8, 8, 8]
    assert store.slots(1, PageTable({1: 8, 2: 3}).pages, range(3, 10)).tolist() == [36, 36, 33, 34, 35, 12, 13]
    assert store.slots(0, PageTable().pages, range(5, 7)).tolist() == [8, 8]
    for missing in ({1: 8}, {2: 3}, {}):
        with pytest.raises(KeyError, match="some page from 1 to 2 is missing"):
            store.slots(1, PageTable(missing).pages, range(3, 10))


def test_what_rows_of_a_chunk_read() -> None:
    """What rows 9 and 10 read of a text with sinks and a window, whose first tokens are kept apart."""
    specs = layer_specs(parse_config(make_config("llama2")).graph, "float32", KVFormat.parse("int8,first=1"), 4, 2)
    store = KVStore(specs, 9, 4)
    tables = [PageTable({0: 2}).pages, PageTable({0: 5, 1: 0, 2: 7}).pages]
    chunk = store.chunk_rows(tables, range(5, 7), 9)
    assert (chunk.rows, chunk.start, chunk.stop) == (range(5, 7), 9, 11)
    assert [one.tolist() for one in chunk.positions] == [[0], [1, 6, 7, 8, 9, 10]]
    assert [one.tolist() for one in chunk.slots] == [[8], [21, 2, 3, 28, 29, 30]]
    first = store.chunk_rows([PageTable({0: 2}).pages, PageTable().pages], range(1), 0)
    assert [one.tolist() for one in first.slots] == [[8], []]
    assert [one.tolist() for one in first.positions] == [[0], []]
    assert {one.dtype for one in (*chunk.slots, *first.slots, *first.positions)} == {np.dtype(np.int64)}
    for missing in ({0: 5, 1: 0}, {0: 5, 2: 7}, {1: 0, 2: 7}):
        with pytest.raises(KeyError):
            store.chunk_rows([tables[0], PageTable(missing).pages], range(2), 9)


@pytest.mark.parametrize("kv", KVS)
def test_poison_is_found_wherever_it_is_read(kv: str) -> None:
    store = written(specs_of(kv))
    poison(store)
    for layer in range(len(store.specs)):
        for part in store.view(layer).parts:
            for side in (part.k, part.v):
                assert kv_codec.read(side, torch.arange(16), torch.float32).isnan().all()
