"""The layout of GGUF files: the tensors' common names, and facts that differ between architectures."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from tokenwright.checkpoints.families.family import Family, NextNames, Order, TensorSource, in_layers, named
from tokenwright.checkpoints.families.llama import LLAMA
from tokenwright.checkpoints.files.safetensors import Stored
from tokenwright.models.graph import Graph


def layered(text: str) -> dict[str, TensorSource]:
    return in_layers(text, "blk.{i}")


_SCORES = {1: "softmax", 2: "sigmoid"}
RMS = "attention.layer_norm_rms_epsilon"
LAYER = "attention.layer_norm_epsilon"
WINDOW = "attention.sliding_window=sliding_window"
PATTERN = "attention.sliding_window_pattern=sliding_window_pattern"
CLAMP = "attention.clamp_kqv=clip_qkv"
SECTIONS = "rope.dimension_sections=_sections"  # of the three positions of a picture's rows, interleaved
EXPERTS_USED = "expert_used_count=num_experts_per_tok"
QWEN_EXPERTS = f"""
    expert_count=num_experts expert_feed_forward_length=moe_intermediate_size expert_weights_norm=norm_topk_prob
    {EXPERTS_USED}
"""
GRANITE_KEYS = """
    attention.scale=attention_multiplier embedding_scale=embedding_multiplier residual_scale=residual_multiplier
    logit_scale=logits_scaling
"""

_NAMES = {
    **named("embed=token_embd positions=position_embd norm=output_norm head=output"),
    **layered("""
        attention_norm=attn_norm attention.q=attn_q attention.k=attn_k attention.v=attn_v attention.o=attn_output
        attention.q_norm=attn_q_norm attention.k_norm=attn_k_norm attention.sinks=attn_sinks
        attention_post_norm=post_attention_norm mlp_norm=ffn_norm mlp.gate=ffn_gate mlp.up=ffn_up mlp.down=ffn_down
        mlp_post_norm=post_ffw_norm mlp.router=ffn_gate_inp mlp.shared_gate=ffn_gate_inp_shexp
        mlp.shared.gate=ffn_gate_shexp mlp.shared.up=ffn_up_shexp mlp.shared.down=ffn_down_shexp
    """),
    **{
        f"layers.{{i}}.mlp.experts.{{e}}.{part}": TensorSource(f"blk.{{i}}.ffn_{part}_exps", stacked=True)
        for part in ("gate", "up", "down")
    },
}
FUSED_QKV = {f"layers.{{i}}.attention.{part}": TensorSource("blk.{i}.attn_qkv", fused=True) for part in ("q", "k", "v")}
FUSED_UP = {f"layers.{{i}}.mlp.{part}": TensorSource("blk.{i}.ffn_up", fused=True) for part in ("gate", "up")}
_BOTH = "blk.{i}.ffn_gate_up_exps"  # an expert's gates before its values
FUSED_EXPERTS = {
    f"layers.{{i}}.mlp.experts.{{e}}.{part}": TensorSource(_BOTH, stacked=True, turn=(at, 2), halves=True)
    for at, part in enumerate(("gate", "up"))
}
EACH_EXPERT = layered(" ".join(f"mlp.experts.{{e}}.{part}=ffn_{part}.{{e}}" for part in ("gate", "up", "down")))
CORRECTION = {"layers.{i}.mlp.correction": TensorSource("blk.{i}.exp_probs_b", wide=True)}
NEXT = NextNames("nextn.eh_proj", "nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm", at="blk.{i}")
_EXPERTS = r"ffn_(?:gate|up|down|gate_up)_exps\.(?:weight|bias)"
_STACKS = re.compile(
    rf"blk\.\d+\.(?:{_EXPERTS}|(?:attn_[qk]_norm|ssm_(?:a|d|norm)|exp_probs_b)\.weight)"
    r"|blk\.\d+\.attn_[kv]_b\.weight|altup_(?:unembd_)?proj\.weight"
)
_FAMILY = Family({}, LLAMA.parse, "", {}, re.compile(r"(?!)"), stacks=_STACKS)  # of names only
_ROW = re.compile(r"blk\.\d+\.ffn_gate_inp_shexp\.weight")  # a vector in the file, a matrix of one row in a graph


_BARE = re.compile(r"(blk\.\d+\.(?:ssm_[ad]|exp_probs_b|ffn_norm(?!\.)))(?:\.bias)?$")  # without `.weight`
_SCALES = re.compile(r"(blk\.\d+\.ffn_(?:gate_inp|down_exps))\.scale")
_STEPS = re.compile(r"(blk\.\d+\.ssm_dt)(?:\.bias)?$")  # beside a matrix of that name in Mamba-1
_FILTERS = re.compile(r"blk\.\d+\.ssm_conv1d_[qkv]\.weight")  # [1, channels, 1, taps], or without the first
_SCAN = re.compile(r"blk\.\d+\.ssm_a\.weight")  # [columns, keys] in Mamba-1; else [heads, 1]

Keys = dict[str, Any]  # keys of a config.json


def nothing(found: Keys, _: Mapping[str, Stored]) -> Keys:
    return found


@dataclass(frozen=True, slots=True)
class Layout:
    model: str  # transformers' name
    names: Mapping[str, TensorSource] = field(default_factory=dict)  # those that differ from Llama's
    neighbours: bool = False  # llama.cpp rotates neighbouring dimensions, and files order rows so
    keys: str = ""  # of the metadata and of a config.json, METADATA=CONFIG
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of keys that metadata may lack
    fixed: Mapping[str, Any] = field(default_factory=dict)  # keys that llama.cpp builds in
    present: str = ""  # keys that say whether some tensor's name has an ending
    scores: str | None = None  # the key of the experts' scores
    more: Callable[[Keys, Mapping[str, Stored]], Keys] = nothing  # adds keys by llama.cpp's other rules
    epsilon: tuple[str, str] = (RMS, "rms_norm_eps")
    theta: str = "rope_theta"
    share: str | None = None  # the key of the share of a head that rotates; None: all of it
    orders: Callable[[str, Graph], Order | None] | None = None
    bias: str | None = "attention_bias"  # the key of biases; None: the architecture decides
    by_layer: bool = False  # KV heads and MLP widths differ by layer; `more` gets the lists
    turned: bool = True  # q's and k's row order follows the rotation; else ours or `orders`
    latent: bool = False
    log_factor: float | None = None  # of YaRN's log multiplier in mscale_all_dim; None: refused
    following: NextNames | None = None
    listed: Mapping[str, str] = field(default_factory=dict)  # lists by layer, and the tensors that they stand for

    @property
    def family(self) -> Family:
        return replace(
            _FAMILY,
            names={**_NAMES, **self.names},
            neighbours=self.neighbours,
            orders=None if self.turned else self.orders or (lambda name, graph: None),  # noqa: ARG005
            own_orders=self.orders,
            following=self.following,
        )


def name_of(name: str) -> str:
    return _SCALES.sub(r"\1_scale.weight", _STEPS.sub(r"\1_bias.weight", _BARE.sub(r"\1.weight", name)))


def shape_of(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that a tensor of a file is read with: experts and heads are rows of one matrix."""
    if _SCAN.fullmatch(name) and len(shape) > 2:  # [1, heads, 1] and the like
        return (prod(shape),)
    if _SCAN.fullmatch(name) and shape[1:] != (1,):
        return shape
    if _FILTERS.fullmatch(name) and len(shape) > 2:
        return shape[-3], shape[-1]
    return (1, *shape) if _ROW.fullmatch(name) and len(shape) == 1 else _FAMILY.shape_of(name, shape)


def with_pictures(found: Keys) -> Keys:
    """Positions with three axes, and layers that add to a picture's rows."""
    rope = found.get("rope_scaling") or {"rope_type": "default"}
    for key, mixed in (("_sections", True), ("_sections_in_turn", False)):
        if found.get(key):
            found["rope_scaling"] = {**rope, "mrope_section": found[key][:3], "mrope_interleaved": mixed}
    deep = {"vision_config": {"deepstack_visual_indexes": [*range(found.get("_pictures", 0))]}}
    return found | (deep if found.get("_pictures") else {})


def qwen2_experts(found: Keys, tensors: Mapping[str, Stored]) -> Keys:
    widths = {
        key: tensors[f"blk.0.ffn_gate_{name}.weight"].shape[-2]
        for key, name in (("moe_intermediate_size", "exps"), ("shared_expert_intermediate_size", "shexp"))
        if f"blk.0.ffn_gate_{name}.weight" in tensors
    }
    return {**widths, **found}


def scores_of(found: Keys, default: str) -> str:
    """The scores of experts. Raises KeyError for unknown ones."""
    return _SCORES[found["_scores"]] if found.get("_scores") else default
