"""Graph builders that families share: from a ModelConfig to ops over weights under our names. No tensors here."""

from tokenwright.config import Learned, ModelConfig, Rope
from tokenwright.models.graph import MLP, Attention, Embed, Graph, Head, Matrix, Norm


def decoder(config: ModelConfig) -> Graph:
    """In each layer attention, then an MLP, each with its own norm: on its input, or on its result (`post_norm`)."""
    embed = Matrix.single("embed", config.vocab_size, config.width)
    head = embed if config.tied_head else Matrix.single("head", config.vocab_size, config.width)
    blocks = [op for i in range(config.layers) for op in (_attention(config, i), _mlp(config, i))]
    return Graph(
        config.architecture,
        config.context,
        Embed(embed, config.context if isinstance(config.positions, Learned) else None, config.scales.embedding),
        tuple(blocks),
        Head(_norm(config, "norm"), head, config.scales.logits),
    )


def _norm(config: ModelConfig, name: str) -> Norm:
    return Norm(name, config.norm, config.width, config.norm_eps)


def _norms(config: ModelConfig, at: str) -> tuple[Norm | None, Norm | None]:
    """The norms before and after a block's op; it has one of them."""
    if config.post_norm:
        return None, _norm(config, f"{at}_post_norm")
    return _norm(config, f"{at}_norm"), None


def _head_norm(config: ModelConfig, name: str, heads: int) -> Norm | None:
    """The norm of q or k: over each head, or over all of them together."""
    if config.qk_norm is None:
        return None
    return Norm(name, "rms", config.head_size * (heads if config.qk_norm == "whole" else 1), config.norm_eps)


def _attention(config: ModelConfig, layer: int) -> Attention:
    at, width, size = f"layers.{layer}.attention", config.width, config.head_size
    q, kv = config.heads * size, config.kv_heads * size
    before, after = _norms(config, at)
    return Attention(
        layer,
        config.heads,
        config.kv_heads,
        size,
        scale=config.score_scale,
        norm=before,
        qkv=Matrix(f"{at}.qkv", ((f"{at}.q", q), (f"{at}.k", kv), (f"{at}.v", kv)), width, config.qkv_bias),
        out=Matrix.single(f"{at}.o", width, q, config.out_bias),
        q_norm=_head_norm(config, f"{at}.q_norm", config.heads),
        k_norm=_head_norm(config, f"{at}.k_norm", config.kv_heads),
        rotary=config.positions if config.rotary[layer] and isinstance(config.positions, Rope) else None,
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
