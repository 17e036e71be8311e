"""The KV memory on a GPU: an array of pages for each layer of a group, indexed as `cache.KVStore` needs."""

from collections.abc import Sequence
from copy import copy
from math import prod
from typing import Any, Self

import numpy as np

from tokenwright.arrays import Array, as_bytes
from tokenwright.backends.wgpu.gpu import Gpu
from tokenwright.errors import RequestError


class PagesOnGpu:
    """[layers, pages, page_size, G, n] in one buffer a layer. `[:, where]` selects pages, `[layer]` a layer."""

    def __init__(self, gpu: Gpu, shape: Sequence[int], dtype: np.dtype[Any]) -> None:
        self.gpu, self.shape, self.dtype = gpu, tuple(shape), dtype
        self.page_bytes = prod(self.shape[2:]) * dtype.itemsize
        if self.page_bytes % 4:
            raise RequestError("on a GPU a page of the cache must be whole words; give an even page_size", "page_size")
        self.buffers = [gpu.buffer(self.shape[1] * self.page_bytes) for _ in range(self.shape[0])]
        self.selected: Sequence[int] = range(self.shape[1])

    def reshape(self, *shape: int) -> Self:  # noqa: ARG002  a layer's pages are its slots
        return self

    def __getitem__(self, key: Any) -> Self:
        found = copy(self)
        if isinstance(key, int):
            found.buffers = [self.buffers[key]]
        else:
            found.selected = self._numbers(key[1])
        return found

    def __setitem__(self, key: Any, content: "PagesOnGpu | Array") -> None:
        """Write or copy pages, through another buffer: WebGPU copies within none."""
        numbers, size = self._numbers(key[1]), self.page_bytes
        if not len(numbers):
            return
        if not isinstance(content, PagesOnGpu):
            rows = as_bytes(np.ascontiguousarray(content)).reshape(len(self.buffers), len(numbers), -1)
            for buffer, row in zip(self.buffers, rows, strict=True):
                for number, page in zip(numbers, row, strict=True):
                    self.gpu.write(buffer, number * size, page)
            return
        between, encoder = self.gpu.buffer(len(numbers) * size), self.gpu.device.create_command_encoder()
        for mine, other in zip(self.buffers, content.buffers, strict=True):
            for i, number in enumerate(content.selected):
                encoder.copy_buffer_to_buffer(other, number * size, between, i * size, size)
            for i, number in enumerate(numbers):
                encoder.copy_buffer_to_buffer(between, i * size, mine, number * size, size)
        self.gpu.submit(encoder)

    def _numbers(self, where: int | slice | list[int]) -> Sequence[int]:
        if isinstance(where, slice):
            return range(*where.indices(self.shape[1]))
        return [where] if isinstance(where, int) else where

    def fetched(self) -> Array:
        """The selected pages [layers, n, page_size, G, n], on the CPU."""
        size = self.page_bytes
        pages = [self.gpu.read(buffer, number * size, size) for buffer in self.buffers for number in self.selected]
        shape = (len(self.buffers), len(self.selected), *self.shape[2:])
        return np.concatenate([np.zeros(0, np.uint8), *pages]).view(self.dtype).reshape(shape)


class GpuMemory:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.name = gpu, gpu.name

    def wait(self) -> None:
        self.gpu.read(self.gpu.nothing, 0, 4)

    def zeros(self, shape: Sequence[int], dtype: np.dtype[Any]) -> PagesOnGpu:
        return PagesOnGpu(self.gpu, shape, dtype)

    def fetched(self, memory: PagesOnGpu) -> Array:
        return memory.fetched()

    def sent(self, content: Array) -> Array:
        return content
