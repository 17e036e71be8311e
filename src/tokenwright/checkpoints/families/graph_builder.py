"""Builds a graph of ops, over weights under our names, from a family's ModelConfig. It reads no tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from tokenwright.config import LatentHeads, Learned, Mixture, ModelConfig, Rope
from tokenwright.models.combined import Parallel
from tokenwright.models.experts import Experts, Routing
from tokenwright.models.graph import MLP, Attention, Embed, Graph, Head, NextInput
from tokenwright.models.latent import LatentAttention
from tokenwright.models.op import Matrix, Norm, Op, Scoring
from tokenwright.models.recurrent import Recurrent

_NO_MIXERS: Mapping[int, Op] = MappingProxyType({})
_LATENT_EPS = 1e-6  # the epsilon of latents' norms, which no config has


def decoder(config: ModelConfig, mixers: Mapping[int, Op] = _NO_MIXERS) -> Graph:
    """A graph whose layers have attention, or their op in `mixers`, then an MLP or experts, or both in parallel."""
    return graph_of(config, [op for i in range(config.layers) for op in block(config, i, mixers.get(i))])


def graph_of(config: ModelConfig, blocks: Sequence[Op]) -> Graph:
    embed = Matrix.single("embed", config.vocab_size, config.width)
    head = embed if config.tied_head else Matrix.single("head", config.vocab_size, config.width, config.head_bias)
    learned = config.context if isinstance(config.positions, Learned) else None
    behind = _norm(config, "embed_norm") if config.embed_norm else None
    return Graph(
        config.architecture,
        config.context,
        Embed(embed, learned, config.scales.embedding, behind),
        tuple(blocks),
        Head(_norm(config, "norm"), head, config.scales.logits, config.logit_cap),
    )


def block(config: ModelConfig, layer: int, mixer: Op | None = None) -> tuple[Op, ...]:
    mixture = config.mixture
    attention = mixer
    if attention is None:
        attention = _latent(config, config.latent, layer) if config.latent is not None else _attention(config, layer)
    if not config.mlp_width:
        return (attention,)
    if mixture is not None and mixture.layers[layer]:
        return attention, _experts(config, mixture, layer)
    mlp = _mlp(config, layer)
    if config.parallel is None:
        return attention, mlp
    assert isinstance(attention, Attention), "no family has another mixer beside an MLP"
    if config.parallel == "one norm":
        mlp = replace(mlp, norm=attention.norm)
    return (Parallel(attention, mlp),)


def side_by_side(config: ModelConfig, layer: int, mixer: Recurrent, scales: tuple[float, float]) -> tuple[Op, ...]:
    """A layer with attention and a recurrence over the same input, then the MLP. scales: of their results."""
    attention, mlp = block(config, layer)
    assert isinstance(attention, Attention) and isinstance(mlp, MLP), "such layers have both"
    mixer = replace(mixer, beside=True)
    return replace(attention, kept=True, residual_scale=scales[0]), mixer, replace(mlp, residual_scale=scales[1])


def numbered(blocks: Sequence[Op]) -> list[Op]:
    """Number ops that are one layer each in the file by their caches; an MLP has the number before it."""
    found, place = list[Op](), 0
    for one in blocks:
        assert isinstance(one, Attention | LatentAttention | Experts | MLP | Recurrent), "such models have no others"
        found.append(replace(one, layer=place if one.kv is not None else max(place - 1, 0)))
        place += one.kv is not None
    return found


def next_graph(config: ModelConfig, graph: Graph, hidden_first: bool) -> Graph:
    """The graph of an MTP layer, with the model's embedding and head. Its cache is that of a first layer."""
    layer, mixture = config.layers, config.mixture
    at = f"layers.{layer}.next"
    more = replace(
        config,
        windows=(*config.windows, None),
        rotary=(*config.rotary, True),
        mixture=mixture and replace(mixture, layers=(*mixture.layers, True)),
    )
    project = Matrix.single(f"{at}.project", config.width, 2 * config.width)
    joined = NextInput(_norm(config, f"{at}.token_norm"), _norm(config, f"{at}.hidden_norm"), project, hidden_first)
    head = replace(graph.head, norm=_norm(config, f"{at}.norm"))
    return replace(graph, blocks=(joined, *numbered(block(more, layer))), head=head)


def _norm(config: ModelConfig, name: str) -> Norm:
    return Norm(name, config.norm, config.width, config.norm_eps, config.norm_bias, weighted=config.norm_weights)


def _norms(config: ModelConfig, at: str) -> tuple[Norm | None, Norm | None]:
    before = _norm(config, f"{at}_norm") if config.pre_norm else None
    return before, _norm(config, f"{at}_post_norm") if config.post_norm else None


def mixer_norms(config: ModelConfig, layer: int) -> tuple[Norm | None, Norm | None]:
    return _norms(config, f"layers.{layer}.attention")


def _head_norm(config: ModelConfig, name: str, heads: int) -> Norm | None:
    if config.qk_norm is None:
        return None
    if config.qk_norm == "own":
        return Norm(name, "layer", config.head_size * heads, config.norm_eps, bias=False, parts=heads)
    if config.qk_norm == "biased":
        return Norm(name, "layer", config.head_size, config.norm_eps)
    size = config.head_size * (heads if config.qk_norm == "whole" else 1)
    return Norm(name, "rms", size, config.norm_eps, weighted=config.norm_weights)


def _rope(config: ModelConfig, layer: int) -> Rope | None:
    if not config.rotary[layer] or not isinstance(config.positions, Rope):
        return None
    return config.local if config.local is not None and config.windows[layer] is not None else config.positions


def _attention(config: ModelConfig, layer: int) -> Attention:
    at, width, size = f"layers.{layer}.attention", config.width, config.head_size
    q, kv = config.heads * size, config.kv_heads * size
    before, after = _norms(config, at)
    gate = ((f"{at}.out_gate", q),) if config.out_gate else ()
    return Attention(
        layer,
        config.heads,
        config.kv_heads,
        size,
        scoring=Scoring(config.score_scale, config.score_cap),
        norm=before,
        qkv=Matrix(f"{at}.qkv", ((f"{at}.q", q), (f"{at}.k", kv), (f"{at}.v", kv), *gate), width, config.qkv_bias),
        out=Matrix.single(f"{at}.o", width, q, config.out_bias),
        q_norm=_head_norm(config, f"{at}.q_norm", config.heads),
        k_norm=_head_norm(config, f"{at}.k_norm", config.kv_heads),
        rotary=_rope(config, layer),
        window=config.windows[layer],
        post_norm=after,
        residual_scale=config.scales.residual,
        sink_logits=f"{at}.sinks" if config.sink_logits else None,
        out_gate=config.out_gate,
        norms_last=config.qk_norm_last,
        clip=config.qkv_clip,
        out_norm=Norm(f"{at}.out_norm", "rms", q, config.norm_eps) if config.sub_norms else None,
    )


def _latent(config: ModelConfig, sizes: LatentHeads, layer: int) -> LatentAttention:
    at, width, heads = f"layers.{layer}.attention", config.width, config.heads
    q, latent = heads * (sizes.nope + sizes.rope), (f"{at}.kv_a", sizes.rank + sizes.rope)
    first = (f"{at}.q_a", sizes.q_rank) if sizes.q_rank else (f"{at}.q", q)
    before, after = _norms(config, at)
    return LatentAttention(
        layer,
        heads,
        sizes.nope,
        sizes.rope,
        sizes.value,
        sizes.rank,
        scoring=Scoring(config.score_scale, config.score_cap),
        norm=before,
        down=Matrix(f"{at}.down", (first, latent), width),
        q_norm=Norm(f"{at}.q_a_norm", "rms", sizes.q_rank, _LATENT_EPS) if sizes.q_rank else None,
        q_up=Matrix.single(f"{at}.q_b", q, sizes.q_rank) if sizes.q_rank else None,
        kv_norm=Norm(f"{at}.kv_a_norm", "rms", sizes.rank, _LATENT_EPS),
        k_up=Matrix.single(f"{at}.k_up", heads * sizes.rank, sizes.nope),
        v_up=Matrix.single(f"{at}.v_up", heads * sizes.value, sizes.rank),
        out=Matrix.single(f"{at}.o", width, heads * sizes.value),
        rotary=_rope(config, layer),
        window=config.windows[layer],
        post_norm=after,
        residual_scale=config.scales.residual,
    )


def _mlp(config: ModelConfig, layer: int) -> MLP:
    at, width, inner = f"layers.{layer}.mlp", config.width, config.mlp_width
    before, after = _norms(config, at)
    return MLP(
        layer,
        before,
        _gate_up(at, [at], inner, width, config.mlp_bias, config.gated),
        Matrix.single(f"{at}.down", width, inner, config.mlp_bias),
        config.activation,
        config.gated,
        after,
        config.scales.residual,
        () if config.scales.gates == 1 else (config.scales.gates, 1.0),
        f"{at}.act" if config.activation == "xielu" else None,
        down_norm=Norm(f"{at}.down_norm", "rms", inner, config.norm_eps) if config.sub_norms else None,
    )


def _gate_up(name: str, mlps: Sequence[str], inner: int, width: int, bias: bool, gated: bool) -> Matrix:
    parts = tuple((f"{mlp}.{one}", inner) for mlp in mlps for one in (("gate", "up") if gated else ("up",)))
    return Matrix(f"{name}.gate_up" if gated else f"{name}.up", parts, width, bias)


def _experts(config: ModelConfig, mixture: Mixture, layer: int) -> Experts:
    at, width = f"layers.{layer}.mlp", config.width
    experts = [f"{at}.experts.{i}" for i in range(mixture.experts)]
    gate = ((f"{at}.shared_gate", 1),) if mixture.shared_gate else ()
    before, after = _norms(config, at)
    return Experts(
        layer,
        before,
        _routing(mixture),
        Matrix(f"{at}.routing", ((f"{at}.router", mixture.experts), *gate), width, mixture.bias),
        _gate_up(f"{at}.experts", experts, mixture.width, width, config.mlp_bias, config.gated),
        Matrix(f"{at}.experts.down", tuple((f"{one}.down", width) for one in experts), mixture.width, config.mlp_bias),
        config.activation,
        _shared(f"{at}.shared", mixture.shared_width, width, config.gated) if mixture.shared_width else None,
        after,
        config.scales.residual,
        f"{at}.correction" if mixture.corrected else None,
        config.gated,
    )


def _routing(mixture: Mixture) -> Routing:
    groups = (mixture.groups, mixture.chosen_groups, mixture.group_best)
    facts = (mixture.scores, mixture.renormalise, mixture.shared_gate, *groups, mixture.factor)
    return Routing(mixture.experts, mixture.chosen, *facts)


def _shared(at: str, inner: int, width: int, gated: bool) -> tuple[Matrix, Matrix]:
    return _gate_up(at, [at], inner, width, False, gated), Matrix.single(f"{at}.down", width, inner)
