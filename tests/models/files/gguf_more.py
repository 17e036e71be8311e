"""What GGUF files of more architectures have, by the conversion that llama.cpp has for each: facts and tensors.

`gguf_files.py` writes them, with the facts and the changes that most architectures share.
"""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import gguf
import torch
from torch import Tensor

A = gguf.MODEL_ARCH
# By model_type, or by `_arch` of a config.json: the same model under another architecture's name.
MORE = {
    "deepseek_v2": A.DEEPSEEK2, "deepseek_v3": A.DEEPSEEK2, "glm4_moe_lite": A.DEEPSEEK2, "youtu": A.DEEPSEEK2,
    "glm4_moe": A.GLM4_MOE, "bailingmoe2": A.BAILINGMOE2, "dots1": A.DOTS1, "exaone_moe": A.EXAONE_MOE,
    "afmoe": A.AFMOE, "minimax_m2": A.MINIMAXM2, "ernie4_5_moe": A.ERNIE4_5_MOE, "hunyuan_v1_moe": A.HUNYUAN_MOE,
    "internlm2": A.INTERNLM2, "xverse": A.XVERSE, "exaone": A.EXAONE, "arcee": A.ARCEE, "ministral3": A.MISTRAL3,
    "mistral3": A.MISTRAL3, "minicpm": A.MINICPM, "qwen2vl": A.QWEN2VL, "qwen3vl": A.QWEN3VL,
    "qwen3vlmoe": A.QWEN3VLMOE, "gemma": A.GEMMA, "seed_oss": A.SEED_OSS, "glm": A.CHATGLM, "olmo": A.OLMO,
    "olmoe": A.OLMOE, "granitemoe": A.GRANITE_MOE, "granitemoeshared": A.GRANITE_MOE,
    "stablelm": A.STABLELM, "nemotron": A.NEMOTRON, "jais2": A.JAIS2, "apertus": A.APERTUS, "mamba2": A.MAMBA2,
    "nemotron_h": A.NEMOTRON_H, "nemotron_h_moe": A.NEMOTRON_H_MOE, "falcon_h1": A.FALCON_H1,
    "qwen3_5_moe_text": A.QWEN35MOE,
}  # fmt: skip
# Their files have q and k in pairs that turn.
PAIRED = ("internlm2", "xverse", "arcee", "ministral3", "mistral3", "olmo", "granitemoe", "granitemoeshared", "minicpm")
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu")
_PLUS = ("gemma", "nemotron", "qwen3_5_moe_text")  # norms multiply by 1 + weight
_STATES = ("mamba2", "nemotron_h", "nemotron_h_moe")
# A key of a config.json, and the writer's method for it.
_KEYS = {
    "n_routed_experts": "expert_count", "moe_num_experts": "expert_count", "n_shared_experts": "expert_shared_count",
    "num_shared_experts": "expert_shared_count", "moe_num_shared_experts": "expert_shared_count",
    "num_shared_expert": "expert_shared_count", "moe_k": "expert_used_count", "moe_topk": "expert_used_count",
    "n_group": "expert_group_count", "topk_group": "expert_group_used_count",
    "routed_scaling_factor": "expert_weights_scale", "route_scale": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm", "route_norm": "expert_weights_norm",
    "first_k_dense_replace": "leading_dense_block_count", "num_dense_layers": "leading_dense_block_count",
    "moe_layer_start_index": "leading_dense_block_count", "moe_layer_interval": "interleave_moe_layer_step",
    "sliding_window": "sliding_window",
    "q_lora_rank": "q_lora_rank", "kv_lora_rank": "kv_lora_rank", "v_head_dim": "value_length_mla",
    "scale_emb": "embedding_scale", "norm_eps": "layer_norm_eps", "clip_qkv": "clamp_kqv",
    "ssm_state_size": "ssm_state_size", "num_heads": "ssm_time_step_rank", "mamba_num_heads": "ssm_time_step_rank",
    "n_groups": "ssm_group_count", "shared_intermediate_size": "expert_shared_feed_forward_length",
    "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}  # fmt: skip
_SCORED = ("deepseek_v3", "glm4_moe_lite", "glm4_moe", "bailingmoe2", "dots1", "exaone_moe", "afmoe", "minimax_m2")


def file_kind(config: Mapping[str, Any]) -> str:
    return str(config.get("_arch", config["model_type"]))


def xielu_facts(writer: gguf.GGUFWriter, tensors: Mapping[str, Tensor]) -> None:
    """The numbers of Apertus' activation, layer by layer."""
    for part in ("alpha_p", "alpha_n", "beta", "eps"):
        each = [float(one.float()) for name, one in sorted(tensors.items()) if name.endswith(f"act_fn.{part}")]
        if each:
            getattr(writer, f"add_xielu_{part}")(each)


def add_sections(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """The pairs of a head that turn with each axis of a position."""
    rope = config.get("rope_parameters") or {}
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    pairs = int(size * rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1))) // 2
    fourth = pairs // 4
    writer.add_rope_dimension_sections([*rope.get("mrope_section", (pairs - 2 * fourth, fourth, fourth)), 0])


def more_facts(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """The facts beside those of most architectures."""
    kind, following = file_kind(config), config.get("_next", 0)
    if following:
        _replace(writer, "block_count", writer.add_block_count, config["num_hidden_layers"] + following)
        writer.add_nextn_predict_layers(following)
    if kind not in MORE:
        return
    for key, method in _KEYS.items():
        if config.get(key) is not None and not (key == "sliding_window" and kind not in ("afmoe", "exaone_moe")):
            getattr(writer, f"add_{method}")(config[key])
    if kind in _SCORED:
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if kind in LATENT:
        _latent_facts(writer, config)
    if kind in ("qwen2vl", "qwen3vl", "qwen3vlmoe", "qwen3_5_moe_text"):
        add_sections(writer, config)
    if kind in ("qwen3vl", "qwen3vlmoe"):
        writer.add_num_deepstack_layers(config.get("_deep", 1))
    if kind in ("minimax_m2", "hunyuan_v1_moe"):
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if kind in ("olmo", "jais2"):
        writer.add_layer_norm_eps(config.get("layer_norm_eps", 1e-5))
    if kind in _OWN:
        _OWN[kind](writer, config)


def _minimax_facts(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    _replace(writer, "rope.dimension_count", writer.add_rope_dimension_count, config["rotary_dim"])


def _exaone_facts(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_sliding_window_pattern([one == "sliding_attention" for one in config["layer_types"]] + [False])


def _ministral_facts(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_rope_scaling_yarn_log_mul(config["rope_scaling"]["mscale_all_dim"])
    writer.add_attn_temperature_scale(config["rope_scaling"]["llama_4_scaling_beta"])


def _minicpm_facts(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_residual_scale(config["scale_depth"] / config["num_hidden_layers"] ** 0.5)
    writer.add_logit_scale(config["hidden_size"] / config["dim_model_base"])


def _ernie_facts(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """A width of shared experts that no model has."""
    writer.add_expert_shared_feed_forward_length(config["intermediate_size"] // config["num_key_value_heads"])


def _falcon_facts(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.kv_data[0].pop("falcon-h1.embedding_scale")  # its factors are in the weights
    writer.add_ssm_inner_size(config["mamba_d_ssm"])


def _minitron_facts(writer: gguf.GGUFWriter, _: Mapping[str, Any]) -> None:
    writer.kv_data[0].pop("nemotron.attention.layer_norm_rms_epsilon")


def _replace(writer: gguf.GGUFWriter, key: str, add: Any, value: Any) -> None:
    writer.kv_data[0].pop(f"{writer.arch}.{key}", None)
    add(value)


def _latent_facts(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """Attention over the latent has one KV head; the first files have the heads that come of it."""
    rank, rope, nope = config["kv_lora_rank"], config["qk_rope_head_dim"], config["qk_nope_head_dim"]
    value, facts = config["v_head_dim"], writer.kv_data[0]
    whole = config.get("_whole_kv_b")
    kv, key, length = (config["num_attention_heads"], nope + rope, value) if whole else (1, rank + rope, rank)
    _replace(writer, "attention.head_count_kv", writer.add_head_count_kv, kv)
    _replace(writer, "attention.key_length", writer.add_key_length, key)
    _replace(writer, "attention.value_length", writer.add_value_length, length)
    _replace(writer, "rope.dimension_count", writer.add_rope_dimension_count, rope)
    if whole:
        facts.pop("deepseek2.attention.value_length_mla")
    else:
        writer.add_key_length_mla(nope + rope)
    if "mscale_all_dim" in (config.get("rope_scaling") or {}):
        writer.add_rope_scaling_yarn_log_mul(0.1 * config["rope_scaling"]["mscale_all_dim"])
    for key in ("expert_group_count", "expert_group_used_count", "expert_gating_func"):
        if config.get("_first"):  # files from before these keys
            facts.pop(f"deepseek2.{key}", None)


def mamba2_facts(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_context_length(2**20)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_group_count(config["n_groups"])
    writer.add_ssm_inner_size(config["num_heads"] * config["head_dim"])
    writer.add_ssm_state_size(config["state_size"])
    writer.add_ssm_time_step_rank(config["num_heads"])


def _nemotron_facts(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """Nemotron-H's lists by layer."""
    listed = config.get("layers_block_type") or [*config["hybrid_override_pattern"]]
    letters = [{"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}.get(one, one) for one in listed]
    width = config.get("moe_intermediate_size") if "E" in letters else config["intermediate_size"]
    heads = [config["num_key_value_heads"] * (one == "*") for one in letters]
    _replace(writer, "attention.head_count_kv", writer.add_head_count_kv, heads)
    widths = [width if one in "-E" else 0 for one in letters]
    _replace(writer, "feed_forward_length", writer.add_feed_forward_length, widths)
    writer.kv_data[0].pop(f"{writer.arch}.attention.layer_norm_epsilon", None)
    _replace(writer, "attention.layer_norm_rms_epsilon", writer.add_layer_norm_rms_eps, config["layer_norm_epsilon"])
    writer.add_ssm_inner_size(config["mamba_num_heads"] * config["mamba_head_dim"])


_OWN = {
    "ernie4_5_moe": _ernie_facts, "exaone_moe": _exaone_facts, "falcon_h1": _falcon_facts,
    "minicpm": _minicpm_facts, "minimax_m2": _minimax_facts, "ministral3": _ministral_facts,
    "nemotron": _minitron_facts, "nemotron_h": _nemotron_facts, "nemotron_h_moe": _nemotron_facts,
}  # fmt: skip


def more_tensors(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]] | None:
    """The tensors of a file that come of one of a folder, where that is not itself; None for the usual ones."""
    kind = file_kind(config)
    if kind not in MORE:
        return None
    layer = next((part for part in name.split(".") if part.isdecimal()), "")
    if kind in LATENT and name.endswith("kv_b_proj.weight"):
        return iter(_halves(layer, tensor, config))
    if kind == "apertus" and ".act_fn." in name:
        return iter([])  # numbers of the metadata
    if name.endswith("e_score_correction_bias"):
        return iter([(f"blk.{layer}.exp_probs_b.bias", tensor)])
    if kind in _PLUS and name.endswith("norm.weight") and "linear_attn" not in name:
        return iter([(name, tensor.float() + 1)])
    if kind in _STATES:
        return _states(name, tensor, config)
    if kind == "falcon_h1":
        return iter([(_flat(name), _multiplied(name, tensor, config))])
    if kind in ("granitemoe", "granitemoeshared") and name.endswith("input_linear.weight"):
        return _apart(layer, "shexp" if "shared_mlp" in name else "exps", tensor)
    if name.endswith("experts.gate_up_proj"):
        both = iter([(f"blk.{layer}.ffn_gate_up_exps.weight", tensor)])
        return both if config.get("_both") else _apart(layer, "exps", tensor)
    if name.endswith("experts.down_proj"):
        return iter([(f"blk.{layer}.ffn_down_exps.weight", tensor)])
    return None


def joined(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """The tensors of a folder, those of a layer behind the last as of a layer; q, k and v in one where files are so."""
    last = config["num_hidden_layers"]
    found = {_of_next(name, last): tensor for name, tensor in tensors.items()}
    if file_kind(config) != "bailingmoe2" and "_fused" not in config:
        return found
    for i, kind in product(range(last + config.get("_next", 0)), ("weight", "bias")):
        names = [f"model.layers.{i}.self_attn.{part}_proj.{kind}" for part in "qkv"]
        if names[0] in found:
            found[f"blk.{i}.attn_qkv.{kind}"] = torch.cat([found.pop(name) for name in names])
    if (norm := f"blk.{last}.nextn.shared_head_norm.weight") in found:
        found[f"blk.{last}.layer_output_norm.weight"] = found.pop(norm)
    return found


_NEXT = {
    "eh_proj": "eh_proj", "fc": "eh_proj", "enorm": "enorm", "pre_fc_norm_embedding": "enorm", "hnorm": "hnorm",
    "pre_fc_norm_hidden": "hnorm", "norm": "shared_head_norm", "shared_head.norm": "shared_head_norm",
    "embed_tokens": "embed_tokens", "shared_head.head": "shared_head_head",
}  # fmt: skip


def _of_next(name: str, last: int) -> str:
    """The name of a tensor of the layer that predicts further tokens, by the number of the layers before it."""
    bare = name.removeprefix("mtp.").removeprefix(f"model.layers.{last}.")
    if bare == name:
        return name
    part = _NEXT.get(bare.removesuffix(".weight"))
    return f"blk.{last}.nextn.{part}.weight" if part else f"model.layers.{last}.{bare.removeprefix('layers.0.')}"


def _halves(layer: str, tensor: Tensor, config: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    if config.get("_whole_kv_b"):
        return [(f"blk.{layer}.attn_kv_b.weight", tensor)]
    both = tensor.unflatten(0, (config["num_attention_heads"], -1))
    k, v = both.split([config["qk_nope_head_dim"], config["v_head_dim"]], 1)
    return [(f"blk.{layer}.attn_k_b.weight", k.transpose(1, 2)), (f"blk.{layer}.attn_v_b.weight", v)]


def _states(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    at = name.replace("model.layers.", "backbone.layers.") if ".mixer." in name else name
    if ".mixer.experts." in name:
        return iter([(name.replace("backbone.", "model.").replace(".mixer.", ".mlp."), tensor)])
    if name.endswith((".A_log", ".D")):
        return iter([(at, (-tensor.exp() if name.endswith("A_log") else tensor)[:, None])])
    if name.endswith("mixer.norm.weight"):
        return iter([(at, tensor.view(config["n_groups"], -1))])
    return iter([(_flat(at), tensor.squeeze(1) if "conv1d.weight" in name else tensor)])


def _flat(name: str) -> str:
    return name.replace("dt_bias", "dt_proj.bias")


def _multiplied(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Falcon-H1's weights times its constant factors."""
    if name.endswith((".A_log", ".D")):
        return (-tensor.exp() if name.endswith("A_log") else tensor)[:, None]
    if name.endswith("mamba.norm.weight"):
        return tensor.view(config["mamba_n_groups"], -1)
    attention, gates = config["attention_in_multiplier"], config["mlp_multipliers"]
    factors = {
        "down_proj": gates[1], "gate_proj": gates[0], "k_proj": config["key_multiplier"] * attention,
        "q_proj": attention, "v_proj": attention, "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"], "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }  # fmt: skip
    if ".in_proj" in name:
        inner, shared = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        rows = [inner, inner, shared, shared, config["mamba_n_heads"]]
        each = [config["ssm_in_multiplier"] * one for one in config["ssm_multipliers"]]
        return tensor * torch.repeat_interleave(torch.tensor(each), torch.tensor(rows))[:, None]
    found = tensor.squeeze(1) if "conv1d.weight" in name else tensor
    return found * next((one for part, one in factors.items() if f".{part}." in f".{name}"), 1.0)


def _apart(layer: str, kind: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Gates and values apart."""
    halves = zip(("gate", "up"), tensor.chunk(2, -2), strict=True)
    return iter([(f"blk.{layer}.ffn_{part}_{kind}.weight", rows) for part, rows in halves])
