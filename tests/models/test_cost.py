"""The cost model against published shapes, and against operations counted where they are called."""

from math import prod

import pytest
import torch

from tests.models.fixtures import KINDS, make_checkpoint
from tests.tensors import TensorModel, tensors_of
from tokenwright import LLM, SamplingParams
from tokenwright.backends.runner import Model
from tokenwright.backends.torch.backend import TorchBackend
from tokenwright.backends.torch.decoder import Decoder
from tokenwright.backends.torch.reference_kernels import ReferenceKernels
from tokenwright.cache import layer_specs
from tokenwright.checkpoints.families.graph_builder import decoder
from tokenwright.checkpoints.folder import Checkpoint
from tokenwright.config import Learned, ModelConfig, Rope
from tokenwright.formats import KVFormat
from tokenwright.models.cost import Cost, CostModel


def shape(family, layers, width, heads, kv_heads, mlp, vocab, *, tied, bias=False, dtype="bfloat16"):
    config = ModelConfig(
        architecture="-",
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_size=width // heads,
        mlp_width=mlp,
        vocab_size=vocab,
        context=1024,
        positions=Learned() if family == "gpt2" else Rope(),
        windows=(None,) * layers,
        rotary=(True,) * layers,
        norm="layer" if family == "gpt2" else "rms",
        norm_eps=1e-5,
        activation="gelu_tanh" if family == "gpt2" else "silu",
        gated=family == "llama",
        qkv_bias=bias,
        tied_head=tied,
    )
    graph = decoder(config)
    return CostModel(graph, layer_specs(graph, dtype))


@pytest.mark.parametrize(
    ("model", "fixed", "slope", "kv_bytes"),
    [
        (shape("gpt2", 12, 768, 12, 12, 3072, 50257, tied=True, dtype="float32"), 247_064_064, 36_864, 73_728),
        (shape("llama", 24, 896, 14, 2, 4864, 151_936, tied=True, bias=True), 987_922_432, 86_016, 12_288),
        (shape("llama", 32, 4096, 32, 8, 14_336, 128_256, tied=False), 15_009_316_864, 524_288, 131_072),
    ],
    ids=["gpt2", "qwen2.5-0.5b", "llama3-8b"],
)
def test_published_shapes(model, fixed, slope, kv_bytes):
    for context in (1, 2, 777):
        cost = model.chunk(context - 1, 1)
        assert cost == Cost(fixed + slope * context, kv_bytes * context, kv_bytes)
    assert model.bytes_per_token == kv_bytes


def row_bytes(part):
    """Bytes of K and V of one token; the values of a latent are a view of its keys."""
    sides = (part.k,) if part.v.size < part.k.size else (part.k, part.v)
    return sum(memory[0].nbytes for side in sides for memory in side.memory)


class Counting(ReferenceKernels):
    """Counts, at each call, the operations of its products and the bytes of K and V it reads and writes."""

    def __init__(self, page_size):
        super().__init__()
        self.page_size = page_size
        self.cost = Cost()

    def linear(self, x, weight):
        self.cost += Cost(2 * len(x) * prod(weight.weight.shape))
        return super().linear(x, weight)

    def store(self, view, slots, k, v):
        for part in view.parts:
            token_bytes = row_bytes(part)
            scratch = len(part.k.memory[0]) - self.page_size
            self.cost += Cost(kv_written=token_bytes * int((slots[part.group] < scratch).sum()))
        super().store(view, slots, k, v)

    def attention(self, q, view, chunks, scale, sink_q=None):
        spec = view.spec
        window, sinks = spec.window.size, spec.window.sinks
        sizes = [row_bytes(part) for part in view.parts]
        for chunk in chunks:
            seen = set()
            for position in range(chunk.start, chunk.stop):
                read = [p for p in range(position + 1) if window is None or p < sinks or p > position - window]
                seen.update(read)
                self.cost += Cost(2 * q.shape[1] * (q.shape[2] + view.parts[0].v.size) * len(read))
            self.cost += Cost(kv_read=sum(sizes[0 if position < spec.first else -1] for position in seen))
        return super().attention(q, view, chunks, scale, sink_q)

    def recur(self, projected, of, tensors, view, chunks):
        state = view.memory[0].nbytes * len(of.moved) // of.numbers
        self.cost += Cost(kv_read=state * sum(chunk.start > 0 for chunk in chunks), kv_written=state * len(chunks))
        return super().recur(projected, of, tensors, view, chunks)


STEPS = ((0, 70), (70, 1), (71, 5), (76, 1))


def counted_steps(tmp_path, kind, steps=STEPS, kv="native", window=None, sinks=0):
    """The cost of each step twice: as derived, and as counted."""
    folder, _ = make_checkpoint(tmp_path / "m", kind)
    checkpoint = Checkpoint.open(folder)
    graph = checkpoint.graph
    specs = layer_specs(graph, "float32", KVFormat.parse(kv), window, sinks)
    kernels = Counting(Model.PAGE_SIZE)
    model = TensorModel(Decoder(graph, kernels, tensors_of(checkpoint, torch.float32)), specs)
    costs = CostModel(graph, specs)
    cache = None
    for start, length in steps:
        kernels.cost = Cost()
        _, cache = model([7] * length, cache)
        yield costs.chunk(start, length, rows=length), kernels.cost


@pytest.mark.parametrize("kind", KINDS)
def test_derived_is_counted(kind, tmp_path):
    for derived, counted in counted_steps(tmp_path, kind):
        assert derived == counted


@pytest.mark.parametrize("kind", ["llama2", "qwen2-window", "smollm3"])
@pytest.mark.parametrize(
    ("kv", "window", "sinks"),
    [
        ("native", 9, 0),
        ("native", 9, 4),
        ("native", 1, 1),
        ("native", 500, 3),
        ("k=int8,v=int4,native=1", None, 0),
        ("fp8,first=7", None, 0),
        ("int4,first=7,native=0", 20, 3),
        ("int8,first=3", 20, 7),
        ("int8,first=72", 5, 2),
        ("int8,first=1000", None, 0),
    ],
)
def test_derived_is_counted_for_every_way_to_keep(kind, kv, window, sinks, tmp_path):
    steps = ((0, 2), (2, 1), (3, 9), (12, 58), *STEPS[1:])
    for derived, counted in counted_steps(tmp_path, kind, steps, kv, window, sinks):
        assert derived == counted


def test_nothing_is_done_for_no_tokens():
    model = shape("llama", 2, 64, 4, 2, 96, 320, tied=True)
    assert model.chunk(5, 0, rows=0) == Cost()


def test_a_whole_run_is_the_sum_of_its_steps(tmp_path):
    folder, _ = make_checkpoint(tmp_path / "m", "mistral")
    with LLM(folder, pages=64, speculate="off") as llm:  # rows of drafts read the cache once
        kernels = Counting(llm.engine.runner.store.page_size)
        specs = layer_specs(llm.graph, "float32")
        weights = tensors_of(Checkpoint.open(folder), torch.float32)
        decoder, runner = Decoder(llm.graph, kernels, weights), llm.engine.runner
        runner.backend = TorchBackend(decoder, runner.store)
        costs = CostModel(llm.graph, specs)
        for cache in (True, False):
            kernels.cost = Cost()
            llm.generate([[5] * 50], SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True), cache=cache)
            assert kernels.cost == costs.run(50, 9, cache=cache)
