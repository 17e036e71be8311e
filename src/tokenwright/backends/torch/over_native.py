"""The native kernels as `Kernels` over tensors on the CPU, so that the op-by-op decoder can call them one by one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from tokenwright.arrays import Array
from tokenwright.backends import Scored
from tokenwright.backends.native.native_kernels import NativeKernels
from tokenwright.backends.torch.border import TensorRotation, array, tensor
from tokenwright.cache import ChunkRows, KVView, StateView
from tokenwright.models.experts import Routing
from tokenwright.models.recurrent import Recurrence
from tokenwright.models.rotary import Rotation


class TensorKernels:
    """Implements `Kernels`: hands the memory of tensors to native kernels, and makes tensors of what they return."""

    def __init__(self, native: NativeKernels) -> None:
        self.native = native

    def own(self, weight: Array | torch.Tensor) -> torch.Tensor:
        return tensor(weight)

    def __getattr__(self, name: str) -> Callable[..., torch.Tensor]:
        """An operation of tensors, numbers and names that returns one array."""
        function = getattr(self.native, name)
        return lambda *arguments: tensor(function(*map(array, arguments)))

    def route(
        self, logits: torch.Tensor, routing: Routing, correction: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        biases = None if correction is None else array(correction)
        ids, weights = self.native.route(array(logits), routing, biases)
        return tensor(ids), tensor(weights)

    def rotate(self, x: torch.Tensor, rotation: TensorRotation) -> torch.Tensor:
        return tensor(self.native.rotate(array(x), Rotation(array(rotation.cos), array(rotation.sin))))

    def store(self, view: KVView, slots: Sequence[torch.Tensor], k: torch.Tensor, v: torch.Tensor) -> None:
        self.native.store(view, [array(one) for one in slots], array(k), array(v))

    def attention(
        self,
        q: torch.Tensor,
        view: KVView,
        chunks: Sequence[ChunkRows],
        scoring: Scored,
        sink_q: torch.Tensor | None = None,
    ) -> torch.Tensor:
        read = list(map(_arrays_of, chunks))
        learned = None if scoring.sink_logits is None else array(scoring.sink_logits)
        sinks = None if sink_q is None else array(sink_q)
        return tensor(self.native.attention(array(q), view, read, replace(scoring, sink_logits=learned), sinks))

    def recur(
        self,
        projected: torch.Tensor,
        of: Recurrence,
        tensors: Mapping[str, torch.Tensor],
        view: StateView,
        chunks: Sequence[ChunkRows],
    ) -> torch.Tensor:
        kept = {name: array(one) for name, one in tensors.items()}
        states = StateView(view.group, array(view.memory)) if isinstance(view.memory, torch.Tensor) else view
        return tensor(self.native.recur(array(projected), of, kept, states, list(map(_arrays_of, chunks))))


def _arrays_of(chunk: ChunkRows) -> ChunkRows:
    slots, positions = (tuple(map(array, each)) for each in (chunk.slots, chunk.positions))
    return ChunkRows(chunk.rows, chunk.start, slots, positions, None if chunk.ends is None else array(chunk.ends))
