"""Gemma 1 to 3: norms before and after attention and MLP, soft caps, windows in most layers, two rotary bases.

Norms multiply by 1 + weight, summed in fp32 when a file is loaded: the same bits as transformers' sum at each use.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt

from tokenwright.checkpoints.families.family import (
    MOST_VOCAB,
    TensorSource,
    activation,
    check_repeats,
    dtype,
    heads_of,
    named,
    sizes,
)
from tokenwright.checkpoints.families.graph_builder import decoder
from tokenwright.checkpoints.families.llama import LLAMA
from tokenwright.checkpoints.families.positions import read_both_ropes, read_layer_types, read_rope
from tokenwright.checkpoints.files.json_keys import JsonKeys
from tokenwright.checks import MAX_TOKENS
from tokenwright.config import ModelConfig, Rope, Scales
from tokenwright.formats import DType
from tokenwright.models.graph import Attention, Graph
from tokenwright.models.layer_inputs import InputGate, LayerInputs
from tokenwright.models.op import Matrix, Norm


@dataclass(frozen=True, slots=True)
class GemmaLike:
    """The differences between the generations; each default is the value of an absent key."""

    context: int
    vocab_size: int
    pattern: int  # every so many layers, one has full attention
    third: bool  # Gemma 3: norms of q and k, a rotation of its own in layers with a window, no soft caps
    first: bool = False  # Gemma 1: no windows, no soft caps, the usual scale of scores
    post_norm: bool = True
    heads: tuple[int, int] = (8, 4)


_SECOND = GemmaLike(context=8192, vocab_size=256000, pattern=2, third=False)
_THIRD = GemmaLike(context=131072, vocab_size=262208, pattern=6, third=True)
_FIRST = GemmaLike(8192, 256000, 1, third=False, first=True, post_norm=False, heads=(16, 16))


def _parse(keys: JsonKeys, architecture: str, like: GemmaLike) -> tuple[ModelConfig, Graph]:
    found = sizes(keys, like.vocab_size)
    layers, width = found["layers"], found["width"]
    heads, kv_heads = heads_of(keys, *like.heads)
    head_size = keys.whole("head_dim", 256, most=1 << 16)
    context = keys.whole("max_position_embeddings", like.context, most=MAX_TOKENS)
    check_repeats(keys, context)
    rope, local = _ropes(keys, head_size, context, like)
    biases = keys.flag("attention_bias", False)
    kept = dtype(keys)
    keys.raw("hidden_act")  # a name of former times; hidden_activation decides
    keys.only("use_bidirectional_attention", False, why="attention to later tokens")
    config = ModelConfig(
        architecture=architecture,
        **found,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        context=context,
        positions=rope,
        windows=_windows(keys, layers, like),
        rotary=(True,) * layers,
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        activation=activation(keys, "hidden_activation", "gelu_pytorch_tanh"),
        qkv_bias=biases,
        out_bias=biases,
        qk_norm="head" if like.third else None,
        post_norm=like.post_norm,
        local=local,
        score_cap=_cap(keys, "attn_logit_softcapping", 50.0, like),
        logit_cap=_cap(keys, "final_logit_softcapping", 30.0, like),
        scales=Scales(
            embedding=rounded(width**0.5, kept),
            attention=(head_size if like.first else keys.number("query_pre_attn_scalar", 256.0)) ** -0.5,
        ),
        tied_head=keys.flag("tie_word_embeddings", True),
        dtype=kept,
    )
    return config, decoder(config)


def rounded(value: float, to: DType) -> float:
    """A number rounded to `to`: transformers scales embeddings by the width's root in bfloat16, 59.75 for 59.8665."""
    narrow: float = struct.unpack("f", struct.pack("f", value))[0]
    if to == "float16":
        narrow = struct.unpack("e", struct.pack("e", narrow))[0]
    elif to == "bfloat16":
        [bits] = struct.unpack("I", struct.pack("f", narrow))
        narrow = struct.unpack("f", struct.pack("I", (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000))[0]
    return narrow


def _cap(keys: JsonKeys, key: str, default: float, like: GemmaLike) -> float | None:
    if like.third or like.first:
        keys.only(key, why="a soft cap in this architecture")
        return None
    return None if keys.is_null(key) else keys.number(key, default)


def _ropes(keys: JsonKeys, head_size: int, context: int, like: GemmaLike) -> tuple[Rope, Rope | None]:
    """The rotations of layers with full attention, and with a window. A scaling does not change the context."""
    if not like.third:
        return read_rope(keys, 10000.0, head_size, context)[0], None
    theta, local = keys.number("rope_theta", 1e6, above=1.0), keys.number("rope_local_base_freq", 1e4, above=1.0)
    full, _, sliding = read_both_ropes(keys, theta, local, head_size, context)
    return full, sliding


def _windows(keys: JsonKeys, layers: int, like: GemmaLike) -> tuple[int | None, ...]:
    if like.first:
        return (None,) * layers
    window = keys.whole("sliding_window", 4096, most=MAX_TOKENS)
    keys.only("sliding_window_size", window, why="two windows")  # Gemma 2 9B has the same number twice
    every = keys.whole("sliding_window_pattern", like.pattern) if like.third else like.pattern
    types = keys.raw("layer_types")
    sliding = [(i + 1) % every != 0 for i in range(layers)] if types is None else read_layer_types(keys, types, layers)
    return tuple(window if slides else None for slides in sliding)


def _one_more(names: Mapping[str, str]) -> dict[str, TensorSource]:
    """Norms whose weights are stored without the 1 that they have in use."""
    return {ours: TensorSource(theirs, plus=1.0) for ours, theirs in names.items()}


GEMMA = replace(
    LLAMA,
    architectures={"GemmaForCausalLM": "gemma"},
    parse=partial(_parse, like=_FIRST),
    names=LLAMA.names
    | _one_more(
        {
            "norm": "norm",
            "layers.{i}.attention_norm": "layers.{i}.input_layernorm",
            "layers.{i}.mlp_norm": "layers.{i}.post_attention_layernorm",
        }
    ),
)
_BEFORE_MLP = _one_more({"layers.{i}.mlp_norm": "layers.{i}.pre_feedforward_layernorm"})
VAULT_GEMMA = replace(
    GEMMA,
    architectures={"VaultGemmaForCausalLM": "vaultgemma"},
    parse=partial(_parse, like=replace(_SECOND, post_norm=False)),
    names=GEMMA.names | _BEFORE_MLP,
)
GEMMA2 = replace(
    GEMMA,
    architectures={"Gemma2ForCausalLM": "gemma2"},
    parse=partial(_parse, like=_SECOND),
    names=GEMMA.names
    | _BEFORE_MLP
    | _one_more(
        {
            "layers.{i}.attention_post_norm": "layers.{i}.post_attention_layernorm",
            "layers.{i}.mlp_post_norm": "layers.{i}.post_feedforward_layernorm",
        }
    ),
)

GEMMA3 = replace(
    GEMMA2,
    architectures={"Gemma3ForCausalLM": "gemma3_text", "Gemma3ForConditionalGeneration": "gemma3"},
    parse=partial(_parse, like=_THIRD),
    names=GEMMA2.names
    | _one_more(
        {
            "layers.{i}.attention.q_norm": "layers.{i}.self_attn.q_norm",
            "layers.{i}.attention.k_norm": "layers.{i}.self_attn.k_norm",
        }
    ),
)

INPUT_NAMES = named(
    {
        "layers.{i}.inputs.gate": "layers.{i}.per_layer_input_gate",
        "layers.{i}.inputs.out": "layers.{i}.per_layer_projection",
        "layers.{i}.inputs.post_norm": "layers.{i}.post_per_layer_input_norm",
        "layer_inputs.table": "embed_tokens_per_layer",
        "layer_inputs.project": "per_layer_model_projection",
        "layer_inputs.norm": "per_layer_projection_norm",
    }
)


def read_shared(keys: JsonKeys, windows: Sequence[int | None], default: int) -> int:
    """The number of the last layers that read K and V of layers before. Raises CheckpointError."""
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
