"""The KV memory on a GPU: an array of pages for each layer of a group, with the indexing that `cache.KVStore` needs."""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from tokenwright.arrays import Array, as_bytes
from tokenwright.backends.wgpu.gpu import Buffer, Gpu
from tokenwright.errors import RequestError

Where = int | slice | list[int]


class PagesOnGpu:
    """[layers, pages, page_size, G, n] in one buffer a layer. `[:, where]` selects pages, `[layer]` a layer."""

    def __init__(self, gpu: Gpu, shape: Sequence[int], dtype: np.dtype[Any]) -> None:
        self.gpu, self.shape, self.dtype = gpu, tuple(shape), dtype
        self.page_bytes = prod(self.shape[2:]) * dtype.itemsize
        if self.page_bytes % 4:
            raise RequestError("on a GPU a page of the cache must be whole words; give an even page_size", "page_size")
        self.buffers = [gpu.buffer(self.shape[1] * self.page_bytes) for _ in range(self.shape[0])]

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, int):
            return Slots(self.buffers[key])
        whole, where = key
        assert whole == slice(None), "pages are selected in all layers"
        return Selected(self, self._numbers(where), isinstance(where, int))

    def __setitem__(self, key: Any, content: "Selected | Array") -> None:
        numbers = self._numbers(key[1])
        if isinstance(content, Selected):
            self._copy(numbers, content)
            return
        rows = as_bytes(np.ascontiguousarray(content)).reshape(len(self.buffers), len(numbers), -1)
        for buffer, row in zip(self.buffers, rows, strict=True):
            for number, page in zip(numbers, row, strict=True):
                self.gpu.write(buffer, number * self.page_bytes, page)

    def _numbers(self, where: Where) -> list[int]:
        if isinstance(where, slice):
            return list(range(*where.indices(self.shape[1])))
        return [where] if isinstance(where, int) else list(where)

    def _copy(self, numbers: Sequence[int], source: "Selected") -> None:
        """Copy pages of this array or another one, through a buffer of their own: WebGPU copies within none."""
        size, count = self.page_bytes, len(numbers)
        if not count:
            return
        between = self.gpu.buffer(count * size)
        encoder = self.gpu.device.create_command_encoder()
        for mine, other in zip(self.buffers, source.whole.buffers, strict=True):
            for i, number in enumerate(source.numbers):
                encoder.copy_buffer_to_buffer(other, number * size, between, i * size, size)
            for i, number in enumerate(numbers):
                encoder.copy_buffer_to_buffer(between, i * size, mine, number * size, size)
        self.gpu.submit(encoder)


class Slots:
    """The buffer of one layer, whatever its shape is called."""

    shape: tuple[int, ...] = ()

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer

    def reshape(self, *shape: int) -> "Slots":  # noqa: ARG002
        return self


class Selected:
    """Some pages of all layers."""

    def __init__(self, whole: PagesOnGpu, numbers: list[int], single: bool) -> None:
        self.whole, self.numbers, self.single = whole, numbers, single

    def fetched(self) -> Array:
        whole = self.whole
        pages = [
            whole.gpu.read(buffer, number * whole.page_bytes, whole.page_bytes)
            for buffer in whole.buffers
            for number in self.numbers
        ]
        shape = (whole.shape[0], *(() if self.single else (len(self.numbers),)), *whole.shape[2:])
        joined = np.concatenate(pages) if pages else np.zeros(0, np.uint8)
        return joined.view(whole.dtype).reshape(shape)


class GpuMemory:
    """Implements `StoreMemory` on a GPU."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.name = gpu, gpu.name

    def free_bytes(self) -> int | None:
        """WebGPU does not tell it."""
        return None

    def wait(self) -> None:
        """Wait for the device's queued work."""
        self.gpu.read(self.gpu.nothing, 0, 4)

    def zeros(self, shape: Sequence[int], dtype: np.dtype[Any]) -> PagesOnGpu:
        return PagesOnGpu(self.gpu, shape, dtype)

    def fetched(self, memory: Selected) -> Array:
        return memory.fetched()

    def sent(self, content: Array) -> Array:
        return content
