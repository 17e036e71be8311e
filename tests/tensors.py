"""What the tests that compare with torch use: packed weights and native kernels that take tensors and give tensors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from types import ModuleType
from typing import Any, TypeVar, cast

import numpy as np
import torch

from tokenwright.arrays import Array
from tokenwright.backends import Logits, Scored, layout
from tokenwright.backends.layout import Weights
from tokenwright.backends.native.native_kernels import NativeKernels
from tokenwright.backends.packed import Packed
from tokenwright.backends.runner import Cache, Model
from tokenwright.backends.torch import kv_codec
from tokenwright.backends.torch.backend import TorchBackend
from tokenwright.backends.torch.border import TORCH_DTYPES, TensorRotation, array, tensor
from tokenwright.backends.torch.decoder import Decoder
from tokenwright.backends.torch.op_batch import OpBatcher
from tokenwright.cache import ChunkRows, KVStore, KVView, StateView
from tokenwright.cache.codec import Codec
from tokenwright.checkpoints.folder import Checkpoint
from tokenwright.decode import RowSampler
from tokenwright.decode.sampler import Observe, unobserved
from tokenwright.engine import Batch, Output, Result, Step
from tokenwright.models.experts import Routing
from tokenwright.models.graph import Graph
from tokenwright.models.recurrent import Recurrence
from tokenwright.models.rotary import RotaryTable, Rotation
from tokenwright.models.taps import Tap

CPU = torch.device("cpu")


class TensorPacked(Packed):
    """A packed weight of which rows go in and come out as tensors; `codes` and `scales` are arrays."""

    def pack_rows(self, first: int, rows: Any) -> int:
        return super().pack_rows(first, array(rows))

    def put_codes(self, first: int, codes: Any, scales: Any) -> int:
        return super().put_codes(first, array(codes), array(scales))

    def rows(self, ids: Any) -> Any:
        return tensor(super().rows(array(ids)))

    def blocks(self, first: int, last: int) -> Any:
        return tensor(super().blocks(first, last))


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


class NativeOverTensors(TensorKernels):
    """`TensorKernels` with the rest of what native kernels can do, over tensors."""

    def __init__(self, native: NativeKernels) -> None:
        super().__init__(native)
        self.isa, self.library, self.handle = native.isa, native.library, native.handle
        self.compute, self.multiply = native.compute, native.multiply

    def summarise(self, logits: Any) -> tuple[tuple[int, ...], tuple[float, ...]]:
        return self.native.summarise(np.ascontiguousarray(array(logits)))

    def pack(self, packed: Packed, first: int, rows: Any, threads: int = 1) -> int:
        return self.native.pack(packed, first, array(rows), threads)

    def read(self, buffer: Any, ahead: int = 0) -> int:
        return self.native.read(array(buffer), ahead)


def op_by_op(backend: Any, batch: Batch, tap: Tap) -> Logits:
    """A batch computed by a backend's kernels, called one by one, under a tap."""
    if isinstance(backend, TorchBackend):
        return backend._head(backend.decoder, batch, backend._blocks(backend.decoder, batch, tap))
    decoder = backend.decoder.over_arrays
    x = decoder.forward(OpBatcher(decoder.graph, backend.store)(batch), backend.store, tap)  # [T, width]
    rows = decoder.logits(x[batch.logits_rows.tolist()])
    hidden = decoder.hidden(x[batch.hidden_rows.tolist()]) if batch.hidden_rows else None
    best, totals = backend.decoder.kernels.summarise(rows)
    return Logits(rows, best, totals, hidden)


def tensor_decoder(decoder: Any) -> Decoder:
    """The model of a decoder, run op by op over tensors with the same kernels."""
    if isinstance(decoder, Decoder):
        return decoder
    weights, adapters = decoder._parts
    return Decoder(decoder.graph, TensorKernels(decoder.kernels), {**weights}, adapters)


def encode(codec: Codec, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return kv_codec.encode(codec.name, x)


def decode(codec: Codec, parts: tuple[torch.Tensor, ...], count: int, dtype: torch.dtype) -> torch.Tensor:
    return kv_codec.decode(codec.name, parts, count, dtype)


def address(of: torch.Tensor | None) -> int | None:
    """The address of a tensor's first number."""
    return None if of is None or not of.numel() else of.data_ptr()


def tensors_of(checkpoint: Checkpoint, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint as tensors."""
    name = None if dtype is None else next(name for name, one in TORCH_DTYPES.items() if one is dtype)
    return {ours: tensor(one) for ours, one in checkpoint.tensors(name).items()}


def kv_memory(store: KVStore, group: int) -> list[torch.Tensor]:
    """The memory of a group of a store, as tensors over it."""
    return [tensor(one) for one in store.arrays(group)]


Function = TypeVar("Function", bound=Callable[..., Any])


def over_tensors(function: Function) -> Function:
    """A function over arrays as one over tensors: its arguments, and its result, alone or in a tuple."""

    @wraps(function)
    def called(*arguments: Any, **named: Any) -> Any:
        tensors: dict[int, torch.Tensor] = {}  # by id() of the array made of it, which is alive meanwhile

        def given(one: Any) -> Any:
            if not isinstance(one, torch.Tensor):
                return one
            made = array(one)
            tensors[id(made)] = one
            return made

        arrays, more = [given(one) for one in arguments], {name: given(one) for name, one in named.items()}
        found = function(*arrays, **more)
        return tensors[id(found)] if id(found) in tensors else _made(found)

    return cast("Function", called)


def _made(found: Any) -> Any:
    if isinstance(found, np.ndarray):
        return tensor(found) if found.flags.writeable else tensor(found.copy())
    return tuple(map(_made, found)) if type(found) is tuple else found


class TensorSampler(RowSampler):
    """The engine's sampler over logits in tensors."""

    def pick(self, output: Output[Any], step: Step, observe: Observe = unobserved) -> list[Result]:
        given = replace(output, logits=array(output.logits))
        if observe is unobserved:
            return super().pick(given, step)
        return super().pick(given, step, lambda chunk, *both: observe(chunk, *map(_made, both)))


class TensorModel(Model):
    """The decoder as a function, with its logits as tensors."""

    def __call__(self, tokens: Any, cache: Cache | None = None) -> tuple[Any, Cache]:
        logits, cache = super().__call__(tokens, cache)
        return tensor(logits), cache


class Processors:
    """A module of functions over arrays, as functions over tensors."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        return over_tensors(found) if callable(found) else found


class TensorTable(RotaryTable):
    """Cosines and sines of positions, as tensors."""

    def rows(self, positions: Any, limit: int) -> Any:
        return TensorRotation.of(super().rows(array(positions), limit), CPU)


def unpacked(graph: Graph, weights: Weights) -> dict[str, torch.Tensor]:
    """The weights decoded to fp32, as tensors."""
    return {name: tensor(one) for name, one in layout.unpacked(graph, weights).items()}
