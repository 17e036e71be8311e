"""Reads mixtures of experts: their keys in config.json, and the names of their tensors."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tokenwright.backends.packed import LANES
from tokenwright.checkpoints.families.family import TensorSource, in_layers, mlp_names, stacked_experts, without_ending
from tokenwright.checkpoints.files.json_keys import JsonKeys
from tokenwright.config import Mixture

MOST_EXPERTS = 1 << 16
TRAINING = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")


def _correction(at: str) -> dict[str, TensorSource]:
    return {"layers.{i}.mlp.correction": TensorSource(f"layers.{{i}}.{at}.e_score_correction_bias", wide=True)}


MIXTRAL_NAMES = in_layers("mlp.router=block_sparse_moe.gate") | mlp_names(
    "mlp.experts.{e}", "block_sparse_moe.experts.{e}", "w1 w3 w2"
)
MINIMAX_NAMES = _correction("block_sparse_moe")
ERNIE_NAMES = _correction("mlp.moe_statics")
BIAS_RENAMES = (without_ending(r"(?:block_sparse_moe|mlp\.moe_statics)\.e_score_correction_bias"),)
BIAS_STACKS = re.compile(r"layers\.\d+\.mlp\.moe_statics\.e_score_correction_bias\.weight")  # [1, experts]
EXPERT_NAMES = mlp_names("mlp.experts.{e}", "mlp.experts.{e}")
HUNYUAN_NAMES = in_layers("mlp.router=mlp.gate.wg") | EXPERT_NAMES | mlp_names("mlp.shared", "mlp.shared_mlp")
QWEN_NAMES = (
    in_layers("mlp.router=mlp.gate mlp.shared_gate=mlp.shared_expert_gate")
    | EXPERT_NAMES
    | mlp_names("mlp.shared", "mlp.shared_expert")
)

_UP = "layers.{i}.mlp.experts.gate_up_proj"
GPT_OSS_NAMES: dict[str, TensorSource] = {
    **in_layers("attention.sinks=self_attn.sinks mlp.router=mlp.router"),
    "layers.{i}.mlp.experts.{e}.gate": TensorSource(_UP, fused=True, turn=(0, 2)),
    "layers.{i}.mlp.experts.{e}.up": TensorSource(_UP, fused=True, turn=(1, 2)),
    "layers.{i}.mlp.experts.{e}.down": TensorSource("layers.{i}.mlp.experts.down_proj", fused=True),
}
# transformers stores each expert as [in, out], with the columns of gate and up in turn.
GPT_OSS_PLAIN = stacked_experts("mlp.experts.gate_up_proj", "mlp.experts.down_proj", transpose=True, halves=False)
GPT_OSS_RENAMES = (  # biases of all experts: [E, out]; mlx-lm's matrices: [E, out, in]
    (re.compile(r"(layers\.\d+\.mlp)\.experts\.(down_proj\.(?:weight|scales|bias))"), r"\1.switch_mlp.\2"),
    (re.compile(r"(layers\.\d+\.mlp\.experts\.(?:gate_up|down)_proj)_bias"), r"\1.bias"),
    without_ending(r"mlp\.experts\.(?:gate_up|down)_proj|self_attn\.sinks"),
)
GPT_OSS_STACKS = re.compile(r"layers\.\d+\.mlp\.experts\.(?:gate_up|down)_proj\.(?:bias|weight)")


_LOCAL = "num_local_experts num_experts_per_tok intermediate_size"
Reader = Callable[[JsonKeys, int], Mixture | None]  # reads a config with a number of layers; None: there are no experts


def read_mixture(keys: JsonKeys, read: Reader | None, layers: int) -> Mixture | None:
    if read is None:
        return None
    keys.skip(*TRAINING)
    return read(keys, layers)


def _sizes(keys: JsonKeys, named: str, defaults: tuple[int, int, int]) -> tuple[int, int, int]:
    """How many experts a layer has, how many it chooses, and their width, by the names of the three keys."""
    experts, chosen, width = named.split()
    count = keys.whole(experts, defaults[0], most=MOST_EXPERTS)
    return count, keys.whole(chosen, defaults[1], most=count), expert_width(keys, width, defaults[2])


def mixtral(keys: JsonKeys, layers: int) -> Mixture:
    keys.only("norm_topk_prob", True, why="experts whose weights are not divided by their sum")
    return Mixture(*_sizes(keys, _LOCAL, (8, 2, 14336)), (True,) * layers)


def granite(keys: JsonKeys, layers: int) -> Mixture:
    shared = keys.whole("shared_intermediate_size", 0, least=0, most=1 << 24)
    return Mixture(*_sizes(keys, _LOCAL, (8, 2, 11008)), (True,) * layers, shared_width=shared)


def afmoe(keys: JsonKeys, layers: int) -> Mixture:
    sizes = _sizes(keys, "num_experts num_experts_per_tok moe_intermediate_size", (64, 6, 1408))
    check_same(keys, "num_local_experts", "num_experts", sizes[0])
    keys.only("score_func", "sigmoid", why="other scores of experts in this architecture")
    keys.only("route_norm", True, why="experts whose weights are not divided by their sum")
    for key in ("n_group", "topk_group", "num_expert_groups", "num_limited_groups"):
        keys.only(key, 1, why="experts in groups in this architecture")
    keys.skip("load_balance_coeff", "use_grouped_mm")
    dense, shared = keys.whole("num_dense_layers", 1, least=0), keys.whole("num_shared_experts", 2, least=0)
    factor, mixed = keys.number("route_scale", 1.0), tuple(i >= dense for i in range(layers))
    return Mixture(*sizes, mixed, "sigmoid", corrected=True, factor=factor, shared_width=sizes[2] * shared)


def hunyuan(keys: JsonKeys, layers: int) -> Mixture:
    """Hunyuan's experts are as wide as the shared MLP; files list some numbers layer by layer."""
    keys.skip("capacity_factor", "moe_drop_tokens", "moe_random_routing_dropped_token")
    keys.only("moe_layer_num_skipped", 0, why="layers without experts in this architecture")
    keys.only("norm_topk_prob", True, why="experts whose weights are not divided by their sum")
    keys.only("use_mixed_mlp_moe", True, why="layers without a shared expert in this architecture")
    keys.only("group_limited_greedy", False, why="experts in groups in this architecture")
    experts, width = keys.whole("num_experts", 1, most=MOST_EXPERTS), expert_width(keys, "intermediate_size", 11008)
    check_same(keys, "num_local_experts", "num_experts", experts)
    each = {
        key: set(given) if isinstance(given := keys.raw(key), list) else {given}
        for key in ("moe_topk", "num_experts_per_tok", "moe_intermediate_size", "num_shared_expert")
    }
    chosen = (each["moe_topk"] | each["num_experts_per_tok"]) - {None}
    if len(chosen) > 1 or each["moe_intermediate_size"] - {None, width} or each["num_shared_expert"] - {None, 1}:
        raise keys.error("layers have other numbers or sizes of experts than others, which Tokenwright lacks")
    number = JsonKeys({"moe_topk": next(iter(chosen), 1)}, keys.where).whole("moe_topk", most=experts)
    return Mixture(experts, number, width, (True,) * layers, shared_width=width)


def aria(keys: JsonKeys, layers: int) -> Mixture:
    sizes = _sizes(keys, "moe_num_experts moe_topk intermediate_size", (8, 2, 4096))
    keys.only("hidden_act", "silu", why="another activation of shared experts than of others")
    shared = keys.whole("moe_num_shared_experts", 2, least=0)
    return Mixture(*sizes, (True,) * layers, shared_width=sizes[2] * shared)


def olmoe(keys: JsonKeys, layers: int) -> Mixture:
    sizes = _sizes(keys, "num_experts num_experts_per_tok intermediate_size", (64, 8, 2048))
    check_same(keys, "num_local_experts", "num_experts", sizes[0])
    return Mixture(*sizes, (True,) * layers, renormalise=keys.flag("norm_topk_prob", False))


def minimax(keys: JsonKeys, layers: int) -> Mixture:
    sizes = _sizes(keys, _LOCAL, (256, 8, 1536))
    check_same(keys, "num_experts", "num_local_experts", sizes[0])
    keys.only("scoring_func", "sigmoid", why="other scores of experts in this architecture")
    keys.only("use_routing_bias", True, why="a choice of experts without biases in this architecture")
    keys.only("shared_intermediate_size", 0, why="a shared expert in this architecture")
    if any(kind != 1 for kind in keys.raw("attn_type_list") or ()):
        raise keys.error("attn_type_list asks for linear attention, which Tokenwright does not have")
    keys.skip("num_mtp_modules", "mtp_transformer_layers", "use_mtp")
    return Mixture(*sizes, (True,) * layers, "sigmoid", corrected=True)


def ernie(keys: JsonKeys, layers: int) -> Mixture | None:
    """ERNIE 4.5 has experts in a range of layers, with a learned bias of the choice, and shared experts."""
    experts = keys.whole("moe_num_experts", 64, least=0, most=MOST_EXPERTS)
    chosen = keys.whole("moe_k", 6, most=experts or MOST_EXPERTS)
    first, last = keys.whole("moe_layer_start_index", 1, least=0), keys.number("moe_layer_end_index", -1, least=-1)
    step = keys.whole("moe_layer_interval", 1)
    keys.only("moe_norm_min", 1e-12, why="another least sum of the weights of experts")
    keys.only("moe_gate", "topk", why="another choice of experts")
    keys.only("moe_use_aux_free", True, why="a choice of experts without biases in this architecture")
    keys.skip("moe_capacity", "num_nextn_predict_layers")  # the second: layers that transformers skips too
    width = expert_width(keys, "moe_intermediate_size", 1536)
    shared = keys.whole("moe_num_shared_experts", 2, least=0)
    last = layers - 1 if last == -1 else last
    mixed = tuple((i + 1) % step == 0 and first <= i <= last for i in range(layers))
    if not experts or not any(mixed):
        return None
    return Mixture(experts, chosen, width, mixed, corrected=True, shared_width=width * shared)


def gpt_oss(keys: JsonKeys, layers: int) -> Mixture:
    sizes = _sizes(keys, _LOCAL, (128, 4, 2880))
    check_same(keys, "experts_per_token", "num_experts_per_tok", sizes[1])
    keys.only("swiglu_limit", 7.0, why="another limit of the activation")
    keys.only("swiglu_alpha", 1.702, why="another gain of the activation")
    keys.raw("initial_context_length")  # rope_scaling has it too
    if keys.raw("rope_scaling") is None and keys.raw("rope_parameters") is None:
        raise keys.error("rope_scaling is missing; the published files have YaRN there")
    return Mixture(*sizes, (True,) * layers, bias=True)


@dataclass(frozen=True, slots=True)
class QwenExperts:
    """Qwen's mixtures; the numbers are defaults of absent keys."""

    experts: int
    chosen: int
    width: int
    shared: int = 0  # the width of the shared expert; 0: none
    renormalise: bool = True
    gate: bool = True  # of the shared expert
    typed: bool = False  # mlp_layer_types may give the layers
    normed: bool = False  # norm_topk_prob can only be true
    scores: Literal["softmax", "sigmoid"] = "softmax"
    dense: int = 0  # how many first layers have no experts if mlp_only_layers is absent

    def __call__(self, keys: JsonKeys, layers: int) -> Mixture | None:
        also = keys.whole("num_local_experts", self.experts, least=0, most=MOST_EXPERTS)
        experts = keys.whole("num_experts", also, least=0, most=MOST_EXPERTS)
        check_same(keys, "num_local_experts", "num_experts", experts)
        chosen = keys.whole("num_experts_per_tok", self.chosen, most=experts or MOST_EXPERTS)
        mixed = self._layers(keys, layers, experts)
        width = expert_width(keys, "moe_intermediate_size", self.width)
        shared = keys.whole("shared_expert_intermediate_size", self.shared, most=1 << 24) if self.shared else 0
        renormalise = keys.flag("norm_topk_prob", self.renormalise)
        if self.normed:
            keys.only("norm_topk_prob", True, why="experts whose weights are not divided by their sum")
        if not any(mixed):
            return None
        gate = shared > 0 and self.gate
        facts = (experts, chosen, width, mixed, self.scores, renormalise)
        return Mixture(*facts, shared_width=shared, shared_gate=gate)

    def _layers(self, keys: JsonKeys, layers: int, experts: int) -> tuple[bool, ...]:
        step, without = keys.whole("decoder_sparse_step", 1), listed_layers(keys, "mlp_only_layers", layers)
        if keys.raw("mlp_only_layers") is None:
            without = frozenset(range(self.dense))
        mixed = tuple(experts > 0 and (i + 1) % step == 0 and i not in without for i in range(layers))
        if not self.typed:
            return mixed
        keys.skip("num_mtp_layers", "num_nextn_predict_layers", "mtp_layer_types", "mtp_mlp_layer_types")
        return typed_layers(keys, layers) or mixed


QWEN2 = QwenExperts(60, 4, 1408, 5632, renormalise=False)
QWEN3 = QwenExperts(128, 8, 768, renormalise=False)
QWEN3_NEXT = QwenExperts(512, 10, 512, 512)
QWEN3_5 = QwenExperts(256, 8, 512, 512, normed=True)
MELLUM = QwenExperts(64, 8, 896, typed=True)
FLINT = QwenExperts(256, 6, 512, 1024, gate=False, scores="sigmoid", dense=2)
LARA = QwenExperts(128, 4, 512, 512, gate=False)


def check_same(keys: JsonKeys, key: str, other: str, value: int) -> None:
    if keys.whole(key, value, least=0) != value:
        raise keys.error(f"{other} and {key} differ; keep the one that is right")


def expert_width(keys: JsonKeys, key: str, default: int, gated: bool = True) -> int:
    """The width of an expert's MLP. Each expert must be whole blocks of the packed matrix of all experts."""
    width, model = keys.whole(key, default, most=1 << 24), keys.whole("hidden_size")
    if (1 + gated) * width % LANES or model % LANES:
        raise keys.error(
            f"experts of {key} {width:,} at hidden_size {model:,} cannot be packed: Tokenwright "
            f"needs multiples of {LANES // (1 + gated)} and {LANES}"
        )
    return width


def typed_layers(keys: JsonKeys, layers: int) -> tuple[bool, ...] | None:
    """Whether mlp_layer_types gives experts to each layer; None without it."""
    types = keys.raw("mlp_layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != layers or not all(one in ("dense", "sparse") for one in types):
        raise keys.error(f"mlp_layer_types must list {layers} times dense or sparse, one for each layer")
    return tuple(one == "sparse" for one in types)


def listed_layers(keys: JsonKeys, key: str, layers: int) -> frozenset[int]:
    listed = keys.raw(key) or []
    if not isinstance(listed, list) or not all(type(one) is int and 0 <= one < layers for one in listed):
        raise keys.error(f"{key} must be a list of layers from 0 to {layers - 1}")
    return frozenset(listed)
