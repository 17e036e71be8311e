"""A loaded model has a decoder, a tokenizer and a chat template. Engines with their own caches can share it."""

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tokenwright.backends.adapters import Beside, Updates, beside, not_beside, packed
from tokenwright.backends.device import CPU, Device, free_memory, needs_torch, resolve_device, resolve_dtype
from tokenwright.backends.kv_sizing import MOST_KV_MEMORY, refuse_weights
from tokenwright.backends.layout import Formats, Weights, expert_bytes, nbytes, weight_bytes
from tokenwright.backends.native.compile import compiles, lacking
from tokenwright.backends.native.expert_pool import ExpertPool
from tokenwright.backends.native.native_kernels import NativeKernels, find_kernels
from tokenwright.backends.native.program import NativeDecoder
from tokenwright.backends.native.ranks import SplitDecoder
from tokenwright.backends.runner import dense_decoder, dense_tower, gpu_decoder, torch_decoder
from tokenwright.checkpoints.files.generation_config import GenerationDefaults
from tokenwright.checkpoints.files.pooling import PoolingConfig
from tokenwright.checkpoints.folder import Checkpoint, Report
from tokenwright.checkpoints.lora import Adapter
from tokenwright.checkpoints.packing.packer import load_packed, load_paged, pack_checkpoint
from tokenwright.checkpoints.packing.shared_weights import is_shared, load_shared
from tokenwright.checkpoints.packing.weight_cache import WeightCache
from tokenwright.checks import check_bool, shown
from tokenwright.config import ModelConfig
from tokenwright.engine.driver import Driver, EngineThread
from tokenwright.engine.loop import FORKED
from tokenwright.errors import CheckpointError, EngineError, RequestError
from tokenwright.formats import DTYPE_BYTES, DType, WeightFormat
from tokenwright.llm.ranks.tensor_parallel import check_degree, rank_kernels, split_decoder
from tokenwright.llm.vocabulary import Vocabulary
from tokenwright.models.combined import mixtures
from tokenwright.models.graph import Graph
from tokenwright.text import ChatTemplate, Tokenizer
from tokenwright.units import Size, binary, read_bytes

if TYPE_CHECKING:
    from tokenwright.backends.torch.decoder import Decoder
    from tokenwright.backends.towers.tower_runner import TowerRunner
    from tokenwright.checkpoints.towers.open_vision import Vision


log = logging.getLogger(__name__)
ALONE = "expert_memory is for mixtures of experts, computed on the CPU by one process and native kernels; leave it out"
SPARE = 16  # one part in SPARE of the free memory is left for other uses
Check = Callable[[Graph, DType], object]


class _Owner:
    """The process that loaded the first model. A fork may have inherited locked locks, such as torch's."""

    pid: int | None = None

    @classmethod
    def check(cls) -> None:
        """Raises EngineError in a fork of that process."""
        cls.pid = cls.pid or os.getpid()
        if cls.pid != os.getpid():
            raise EngineError(FORKED)


@dataclass(frozen=True)
class ModelFacts:
    """The facts of a loaded model. `name` is as given; `kernels` the native instruction set, or "reference"."""

    name: str
    config: ModelConfig
    graph: Graph
    generation: GenerationDefaults
    pooling: PoolingConfig
    tokenizer: Tokenizer
    device: Device
    dtype: DType
    weights: WeightFormat
    kernels: str


class PreparedModel:
    """A model without its weights, to prepare requests: files, facts, tokenizer and chat template.

    Options and errors as for `LLM`; EngineError in a process forked after a model was loaded. adapters: by name.
    """

    traced = False  # engines over it record no runs
    team: Any = None  # the other processes that compute it

    def __init__(
        self,
        model: str | Path = "stories",
        *,
        revision: str | None = None,
        device: str = "auto",
        dtype: str = "auto",
        weights: str | WeightFormat = "native",
        lora: Sequence[str | Path] = (),
        adapters: Mapping[str, str | Path] = MappingProxyType({}),
        mmproj: str | Path | None = None,
        check: Check | None = None,
        progress: bool = False,
    ) -> None:
        _Owner.check()
        _check_adapters(adapters)
        self._mmproj = None if mmproj is None else Path(mmproj)
        place = resolve_device(device)
        self.checkpoint = Checkpoint.open(model, revision, progress=progress).merged(lora)
        self.adapters = {name: _beside(self.checkpoint, name, folder) for name, folder in adapters.items()}
        config = self.checkpoint.config
        native = find_kernels() if place.type == "cpu" else None
        kind: DType = resolve_dtype(dtype, config.dtype, place, native is not None)
        if check is not None:
            check(self.checkpoint.graph, kind)
        form = WeightFormat.parse(str(weights))
        self.form = form if place.type in ("cpu", "gpu") else form.resolved(kind)  # torch cannot read GGUF's blocks
        self.facts = ModelFacts(
            name=str(model),
            config=config,
            graph=self.checkpoint.graph,
            generation=self.checkpoint.generation,
            pooling=self.checkpoint.pooling,
            tokenizer=self.checkpoint.tokenizer(),
            device=place,
            dtype=kind,
            weights=self.checkpoint.main_format(self.form, kind),
            kernels="wgsl" if place.type == "gpu" else "reference" if native is None else native.isa,
        )
        for row in self.checkpoint.held(self.form, kind):
            log.log(logging.WARNING if row.converted else logging.INFO, "%s: %s", self.facts.name, row)
        self.template = None if self.facts.tokenizer.chat_template is None else ChatTemplate(self.facts.tokenizer)
        if self.template is not None:
            self.template.start()  # parallel to reading the weights; the first request needs its end tokens
        self.vocabulary = Vocabulary(self.facts.tokenizer, config.vocab_size)
        self._users = 0
        self._lock = threading.Lock()
        if mmproj is not None:
            _ = self.vision  # raises its errors

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        ends = () if self.template is None else self.template.end_ids
        return frozenset((*self.facts.generation.eos_ids, *self.facts.tokenizer.eos_ids, *ends))

    def number(self, adapter: object) -> int:
        """The number of an adapter, by its name; 0 for None. Raises RequestError for an unknown name."""
        if adapter is None:
            return 0
        if not isinstance(adapter, str) or adapter not in self.adapters:
            there = f"it has {', '.join(self.adapters)}" if self.adapters else "it was opened without adapters"
            raise RequestError(f"the model has no adapter {shown(adapter)}; {there}")
        return list(self.adapters).index(adapter) + 1

    @cached_property
    def vision(self) -> "Vision":
        """The model's tower and its processor. Raises CheckpointError for a model that takes no pictures."""
        from tokenwright.checkpoints.towers.open_vision import read_vision  # here: texts need none of it

        if self.facts.device.type == "gpu" or self.team is not None:
            raise CheckpointError("pictures are computed by one process, on cpu, cuda or mps; change device or ranks")
        return read_vision(self.checkpoint, self.facts.tokenizer, self._mmproj)

    def enter(self) -> None:
        with self._lock:
            self._users += 1

    def leave(self) -> None:
        """Unregister an engine; the last one ends the helper processes (chat template, grammar workers)."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
        if self.template is not None:
            self.template.close()
        self.vocabulary.close()
        self._free()

    def _free(self) -> None:
        """Free memory and processes: the last engine has left."""


class LoadedModel(PreparedModel):
    """A model in memory, with its weights. It does not change while engines use it.

    shared: the descriptor of a file in memory from which processes read packed weights (shared_weights.py). `check` is
    called with graph and dtype before the weights are read, to raise for unsupported options; `driven` makes the driver
    of engines.
    """

    def __init__(
        self,
        model: str | Path = "stories",
        *,
        report: Callable[[int, int], None] | None = None,
        trace: bool = False,
        shared: int | None = None,
        tensor_parallel: int = 1,
        driven: Callable[[Callable[[], bool]], Driver] = EngineThread,
        expert_memory: Size | None = None,
        gpu_layers: Size | None = None,
        **preparing: Any,
    ) -> None:
        check_degree(tensor_parallel)
        pool = None if expert_memory is None else read_bytes(expert_memory, "expert_memory")
        check_bool("trace", trace)
        if trace and tensor_parallel > 1:
            raise RequestError(
                "trace needs a model that one process computes; leave it or tensor_parallel out", "trace"
            )
        super().__init__(model, progress=report is not None, **preparing)
        if self.facts.device.type == "gpu" and (trace or tensor_parallel > 1 or self.adapters):
            raise RequestError(
                "a model on a GPU has no trace (the explorer's), tensor_parallel or adapters; use device cpu", "device"
            )
        if gpu_layers is not None and self.facts.device.type != "gpu":
            raise RequestError("gpu_layers is for device gpu; give that too, or leave it out", "gpu_layers", "device")
        self.traced, self.driven = trace, driven
        self.copies = self.checkpoint.kept(self.form)  # matrices whose blocks are copied from a GGUF file
        numbered = {self.number(name): adapter.updates for name, adapter in self.adapters.items()}
        form = self.checkpoint, self.form, self.facts.dtype, self.facts.device
        self.decoder = make_decoder(*form, report, numbered, shared, tensor_parallel, pool, gpu_layers)
        self._towers: list[TowerRunner] = []  # the tower once it is open, shared with copies
        self._opening = threading.Lock()
        self.team = self.decoder.team if isinstance(self.decoder, SplitDecoder) else None  # the other processes

    def tower(self) -> "TowerRunner":
        """The tower. The first call reads its weights."""
        with self._opening:
            if not self._towers:
                self._towers.append(self._open_tower())
            return self._towers[0]

    def _open_tower(self) -> "TowerRunner":
        """Read the tower. Raises CheckpointError for damaged tensors, CapacityError if memory does not suffice."""
        from tokenwright.backends.towers.tower_runner import TowerRunner  # here: texts need none of it

        vision, dtype, device = self.vision, self.facts.dtype, self.facts.device
        tower, colours = vision.sight.tower, (vision.processor.mean, vision.processor.deviation)
        refuse_weights(tower.parameters * DTYPE_BYTES[dtype], device, dtype)
        if device.type == "cpu" and (native := find_kernels()) is not None:
            weights: dict[str, Any] = {**pack_checkpoint(vision.checkpoint, WeightFormat(dtype))}
            return TowerRunner(tower, native, weights, *colours)
        return dense_tower(tower, vision.checkpoint.tensors(dtype), colours, device)

    def again(self, *, trace: bool = False) -> "LoadedModel":
        """The same model with shared weights but counts of its own. It must not outlive this one."""
        other = copy(self)
        other.traced = trace
        other.decoder = self.decoder.again()
        return other

    def _free(self) -> None:
        if self.team is not None:
            self.team.stop()


def _check_adapters(adapters: object) -> None:
    items = adapters.items() if isinstance(adapters, Mapping) else [(None, None)]
    if not all(isinstance(name, str) and isinstance(folder, str | Path) for name, folder in items):
        raise RequestError(
            f'adapters must map names to folders, such as {{"french": "folder"}}, not {shown(adapters)}', "adapters"
        )


def _beside(checkpoint: Checkpoint, name: str, folder: str | Path) -> Adapter:
    adapter = checkpoint.adapter(folder)
    if unable := not_beside(checkpoint.graph, adapter.updates):
        raise CheckpointError(
            f"the adapter {name} in {folder} updates {unable[0]}, which only a merge can (lora): beside the weights an "
            "adapter updates attention and MLPs, not experts or the head",
            "lora",
        )
    return adapter


def make_decoder(
    checkpoint: Checkpoint,
    form: WeightFormat,
    dtype: DType,
    device: Device,
    report: Report | None = None,
    adapters: Mapping[int, Updates] = MappingProxyType({}),
    shared: int | None = None,
    ranks: int = 1,
    expert_memory: int | None = None,
    gpu_layers: Size | None = None,
) -> "NativeDecoder | Decoder":
    """The decoder of a checkpoint, with weights in `form`; with reference kernels if there are no native ones.

    Raises CheckpointError for an op that no backend has, CapacityError if the memory does not suffice, RequestError for
    a format without kernels on the device.
    """
    if missing := lacking(checkpoint.graph):
        raise CheckpointError(
            f"{checkpoint.graph.architecture} needs {', '.join(missing)}, which this Tokenwright does not have; "
            "use a newer one"
        )
    graph, native = checkpoint.graph, find_kernels() if device.type == "cpu" else None
    kept = (checkpoint.packed or form).resolved(dtype)
    copies = checkpoint.kept(form)
    pages = native is not None and ranks == 1 and shared is None and compiles(graph) and bool(mixtures(graph))
    if expert_memory is not None and not pages:
        raise RequestError(ALONE, "expert_memory")

    def load() -> Weights:
        return load_packed(checkpoint, form, dtype, report, WeightCache.default() if kept.quantised else None)

    if device.type == "gpu":
        refuse_weights(weight_bytes(graph, kept, copies), device, str(kept))
        return gpu_decoder(graph, device, load, dtype, gpu_layers)  # type: ignore[no-any-return]
    if native is None or not compiles(graph):
        needs_torch("this installation has no native kernels, and without them a model" if native is None else "it")
    if pages and (memory := expert_memory or found_memory(graph, kept, copies)):
        assert native is not None, "else there are no pages"
        return paged_decoder(checkpoint, form, dtype, native, beside(graph, adapters, packed), memory, report)
    if native is None and not kept.quantised and not copies:
        refuse_weights(graph.parameters * DTYPE_BYTES[dtype], device, dtype)
        return dense_decoder(graph, checkpoint.tensors(dtype, report), dtype, device, adapters)
    if device.type != "cpu":
        other = "" if checkpoint.packed else ", or native weights"
        raise RequestError(f"{kept} weights are computed on the CPU alone; use device cpu{other}", "device")
    if shared is None or not is_shared(shared):
        refuse_weights(weight_bytes(graph, kept, copies), device, str(kept))

    if ranks > 1:
        return split_decoder(graph, rank_kernels(graph, native, adapters), load, ranks)
    weights = load() if shared is None else load_shared(shared, load)
    kept_beside = beside(graph, adapters, packed)
    if native is not None and compiles(graph):
        return NativeDecoder(graph, native, weights, kept_beside)
    return torch_decoder(graph, weights, kept_beside)


def found_memory(graph: Graph, form: WeightFormat, kept: Formats) -> int:
    """Bytes for experts if the weights do not fit: the free memory without other weights and a KV cache; else 0."""
    free, total = free_memory(CPU), weight_bytes(graph, form, kept)
    if free is None or total <= free:
        return 0
    left = free - free // SPARE - min(free // 8, MOST_KV_MEMORY) - (total - expert_bytes(graph, form, kept))
    if left > 0:
        log.warning(
            "the model needs %s, and %s are free: its experts stay in a file, and %s hold some of them (expert_memory)",
            *map(binary, (total, free, left)),
        )
    return max(0, left)


def paged_decoder(
    checkpoint: Checkpoint,
    form: WeightFormat,
    dtype: DType,
    native: NativeKernels,
    adapters: Beside,
    memory: int,
    report: Report | None,
) -> NativeDecoder:
    """A decoder that reads experts from a file. Raises CapacityError or RequestError for too large or small a pool."""
    graph, kept = checkpoint.graph, checkpoint.kept(form)
    own = (checkpoint.packed or form).resolved(dtype)
    experts = expert_bytes(graph, own, kept)
    refuse_weights(weight_bytes(graph, own, kept) - experts + min(memory, experts), CPU, str(own))
    weights = load_paged(checkpoint, form, dtype, WeightCache.default(), report)
    pool = ExpertPool(native.library, graph, weights, memory)
    log.info("%s of weights in memory, %d of %d experts", binary(nbytes(weights)), pool.slots, pool.total)
    return NativeDecoder(graph, native, weights, adapters, pool=pool)
