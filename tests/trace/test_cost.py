"""The cost model against published shapes, and against operations counted where they are called."""

from math import prod

import pytest
import torch

from tests.models.fixtures import KINDS, make_checkpoint
from tokenwright import LLM, SamplingParams
from tokenwright.cache import Window, layer_specs
from tokenwright.config import Learned, ModelConfig, Rope
from tokenwright.kernels import ReferenceKernels
from tokenwright.models.checkpoint import Checkpoint
from tokenwright.models.decoder import Decoder
from tokenwright.models.runner import Model
from tokenwright.trace.cost import Cost, CostModel


def shape(family, layers, width, heads, kv_heads, mlp, vocab, *, tied, bias=False, dtype="bfloat16"):
    config = ModelConfig(
        family=family,
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
    return CostModel(config, layer_specs(config, dtype))


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


class Counting(ReferenceKernels):
    """Counts, at each call, the operations of its products and the bytes of K and V it reads and writes."""

    def __init__(self):
        self.cost = Cost()

    def linear(self, x, weight):
        self.cost += Cost(2 * len(x) * prod(weight.weight.shape))
        return super().linear(x, weight)

    def store(self, view, slots, k, v):
        self.cost += Cost(kv_written=k.nbytes + v.nbytes)
        super().store(view, slots, k, v)

    def attention(self, q, view, spans, scale):
        token_bytes = 2 * view.k[0, 0].nbytes
        for span in spans:
            seen = set()
            for position in range(span.start, span.stop):
                first = max(0, position + 1 - view.spec.reach.tokens) if isinstance(view.spec.reach, Window) else 0
                reach = range(first, position + 1)
                seen.update(reach)
                self.cost += Cost(4 * q.shape[1] * q.shape[2] * len(reach))
            self.cost += Cost(kv_read=len(seen) * token_bytes)
        return super().attention(q, view, spans, scale)


@pytest.mark.parametrize("kind", KINDS)
def test_derived_is_counted(kind, tmp_path):
    folder, _ = make_checkpoint(tmp_path / kind, kind)
    checkpoint = Checkpoint.open(folder)
    kernels = Counting()
    decoder = Decoder(checkpoint.config, kernels, checkpoint.tensors(torch.float32))
    model = Model(checkpoint.config, decoder, "float32", torch.device("cpu"))
    costs = CostModel(checkpoint.config, layer_specs(checkpoint.config, "float32"))
    cache = None
    for start, length in ((0, 70), (70, 1), (71, 5), (76, 1)):
        kernels.cost = Cost()
        _, cache = model([7] * length, cache)
        assert kernels.cost == costs.chunk(start, length, rows=length)


def test_a_whole_run_is_the_sum_of_its_steps(tmp_path):
    folder, _ = make_checkpoint(tmp_path / "m", "mistral")
    with LLM(folder, pages=64) as llm:
        kernels = Counting()
        specs = layer_specs(llm.config, "float32")
        weights = Checkpoint.open(folder).tensors(torch.float32)
        llm.engine.runner.decoder = Decoder(llm.config, kernels, weights)
        costs = CostModel(llm.config, specs)
        for cache in (True, False):
            kernels.cost = Cost()
            llm.generate([[5] * 50], SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True), cache=cache)
            assert kernels.cost == costs.run(50, 9, cache=cache)
