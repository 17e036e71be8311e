"""Runs a decoder as the engine's Runner over pages, or as a plain function with its own cache."""

import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenwright.arrays import Array, Floats
from tokenwright.backends import Backend, Logits
from tokenwright.backends.adapters import Beside, Updates, beside
from tokenwright.backends.array_passes import ArrayPasses
from tokenwright.backends.device import CPU, Device
from tokenwright.backends.kv_sizing import memory_of
from tokenwright.backends.layout import Weights
from tokenwright.backends.native.program import NativeBackend, NativeDecoder
from tokenwright.backends.native.ranks import SplitBackend, SplitDecoder, SplitStore
from tokenwright.backends.observation import Observed, Watched
from tokenwright.backends.towers.picture_memory import PictureMemory
from tokenwright.cache import KVStore, LayerSpec, StoreMemory
from tokenwright.config import DynamicScaling, Rope, angle_length
from tokenwright.engine import Batch, Output, Step, flatten, one_chunk
from tokenwright.engine.layer_group import PageTable
from tokenwright.errors import ContextError, RequestError
from tokenwright.formats import DType
from tokenwright.models.graph import Graph
from tokenwright.models.tower import Tower
from tokenwright.units import Size

if TYPE_CHECKING:
    from tokenwright.backends.torch.decoder import Decoder
    from tokenwright.backends.towers.tower_runner import TowerRunner


def torch_decoder(graph: Graph, weights: Weights, adapters: Beside) -> "Decoder":
    from tokenwright.backends.torch.decoder import Decoder
    from tokenwright.backends.torch.reference_kernels import ReferenceKernels

    return Decoder(graph, ReferenceKernels(), {**weights}, adapters)


def dense_decoder(
    graph: Graph, weights: dict[str, Array], dtype: DType, device: Device, adapters: Mapping[int, Updates]
) -> "Decoder":
    """A graph over weights on a torch device. Empties `weights`. Needs torch."""
    from tokenwright.backends.torch.border import TORCH_DTYPES, weights_on
    from tokenwright.backends.torch.decoder import Decoder
    from tokenwright.backends.torch.reference_kernels import ReferenceKernels, dense

    kept_beside = beside(graph, adapters, dense(TORCH_DTYPES[dtype], str(device)))
    return Decoder(graph, ReferenceKernels(), {**weights_on(device, weights)}, kept_beside)


def dense_tower(
    tower: Tower, weights: dict[str, Array], colours: tuple[Sequence[float], Sequence[float]], device: Device
) -> "TowerRunner":
    """A tower on a torch device. colours: mean and deviation. Empties `weights`. Needs torch."""
    from tokenwright.backends.torch.border import weights_on
    from tokenwright.backends.torch.reference_kernels import ReferenceKernels
    from tokenwright.backends.torch.tensor_batch import on_device
    from tokenwright.backends.towers.tower_runner import TowerRunner

    return TowerRunner(tower, ReferenceKernels(), {**weights_on(device, weights)}, *colours, on_device(device))


def gpu_decoder(graph: Graph, device: Device, load: Callable[[], Weights], dtype: DType, layers: Size | None) -> Any:
    """A graph, or its last layers, on a GPU that has proved its kernels. Needs wgpu."""
    from tokenwright.backends.wgpu.cut import layers_before
    from tokenwright.backends.wgpu.dispatches import refuse
    from tokenwright.backends.wgpu.gpu import open_gpu
    from tokenwright.backends.wgpu.gpu_backend import GpuDecoder
    from tokenwright.backends.wgpu.proof import prove

    refuse(graph)  # before minutes of loading
    gpu, weights = open_gpu(device.index), load()
    first = layers_before(graph, weights, layers)
    return GpuDecoder(graph, gpu, weights, prove(gpu, graph, weights, dtype), first)


def _on_gpu(decoder: object) -> Any:
    """The module `wgpu.gpu_backend` if it made the decoder, and so is loaded."""
    module = sys.modules.get("tokenwright.backends.wgpu.gpu_backend")
    return module if module is not None and isinstance(decoder, module.GpuDecoder) else None


def backend_over(decoder: "NativeDecoder | Decoder", store: KVStore) -> Backend:
    if isinstance(decoder, SplitDecoder):
        assert isinstance(store, SplitStore), "`store_over` makes it"
        return SplitBackend(decoder, store)
    if isinstance(decoder, NativeDecoder):
        return NativeBackend(decoder, store)
    if (gpu := _on_gpu(decoder)) is not None:
        return gpu.GpuBackend(decoder, store)  # type: ignore[no-any-return]
    from tokenwright.backends.torch.backend import TorchBackend

    return TorchBackend(decoder, store)


def store_over(
    decoder: "NativeDecoder | Decoder",
    specs: Sequence[LayerSpec],
    pages: int | Sequence[int],
    page_size: int,
    memory: StoreMemory,
) -> KVStore:
    if isinstance(decoder, SplitDecoder):
        return SplitStore(decoder.team, specs, pages, page_size)
    return KVStore(specs, pages, page_size, memory)


def passes_over(decoder: "NativeDecoder | Decoder", around: Callable[[Any], Any] | None = None) -> ArrayPasses:
    """around: wraps the decoder's kernels."""
    if _on_gpu(decoder) is not None:
        raise RequestError("a model on a GPU cannot be looked into; use device cpu", "device")
    op_by_op = decoder.over_arrays if isinstance(decoder, NativeDecoder) else decoder
    if around is not None:
        op_by_op = op_by_op.using(around(op_by_op.kernels))
    if isinstance(decoder, NativeDecoder):
        from tokenwright.backends.native.native_passes import NativePasses

        return NativePasses(op_by_op, decoder.kernels)
    from tokenwright.backends.torch.backend import OpByOp

    return OpByOp(op_by_op)


class ModelRunner:
    def __init__(
        self, decoder: "NativeDecoder | Decoder", store: KVStore, pictures: PictureMemory | None = None
    ) -> None:
        self.decoder = decoder
        self.store = store
        self.pictures = pictures
        self.backend = backend_over(decoder, store)

    def forward(self, step: Step) -> Output[Floats]:
        batch = self._batch(step)
        return _output(batch, self.backend(batch))

    def _batch(self, step: Step) -> Batch:
        batch = flatten(step)
        if batch.pictures:
            assert self.pictures is not None, "pictures are refused where there is no tower"
            self.pictures.insert(batch)
        return batch

    def forward_with_states(self, step: Step) -> tuple[Output[Floats], Floats]:
        """As `forward`; also the hidden states [T, width] of all rows, in fp32."""
        batch = self._batch(step)
        asked, batch.hidden_rows = batch.hidden_rows, array("q", range(len(batch.tokens)))
        output = _output(batch, self.backend(batch))
        states = output.hidden
        assert states is not None, "rows were asked for"
        output.hidden = states[asked] if asked else None
        return output, states

    def observe(self, step: Step, watched: Sequence[Watched]) -> tuple[Output[Floats], Observed]:
        """As `forward`; also the facts of the pass. Fills in `watched`."""
        batch = self._batch(step)
        logits, observed = self.backend.observe(batch, watched)
        return _output(batch, logits), observed


class DraftRunner(ModelRunner):
    """A draft model's runner, without adapters. Ids that only the model has are computed as 0 and never chosen."""

    def __init__(self, decoder: "NativeDecoder | Decoder", store: KVStore, vocab_size: int) -> None:
        super().__init__(decoder, store)
        self.known = decoder.graph.vocab_size
        self.vocab_size = vocab_size

    def forward(self, step: Step) -> Output[Floats]:
        batch = flatten(step)
        batch.adapters.clear()
        if self.known < self.vocab_size:
            batch.tokens = array("q", (token if token < self.known else 0 for token in batch.tokens))
        output = _output(batch, self.backend(batch))
        if self.known > self.vocab_size:
            output.logits, output.best = output.logits[:, : self.vocab_size], ()
        elif self.known < self.vocab_size:
            rows, more = output.logits, ((0, 0), (0, self.vocab_size - self.known))
            widened = getattr(rows, "widened", lambda _: np.pad(rows, more, constant_values=-np.inf))
            output.logits = widened(self.vocab_size)  # a GPU's stay there
        return output


class NextLayerRunner(ModelRunner):
    def forward_after(self, step: Step, before: Floats) -> tuple[Output[Floats], Floats]:
        """The step's logits, and their rows' hidden states in fp32. before: [T, width], of the tokens before."""
        batch = flatten(step)
        batch.adapters.clear()
        batch.before, batch.hidden_rows = np.ascontiguousarray(before, np.float32), batch.logits_rows
        output = _output(batch, self.backend(batch))
        return output, before[:0] if output.hidden is None else output.hidden


def _output(batch: Batch, logits: Logits) -> Output[Floats]:
    return Output(batch.output_rows, logits.rows, logits.best, logits.log_totals, logits.hidden, logits.faults)


class Cache:
    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.tokens: list[int] = []

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def store(self) -> KVStore:
        return self.backend.store

    @property
    def nbytes(self) -> int:
        return sum(spec.stored_bytes(range(self.length)) for spec in self.store.specs)


class Model:
    """The decoder as a function: `logits, cache = model(tokens, cache)`.

    It appends K and V of `tokens` (ids) to the cache in place, and returns logits [len(tokens), vocabulary] in fp32.
    Raises RequestError for no tokens or ids beyond the vocabulary, ContextError beyond the context.
    """

    PAGE_SIZE = 64

    def __init__(self, decoder: "NativeDecoder | Decoder", specs: Sequence[LayerSpec], device: Device = CPU) -> None:
        graph = decoder.graph
        self.decoder = decoder
        self.specs = tuple(specs)
        self.device = device
        self.vocab_size = graph.vocab_size
        self.context = graph.context
        self._positions = graph.positions
        if isinstance(graph.positions, Rope) and isinstance(graph.positions.scaling, DynamicScaling):
            # The angles depend on a maximum length, which is unknown here.
            self.context = graph.positions.scaling.original_context

    def __call__(self, tokens: Sequence[int], cache: Cache | None = None) -> tuple[Floats, Cache]:
        length = len(tokens) + (cache.length if cache else 0)
        if not len(tokens) or not all(type(token) is int and 0 <= token < self.vocab_size for token in tokens):
            raise RequestError(f"tokens must be a list of ids from 0 to {self.vocab_size - 1}, at least one")
        if length > self.context:
            raise ContextError(length, self.context)
        cache = cache or Cache(self._over(length))
        before = cache.length
        if before and angle_length(self._positions, before) != angle_length(self._positions, length):
            logits, again = self([*cache.tokens, *tokens])  # LongRoPE's angles of longer texts
            cache.backend, cache.tokens = again.backend, again.tokens
            return logits[before:], cache
        pages = -(-length // self.PAGE_SIZE)
        if pages > cache.store.pages[0]:
            grown = self._over(2 * length)
            grown.store.take(cache.store)
            cache.backend = grown
        table = PageTable({page: page for page in range(pages)})
        batch = one_chunk(tokens, cache.length, [table] * len(cache.store.groups), length)
        found = cache.backend(batch)
        for error in found.faults.values():
            raise error
        logits = np.asarray(found.rows)  # a GPU's are read on demand
        cache.tokens += tokens
        return logits, cache

    def _over(self, tokens: int) -> Backend:
        pages = -(-max(1, min(tokens, self.context)) // self.PAGE_SIZE)
        store = store_over(self.decoder, self.specs, pages, self.PAGE_SIZE, memory_of(self.device))
        return backend_over(self.decoder, store)
