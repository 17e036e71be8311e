"""The KV memory: one tensor, cut into pages, and a view of it for each layer that kernels read and write.

The store owns memory and knows neither sequences nor kernels. Slot `s` is token slot `s % page_size` of page
`s // page_size`, the same in every layer. Behind the last page lies one more that no page table names: who looks at a
past step runs it again, and what that writes goes there (`scratch`).

    memory [layers, 2, pages + 1, page_size, G, D]
                    |
    view(i).k  [pages + 1, page_size, G, D]      view(i).v  the same
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tokenwright.cache.spec import LayerSpec
from tokenwright.config import DType
from tokenwright.errors import CapacityError

TORCH_DTYPES: Mapping[DType, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True)
class KVView:
    """One layer's K and V: [pages + 1, page_size, G, D] each."""

    spec: LayerSpec
    k: torch.Tensor
    v: torch.Tensor


class KVStore:
    """Memory for `pages` pages of `page_size` tokens in every layer. Raises CapacityError if it cannot be had."""

    def __init__(self, specs: Sequence[LayerSpec], pages: int, page_size: int, device: torch.device) -> None:
        layout = specs[0].layout
        assert all(spec.layout == layout and spec.dtype == specs[0].dtype for spec in specs), (
            "one format for all layers"
        )
        self.specs = tuple(specs)
        self.pages = pages
        self.page_size = page_size
        shape = (len(specs), 2, pages + 1, page_size, layout.kv_heads, layout.head_size)
        try:
            self.memory = torch.empty(shape, dtype=TORCH_DTYPES[specs[0].dtype], device=device)
        except RuntimeError as error:  # torch has no narrower class for it on the CPU
            raise CapacityError(
                f"the KV cache of {pages} pages needs {self.nbytes} bytes, which {device} does not have; "
                "grant it less (kv_memory) or free some memory"
            ) from error

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in all layers together."""
        return sum(spec.bytes_per_token for spec in self.specs)

    @property
    def scratch(self) -> int:
        """A slot that belongs to no page of the pool."""
        return self.pages * self.page_size

    @property
    def nbytes(self) -> int:
        """Bytes of the whole memory, the scratch page included."""
        return (self.pages + 1) * self.page_size * self.bytes_per_token

    def view(self, layer: int) -> KVView:
        """The K and V of one layer, not copied."""
        return KVView(self.specs[layer], self.memory[layer, 0], self.memory[layer, 1])
