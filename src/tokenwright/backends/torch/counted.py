"""Counts the work of a forward pass by the operations that run; `CostModel` derives it from the graph.

A product [n, in] x [in, out] is 2 n in out FLOP, attention 2 H (key size + value size) for each pair, masked or not.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenwright.backends import Scored
from tokenwright.backends.torch.kernels import Kernels, Linear, Values
from tokenwright.cache import ChunkRows, KVView, StateView
from tokenwright.models.recurrent import Recurrence


@dataclass(slots=True)
class WorkCounts:
    flop: int = 0  # of matrix products, over all rows
    weight_bytes: int = 0
    attention_flop: Counter[int] = field(default_factory=Counter)  # by chunk
    kv_read: Counter[int] = field(default_factory=Counter)
    kv_written: Counter[int] = field(default_factory=Counter)


class CountedKernels:
    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self.counts = WorkCounts()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernels, name)

    def linear(self, x: Values, weight: Linear) -> Values:
        if len(x):
            self.counts.flop += 2 * weight.numel * len(x)
            self.counts.weight_bytes += weight.nbytes
        return self.kernels.linear(x, weight)

    def attention(
        self, q: Values, view: KVView, chunks: Sequence[ChunkRows], scoring: Scored, sink_q: Values | None = None
    ) -> Values:
        for index, chunk in enumerate(chunks):
            read = [(part.bytes_per_token, len(chunk.slots[part.group])) for part in view.parts]
            keys = sum(count for _, count in read)
            sizes = q.shape[2] + view.spec.layout.value_size
            self.counts.attention_flop[index] += 2 * q.shape[1] * sizes * len(chunk.rows) * keys
            self.counts.kv_read[index] += sum(size * count for size, count in read)
            self.counts.kv_written[index] += view.spec.stored_bytes(range(chunk.start, chunk.stop))
        return self.kernels.attention(q, view, chunks, scoring, sink_q)

    def recur(
        self,
        projected: Values,
        of: Recurrence,
        tensors: Mapping[str, Values],
        view: StateView,
        chunks: Sequence[ChunkRows],
    ) -> Values:
        for index, chunk in enumerate(chunks):
            self.counts.kv_read[index] += 4 * len(of.moved) if chunk.start else 0
            self.counts.kv_written[index] += 4 * len(of.moved)
        return self.kernels.recur(projected, of, tensors, view, chunks)
