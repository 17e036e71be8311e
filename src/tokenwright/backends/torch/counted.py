"""Kernels that count: they add up the work of a forward pass, call by call.

Counts are those of the operations that ran. A product [n, in] x [in, out] is 2 n in out FLOP; attention over a chunk is
2 H (size of a key + size of a value) for each pair of a row and a position that some row of its chunk reads, masked
pairs included, because the wrapped kernels compute them. `CostModel` derives the necessary work; a frame has both.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tokenwright.arrays import Array
from tokenwright.backends import Scored
from tokenwright.backends.torch.kernels import Kernels, Linear, Turns, Values
from tokenwright.cache import ChunkRows, KVView, StateView
from tokenwright.models.experts import Routing
from tokenwright.models.recurrent import Recurrence


@dataclass(slots=True)
class WorkCounts:
    """The work of one forward pass."""

    flop: int = 0  # of the matrix products so far, over all rows
    weight_bytes: int = 0
    attention_flop: Counter[int] = field(default_factory=Counter)  # for each chunk of the step
    kv_read: Counter[int] = field(default_factory=Counter)  # bytes, for each chunk of the step
    kv_written: Counter[int] = field(default_factory=Counter)  # bytes, for each chunk of the step


class CountedKernels:
    """Implements `Kernels`: calls the given kernels, and adds to `counts`."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self.counts = WorkCounts()

    def own(self, weight: Array | Values) -> Values:
        return self.kernels.own(weight)

    def linear(self, x: Values, weight: Linear) -> Values:
        if len(x):
            self.counts.flop += 2 * weight.numel * len(x)
            self.counts.weight_bytes += weight.nbytes
        return self.kernels.linear(x, weight)

    def rows(self, weight: Linear, ids: Values) -> Values:
        return self.kernels.rows(weight, ids)

    def rms_norm(self, x: Values, weight: Values, eps: float) -> Values:
        return self.kernels.rms_norm(x, weight, eps)

    def layer_norm(self, x: Values, weight: Values, bias: Values, eps: float) -> Values:
        return self.kernels.layer_norm(x, weight, bias, eps)

    def activate(self, x: Values, activation: str) -> Values:
        return self.kernels.activate(x, activation)

    def xielu(self, x: Values, facts: Sequence[float]) -> Values:
        return self.kernels.xielu(x, facts)

    def sparse(self, x: Values, deviations: float) -> Values:
        return self.kernels.sparse(x, deviations)

    def restored(self, x: Values, like: Values) -> Values:
        return self.kernels.restored(x, like)

    def gated(self, x: Values, activation: str) -> Values:
        return self.kernels.gated(x, activation)

    def route(self, logits: Values, routing: Routing, correction: Values | None = None) -> tuple[Values, Values]:
        return self.kernels.route(logits, routing, correction)

    def soft_cap(self, x: Values, cap: float) -> Values:
        return self.kernels.soft_cap(x, cap)

    def rotate(self, x: Values, rotation: Turns) -> Values:
        return self.kernels.rotate(x, rotation)

    def store(self, view: KVView, slots: Sequence[Values], k: Values, v: Values) -> None:
        self.kernels.store(view, slots, k, v)

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

    def weighted(self, x: Values, gates: Values) -> Values:
        return self.kernels.weighted(x, gates)

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
