"""Models that can be planned and not yet run: Gemma 3 and DeepSeek-V3, as far as their sizes go.

Only what fixes shapes and reach is read. Absent keys take transformers' defaults (configuration_gemma3.py); a key that
is neither read nor known to leave the sizes alone is refused by name.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast, get_args

from tokenwright.cache.spec import Heads, Latent
from tokenwright.checkpoints.strict import Keys
from tokenwright.config import DType
from tokenwright.planner.blueprint import Blueprint, Layer, Shape

_MOST = 1 << 24
_SIZELESS = frozenset(
    (
        "architectures", "model_type", "transformers_version", "auto_map", "torch_dtype", "dtype", "use_cache",
        "cache_implementation", "initializer_range", "attention_dropout", "pretraining_tp", "bos_token_id",
        "eos_token_id", "pad_token_id", "rms_norm_eps", "hidden_act", "hidden_activation", "rope_theta",
        "rope_scaling", "rope_parameters", "rope_local_base_freq", "rope_interleave", "query_pre_attn_scalar",
        "attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention", "boi_token_index",
        "eoi_token_index", "image_token_index", "image_token_id", "mm_tokens_per_image", "vision_config", "ep_size",
        "aux_loss_alpha", "seq_aux", "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor",
        "scoring_func", "num_key_value_heads", "qk_head_dim", "head_dim", "output_router_logits",
    )
)  # fmt: skip
_REACHES = {"full_attention", "sliding_attention"}
_ADVICE = "the planner cannot tell whether that changes the sizes. If it does not, remove it from config.json"


def planned_only(config: Mapping[str, Any], where: str) -> Blueprint | None:
    """The blueprint of a config.json of one of these models; None for any other. Raises CheckpointError."""
    listed = config.get("architectures")
    name = listed[0] if isinstance(listed, list) and len(listed) == 1 else None
    reader = _READERS.get(name) if isinstance(name, str) else None
    return reader(_keys(config, where), str(name)) if reader else None


def _keys(values: Mapping[str, Any], where: str) -> Keys:
    return Keys({key: value for key, value in values.items() if not key.startswith("_")}, where)


def _dtype(keys: Keys) -> DType:
    name = str(keys.raw("dtype") or keys.raw("torch_dtype")).removeprefix("torch.")
    return cast(DType, name) if name in get_args(DType) else "float32"


def _linears(at: str, **shapes: Shape) -> dict[str, Shape]:
    return {f"{at}.{name}.weight": shape for name, shape in shapes.items()}


def _gated(at: str, width: int, inner: int, *experts: int) -> dict[str, Shape]:
    """A gated MLP, or so many of them."""
    wide, narrow = (*experts, inner, width), (*experts, width, inner)
    return _linears(at, gate=wide, up=wide, down=narrow)


def _gemma3(keys: Keys, architecture: str) -> Blueprint:
    """Gemma 3: two norms more in each block than Llama has, and a window in five of six layers."""
    dtype = _dtype(keys)
    text, remarks = keys, tuple[str, ...]()
    if architecture == "Gemma3ForConditionalGeneration":
        inner = keys.raw("text_config")
        if not isinstance(inner, dict):
            raise keys.error("text_config must be an object")
        text, remarks = _keys(inner, f"{keys.where}: text_config"), ("the text model alone, without its image encoder",)
    layers = text.whole("num_hidden_layers", most=4096)
    d, m = text.whole("hidden_size", most=_MOST), text.whole("intermediate_size", most=_MOST)
    heads, kv_heads = text.whole("num_attention_heads", 8, most=_MOST), text.whole("num_key_value_heads", 4, most=_MOST)
    size = text.whole("head_dim", 256, most=_MOST)
    text.only("attention_bias", False, why="biases of attention")
    tensors: dict[str, Shape] = {"embed.weight": (text.whole("vocab_size", 262208, most=_MOST), d)}
    for i in range(layers):
        at = f"layers.{i}"
        q, kv = (heads * size, d), (kv_heads * size, d)
        tensors |= _linears(f"{at}.attention", q=q, k=kv, v=kv, o=(d, heads * size), q_norm=(size,), k_norm=(size,))
        tensors |= _linears(at, attention_norm=(d,), after_attention_norm=(d,), mlp_norm=(d,), after_mlp_norm=(d,))
        tensors |= _gated(f"{at}.mlp", d, m)
    tensors["norm.weight"] = (d,)
    for place in (text, keys):
        place.only("tie_word_embeddings", True, why="a head of its own")
    kept = Heads(kv_heads, size)
    drawn = tuple(Layer(kept, window, 4 * heads * size) for window in _gemma3_windows(text, layers))
    context = text.whole("max_position_embeddings", 131072)
    text.finish(_SIZELESS, _ADVICE)
    keys.finish(_SIZELESS, _ADVICE)
    return Blueprint(architecture, context, dtype, tensors, drawn, remarks=remarks)


def _gemma3_windows(keys: Keys, layers: int) -> list[int | None]:
    """The reach of each layer: every sixth is full, where the file does not say otherwise."""
    window, pattern = keys.whole("sliding_window", 4096), keys.whole("sliding_window_pattern", 6)
    types = keys.raw("layer_types") or [
        "sliding_attention" if i % pattern else "full_attention" for i in range(1, layers + 1)
    ]
    if not isinstance(types, list) or len(types) != layers or not {*map(str, types)} <= _REACHES:
        raise keys.error(f"layer_types must list {layers} times full_attention or sliding_attention")
    return [None if kind == "full_attention" else window for kind in types]


def _deepseek3(keys: Keys, architecture: str) -> Blueprint:
    """DeepSeek-V3 (arXiv 2412.19437): a latent in place of K and V (MLA), and experts in all but the first layers.

    Attention is counted absorbed: the latent itself is scored and summed, and the matrix that would unfold it is
    multiplied with the query and with the result instead.
    """
    layers = keys.whole("num_hidden_layers", most=4096)
    d, heads = keys.whole("hidden_size", most=_MOST), keys.whole("num_attention_heads", most=_MOST)
    rank, rope = keys.whole("kv_lora_rank", most=_MOST), keys.whole("qk_rope_head_dim", most=_MOST)
    nope, value = keys.whole("qk_nope_head_dim", most=_MOST), keys.whole("v_head_dim", most=_MOST)
    vocab, dense = keys.whole("vocab_size", most=_MOST), keys.whole("first_k_dense_replace", 0, least=0)
    chosen = keys.whole("num_experts_per_tok", most=_MOST)
    keys.only("attention_bias", False, why="biases of attention")
    keys.only("tie_word_embeddings", False, why="a tied head")
    keys.only("moe_layer_freq", 1, why="experts in some layers only")
    keys.only("topk_method", "noaux_tc", why="another choice of experts")
    q_rank = 0 if keys.is_null("q_lora_rank") else keys.whole("q_lora_rank", most=_MOST)
    q = _low_rank("q", d, q_rank, rope=0, out=heads * (nope + rope))
    kv = _low_rank("kv", d, rank, rope, out=heads * (nope + value))
    tensors: dict[str, Shape] = {"embed.weight": (vocab, d), "norm.weight": (d,), "head.weight": (vocab, d)}
    mlp, moe = _gated("", d, keys.whole("intermediate_size", most=_MOST)), _experts(keys, d)
    for i in range(layers):
        at = f"layers.{i}"
        tensors |= _linears(f"{at}.attention", **q, **kv, o=(d, heads * value))
        tensors |= _linears(at, attention_norm=(d,), mlp_norm=(d,))
        tensors |= {f"{at}.mlp{name}": shape for name, shape in (mlp if i < dense else moe).items()}
    drawn = (Layer(Latent(rank, rope), None, 2 * heads * (2 * rank + rope)),) * layers
    context, remarks = keys.whole("max_position_embeddings"), _deepseek3_remarks(keys)
    dtype = _dtype(keys)
    keys.finish(_SIZELESS, _ADVICE)
    return Blueprint(architecture, context, dtype, tensors, drawn, chosen, remarks=remarks)


def _low_rank(name: str, width: int, rank: int, rope: int, out: int) -> dict[str, Shape]:
    """A projection through a vector of `rank`, which a norm follows, and `rope` more that go past it; rank 0: plain."""
    if not rank:
        return {name: (out, width)}
    return {f"{name}_a": (rank + rope, width), f"{name}_a_norm": (rank,), f"{name}_b": (out, rank)}


def _experts(keys: Keys, width: int) -> dict[str, Shape]:
    """The router, with its correction of the choice, the routed experts, and the shared ones as one wide MLP."""
    count, inner = keys.whole("n_routed_experts", most=_MOST), keys.whole("moe_intermediate_size", most=_MOST)
    router: dict[str, Shape] = {".router.weight": (count, width), ".router.bias": (count,)}
    keys.whole("num_experts_per_tok", most=count)
    shared = keys.whole("n_shared_experts", most=_MOST)
    return router | _gated(".experts", width, inner, count) | _gated(".shared", width, shared * inner)


def _deepseek3_remarks(keys: Keys) -> tuple[str, ...]:
    remarks = ["attention counted with the latent absorbed"]
    if keys.whole("num_nextn_predict_layers", 0, least=0):
        remarks.append("without the layers that predict a second token (MTP)")
    stored = keys.raw("quantization_config")
    if stored is not None:
        kind = stored.get("quant_method") if isinstance(stored, dict) else None
        if kind != "fp8":
            raise keys.error("quantization_config must be of quant_method fp8, as the model was published")
        remarks.append(f"its files hold fp8; native is the dtype that config.json names, {_dtype(keys)}")
    return tuple(remarks)


_READERS: Mapping[str, Callable[[Keys, str], Blueprint]] = {
    "Gemma3ForConditionalGeneration": _gemma3,
    "Gemma3ForCausalLM": _gemma3,
    "DeepseekV3ForCausalLM": _deepseek3,
}
