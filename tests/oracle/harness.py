"""What the oracle tests share: a small random model as ours and as transformers', and the engine around it.

    subject = make_subject("qwen2")                       # our decoder and the oracle, of the same files
    sampler = Recorder()                                  # greedy; it keeps the rows of logits it was given
    engine = subject.engine(sampler, page_size=16, token_budget=7)
    [text] = write(engine, [greedy(prompt, max_tokens=65)])
    ours = sampler.rows[text.id]                          # position -> its row of logits
    theirs = subject.logits(prompt + text, limit=...)     # the oracle, all positions in one causal pass

The KV memory is filled with NaN before each engine is used: whoever reads a slot that was never written fails.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.engine.invariants import check_invariants
from tests.models.fixtures import VOCAB, make_checkpoint
from tests.poison import poison
from tests.tensors import NativeOverTensors, TensorModel, tensors_of
from tokenwright.backends.device import CPU, Device
from tokenwright.backends.kv_sizing import memory_of
from tokenwright.backends.layout import Weights
from tokenwright.backends.native.native_kernels import NativeKernels
from tokenwright.backends.native.program import NativeDecoder
from tokenwright.backends.runner import Model, ModelRunner
from tokenwright.backends.torch.border import tensor
from tokenwright.backends.torch.decoder import Decoder
from tokenwright.backends.torch.kernels import Kernels
from tokenwright.backends.torch.reference_kernels import ReferenceKernels
from tokenwright.cache import KVStore, LayerSpec, groups_for, layer_specs
from tokenwright.checkpoints.folder import Checkpoint
from tokenwright.checkpoints.packing.packer import load_packed
from tokenwright.config import DynamicScaling, ModelConfig, angle_length
from tokenwright.decode import RowSampler
from tokenwright.engine import (
    Engine,
    Failed,
    Output,
    PagePool,
    Pick,
    Request,
    Result,
    Runner,
    SamplingParams,
    Scheduler,
    Step,
)
from tokenwright.engine import Sequence as Text
from tokenwright.formats import DType, KVFormat, WeightFormat
from tokenwright.models.graph import Graph

DEVICE = Device.named(os.environ.get("TESTS_DEVICE", "cpu"))  # of the torch backend; native kernels are the CPU's
TOLERANCE = 1e-4  # of logits in fp32, ours against the oracle's
MARGIN = 1e-3  # between the oracle's two highest logits, above which greedy must agree


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    """Random ids, no special ones among them."""
    random = torch.Generator().manual_seed(1000 * seed + length)
    return tuple(torch.randint(5, VOCAB, (length,), generator=random).tolist())


class Recorder:
    """A sampler that keeps the rows of logits it was given, by sequence and position.

    `forced` maps a sequence to its whole text, whose tokens are then written instead of those chosen.
    """

    def __init__(self, forced: Mapping[int, Sequence[int]] | None = None) -> None:
        self.sampler = RowSampler()
        self.forced = forced or {}
        self.rows: dict[int, dict[int, torch.Tensor]] = {}

    def pick(self, output: Output[Any], step: Step) -> list[Result]:
        stops: dict[int, int] = {}
        for chunk, rows in zip(step.chunks, output.rows, strict=True):
            stops[chunk.sequence.id] = chunk.stop
            kept = self.rows.setdefault(chunk.sequence.id, {})
            for place, row in zip(range(chunk.stop - len(rows), chunk.stop), rows, strict=True):
                kept[place] = tensor(output.logits[row]).clone()
        results = self.sampler.pick(output, step)
        return [
            replace(one, tokens=(self.forced[one.sequence][stops[one.sequence]],))
            if isinstance(one, Pick) and one.sequence in self.forced
            else one
            for one in results
        ]


def device_of(kernels: Kernels | NativeKernels | None) -> Device:
    """Where a model with these kernels computes."""
    return CPU if isinstance(kernels, NativeKernels | NativeOverTensors) else DEVICE


@dataclass
class Subject:
    """One kind of model: our weights and the oracle, which is transformers' with the same ones, in fp32."""

    kind: str
    config: ModelConfig
    graph: Graph
    weights: Mapping[str, torch.Tensor]
    dtype: DType
    oracle: PreTrainedModel
    packed: Weights | None = None  # the same weights for native kernels
    _last: tuple[object, torch.Tensor] | None = field(default=None, repr=False)

    def decoder(self, kernels: Any = None) -> Decoder:
        """On the reference kernels, or on given ones; with native kernels a step is one call."""
        if isinstance(kernels, NativeOverTensors):
            kernels = kernels.native
        if isinstance(kernels, NativeKernels):
            assert self.packed is not None, "make_subject packs weights"
            return NativeDecoder(self.graph, kernels, dict(self.packed))
        return Decoder(
            self.graph, kernels or ReferenceKernels(), {name: one.to(str(DEVICE)) for name, one in self.weights.items()}
        )

    def specs(self, kv: str = "native", window: int | None = None, sinks: int = 0) -> tuple[LayerSpec, ...]:
        return layer_specs(self.graph, self.dtype, KVFormat.parse(kv), window, sinks)

    def model(self, specs: Sequence[LayerSpec] | None = None, kernels: Any = None) -> Model:
        return TensorModel(self.decoder(kernels), specs or self.specs(), device_of(kernels))

    def engine(
        self,
        sampler: Recorder | RowSampler,
        *,
        page_size: int = 16,
        pages: int | None = None,
        token_budget: int = 512,
        max_sequences: int = 64,
        specs: Sequence[LayerSpec] | None = None,
        kernels: Any = None,
        around: Callable[[ModelRunner], Runner[Any]] = lambda runner: runner,
    ) -> Engine:
        """An engine over a fresh pool, by default of one full context. `around` may wrap its runner."""
        pages = pages or -(-self.config.context // page_size)
        specs = specs or self.specs()
        groups = groups_for(specs, page_size, pages, token_budget, max_sequences)
        store = KVStore(specs, [group.pages for group in groups], page_size, memory_of(device_of(kernels)))
        poison(store)
        runner = ModelRunner(self.decoder(kernels), store)
        scheduler = Scheduler(PagePool(groups, page_size, store), token_budget, max_sequences)
        return Engine(around(runner), sampler, scheduler, self.config.context)

    @contextmanager
    def pinned(self, limit: int) -> Iterator[PreTrainedModel]:
        """The oracle with the frequencies that a text of up to `limit` tokens has under dynamic scaling.

        transformers lets them follow the length as it grows, so that its cached keys were turned by other angles
        than its queries; we fix them at admission. They are still transformers' own, from its own function.
        """
        rope = self.config.positions
        if angle_length(rope, limit) is not None:
            part = self.oracle.model.rotary_emb
            part.rope_type = "default"  # leave inv_freq as it is
            kind = "dynamic" if isinstance(rope.scaling, DynamicScaling) else "longrope"
            part.inv_freq, scale = ROPE_INIT_FUNCTIONS[kind](self.oracle.config, seq_len=limit)
            assert scale == part.attention_scaling == getattr(rope.scaling, "attention_factor", 1.0)
        yield self.oracle

    def logits(self, tokens: Sequence[int], limit: int) -> torch.Tensor:
        """The oracle's logits [t, V] at every position, from one causal pass over all tokens."""
        key = (tuple(tokens), limit)
        if self._last is None or self._last[0] != key:
            with torch.no_grad(), self.pinned(limit) as oracle:
                self._last = key, oracle(torch.tensor([list(tokens)]), use_cache=False).logits[0].float()
        return self._last[1]


@cache
def make_subject(kind: str, dtype: DType = "float32") -> Subject:
    """The kind's model from its files, our weights in `dtype`; the oracle holds the same values in fp32."""
    with tempfile.TemporaryDirectory() as folder:
        path, oracle = make_checkpoint(Path(folder) / "model", kind, dtype=dtype)
        return subject_of(path, oracle, kind, dtype)


def subject_of(path: Path, oracle: PreTrainedModel, kind: str, dtype: DType = "float32") -> Subject:
    """The model in a folder, read whole, and the oracle of the same weights."""
    checkpoint = Checkpoint.open(path)
    weights = tensors_of(checkpoint, getattr(torch, dtype))
    packed = load_packed(checkpoint, WeightFormat(dtype), dtype)
    return Subject(kind, checkpoint.config, checkpoint.graph, weights, dtype, oracle, packed)


def greedy(prompt: Sequence[int], max_tokens: int, *, cache: bool = True, prompt_logprobs: bool = False) -> Request:
    """A greedy request. Texts that may come to other lengths share no pages: dynamic scaling turns their keys apart."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    salt = str(len(prompt) + max_tokens).encode()
    return Request(tuple(prompt), params, cache=cache, prompt_logprobs_from=1 if prompt_logprobs else None, salt=salt)


def write(engine: Engine, requests: Sequence[Request]) -> list[Text]:
    """Run the requests to their ends. A request that fails fails the test."""
    texts = [engine.submit(request) for request in requests]
    while engine.busy:
        for event in engine.step():
            if isinstance(event, Failed):
                raise event.error
        check_invariants(engine.scheduler)
    return texts
