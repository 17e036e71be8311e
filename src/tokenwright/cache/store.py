"""The KV memory: pages for each group of layers, and for each layer a view that kernels read and write.

Slot `s` of a group is token slot `s % page_size` of its page `s // page_size`, in every layer of the group. A group's
last page is followed by a scratch page, in no page table: kernels write rows there that the group does not keep.

    one array for each group, side (K, V) and codec part:       [layers, pages + 1, page_size, G, n]
                                                                   |
    view(i).parts[j].k.memory: for each codec part                 [slots, G, n]         .v the same

A latent has the side K only; V is a view of the first numbers of each row. A recurrent group has one array of states
[layers, pages + 1, numbers]. The arrays are NumPy's, or torch's on a device (`backends/torch/border.py`).
"""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from tokenwright.arrays import Array, zeros
from tokenwright.cache.codec import Codec
from tokenwright.cache.spec import LayerGroup, LayerSpec, group_layers, stored
from tokenwright.config import Heads, RecurrentState
from tokenwright.engine.layer_group import AttentionWindow, Pages, StateWindow
from tokenwright.errors import CapacityError


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """The rows of one chunk among the rows of a step, and the slots of the K and V that they read.

    In a group of states: the page of the state before the rows, then the pages that they write; and the number of
    tokens that each state covers.
    """

    rows: range
    start: int  # the position of the first row
    slots: tuple[Any, ...]  # of each group [t], int64: the slots that the rows read
    positions: tuple[Any, ...]  # of each group [t], int64: their positions
    ends: Any = None  # [rows], int64, never falling: where the positions end that each row reads; None: at its own

    @property
    def stop(self) -> int:
        return self.start + len(self.rows)


@dataclass(frozen=True, slots=True)
class Side:
    """K or V of one layer: G heads of D = `size` numbers."""

    codec: Codec
    size: int
    memory: tuple[Any, ...]  # [slots, G, n] each

    def head(self, index: int) -> "Side":
        return replace(self, memory=tuple(memory[:, index : index + 1] for memory in self.memory))

    def first(self, size: int) -> "Side":
        """A view of the first `size` numbers of each row, which must be whole groups of a scale."""
        assert self.codec.group is None or size % self.codec.group == 0, "a group of numbers is not divided"
        lengths = (length for _, length in self.codec.parts(size))
        return Side(self.codec, size, tuple(one[..., :n] for one, n in zip(self.memory, lengths, strict=True)))


@dataclass(frozen=True, slots=True)
class KVPart:
    group: int
    window: AttentionWindow
    bytes_per_token: int
    k: Side
    v: Side


@dataclass(frozen=True, slots=True)
class KVView:
    spec: LayerSpec
    parts: tuple[KVPart, ...]

    def head(self, index: int) -> "KVView":
        parts = (replace(part, k=part.k.head(index), v=part.v.head(index)) for part in self.parts)
        return replace(self, parts=tuple(parts))


@dataclass(frozen=True, slots=True)
class StateView:
    group: int
    memory: Any  # [pages + 1, numbers]


class StoreMemory(Protocol):
    name: str  # of the device

    def zeros(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Any:
        """An array of zeros, because a cache file must not leak old memory. Raises an error if there is too little."""

    def fetched(self, memory: Any) -> Array:
        """The memory as a NumPy array, copied from a device."""

    def sent(self, content: Array) -> Any: ...


class HostMemory:
    name = "cpu"

    def zeros(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        return zeros(shape, dtype)

    def fetched(self, memory: Array) -> Array:
        return memory

    def sent(self, content: Array) -> Array:
        return content


HOST = HostMemory()


class KVStore:
    """Memory for pages of `page_size` tokens in every group. Raises CapacityError if the device lacks the memory.

    pages: the number of each group, in the order of `group_layers`; or one number for all.
    """

    def __init__(
        self, specs: Sequence[LayerSpec], pages: int | Sequence[int], page_size: int, memory: StoreMemory = HOST
    ) -> None:
        self.specs = tuple(specs)
        self.groups = group_layers(specs)
        self.pages = (pages,) * len(self.groups) if isinstance(pages, int) else tuple(pages)
        assert len(self.pages) == len(self.groups), "a number of pages for each group"
        self.page_size = page_size
        self.memory = memory
        try:
            self._sides = tuple(
                self._allocated(group, count + 1) for group, count in zip(self.groups, self.pages, strict=True)
            )
        except (RuntimeError, OSError, OverflowError) as error:  # torch raises no narrower class
            raise CapacityError(
                f"the KV cache of {sum(self.pages)} pages needs {self.nbytes} bytes, which {memory.name} does not "
                "have; grant it less (kv_memory) or free some memory"
            ) from error
        self._views = tuple(self._viewed(layer, spec) for layer, spec in enumerate(specs))
        self._used = frozenset(range(len(self.groups)))

    def _memory_of(self, group: LayerGroup) -> StoreMemory:
        return HOST if group.part.on_host else self.memory

    def _allocated(self, group: LayerGroup, pages: int) -> tuple[tuple[Any, ...], ...]:
        layout, memory = group.part.layout, self._memory_of(group)
        if isinstance(layout, RecurrentState):
            return ((memory.zeros((len(group.layers), pages, layout.numbers), np.dtype(np.float32)),),)
        sides: list[tuple[Codec, int]] = [(group.part.k, layout.key_size)]
        if isinstance(layout, Heads):
            sides.append((group.part.v, layout.value_size))
        shape = (len(group.layers), pages, self.page_size, layout.kv_heads)
        return tuple(
            tuple(memory.zeros((*shape, length), dtype) for dtype, length in codec.parts(size)) for codec, size in sides
        )

    def _viewed(self, layer: int, spec: LayerSpec) -> KVView | StateView:
        places = {group.part: index for index, group in enumerate(self.groups)}
        parts = []
        for part in spec.parts:
            index = places[part]
            at = self.groups[index].layers.index(layer - (spec.source or 0))
            if part.state_bytes:
                return StateView(index, next(self.arrays(index))[at])
            memories = [tuple(one[at].reshape(-1, *one[at].shape[2:]) for one in side) for side in self._sides[index]]
            k = Side(part.k, part.layout.key_size, memories[0])
            size = part.layout.value_size
            v = Side(part.v, size, memories[1]) if isinstance(part.layout, Heads) else k.first(size)
            parts.append(KVPart(index, part.window, part.bytes_per_token, k, v))
        return KVView(spec, tuple(parts))

    def of_layers(self, first: int, stop: int) -> Self:
        """The same memory for a model with the layers [first, stop); it has all groups and pages."""
        other = copy(self)
        other.specs, other._views = self.specs[first:stop], self._views[first:stop]
        used = ((view,) if isinstance(view, StateView) else view.parts for view in other._views)
        other._used = frozenset(one.group for each in used for one in each)
        return other

    @property
    def nbytes(self) -> int:
        each = zip(self.groups, self.pages, strict=True)
        return sum((count + 1) * group.page_bytes(self.page_size) for group, count in each)

    def arrays(self, group: int) -> Iterator[Any]:
        """All arrays of a group: [layers, pages + 1, page_size, G, n] each, or one of states."""
        for side in self._sides[group]:
            yield from side

    def scratch(self, group: int) -> int:
        return self.pages[group] * self.page_size

    def view(self, layer: int) -> KVView:
        found = self._views[layer]
        assert isinstance(found, KVView), "a recurrent layer has no K and V"
        return found

    def states(self, layer: int) -> StateView:
        found = self._views[layer]
        assert isinstance(found, StateView), "a layer with attention has no states"
        return found

    def slots(self, group: int, pages: Pages, positions: range) -> NDArray[np.int64]:
        """The slots [n] of adjacent positions, scratch for positions not kept. Raises KeyError if a page is missing."""
        window = self.groups[group].window
        kept = range(0) if isinstance(window, StateWindow) else stored(window, positions)
        slots = np.full(len(positions), self.scratch(group), np.int64)
        if kept:
            first = kept.start - positions.start
            slots[first : first + len(kept)] = self._found(pages, kept)
        return slots

    def chunk_rows(self, tables: Sequence[Pages], rows: range, start: int) -> ChunkRows:
        """The chunk `rows` of a step, from position `start` of a text on, with one page table per group.

        Raises KeyError if a page that the rows read is missing.
        """
        slots, positions = [], []
        for number, (group, pages) in enumerate(zip(self.groups, tables, strict=True)):
            if number not in self._used:  # another model's, which may have no page for these rows
                slots.append(_joined([]))
                positions.append(_joined([]))
                continue
            if isinstance(group.window, StateWindow):
                found, ends = self._found_states(number, pages, start, start + len(rows))
                slots.append(found)
                positions.append(ends)
                continue
            read = group.window.spans(start, start + len(rows))
            slots.append(_joined([self._found(pages, some) for some in read]))
            positions.append(_joined([np.arange(some.start, some.stop) for some in read]))
        return ChunkRows(rows, start, tuple(slots), tuple(positions))

    def _found_states(self, group: int, pages: Pages, start: int, stop: int) -> tuple[NDArray[np.int64], ...]:
        """The page of the state that a chunk begins with, and those that it writes; the tokens that each covers.

        Raises KeyError if the first or the last one is missing.
        """
        first, last = (start - 1) // self.page_size, (stop - 1) // self.page_size
        for page in (first, last):
            if page >= len(pages) or (page >= 0 and pages[page] < 0):
                raise KeyError(f"the state of page {page} is missing")
        on_the_way = [page for page in range(start // self.page_size, last) if pages[page] >= 0]
        found = [pages[first] if start else self.pages[group], *(pages[page] for page in on_the_way), pages[last]]
        return np.array(found), np.array([start, *((page + 1) * self.page_size for page in on_the_way), stop])

    def _found(self, pages: Pages, positions: range) -> NDArray[np.int64]:
        """The slots [n] of adjacent positions. Raises KeyError if the table lacks one of their pages."""
        size, first = self.page_size, positions.start // self.page_size
        count = (positions.stop - 1) // size + 1 - first
        found = pages[first : first + count]
        if len(found) < count or min(found) < 0:
            raise KeyError(f"some page from {first} to {first + count - 1} is missing")
        numbers = np.frombuffer(found, np.int32).astype(np.int64)
        slots = (numbers[:, None] * size + np.arange(size)).reshape(-1)
        return slots[positions.start - first * size : positions.stop - first * size]

    def copy(self, group: int, source: int, target: int) -> None:
        for whole in self.arrays(group):
            whole[:, target] = whole[:, source]

    def read(self, group: int, pages: Sequence[int]) -> tuple[Array, ...]:
        """The contents of a group's pages, copied to the CPU: [layers, n, page_size, G, n_i] each."""
        memory = self._memory_of(self.groups[group])
        return tuple(memory.fetched(whole[:, list(pages)]) for whole in self.arrays(group))

    def write(self, group: int, pages: Sequence[int], contents: Sequence[Array]) -> None:
        adjacent = range(pages[0], pages[0] + len(pages)) if pages else range(0)
        where: Any = slice(adjacent.start, adjacent.stop) if list(pages) == list(adjacent) else list(pages)
        memory = self._memory_of(self.groups[group])
        for whole, content in zip(self.arrays(group), contents, strict=True):
            whole[:, where] = memory.sent(content)

    def take(self, other: "KVStore") -> None:
        """Copy all pages of a smaller store with equal specs and page size to the same numbers."""
        for group, count in enumerate(other.pages):
            for mine, theirs in zip(self.arrays(group), other.arrays(group), strict=True):
                mine[:, :count] = theirs[:, :count]


def _joined(parts: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)
