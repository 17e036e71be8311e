"""Gemma 1 to 3. Norms multiply by 1 + weight, summed in fp32 on loading: the bits of transformers' sum at each use."""

import re
from collections.abc import Sequence
from dataclasses import replace
from math import sqrt

import numpy as np

from tokenwright.arrays import DTYPES, narrowed, widened
from tokenwright.checkpoints.families.family import MOST_VOCAB, in_layers, named, one_more
from tokenwright.checkpoints.families.llama import EACH_HEAD, FOUR_NORMS, LLAMA
from tokenwright.checkpoints.families.llama_like import Facts, LlamaLike, MLPs, Positions, Sizes, around, by_config
from tokenwright.checkpoints.families.positions import read_both_ropes, read_rope, windows_but
from tokenwright.checkpoints.files.json_keys import JsonKeys
from tokenwright.config import ModelConfig, Rope, Scales
from tokenwright.formats import DType
from tokenwright.models.graph import Attention, Graph
from tokenwright.models.op import InputGate, LayerInputs, Matrix, Norm


def rounded(value: float, to: DType) -> float:
    """A number rounded to `to`: transformers scales embeddings by the width's root in bfloat16, 59.75 for 59.8665."""
    return float(widened(narrowed(np.array([value], np.float32), DTYPES[to]))[0])


def _scales(keys: JsonKeys, facts: Facts) -> Scales:
    return Scales(rounded(facts["width"] ** 0.5, facts["dtype"]), keys.number("query_pre_attn_scalar", 256.0) ** -0.5)


def causal(keys: JsonKeys, facts: Facts) -> Facts:  # noqa: ARG001
    keys.only("use_bidirectional_attention", False, why="attention to later tokens")
    return {}


def _no_caps(keys: JsonKeys, facts: Facts) -> Facts:  # noqa: ARG001
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        keys.only(key, why="a soft cap in this architecture")
    return {}


def _caps(keys: JsonKeys, facts: Facts) -> Facts:  # noqa: ARG001
    defaults = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    score, logit = (None if keys.is_null(key) else keys.number(key, one) for key, one in defaults.items())
    keys.only("sliding_window_size", keys.whole("sliding_window", 4096), why="two windows")  # Gemma 2 9B has it twice
    return {"score_cap": score, "logit_cap": logit}


def both_ropes(keys: JsonKeys, head_size: int, context: int) -> tuple[Rope, int, Rope]:
    """The rotations of layers with full attention, and of those with a window. Scaling does not change the context."""
    theta, local = keys.number("rope_theta", 1e6, above=1.0), keys.number("rope_local_base_freq", 1e4, above=1.0)
    full, _, sliding = read_both_ropes(keys, theta, local, head_size, context)
    return full, context, sliding


def _one_rope(keys: JsonKeys, head_size: int, context: int) -> tuple[Rope, int, None]:
    return read_rope(keys, 10000.0, head_size, context)[0], context, None


GELU = MLPs("gelu_pytorch_tanh", key="hidden_activation")
_GEMMA1 = LlamaLike(
    by_config(),
    positions=Positions(_one_rope, windows=None),
    sizes=Sizes(heads=16, kv_heads=16, head_size=256, vocab_size=256000, context=8192),
    mlps=GELU,
    scales=lambda _, facts: Scales(rounded(facts["width"] ** 0.5, facts["dtype"]), facts["head_size"] ** -0.5),
    tied=True,
    more=(causal, _no_caps),
    unused=("hidden_act",),
)
_SIZES = Sizes(heads=8, kv_heads=4, head_size=256, vocab_size=256000, context=8192)
_VAULT = replace(
    _GEMMA1, positions=Positions(_one_rope, windows_but(2, 4096)), sizes=_SIZES, scales=_scales, more=(causal, _caps)
)
_GEMMA2 = replace(_VAULT, norms=around(1e-6))
_GEMMA3 = replace(
    _GEMMA2,
    qk_norm=EACH_HEAD,
    positions=Positions(both_ropes, windows_but(6, 4096, "sliding_window_pattern")),
    sizes=replace(_SIZES, vocab_size=262208, context=131072),
    more=(causal, _no_caps),
)

GEMMA = replace(LLAMA, architectures={"GemmaForCausalLM": "gemma"}, parse=_GEMMA1.parse, names=one_more(LLAMA.names))
VAULT_GEMMA = replace(
    GEMMA,
    architectures={"VaultGemmaForCausalLM": "vaultgemma"},
    parse=_VAULT.parse,
    names=one_more(LLAMA.names | in_layers("mlp_norm=pre_feedforward_layernorm")),
)
GEMMA2 = replace(
    GEMMA, architectures={"Gemma2ForCausalLM": "gemma2"}, parse=_GEMMA2.parse, names=one_more(LLAMA.names | FOUR_NORMS)
)
GEMMA3 = replace(
    GEMMA2,
    architectures={"Gemma3ForCausalLM": "gemma3_text", "Gemma3ForConditionalGeneration": "gemma3"},
    parse=_GEMMA3.parse,
)

SHARED_KV = re.compile(r"layers\.(\d+)\.self_attn\.(?:[kv]_proj|k_norm)\.(?:weight|bias)")
INPUT_NAMES = in_layers("""
    inputs.gate=per_layer_input_gate inputs.out=per_layer_projection inputs.post_norm=post_per_layer_input_norm
""") | named("""
    layer_inputs.table=embed_tokens_per_layer layer_inputs.project=per_layer_model_projection
    layer_inputs.norm=per_layer_projection_norm
""")


def read_shared(keys: JsonKeys, windows: Sequence[int | None], default: int) -> int:
    """How many last layers read K and V of earlier layers."""
    layers, shared = len(windows), keys.whole("num_kv_shared_layers", default, least=0)
    first = layers - shared
    if shared and (first < 1 or {one is None for one in windows[:first]} < {one is None for one in windows[first:]}):
        raise keys.error(
            f"the last {shared} layers read K and V of the layer of their kind before them, but there is none"
        )
    return shared


def read_inputs_vocab(keys: JsonKeys) -> int:
    return keys.whole("vocab_size_per_layer_input", 262144, most=MOST_VOCAB)


def with_inputs(config: ModelConfig, graph: Graph, size: int, vocab: int) -> Graph:
    inputs = LayerInputs(
        Matrix.single("layer_inputs.table", vocab, config.layers * size),
        rounded(sqrt(size), config.dtype),
        Matrix.single("layer_inputs.project", config.layers * size, config.width),
        config.width**-0.5,
        Norm("layer_inputs.norm", "rms", size, config.norm_eps),
        0.5**0.5,
    )
    return replace(graph, embed=replace(graph.embed, inputs=inputs))


def input_gate(config: ModelConfig, size: int, layer: int) -> InputGate:
    at = f"layers.{layer}.inputs"
    return InputGate(
        layer * size,
        Matrix.single(f"{at}.gate", size, config.width),
        config.activation,
        Matrix.single(f"{at}.out", config.width, size),
        Norm(f"{at}.post_norm", "rms", config.width, config.norm_eps),
    )


def own_or_shared(config: ModelConfig, op: Attention) -> Attention:
    first = config.layers - config.kv_shared
    if op.layer >= first:
        source = max(i for i in range(first) if config.windows[i] == op.window)
        return replace(op, qkv=replace(op.qkv, parts=op.qkv.parts[:1]), k_norm=None, source=source)
    name = f"layers.{op.layer}.attention.v_norm"
    return replace(op, v_norm=Norm(name, "rms", op.head_size, config.norm_eps, weighted=False))
