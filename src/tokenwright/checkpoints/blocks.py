"""Graph builders that families share: from a ModelConfig to ops over weights under our names. No tensors here."""

from tokenwright.config import Learned, ModelConfig, Rope
from tokenwright.models.graph import MLP, Attention, Embed, Graph, Head, Matrix, Norm


def pre_norm(config: ModelConfig) -> Graph:
    """A pre-norm decoder: in each layer attention, then an MLP, each with its own norm on its input."""
    embed = Matrix.single("embed", config.vocab_size, config.width)
    head = embed if config.tied_head else Matrix.single("head", config.vocab_size, config.width)
    blocks = [op for i in range(config.layers) for op in (_attention(config, i), _mlp(config, i))]
    return Graph(
        config.architecture,
        config.context,
        Embed(embed, config.context if isinstance(config.positions, Learned) else None),
        tuple(blocks),
        Head(_norm(config, "norm"), head),
    )


def _norm(config: ModelConfig, name: str) -> Norm:
    return Norm(name, config.norm, config.width, config.norm_eps)


def _attention(config: ModelConfig, layer: int) -> Attention:
    at, width, size = f"layers.{layer}.attention", config.width, config.head_size
    q, kv = config.heads * size, config.kv_heads * size
    q_norm, k_norm = (Norm(f"{at}.{name}", "rms", size, config.norm_eps) for name in ("q_norm", "k_norm"))
    return Attention(
        layer,
        config.heads,
        config.kv_heads,
        size,
        scale=size**-0.5,
        norm=_norm(config, f"layers.{layer}.attention_norm"),
        qkv=Matrix(f"{at}.qkv", ((f"{at}.q", q), (f"{at}.k", kv), (f"{at}.v", kv)), width, config.qkv_bias),
        out=Matrix.single(f"{at}.o", width, q, config.out_bias),
        q_norm=q_norm if config.qk_norm else None,
        k_norm=k_norm if config.qk_norm else None,
        rotary=config.positions if config.rotary[layer] and isinstance(config.positions, Rope) else None,
        window=config.windows[layer],
    )


def _mlp(config: ModelConfig, layer: int) -> MLP:
    at, width, inner = f"layers.{layer}.mlp", config.width, config.mlp_width
    both = Matrix(f"{at}.gate_up", ((f"{at}.gate", inner), (f"{at}.up", inner)), width, config.mlp_bias)
    return MLP(
        layer,
        _norm(config, f"layers.{layer}.mlp_norm"),
        both if config.gated else Matrix.single(f"{at}.up", inner, width, config.mlp_bias),
        Matrix.single(f"{at}.down", width, inner, config.mlp_bias),
        config.activation,
        config.gated,
    )
