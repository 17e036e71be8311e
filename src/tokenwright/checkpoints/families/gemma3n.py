"""Gemma 3n: residual streams (AltUp), LAuReL beside attention, sparse gates, inputs of each layer, shared K and V."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

from tokenwright.checkpoints.families import gemma
from tokenwright.checkpoints.families.family import MOST_MLP, MOST_WIDTH, in_layers, named, without_ending
from tokenwright.checkpoints.families.gemma4 import embedding_scale
from tokenwright.checkpoints.families.graph_builder import block, graph_of
from tokenwright.checkpoints.families.llama import EACH_HEAD, FOUR_NORMS, LLAMA
from tokenwright.checkpoints.families.llama_like import Facts, LlamaLike, Positions, Sizes, around, by_config
from tokenwright.checkpoints.families.positions import windows_but
from tokenwright.checkpoints.files.json_keys import JsonKeys
from tokenwright.config import ModelConfig
from tokenwright.models.graph import MLP, Attention, Graph
from tokenwright.models.op import Matrix, Norm, Op
from tokenwright.models.residual_streams import MOST_STREAMS, Correct, Laurel, Merge, Predict, Spread, StreamRouter

_SPARSE = 10  # by default the first layers have sparse gates, in models with more layers
_LAYERS = 35


@dataclass(frozen=True, slots=True)
class _Layers3n:
    widths: Sequence[int]
    deviations: tuple[float | None, ...]
    streams: int
    rank: int
    inputs: int


def _widths(keys: JsonKeys) -> Sequence[int]:
    widths = _each(keys, "intermediate_size", keys.whole("num_hidden_layers", _LAYERS), 16384)
    if not all(type(one) is int and 1 <= one <= MOST_MLP for one in widths):
        raise keys.error(f"intermediate_size must be whole numbers from 1 to {MOST_MLP:,}")
    return widths


def _own(keys: JsonKeys, facts: Facts) -> Facts:
    keys.only("altup_active_idx", 0, why="layers that compute another residual stream than the first")
    keys.only("altup_correct_scale", True, why="inputs' gates that read their stream without factors")
    cap = "final_logit_softcapping"
    return {
        "logit_cap": None if keys.is_null(cap) else keys.number(cap, 30.0),
        "kv_shared": gemma.read_shared(keys, facts["windows"], 15),
    }


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
    """For each layer, the standard deviations above the mean at which gates begin; the config has the share below."""
    first = _SPARSE if layers > _SPARSE else 0
    shares = _each(keys, "activation_sparsity_pattern", layers, [0.95] * first + [0.0] * (layers - first))
    if not all(type(one) in (int, float) and 0 <= one < 1 for one in shares):
        raise keys.error("activation_sparsity_pattern must be numbers from 0 to less than 1")
    return tuple(NormalDist().inv_cdf(gemma.rounded(one, "float32")) if one else None for one in shares)


def _graph(keys: JsonKeys, config: ModelConfig) -> tuple[ModelConfig, Graph]:
    facts = _Layers3n(
        _widths(keys),
        _deviations(keys, config.layers),
        keys.whole("altup_num_inputs", 4, least=2, most=MOST_STREAMS),
        keys.whole("laurel_rank", 64, most=MOST_WIDTH),
        keys.whole("hidden_size_per_layer_input", 256, most=MOST_WIDTH),
    )
    width, others = config.width, range(1, facts.streams)
    spread = Spread(Matrix("streams.spread", tuple((f"streams.spread.{j}", width) for j in others), width))
    merge = Merge(tuple(Matrix.single(f"streams.merge.{j}", width, width) for j in others))
    blocks = [op for layer in range(config.layers) for op in _block(config, facts, layer)]
    graph = graph_of(config, [spread, *blocks, merge])
    return config, gemma.with_inputs(config, graph, facts.inputs, gemma.read_inputs_vocab(keys))


def _block(config: ModelConfig, facts: _Layers3n, layer: int) -> tuple[Op, ...]:
    attention, mlp = block(replace(config, mlp_width=facts.widths[layer]), layer)
    assert isinstance(attention, Attention) and isinstance(mlp, MLP) and attention.norm, "a layer has all of them"
    at = f"layers.{layer}.streams"
    gate = gemma.input_gate(config, facts.inputs, layer)
    return (
        Predict(_router(config, facts.streams, at, "predict")),
        replace(gemma.own_or_shared(config, attention), kept=True),
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


_LIKE = LlamaLike(
    by_config(),
    around(1e-6),
    EACH_HEAD,
    Positions(gemma.both_ropes, windows_but(5, 512)),
    Sizes(_LAYERS, 2048, 8, 2, 256, lambda keys: max(_widths(keys)), 262400, 32768),
    gemma.GELU,
    scales=embedding_scale,
    tied=True,
    more=(_own,),
    unused=("altup_coef_clip", "altup_lr_multiplier", "query_pre_attn_scalar"),
    graph=_graph,
)
GEMMA3N = replace(
    LLAMA,
    architectures={"Gemma3nForCausalLM": "gemma3n_text", "Gemma3nForConditionalGeneration": "gemma3n"},
    parse=_LIKE.parse,
    names=LLAMA.names
    | gemma.INPUT_NAMES
    | FOUR_NORMS
    | in_layers("""
        streams.norm=altup.router_norm streams.router=altup.modality_router
        streams.predict.coefficients=altup.prediction_coefs streams.correct.coefficients=altup.correction_coefs
        streams.scale=altup.correct_output_scale laurel.left=laurel.linear_left laurel.right=laurel.linear_right
        laurel.post_norm=laurel.post_laurel_norm
    """)
    | named(" ".join(f"streams.spread.{j}=altup_projections.{j - 1}" for j in range(1, MOST_STREAMS)))
    | named(" ".join(f"streams.merge.{j}=altup_unembed_projections.{j - 1}" for j in range(1, MOST_STREAMS))),
    renames=(without_ending(r"altup\.correct_output_scale"),),
    shared_kv=gemma.SHARED_KV,
)
