"""The KV memory: pages for each group of layers, and for each layer a view that kernels read and write.

The store owns memory and knows neither sequences nor kernels. Slot `s` of a group is token slot `s % page_size` of its
page `s // page_size`, the same in every layer of the group. After a group's last page comes a scratch page, which is in
no page table: kernels write rows there whose K and V the group does not keep (`scratch`).

    one tensor for each group, side (K, V) and codec part:      [layers, pages + 1, page_size, G, n]
                                                                   |
    view(i).parts[j].k.memory: for each codec part                 [slots, G, n]         .v the same

Of a latent there is the side K alone; V is a view of the first numbers of each row.
"""

import math
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from tokenwright.cache.codec import Codec, Parts
from tokenwright.cache.spec import LayerGroup, LayerSpec, group_layers, stored
from tokenwright.config import Heads
from tokenwright.engine.page_table import Pages
from tokenwright.engine.window import AttentionWindow
from tokenwright.errors import CapacityError


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """The rows of one chunk among the rows of a step, and the slots of the K and V that they read.

    Row `rows.start + i` is at position `start + i` of its text. `slots` and `positions` have a tensor [t] for each
    group, in the order of the text: the slots that the rows read, and the positions whose K and V these hold.
    """

    rows: range
    start: int
    slots: tuple[torch.Tensor, ...]
    positions: tuple[torch.Tensor, ...]

    @property
    def stop(self) -> int:
        return self.start + len(self.rows)


@dataclass(frozen=True, slots=True)
class Side:
    """K or V of one layer: G heads of D = `size` numbers."""

    codec: Codec
    size: int
    memory: Parts  # [slots, G, n] each

    def write(self, slots: torch.Tensor, x: torch.Tensor) -> None:
        """Encode rows x [n, G, D] into the slots [n]."""
        for memory, part in zip(self.memory, self.codec.encode(x), strict=True):
            memory[slots] = part

    def read(self, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The decoded rows of the slots [n]: [n, G, D] in `dtype`, copied from the memory."""
        parts = tuple(memory.index_select(0, slots) for memory in self.memory)
        return self.codec.decode(parts, self.size, dtype)

    def head(self, index: int) -> "Side":
        """A view of one KV head (G = 1)."""
        return replace(self, memory=tuple(memory[:, index : index + 1] for memory in self.memory))

    def first(self, size: int) -> "Side":
        """A view of the first `size` numbers of each row, which must be whole groups of a scale."""
        assert self.codec.group is None or size % self.codec.group == 0, "a group of numbers is not divided"
        lengths = (length for _, length in self.codec.parts(size))
        return Side(self.codec, size, tuple(one[..., :n] for one, n in zip(self.memory, lengths, strict=True)))


@dataclass(frozen=True, slots=True)
class KVPart:
    """One part of a layer, in its group's memory."""

    group: int
    window: AttentionWindow
    bytes_per_token: int
    k: Side
    v: Side


@dataclass(frozen=True, slots=True)
class KVView:
    """One layer's K and V, its parts in the order of the text."""

    spec: LayerSpec
    parts: tuple[KVPart, ...]

    def head(self, index: int) -> "KVView":
        """A view of one KV head (G = 1)."""
        parts = (replace(part, k=part.k.head(index), v=part.v.head(index)) for part in self.parts)
        return replace(self, parts=tuple(parts))


class KVStore:
    """Memory for pages of `page_size` tokens in every group. Raises CapacityError if the device lacks the memory.

    pages: the number of each group, in the order of `group_layers`; or one number for all groups.
    """

    def __init__(
        self, specs: Sequence[LayerSpec], pages: int | Sequence[int], page_size: int, device: torch.device
    ) -> None:
        self.specs = tuple(specs)
        self.groups = group_layers(specs)
        self.pages = (pages,) * len(self.groups) if isinstance(pages, int) else tuple(pages)
        assert len(self.pages) == len(self.groups), "a number of pages for each group"
        self.page_size = page_size
        self.device = device
        try:
            self._sides = tuple(
                self._allocated(group, count + 1) for group, count in zip(self.groups, self.pages, strict=True)
            )
        except (RuntimeError, OSError, OverflowError) as error:  # torch raises no narrower class
            raise CapacityError(
                f"the KV cache of {sum(self.pages)} pages needs {self.nbytes} bytes, which {device} does not have; "
                "grant it less (kv_memory) or free some memory"
            ) from error
        self._views = tuple(self._viewed(layer, spec) for layer, spec in enumerate(specs))

    def _allocated(self, group: LayerGroup, pages: int) -> tuple[Parts, ...]:
        """The memory of K and V; of a latent that of the rows that are both."""
        layout = group.part.layout
        sides: list[tuple[Codec, int]] = [(group.part.k, layout.key_size)]
        if isinstance(layout, Heads):
            sides.append((group.part.v, layout.value_size))
        shape = (len(group.layers), pages, self.page_size, layout.kv_heads)
        return tuple(
            tuple(zeros((*shape, length), dtype, self.device) for dtype, length in codec.parts(size))
            for codec, size in sides
        )

    def _viewed(self, layer: int, spec: LayerSpec) -> KVView:
        places = {group.part: index for index, group in enumerate(self.groups)}
        parts = []
        for part in spec.parts:
            index = places[part]
            at = self.groups[index].layers.index(layer)
            memories = [tuple(tensor[at].flatten(0, 1) for tensor in side) for side in self._sides[index]]
            k = Side(part.k, part.layout.key_size, memories[0])
            size = part.layout.value_size
            v = Side(part.v, size, memories[1]) if isinstance(part.layout, Heads) else k.first(size)
            parts.append(KVPart(index, part.window, part.bytes_per_token, k, v))
        return KVView(spec, tuple(parts))

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one more token in all layers together."""
        return sum(spec.bytes_per_token for spec in self.specs)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole memory, scratch pages included."""
        each = zip(self.groups, self.pages, strict=True)
        return sum((count + 1) * group.page_bytes(self.page_size) for group, count in each)

    def tensors(self, group: int) -> Iterator[torch.Tensor]:
        """All tensors of a group: [layers, pages + 1, page_size, G, n] each."""
        for side in self._sides[group]:
            yield from side

    def scratch(self, group: int) -> int:
        """The first slot of a group's scratch page, which no text uses."""
        return self.pages[group] * self.page_size

    def view(self, layer: int) -> KVView:
        """The K and V of one layer, without a copy."""
        return self._views[layer]

    def slots(self, group: int, pages: Pages, positions: range) -> torch.Tensor:
        """The slots [n], on the CPU, of adjacent positions; scratch for positions that the group does not keep.

        Raises KeyError if a page is missing.
        """
        kept = stored(self.groups[group].window, positions)
        slots = torch.full((len(positions),), self.scratch(group))
        if kept:
            first = kept.start - positions.start
            slots[first : first + len(kept)] = self._found(pages, kept)
        return slots

    def chunk_rows(self, tables: Sequence[Pages], rows: range, start: int) -> ChunkRows:
        """The chunk `rows` of a step, which begins at position `start` of a text with these page tables, one per group.

        Raises KeyError if a page that the rows read is missing.
        """
        slots, positions = [], []
        for group, pages in zip(self.groups, tables, strict=True):
            read = group.window.spans(start, start + len(rows))
            slots.append(_joined([self._found(pages, some) for some in read]).to(self.device))
            positions.append(_joined([torch.arange(some.start, some.stop) for some in read]).to(self.device))
        return ChunkRows(rows, start, tuple(slots), tuple(positions))

    def _found(self, pages: Pages, positions: range) -> torch.Tensor:
        """The slots [n] of adjacent positions. Raises KeyError if the table lacks one of their pages."""
        size, first = self.page_size, positions.start // self.page_size
        count = (positions.stop - 1) // size + 1 - first
        found = pages[first : first + count]
        if len(found) < count or min(found) < 0:
            raise KeyError(f"some page from {first} to {first + count - 1} is missing")
        numbers = torch.frombuffer(found, dtype=torch.int32).long()
        slots = (numbers[:, None] * size + torch.arange(size)).flatten()  # of whole pages
        return slots[positions.start - first * size : positions.stop - first * size]

    def copy(self, group: int, source: int, target: int) -> None:
        """Copy a page within a group, in all its layers."""
        for tensor in self.tensors(group):
            tensor[:, target] = tensor[:, source]

    def read(self, group: int, pages: Sequence[int]) -> Parts:
        """The contents of a group's pages, copied to the CPU: [layers, n, page_size, G, n_i] each."""
        return tuple(tensor[:, list(pages)].cpu() for tensor in self.tensors(group))

    def write(self, group: int, pages: Sequence[int], contents: Parts) -> None:
        """Write contents that `read` returned into as many pages of a group."""
        for tensor, content in zip(self.tensors(group), contents, strict=True):
            tensor[:, list(pages)] = content.to(self.device)

    def take(self, other: "KVStore") -> None:
        """Copy all pages of a store with equal specs and page size, and at most as many pages, to the same numbers."""
        for group, count in enumerate(other.pages):
            for mine, theirs in zip(self.tensors(group), other.tensors(group), strict=True):
                mine[:, :count] = theirs[:, :count]

    def poison(self) -> None:
        """Fill every slot with encoded NaN, so that a read of a slot that was never written shows. For tests."""
        for view in self._views:
            for part in view.parts:
                for side in (part.k, part.v):
                    nothing = side.codec.encode(torch.full((side.size,), torch.nan, device=self.device))
                    for memory, row in zip(side.memory, nothing, strict=True):
                        memory.copy_(row.expand_as(memory))


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of zeros, because a cache file must not leak old memory.

    On the CPU the system hands out zeroed memory when a page of it is first written, so that a short run does not take
    all of it; `torch.zeros` would write it all. Raises OSError, OverflowError or RuntimeError if memory runs out.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not nbytes:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # aligned to a page
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Index tensors, int64, concatenated to one [n]."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
