"""The graph builder that families share: from a ModelConfig to ops over weights under our names. No tensors here."""

from dataclasses import replace

from tokenwright.config import Learned, ModelConfig, Rope
from tokenwright.models.graph import MLP, Attention, Embed, Graph, Head, Matrix, Norm, Op, Parallel, Scoring


def decoder(config: ModelConfig) -> Graph:
    """In each layer attention, then an MLP, or both side by side; norms on their inputs, their results or on both."""
    embed = Matrix.single("embed", config.vocab_size, config.width)
    head = embed if config.tied_head else Matrix.single("head", config.vocab_size, config.width)
    blocks = [op for i in range(config.layers) for op in _block(config, i)]
    return Graph(
        config.architecture,
        config.context,
        Embed(embed, config.context if isinstance(config.positions, Learned) else None, config.scales.embedding),
        tuple(blocks),
        Head(_norm(config, "norm"), head, config.scales.logits, config.logit_cap),
    )


def _block(config: ModelConfig, layer: int) -> tuple[Op, ...]:
    attention, mlp = _attention(config, layer), _mlp(config, layer)
    if config.parallel is None:
        return attention, mlp
    if config.parallel == "one norm":
        mlp = replace(mlp, norm=attention.norm)
    return (Parallel(attention, mlp),)


def _norm(config: ModelConfig, name: str) -> Norm:
    return Norm(name, config.norm, config.width, config.norm_eps, config.norm_bias)


def _norms(config: ModelConfig, at: str) -> tuple[Norm | None, Norm | None]:
    """The norms before and after a block's op."""
    before = _norm(config, f"{at}_norm") if config.pre_norm else None
    return before, _norm(config, f"{at}_post_norm") if config.post_norm else None


def _head_norm(config: ModelConfig, name: str, heads: int) -> Norm | None:
    """The norm of q or k: over each head, or over all of them together."""
    if config.qk_norm is None:
        return None
    return Norm(name, "rms", config.head_size * (heads if config.qk_norm == "whole" else 1), config.norm_eps)


def _rope(config: ModelConfig, layer: int) -> Rope | None:
    """The rotation of a layer."""
    if not config.rotary[layer] or not isinstance(config.positions, Rope):
        return None
    return config.local if config.local is not None and config.windows[layer] is not None else config.positions


def _attention(config: ModelConfig, layer: int) -> Attention:
    at, width, size = f"layers.{layer}.attention", config.width, config.head_size
    q, kv = config.heads * size, config.kv_heads * size
    before, after = _norms(config, at)
    return Attention(
        layer,
        config.heads,
        config.kv_heads,
        size,
        scoring=Scoring(config.score_scale, config.score_cap),
        norm=before,
        qkv=Matrix(f"{at}.qkv", ((f"{at}.q", q), (f"{at}.k", kv), (f"{at}.v", kv)), width, config.qkv_bias),
        out=Matrix.single(f"{at}.o", width, q, config.out_bias),
        q_norm=_head_norm(config, f"{at}.q_norm", config.heads),
        k_norm=_head_norm(config, f"{at}.k_norm", config.kv_heads),
        rotary=_rope(config, layer),
        window=config.windows[layer],
        post_norm=after,
        residual_scale=config.scales.residual,
    )


def _mlp(config: ModelConfig, layer: int) -> MLP:
    at, width, inner = f"layers.{layer}.mlp", config.width, config.mlp_width
    both = Matrix(f"{at}.gate_up", ((f"{at}.gate", inner), (f"{at}.up", inner)), width, config.mlp_bias)
    before, after = _norms(config, at)
    return MLP(
        layer,
        before,
        both if config.gated else Matrix.single(f"{at}.up", inner, width, config.mlp_bias),
        Matrix.single(f"{at}.down", width, inner, config.mlp_bias),
        config.activation,
        config.gated,
        after,
        config.scales.residual,
    )
