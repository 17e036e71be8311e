"""Parts of llama-like models. Absent keys take transformers' defaults (configuration_*.py), or MiniCPM's authors'."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol

from tokenwright.checkpoints.families import family
from tokenwright.checkpoints.families import positions as places
from tokenwright.checkpoints.families.graph_builder import decoder
from tokenwright.checkpoints.families.mixtures import Reader, read_mixture
from tokenwright.checkpoints.files.json_keys import JsonKeys, neutral
from tokenwright.checks import MAX_TOKENS
from tokenwright.config import Learned, ModelConfig, Rope, Scales
from tokenwright.models.graph import Graph

Facts = dict[str, Any]  # fields of a ModelConfig
GraphReader = Callable[[JsonKeys, ModelConfig], tuple[ModelConfig, Graph]]
Default = int | Callable[[JsonKeys], int] | None  # the value of an absent key, or a reader of other keys


@dataclass(frozen=True, slots=True)
class Sizes:
    """The default sizes. None: the key is required, or (kv_heads) as many as heads. head_size 0: width / heads."""

    layers: Default = None
    width: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_size: Default = 0
    mlp_width: Default = None
    vocab_size: int | None = None
    context: int | None = None

    def read(self, keys: JsonKeys) -> Facts:
        width = keys.whole("hidden_size", self.width, most=family.MOST_WIDTH)
        return {
            "layers": _whole(keys, "num_hidden_layers", self.layers, family.MOST_LAYERS),
            "width": width,
            "mlp_width": _whole(keys, "intermediate_size", self.mlp_width, family.MOST_MLP),
            "vocab_size": keys.whole("vocab_size", self.vocab_size, most=family.MOST_VOCAB),
            **self.read_heads(keys, width),
        }

    def read_heads(self, keys: JsonKeys, width: int) -> Facts:
        heads, kv_heads = family.heads_of(keys, self.heads, self.kv_heads)
        size = _whole(keys, "head_dim", self.head_size, 1 << 16, least=0) or family.size_of_head(keys, width, heads)
        return {"heads": heads, "kv_heads": kv_heads, "head_size": size}


def _whole(keys: JsonKeys, key: str, default: Default, most: int, *, least: int = 1) -> int:
    return default(keys) if callable(default) else keys.whole(key, default, least=least, most=most)


class Biases(NamedTuple):
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool


def _optional(keys: JsonKeys, key: str, allowed: bool, why: str, default: bool) -> bool:
    if allowed:
        return keys.flag(key, default)
    keys.only(key, False, why=f"{why} in this architecture")
    return False


def _mlp_bias(keys: JsonKeys, allowed: bool, default: bool = False) -> bool:
    return _optional(keys, "mlp_bias", allowed, "biases in the MLP", default)


def no_biases(keys: JsonKeys) -> Biases:
    both = _optional(keys, "attention_bias", False, "biases of attention", False)
    return Biases(both, both, _mlp_bias(keys, False))


def by_config(mlp: bool = False, default: bool = False) -> Callable[[JsonKeys], Biases]:
    """Read biases: attention_bias covers q, k, v and o. mlp: there may be an mlp_bias. default: of both keys."""

    def read(keys: JsonKeys) -> Biases:
        both = keys.flag("attention_bias", default)
        return Biases(both, both, _mlp_bias(keys, mlp, default))

    return read


def out_apart(default: bool = True, mlp: bool = False) -> Callable[[JsonKeys], Biases]:
    def read(keys: JsonKeys) -> Biases:
        out = keys.flag("attention_out_bias", False)
        return Biases(keys.flag("attention_bias", default), out, _mlp_bias(keys, mlp))

    return read


def everywhere(default: bool) -> Callable[[JsonKeys], Biases]:
    return lambda keys: Biases(*[keys.flag("use_bias", default)] * 3)


def qwen2_biases(keys: JsonKeys) -> Biases:
    for key in ("attention_bias", "qkv_bias"):
        keys.only(key, True, why="Qwen2's attention without its biases")
    return Biases(True, False, _mlp_bias(keys, False))


def stablelm_biases(keys: JsonKeys) -> Biases:
    keys.only("qk_layernorm", False, why="a LayerNorm of each head of q and k in this architecture")
    return Biases(keys.flag("use_qkv_bias", False), False, _mlp_bias(keys, False))


def gpt_oss_biases(keys: JsonKeys) -> Biases:
    every = keys.flag("attention_bias", True)
    return Biases(every, every, True)


@dataclass(frozen=True, slots=True)
class Norms:
    """The norms of the residual stream. `eps` reads their epsilon, or is the default of `key`."""

    eps: float | Callable[[JsonKeys], float] = 1e-6
    facts: Mapping[str, Any] = field(default_factory=dict)  # if there are not just RMSNorms before attention and MLP
    key: str = "rms_norm_eps"

    def read(self, keys: JsonKeys) -> Facts:
        eps = self.eps(keys) if callable(self.eps) else keys.number(self.key, self.eps)
        return {"norm_eps": eps, **self.facts}


def _layer_eps(keys: JsonKeys) -> float:
    """Some StarCoder 2 files repeat the epsilon under two other names, without effect."""
    keys.only("norm_type", "layer_norm", why="another norm in this architecture")
    keys.only("mlp_type", "default", why="another MLP in this architecture")
    for unused in ("layer_norm_epsilon", "rms_norm_eps"):
        keys.raw(unused)
    return keys.number("norm_epsilon", keys.number("norm_eps", keys.number("layer_norm_eps", 1e-5)))


def around(eps: float) -> Norms:
    return Norms(eps, {"post_norm": True})


def behind(eps: float) -> Norms:
    return Norms(eps, {"pre_norm": False, "post_norm": True})


LAYER_NORMS = Norms(_layer_eps, {"norm": "layer"})
BARE_LAYER_NORMS = Norms(lambda _: 1e-5, {"norm": "layer", "norm_bias": False, "norm_weights": False})
BARE_NORMS = Norms(1e-6, {"norm_weights": False, "embed_norm": True})


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """The norms of q and k, over each head or all of them. optional: only if the config has use_qk_norm."""

    over: Literal["head", "whole"]
    last: bool = False  # after the rotation
    optional: bool = False

    def read(self, keys: JsonKeys) -> Facts:
        if self.optional:
            return {"qk_norm": self.over if keys.flag("use_qk_norm", False) else None}
        keys.only("use_qk_norm", True, why="attention without norms of q and k in this architecture")
        keys.only("qk_norm_type", "per_layer", why="other norms of q and k in this architecture")
        return {"qk_norm": self.over, "qk_norm_last": self.last}


Rotation = Callable[[JsonKeys, int, int], tuple[Rope, int, Rope | None]]  # by the keys, a head's size and the context


def rope(theta: float = 10000.0, partial: float | None = None, alpha: bool = False) -> Rotation:
    return lambda keys, size, context: (*places.read_rope(keys, theta, size, context, partial, alpha), None)


def two_ropes(theta: float, local: float | None) -> Rotation:
    """Two rotations: layers with a window have one without scaling. theta, local: the default bases."""
    return lambda keys, size, context: places.read_both_ropes(keys, theta, local, size, context)


def counted_rope(theta: float, rotated: int | None = None) -> Rotation:
    """One rotation of a number of dimensions, by default `rotated`; None: all of a head."""

    def read(keys: JsonKeys, size: int, context: int) -> tuple[Rope, int, Rope | None]:
        share = keys.whole("rotary_dim", rotated or size, most=size) / size
        return (*places.read_rope(keys, theta, size, context, share), None)

    return read


_PLAIN = rope()


class PositionReader(Protocol):
    def read(self, keys: JsonKeys, facts: Facts, context: int | None) -> Facts:
        """The facts of the context, rotations and windows. context: the default of an absent key."""


@dataclass(frozen=True, slots=True)
class Positions:
    """The rotations and windows of the layers.

    without: layers without rotation: those in no_rope_layers, without a window, or with a layer_rope_theta of 0.
    """

    rotation: Rotation = _PLAIN
    windows: places.Slides | places.Windows | None = "none"  # None: full attention everywhere, and no key says so
    without: Literal["listed", "full", "based"] | None = None
    repeated: bool = True  # whether other keys must repeat the context

    def read(self, keys: JsonKeys, facts: Facts, context: int | None) -> Facts:
        layers, size = facts["layers"], facts["latent"].rope if "latent" in facts else facts["head_size"]
        context = keys.whole("max_position_embeddings", context, most=MAX_TOKENS)
        first, reach, local = self.rotation(keys, size, context)
        if self.repeated:
            family.check_repeats(keys, context, reach)
        rotary = places.read_rotary(keys, layers) if self.without == "listed" else (True,) * layers
        if callable(self.windows):
            windows = self.windows(keys, layers)
        else:
            windows = places.read_windows(keys, self.windows, rotary) if self.windows is not None else (None,) * layers
        if self.without == "full" and not (self.windows == "pattern" and keys.is_null("sliding_window")):
            rotary = tuple(window is not None for window in windows)
        if self.without == "based":
            first, local, rotary = places.read_bases(keys, first, windows)
        return {"context": reach, "positions": first, "local": local, "windows": windows, "rotary": rotary}


@dataclass(frozen=True, slots=True)
class NoPositions:
    """Layers without rotation. learned: there is a table of positions instead."""

    key: str = "max_position_embeddings"
    learned: bool = False

    def read(self, keys: JsonKeys, facts: Facts, context: int | None) -> Facts:
        said = keys.whole("max_position_embeddings", context, most=MAX_TOKENS)
        context = keys.whole(self.key, said, most=MAX_TOKENS)
        family.check_repeats(keys, context)
        layers = facts["layers"]
        found: Facts = {"context": context, "windows": (None,) * layers, "rotary": (False,) * layers}
        return found | ({"positions": Learned()} if self.learned else {})


FULL = Positions(windows=None)


@dataclass(frozen=True, slots=True)
class MLPs:
    act: str = "silu"
    gated: bool = True
    key: str = "hidden_act"

    def read(self, keys: JsonKeys) -> Facts:
        return {"activation": self._activation(keys), "gated": self.gated}

    def _activation(self, keys: JsonKeys) -> str:
        if self.act not in ("xielu", "clamped_swiglu"):
            return family.activation(keys, self.key, self.act)
        keys.only(
            "hidden_act", "xielu" if self.act == "xielu" else "silu", why="another activation in this architecture"
        )
        if self.act == "xielu":
            keys.only("qk_norm", True, why="attention without norms of q and k in this architecture")
            if keys.raw("rope_scaling") is None and keys.raw("rope_parameters") is None:
                raise keys.error("rope_scaling is missing; the published files have that of Llama 3 there")
        return self.act


RELU2 = MLPs("relu2", gated=False)
SUB_NORMS = {"sub_norms": True}


def granite_scales(keys: JsonKeys, facts: Facts) -> Scales:  # noqa: ARG001
    embedding, attention, residual = (
        keys.number(f"{one}_multiplier", 1.0) for one in ("embedding", "attention", "residual")
    )
    return Scales(embedding, attention, residual, 1 / keys.number("logits_scaling", 1.0))


def hyperclovax_scales(keys: JsonKeys, facts: Facts) -> Scales:
    attention = None if keys.raw("attention_multiplier") is None else keys.number("attention_multiplier")
    return replace(granite_scales(keys, facts), attention=attention, logits=keys.number("logits_scaling", 1.0))


def afmoe_scales(keys: JsonKeys, facts: Facts) -> Scales:
    return Scales(embedding=facts["width"] ** 0.5 if keys.flag("mup_enabled", False) else 1.0)


def minicpm_scales(keys: JsonKeys, facts: Facts) -> Scales:
    return Scales(
        embedding=keys.number("scale_emb", 1.0),
        residual=keys.number("scale_depth", 1.0) / facts["layers"] ** 0.5,
        logits=keys.number("dim_model_base", 1.0) / facts["width"],
    )


def next_layers(keys: JsonKeys, facts: Facts) -> Facts:  # noqa: ARG001
    return {"next_layers": keys.whole("num_nextn_predict_layers", 0, least=0, most=family.MOST_LAYERS)}


def clip(keys: JsonKeys, facts: Facts) -> Facts:  # noqa: ARG001
    return {"qkv_clip": None if neutral(keys.raw("clip_qkv")) else keys.number("clip_qkv")}


def capped_logits(keys: JsonKeys, facts: Facts) -> Facts:  # noqa: ARG001
    none = keys.is_null("final_logit_softcapping")
    return {"logit_cap": None if none else keys.number("final_logit_softcapping", 15.0)}


def side_by_side(keys: JsonKeys, facts: Facts) -> Facts:  # noqa: ARG001
    return {"parallel": "one norm" if keys.flag("use_parallel_residual", False) else None}


def silu_twice(keys: JsonKeys, facts: Facts) -> Facts:  # noqa: ARG001
    keys.only("hidden_act", "silu", why="another activation in this architecture")
    return {}


def later_norms(keys: JsonKeys, facts: Facts) -> Facts:  # noqa: ARG001
    return {"post_norm": keys.flag("use_post_norm", True)}


def hunyuan(keys: JsonKeys, facts: Facts) -> Facts:  # noqa: ARG001
    """Read Hunyuan's keys of experts or pictures, and those that repeat others."""
    unused = (
        *("attention_head_dim", "cla_share_factor", "class_num", "dense_list", "eod_token_id", "mask_init_id"),
        *("num_media_embeds", "org_vocab_size", "pad_id", "pool_type", "sep_id"),
    )
    pictures = ("anyres_", "im_", "image_", "text_", "video_", "vit_")
    for key in (*unused, *(name for name in keys.names if name.startswith(pictures))):
        keys.raw(key)
    keys.only("norm_type", "rms", why="another norm in this architecture")
    keys.only("use_cla", False, why="K and V that layers share")
    keys.only("use_rotary_pos_emb", True, why="attention without positions")
    return {}


def plain(keys: JsonKeys, config: ModelConfig) -> tuple[ModelConfig, Graph]:  # noqa: ARG001
    return config, decoder(config)


@dataclass(frozen=True, slots=True)
class LlamaLike:
    biases: Callable[[JsonKeys], Biases] = no_biases
    norms: Norms = Norms()
    qk_norm: HeadNorms | None = None
    positions: PositionReader = Positions()
    sizes: Sizes = Sizes()
    mlps: MLPs = MLPs()
    mixture: Reader | None = None
    scales: Callable[[JsonKeys, Facts], Scales] = lambda *_: Scales()
    tied: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)  # facts that no key decides
    more: tuple[Callable[[JsonKeys, Facts], Facts], ...] = ()  # readers of rare facts, which get the earlier facts
    unused: tuple[str, ...] = ()  # keys without effect on the logits
    graph: GraphReader = plain  # may change the config
    keys: Mapping[str, str] = field(default_factory=dict)  # other names of Llama's keys

    def parse(self, keys: JsonKeys, architecture: str) -> tuple[ModelConfig, Graph]:
        keys.rename(self.keys)
        keys.skip(*self.unused)
        facts = {**self.facts, **self.sizes.read(keys), **self.biases(keys)._asdict(), "dtype": family.dtype(keys)}
        facts |= self.positions.read(keys, facts, self.sizes.context)
        facts |= self.norms.read(keys) | self.mlps.read(keys) | (self.qk_norm.read(keys) if self.qk_norm else {})
        facts["mixture"] = read_mixture(keys, self.mixture, facts["layers"])
        facts["tied_head"] = keys.flag("tie_word_embeddings", self.tied)
        for read in self.more:
            facts |= read(keys, facts)
        facts["scales"] = self.scales(keys, facts)
        return self.graph(keys, ModelConfig(architecture=architecture, **facts))
