"""DeepSeek's mixtures: after some dense layers, routed experts in groups, and shared experts."""

import re
from dataclasses import dataclass
from typing import Literal

from tokenwright.checkpoints.families.family import NextNames, TensorSource, in_layers, mlp_names
from tokenwright.checkpoints.families.mixtures import MOST_EXPERTS, check_same, expert_width, typed_layers
from tokenwright.checkpoints.files.json_keys import JsonKeys
from tokenwright.config import Mixture

MOST_GROUPS = 64  # of experts; as in backends/native/cpp/step.h
ROUTED_NAMES: dict[str, TensorSource] = {
    **in_layers("mlp.router=mlp.gate"),
    **mlp_names("mlp.experts.{e}", "mlp.experts.{e}"),
    **mlp_names("mlp.shared", "mlp.shared_experts"),
    "layers.{i}.mlp.correction": TensorSource("layers.{i}.mlp.gate.e_score_correction_bias", wide=True),
}
# EXAONE stores the biases of the choice outside the router.
ROUTED_RENAMES = (
    (re.compile(r"(layers\.\d+\.mlp)\.(?:gate\.)?e_score_correction_bias"), r"\1.gate.e_score_correction_bias.weight"),
)
ROUTED_NEXT = NextNames("eh_proj", "enorm", "hnorm", "shared_head.norm")


@dataclass(frozen=True, slots=True)
class Routed:
    """The differences between architectures; the numbers are defaults of absent keys."""

    scores: Literal["softmax", "sigmoid"]
    methods: tuple[str, ...]  # ways of choosing experts; the first is the default
    dense: int  # how many first layers have no experts
    factor: float  # multiplies the weights of a row's experts
    renormalise: bool
    groups: tuple[int, int] = (1, 1)  # the number of groups, and from how many a row chooses
    experts: str = "n_routed_experts"  # the key of their number; absent: none
    shared: str = "n_shared_experts"
    shared_count: int | None = None
    gated: bool = True
    factor_key: str = "routed_scaling_factor"

    def __call__(self, keys: JsonKeys, layers: int) -> Mixture | None:
        return read_routed(keys, self, layers)


def read_routed(keys: JsonKeys, like: Routed, layers: int) -> Mixture | None:
    """The experts of the layers that have some; None if no layer has."""
    mixed = _layers(keys, like, layers)
    keys.only("scoring_func", like.scores, why="other scores of experts in this architecture")
    method = keys.text("topk_method", like.methods[0])
    if method not in like.methods:
        raise keys.error(
            f"topk_method is {method!r}; Tokenwright has {' and '.join(like.methods)} in this architecture"
        )
    groups = keys.whole("n_group", like.groups[0], most=MOST_GROUPS)
    top = keys.whole("topk_group", min(like.groups[1], groups), most=groups)
    normalised = keys.flag("norm_topk_prob", like.renormalise)
    factor = keys.number(like.factor_key, like.factor)
    if keys.raw(like.experts) is None or not any(mixed):
        keys.skip(like.experts, like.shared, "num_experts_per_tok", "moe_intermediate_size")
        return None
    experts = keys.whole(like.experts, most=MOST_EXPERTS)
    check_same(keys, "num_local_experts", like.experts, experts)
    groups, top = (1, 1) if method == "greedy" else (groups, top)
    biased = like.methods[0] == "noaux_tc"
    chosen = keys.whole("num_experts_per_tok", most=_offered(keys, experts, groups, top))
    width = expert_width(keys, "moe_intermediate_size", 0, like.gated)
    either = like.scores == "softmax"  # V2's own code normalises (if several are chosen) or scales
    renormalise = normalised and not (either and chosen == 1)
    return Mixture(
        experts,
        chosen,
        width,
        mixed,
        like.scores,
        renormalise,
        groups=groups,
        chosen_groups=top,
        group_best=2 if biased else 1,
        corrected=biased,
        factor=1.0 if renormalise and either else factor,
        shared_width=width * (0 if keys.is_null(like.shared) else keys.whole(like.shared, like.shared_count, least=0)),
    )


def _layers(keys: JsonKeys, like: Routed, layers: int) -> tuple[bool, ...]:
    dense, step = keys.whole("first_k_dense_replace", like.dense, least=0), keys.whole("moe_layer_freq", 1)
    return typed_layers(keys, layers) or tuple(i >= dense and i % step == 0 for i in range(layers))


def _offered(keys: JsonKeys, experts: int, groups: int, top: int) -> int:
    if experts % groups or (groups > 1 and experts < 2 * groups):
        raise keys.error(
            f"{experts} experts cannot be divided into {groups} groups (n_group) of two or more; correct config.json"
        )
    return experts // groups * top
