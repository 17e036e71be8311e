"""Gemma 3n: residual streams (AltUp), LAuReL beside attention, sparse gates, inputs of each layer, shared K and V."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import NormalDist
from typing import Any

from tokenwright.checkpoints.families.family import (
    MOST_LAYERS,
    MOST_MLP,
    MOST_VOCAB,
    MOST_WIDTH,
    activation,
    check_repeats,
    dtype,
    heads_of,
    named,
)
from tokenwright.checkpoints.families.gemma import (
    INPUT_NAMES,
    input_gate,
    own_or_shared,
    read_inputs_vocab,
    read_shared,
    rounded,
    with_inputs,
)
from tokenwright.checkpoints.families.graph_builder import block, graph_of
from tokenwright.checkpoints.families.llama import LLAMA
from tokenwright.checkpoints.families.positions import read_both_ropes, read_layer_types
from tokenwright.checkpoints.files.json_keys import JsonKeys
from tokenwright.checks import MAX_TOKENS
from tokenwright.config import ModelConfig, Scales
from tokenwright.models.graph import MLP, Attention, Graph
from tokenwright.models.op import Matrix, Norm, Op
from tokenwright.models.residual_streams import MOST_STREAMS, Correct, Laurel, Merge, Predict, Spread, StreamRouter

_SPARSE = 10  # by default the first layers have sparse gates, of more layers than these


@dataclass(frozen=True, slots=True)
class _Layers3n:
    widths: tuple[int, ...]  # of the MLPs
    deviations: tuple[float | None, ...]  # of the gates of each layer
    streams: int
    rank: int  # of LAuReL
    inputs: int
    inputs_vocab: int


def _parse(keys: JsonKeys, architecture: str) -> tuple[ModelConfig, Graph]:
    layers, width = (
        keys.whole("num_hidden_layers", 35, most=MOST_LAYERS),
        keys.whole("hidden_size", 2048, most=MOST_WIDTH),
    )
    facts = _facts(keys, layers)
    heads, kv_heads = heads_of(keys, 8, 2)
    head_size = keys.whole("head_dim", 256, most=1 << 16)
    context = keys.whole("max_position_embeddings", 32768, most=MAX_TOKENS)
    check_repeats(keys, context)
    theta, local = keys.number("rope_theta", 1e6, above=1.0), keys.number("rope_local_base_freq", 1e4, above=1.0)
    rope, _, sliding = read_both_ropes(keys, theta, local, head_size, context)
    windows = _windows(keys, layers)
    biases, kept = keys.flag("attention_bias", False), dtype(keys)
    config = ModelConfig(
        architecture=architecture,
        layers=layers,
        width=width,
        mlp_width=max(facts.widths),
        vocab_size=keys.whole("vocab_size", 262400, most=MOST_VOCAB),
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        context=context,
        positions=rope,
        windows=windows,
        rotary=(True,) * layers,
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        activation=activation(keys, "hidden_activation", "gelu_pytorch_tanh"),
        qkv_bias=biases,
        out_bias=biases,
        qk_norm="head",
        post_norm=True,
        local=sliding,
        logit_cap=None if keys.is_null("final_logit_softcapping") else keys.number("final_logit_softcapping", 30.0),
        scales=Scales(embedding=rounded(sqrt(width), kept), attention=1.0),
        kv_shared=read_shared(keys, windows, 15),
        tied_head=keys.flag("tie_word_embeddings", True),
        dtype=kept,
    )
    return config, _graph(config, facts)


def _facts(keys: JsonKeys, layers: int) -> _Layers3n:
    widths = _each(keys, "intermediate_size", layers, 16384)
    if not all(type(one) is int and 1 <= one <= MOST_MLP for one in widths):
        raise keys.error(f"intermediate_size must be whole numbers from 1 to {MOST_MLP:,}")
    keys.only("altup_active_idx", 0, why="layers that compute another residual stream than the first")
    keys.only("altup_correct_scale", True, why="inputs' gates that read their stream without factors")
    for key in ("altup_coef_clip", "altup_lr_multiplier", "query_pre_attn_scalar"):  # of training, and without effect
        keys.raw(key)
    return _Layers3n(
        tuple(widths),
        _deviations(keys, layers),
        keys.whole("altup_num_inputs", 4, least=2, most=MOST_STREAMS),
        keys.whole("laurel_rank", 64, most=MOST_WIDTH),
        keys.whole("hidden_size_per_layer_input", 256, most=MOST_WIDTH),
        read_inputs_vocab(keys),
    )


def _each(keys: JsonKeys, key: str, layers: int, default: Any) -> Sequence[Any]:
    value = keys.raw(key)
    if value is None:
        value = default
    if not isinstance(value, list):
        return [value] * layers
    if len(value) != layers:
        raise keys.error(f"{key} must have a number for each of the {layers} layers, not {len(value)}")
    return value


def _deviations(keys: JsonKeys, layers: int) -> tuple[float | None, ...]:
    """Standard deviations above the mean from which gates of a layer count; the config has the share below."""
    first = _SPARSE if layers > _SPARSE else 0
    shares = _each(keys, "activation_sparsity_pattern", layers, [0.95] * first + [0.0] * (layers - first))
    if not all(type(one) in (int, float) and 0 <= one < 1 for one in shares):
        raise keys.error("activation_sparsity_pattern must be numbers from 0 to less than 1")
    return tuple(NormalDist().inv_cdf(rounded(one, "float32")) if one else None for one in shares)


def _windows(keys: JsonKeys, layers: int) -> tuple[int | None, ...]:
    types, window = keys.raw("layer_types"), keys.whole("sliding_window", 512, most=MAX_TOKENS)
    sliding = [(i + 1) % 5 != 0 for i in range(layers)] if types is None else read_layer_types(keys, types, layers)
    return tuple(window if slides else None for slides in sliding)


def _graph(config: ModelConfig, facts: _Layers3n) -> Graph:
    width, others = config.width, range(1, facts.streams)
    spread = Spread(Matrix("streams.spread", tuple((f"streams.spread.{j}", width) for j in others), width))
    merge = Merge(tuple(Matrix.single(f"streams.merge.{j}", width, width) for j in others))
    blocks = [op for layer in range(config.layers) for op in _block(config, facts, layer)]
    return with_inputs(config, graph_of(config, [spread, *blocks, merge]), facts.inputs, facts.inputs_vocab)


def _block(config: ModelConfig, facts: _Layers3n, layer: int) -> tuple[Op, ...]:
    attention, mlp = block(replace(config, mlp_width=facts.widths[layer]), layer)
    assert isinstance(attention, Attention) and isinstance(mlp, MLP) and attention.norm, "a layer has all of them"
    at = f"layers.{layer}.streams"
    gate = input_gate(config, facts.inputs, layer)
    return (
        Predict(_router(config, facts.streams, at, "predict")),
        replace(own_or_shared(config, attention), kept=True),
        _laurel(config, facts.rank, layer, attention.norm),
        replace(mlp, deviations=facts.deviations[layer]),
        Correct(_router(config, facts.streams, at, "correct"), gate, f"{at}.scale"),
    )


def _router(config: ModelConfig, streams: int, at: str, use: str) -> StreamRouter:
    outputs = streams**2 if use == "predict" else streams
    return StreamRouter(
        Norm(f"{at}.norm", "rms", config.width, config.norm_eps),
        1 / config.width,
        Matrix.single(f"{at}.router", streams, config.width),
        Matrix.single(f"{at}.{use}.coefficients", outputs, streams),
    )


def _laurel(config: ModelConfig, rank: int, layer: int, norm: Norm) -> Laurel:
    at, width = f"layers.{layer}.laurel", config.width
    left, right = Matrix.single(f"{at}.left", rank, width), Matrix.single(f"{at}.right", width, rank)
    return Laurel(norm, left, right, Norm(f"{at}.post_norm", "rms", width, config.norm_eps), 0.5**0.5)


GEMMA3N = replace(
    LLAMA,
    architectures={"Gemma3nForCausalLM": "gemma3n_text", "Gemma3nForConditionalGeneration": "gemma3n"},
    parse=_parse,
    names=LLAMA.names
    | INPUT_NAMES
    | named(
        {
            "layers.{i}.attention_post_norm": "layers.{i}.post_attention_layernorm",
            "layers.{i}.mlp_norm": "layers.{i}.pre_feedforward_layernorm",
            "layers.{i}.mlp_post_norm": "layers.{i}.post_feedforward_layernorm",
            "layers.{i}.streams.norm": "layers.{i}.altup.router_norm",
            "layers.{i}.streams.router": "layers.{i}.altup.modality_router",
            "layers.{i}.streams.predict.coefficients": "layers.{i}.altup.prediction_coefs",
            "layers.{i}.streams.correct.coefficients": "layers.{i}.altup.correction_coefs",
            "layers.{i}.streams.scale": "layers.{i}.altup.correct_output_scale",
            "layers.{i}.laurel.left": "layers.{i}.laurel.linear_left",
            "layers.{i}.laurel.right": "layers.{i}.laurel.linear_right",
            "layers.{i}.laurel.post_norm": "layers.{i}.laurel.post_laurel_norm",
        }
    )
    | named({f"streams.spread.{j}": f"altup_projections.{j - 1}" for j in range(1, MOST_STREAMS)})
    | named({f"streams.merge.{j}": f"altup_unembed_projections.{j - 1}" for j in range(1, MOST_STREAMS)}),
    renames=((re.compile(r"(layers\.\d+\.altup\.correct_output_scale)"), r"\1.weight"),),
    shared_kv=re.compile(r"layers\.(\d+)\.self_attn\.(?:[kv]_proj|k_norm)\.(?:weight|bias)"),
)
