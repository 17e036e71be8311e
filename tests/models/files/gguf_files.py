"""GGUF files of the random models in `fixtures.py`, written by the `gguf` package."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import NormalDist
from typing import Any

import gguf
import numpy
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.models.files.gguf_more import (
    MORE,
    PAIRED,
    add_sections,
    file_kind,
    joined,
    mamba2_facts,
    more_facts,
    more_tensors,
    xielu_facts,
)

Kind = gguf.GGMLQuantizationType
NEWER = int.__new__(Kind, 42)  # Q2_0, which the package's table of types lacks
NEWER._name_, NEWER._value_ = "Q2_0", 42
Kind._member_map_["Q2_0"] = Kind._value2member_map_[42] = NEWER
gguf.GGML_QUANT_SIZES[NEWER] = (64, 18)
OTHER = int.__new__(Kind, 36)  # I2_S of bitnet.cpp
OTHER._name_, OTHER._value_ = "I2_S", 36
Kind._member_map_["I2_S"] = Kind._value2member_map_[36] = OTHER
gguf.GGML_QUANT_SIZES[OTHER] = (128, 32)
# Architectures that have another name than their model_type.
_ARCHITECTURES = {
    "mixtral": "LLAMA", "gemma3_text": "GEMMA3", "gemma3n_text": "GEMMA3N", "gemma4_text": "GEMMA4",
    "cohere": "COMMAND_R", "olmo3": "OLMO2", "granitemoehybrid": "GRANITE_HYBRID", "qwen3_5_text": "QWEN35",
    "hunyuan_v1_dense": "HUNYUAN_DENSE", "falcon_mamba": "MAMBA",
}  # fmt: skip
# Other names of sizes.
_SIZES = {
    "hidden_size": ("n_embd", "n_embed", "d_model"), "num_attention_heads": ("n_head", "n_heads"),
    "num_hidden_layers": ("n_layer", "n_layers"),
    "max_position_embeddings": ("n_positions", "seq_length", "max_seq_len"),
}  # fmt: skip
# q and k lie in pairs that turn; in others' files as published.
_PAIRED = ("llama", "mixtral", "granite", "smollm3", *PAIRED)
_FEED_FORWARD = ("mixtral", "lfm2_moe", "kimi_linear", "minimax_m2")  # the package's name for their experts
# A key of a config.json, and the writer's method for it.
_KEYS = {
    "conv_L_cache": "shortconv_l_cache", "norm_eps": "layer_norm_rms_eps",
    "num_dense_layers": "leading_dense_block_count",
    "mamba_d_conv": "ssm_conv_kernel", "mamba_d_state": "ssm_state_size", "mamba_n_groups": "ssm_group_count",
    "mamba_n_heads": "ssm_time_step_rank", "mamba_dt_rank": "ssm_time_step_rank", "conv_kernel": "ssm_conv_kernel",
    "state_size": "ssm_state_size", "time_step_rank": "ssm_time_step_rank",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
    "linear_conv_kernel_dim": "ssm_conv_kernel", "linear_key_head_dim": "ssm_state_size",
    "linear_num_key_heads": "ssm_group_count", "linear_num_value_heads": "ssm_time_step_rank",
    "full_attention_interval": "full_attention_interval",
    "num_local_experts": "expert_count", "num_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length", "top_k_experts": "expert_used_count",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
    "logit_scale": "logit_scale", "logits_scaling": "logit_scale", "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale", "attention_multiplier": "attention_scale",
    "use_parallel_residual": "parallel_residual", "rms_norm_eps": "layer_norm_rms_eps",
    "layer_norm_eps": "layer_norm_eps", "layer_norm_epsilon": "layer_norm_eps", "norm_epsilon": "layer_norm_eps",
    "rope_local_base_freq": "rope_freq_base_swa",
}  # fmt: skip
_WINDOWED = ("gpt_oss", "gemma2", "gemma3_text", "phi3", "cohere2", "olmo3", "exaone4")  # their files tell the window


def write_gguf(
    file: Path,
    folder: Path,
    kind: Kind = Kind.F32,
    only: str = "",
    metadata: Mapping[str, Any] | None = None,
    split: int = 0,
    blocks: Mapping[str, str] | None = None,
    scaled: bool = False,
) -> Path:
    """The model of a folder as a GGUF file, with matrices of a type; with `only`, those whose name has it, else F32.

    metadata: strings and whole numbers to add or replace. split: the most tensors of one of several files. blocks: for
    a part of a matrix's name a type, of which it has random blocks instead of the model's numbers; "": none. scaled:
    each of these has a tensor of scales, as llama.cpp writes NVFP4.
    """
    config = json.loads((folder / "config.json").read_text())
    config |= {ours: config[key] for ours, others in _SIZES.items() for key in others if key in config}
    if "rope_theta" in (rope := config.get("rope_parameters") or {}):  # as transformers spells them today
        config |= {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
        config |= {"rope_scaling": rope} if rope["rope_type"] != "default" else {}
    config.setdefault("num_hidden_layers", len(config.get("layers_block_type", ())))
    architecture = _architecture(file_kind(config))
    named = "bitnet-b1.58" if config["model_type"] == "bitnet" else gguf.MODEL_ARCH_NAMES[architecture]
    writer = gguf.GGUFWriter(file, named, split_max_tensors=split)
    _facts(writer, config)
    _tokenizer(writer, folder)
    for key, value in (metadata or {}).items():
        kind_of = gguf.GGUFValueType.STRING if isinstance(value, str) else gguf.GGUFValueType.UINT32
        writer.kv_data[0][key] = gguf.GGUFValue(value, kind_of)  # also over what is there
    tensors = load_file(folder / "model.safetensors")
    xielu_facts(writer, tensors)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"] + 1)
    for name, factors in _rotary_factors(config).items():
        writer.add_tensor(name, numpy.asarray(factors, dtype=numpy.float32))
    for name, tensor in _as_written(tensors, config):
        target = name if name.startswith("blk.") else names.get_name(name, try_suffixes=(".weight", ".bias"))
        type_ = next((type_ for part, type_ in (blocks or {}).items() if part in str(target)), "")
        if target is not None and type_ and tensor.ndim > 1:
            rows, inner = tensor.shape[:-1].numel(), tensor.shape[-1]
            raw = random_blocks(type_, rows, inner // gguf.GGML_QUANT_SIZES[Kind[type_]][0])
            raw = raw.reshape(*tensor.shape[:-1], -1)
            if type_ == "I2_S":  # its bytes end in the tensor's scale
                writer.add_tensor_info(target, raw.shape, numpy.dtype(numpy.uint8), raw.nbytes + 32, raw_dtype=OTHER)
                tail = numpy.array([0.03, *[0] * 7], numpy.float32).view(numpy.uint8)
                writer.tensors[-1][target].tensor = numpy.concatenate((raw.ravel(), tail))
            else:
                writer.add_tensor(target, raw, raw_dtype=Kind[type_])
            for end in ("scale", "input_scale") if scaled else ():
                scale = numpy.linspace(0.7, 1.9, len(tensor) if tensor.ndim > 2 else 1, dtype=numpy.float32)
                writer.add_tensor(target.replace("weight", end), scale)
        elif target is not None:
            _add(writer, target, _ordered(tensor, name, config), kind if only in target else Kind.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _architecture(kind: str) -> gguf.MODEL_ARCH:
    names = (_ARCHITECTURES.get(kind, ""), kind.upper(), kind.upper().replace("_", ""))
    known = gguf.MODEL_ARCH.__members__
    return MORE[kind] if kind in MORE else next(known[name] for name in names if name in known)


def _as_written(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors under names that the package maps, with what llama.cpp's files change: experts stacked, and more."""
    stacks: dict[str, dict[int, Tensor]] = {}
    for name, tensor in _changed(tensors, config):
        if expert := re.fullmatch(r"(.+)\.(?:mlp|block_sparse_moe|feed_forward)\.experts\.(\d+)\.(\w+)\.weight", name):
            part = "feed_forward" if config["model_type"] in _FEED_FORWARD else "mlp"
            at = expert[1].removeprefix("model.") if part == "feed_forward" else expert[1]
            stacks.setdefault(f"{at}.{part}.experts.{expert[3]}.weight", {})[int(expert[2])] = tensor
        elif stream := re.fullmatch(r"(model\.altup_(?:unembed_)?projections)\.(\d+)\.weight", name):
            stacks.setdefault(f"{stream[1]}.weight", {})[int(stream[2])] = tensor
        elif config["model_type"] in ("gemma3n_text", "gemma4_text"):
            yield _of_gemma4(name), tensor
        elif config["model_type"] == "gpt_oss" and ".experts." in name:
            yield from _gpt_oss_experts(name, tensor)
        elif config["model_type"] in ("gemma2", "gemma3_text") and name.endswith("norm.weight"):
            yield name, tensor.float() + 1
        elif re.search(r"c_(attn|proj|fc)\.weight", name) and config["model_type"] == "gpt2":
            yield name, tensor.t()
        elif name.endswith("sub_norm.weight"):
            yield re.sub(r"model\.layers\.(\d+)\.\w+", r"blk.\1", name), tensor
        elif "query_key_value" in name:
            heads = config["num_attention_heads"]
            yield name, tensor.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)
        else:
            yield f"{name}.weight" if name.endswith("sinks") else name, tensor.squeeze(0)
    for name, each in stacks.items():
        yield name, torch.stack([each[i] for i in range(len(each))])


def _changed(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors with the changes of one architecture."""
    for name, tensor in joined(tensors, config).items():
        found = more_tensors(name, tensor, config)
        yield from _of_hybrid({name: tensor}, config) if found is None else found


def _of_hybrid(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of layers with a state as llama.cpp's files have them: parts in another order, A = -exp(A_log)."""
    kind = config["model_type"]
    for name, tensor in tensors.items():
        at, _, part = name.rpartition(".linear_attn.")
        if kind == "kimi_linear" and (found := _of_kimi(name, tensor, config)):
            yield from found
        elif name.endswith(("A_log", ".D")):
            bare = -tensor.exp() if name.endswith("A_log") else tensor
            single = "mamba" in name and kind != "jamba"
            yield name, bare[:, None] if single else _in_turn(bare, 0, 1, config)
        elif name.endswith("mamba.norm.weight"):
            yield name, tensor.view(config["mamba_n_groups"], -1)
        elif name.endswith("dt_bias"):
            yield name.replace("dt_bias", "dt_proj.bias"), _in_turn(tensor, 0, 1, config)
        elif name.endswith("expert_bias"):
            yield f"{name}.bias", tensor
        elif kind == "granitemoehybrid" and name.endswith("input_linear.weight"):
            yield from _granite_gates(name, tensor, config)
        elif kind == "granitemoehybrid" and not config["num_local_experts"] and name.endswith("output_linear.weight"):
            yield f"blk.{name.split('.')[2]}.ffn_down.weight", tensor
        elif at:
            yield from _of_delta(at, part, tensor, config)
        elif kind in ("qwen3_next", "qwen3_5_text") and name.endswith("norm.weight"):
            yield name, tensor.float() + 1
        else:
            yield name, tensor.squeeze(1) if "conv" in name and name.endswith("weight") else tensor


def _of_kimi(name: str, tensor: Tensor, config: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """Kimi-Linear's tensors that files hold in another form: the two halves of kv_b apart, k's turned."""
    layer = name.split(".")[2] if "layers." in name else ""
    if name.endswith("_conv1d.weight"):
        return [(name, tensor.reshape(1, len(tensor), 1, -1))]
    if re.search(r"block_sparse_moe\.\w+_proj", name):
        return [(name.replace("block_sparse_moe", "mlp"), tensor)]
    if name.endswith("e_score_correction_bias"):
        return [(f"blk.{layer}.exp_probs_b.bias", tensor)]
    if name.endswith("kv_b_proj.weight"):
        both = tensor.unflatten(0, (config["num_attention_heads"], -1))
        if config.get("_whole_kv_b"):
            return [(f"blk.{layer}.attn_kv_b.weight", tensor)]
        k, v = both.split([config["qk_nope_head_dim"], config["v_head_dim"]], 1)
        return [(f"blk.{layer}.attn_k_b.weight", k.transpose(1, 2)), (f"blk.{layer}.attn_v_b.weight", v)]
    return []


def _of_delta(at: str, part: str, tensor: Tensor, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    keys, size = config["linear_num_key_heads"], config["linear_value_head_dim"]
    queries, name = 2 * keys * config["linear_key_head_dim"], f"{at}.linear_attn.{part}"
    layer = name.split(".")[2]
    if part == "in_proj_qkvz.weight":
        values = config["linear_num_value_heads"] // keys * size
        each = tensor.unflatten(0, (keys, -1)).split([queries // 2 // keys] * 2 + [values] * 2, 1)
        parts = [one.flatten(0, 1) for one in each]
        yield f"blk.{layer}.attn_qkv.weight", torch.cat(parts[:3])
        yield f"blk.{layer}.attn_gate.weight", parts[3]
    elif part in ("conv1d.weight", "in_proj_qkv.weight"):
        rows = tensor.squeeze(1) if part.startswith("conv") else tensor
        yield name, torch.cat((rows[:queries], _in_turn(rows[queries:], 0, size, config)))
    elif part in ("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight"):
        yield name, _in_turn(tensor, 0, size if "_z" in part else 1, config)
    else:
        yield name, _in_turn(tensor, 1, size, config) if part == "out_proj.weight" else tensor


def _in_turn(tensor: Tensor, dim: int, size: int, config: Mapping[str, Any]) -> Tensor:
    """The value heads of all key heads in turn, in files of Qwen3.5."""
    if config["model_type"] != "qwen3_5_text":
        return tensor
    keys = config["linear_num_key_heads"]
    return tensor.unflatten(dim, (keys, -1, size)).transpose(dim, dim + 1).flatten(dim, dim + 2)


def _granite_gates(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Gates and values apart; without experts the shared MLP is the only one."""
    kind = "_exps" if "shared_mlp" not in name else "_shexp" if config["num_local_experts"] else ""
    for part, rows in zip(("gate", "up"), tensor.chunk(2, -2), strict=True):
        yield f"blk.{name.split('.')[2]}.ffn_{part}{kind}.weight", rows


def _of_gemma4(name: str) -> str:
    """The name that the package maps, or that of a file, for scalars and vectors beside matrices."""
    layer = name.split(".")[2]
    for theirs, ours in (("router.scale", "ffn_gate_inp.scale"), ("router.per_expert_scale", "ffn_down_exps.scale")):
        if name.endswith(theirs):
            return f"blk.{layer}.{ours}"
    return name if name.endswith(".weight") else f"{name}.weight"


def _gpt_oss_experts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Gates and values apart, and weights as [experts, out, in]."""
    at, part = name.removesuffix("_bias").rsplit(".", 1)
    kind = "bias" if name.endswith("_bias") else "weight"
    rows = tensor if kind == "bias" else tensor.transpose(1, 2)
    if part == "down_proj":
        yield f"{at}.down_proj.{kind}", rows
    else:
        yield f"{at}.gate_proj.{kind}", rows[:, ::2]
        yield f"{at}.up_proj.{kind}", rows[:, 1::2]


_HALVES = {  # where a block has float16 numbers
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2),
    "TQ1_0": (52,), "TQ2_0": (64,),
}  # fmt: skip


def random_blocks(kind: str, rows: int, count: int, seed: int = 7) -> Any:
    """Random valid blocks [rows, count, bytes]: any codes and integers, with scales of the size of weights."""
    chance = numpy.random.default_rng(seed)
    raw = chance.integers(0, 256, (rows, count, gguf.GGML_QUANT_SIZES[Kind[kind]][1]), dtype=numpy.uint8)
    if kind == "MXFP4":
        raw[..., 0] = chance.integers(104, 144, raw.shape[:2], dtype=numpy.uint8)
        return raw
    if kind == "NVFP4":  # scales without a sign
        raw[..., :4] &= 0x3F
        return raw
    if kind == "Q8_0":
        raw[raw == 0x80] = 0
    if kind == "IQ1_M":  # four bits of its scale in each of the last four words, here those of 0.0156 to 0.031
        raw[..., 49:56:2] &= 0x0F
        raw[..., 55] |= 0x20
        raw[..., 53] |= 0x40
        return raw
    for at in _HALVES.get(kind, (0,)):
        halves = (3e-4 * chance.normal(size=raw.shape[:2])).astype(numpy.float16)
        if kind.startswith("IQ"):  # an eighth of them is a float16 number too
            halves = halves + numpy.float16(0.01)
        raw[..., at : at + 2] = halves.view(numpy.uint8).reshape(rows, count, 2)
    return raw


def _add(writer: gguf.GGUFWriter, name: str, tensor: Tensor, kind: Kind) -> None:
    numbers = tensor.float().numpy()
    if numbers.ndim == 1 or numbers.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
        kind = Kind.F32
    writer.add_tensor(name, numpy.ascontiguousarray(gguf.quants.quantize(numbers, kind)), raw_dtype=kind)


def _ordered(tensor: Tensor, name: str, config: Mapping[str, Any]) -> Tensor:
    """q and k with neighbouring rows of a head in a pair, as files of llama have them."""
    if file_kind(config) not in _PAIRED or not any(part in name for part in ("q_proj", "k_proj")):
        return tensor
    heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
    return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def _rotary_factors(config: Mapping[str, Any]) -> dict[str, Any]:
    scaling = config.get("rope_scaling") or {}
    if config["model_type"] == "gemma4_text":
        pairs = config["global_head_dim"] // 2
        turn = int(pairs * config["rope_parameters"]["full_attention"]["partial_rotary_factor"])
        return {"rope_freqs.weight": [1.0] * turn + [1e30] * (pairs - turn)}
    if scaling.get("type") == "longrope":
        return {f"rope_factors_{at}.weight": scaling[f"{at}_factor"] for at in ("long", "short")}
    if scaling.get("rope_type") != "llama3":
        return {}
    size = config["head_dim"]
    turns = scaling["original_max_position_embeddings"] / (
        2 * numpy.pi * config["rope_theta"] ** (numpy.arange(0, size, 2) / size)
    )
    smooth = numpy.clip((turns - scaling["low_freq_factor"]) / (scaling["high_freq_factor"] - 1), 0, 1)
    return {"rope_freqs.weight": 1 / ((1 - smooth) / scaling["factor"] + smooth)}


def _facts(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    heads, kind = config.get("num_attention_heads", 0), config["model_type"]
    if kind == "mamba2":
        mamba2_facts(writer, config)
        return
    if not heads:
        _mamba_facts(writer, config)
        return
    size = config.get("head_dim") or config["hidden_size"] // heads
    share = config.get("partial_rotary_factor", config.get("rotary_pct", 1.0))
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config.get("intermediate_size", 4 * config["hidden_size"]))
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads", heads))
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_freq_base(config.get("rope_theta", config.get("rotary_emb_base", 10000.0)))
    writer.add_rope_dimension_count(int(size * share))
    known = {method: config[key] for key, method in _KEYS.items() if config.get(key) not in (None, "auto")}
    for method, value in known.items():
        getattr(writer, f"add_{method}")(value)
    if kind == "gpt_oss":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if kind in _WINDOWED:
        writer.add_sliding_window(config.get("sliding_window") or 0)
    if kind in ("gemma3_text", "olmo3", "exaone4"):
        every = config.get("sliding_window_pattern", 4)
        types = config.get("layer_types") or [
            "sliding" * ((i + 1) % every != 0) for i in range(config["num_hidden_layers"])
        ]
        writer.add_sliding_window_pattern([one.startswith("sliding") for one in types])
    if kind == "gemma3n_text":
        _gemma3n_facts(writer, config)
    if kind == "kimi_linear":
        _kimi_facts(writer, config)
    if kind == "gemma4_text":
        _gemma4_facts(writer, config)
    _hybrid_facts(writer, config)
    more_facts(writer, config)
    _scaling(writer, config, config.get("rope_scaling") or {})


def _kimi_facts(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    rules, rank, rope = config["linear_attn_config"], config["kv_lora_rank"], config["qk_rope_head_dim"]
    for key in ("head_count_kv", "key_length"):
        del writer.kv_data[0][f"kimi-linear.attention.{key}"]
    writer.add_head_count_kv([int(i + 1 in rules["full_attn_layers"]) for i in range(config["num_hidden_layers"])])
    writer.add_ssm_conv_kernel(rules["short_conv_kernel_size"])
    writer.add_kda_head_dim(rules["head_dim"])
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + rope)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rope)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_expert_used_count(config["num_experts_per_token"])
    writer.add_expert_shared_count(config["num_shared_experts"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])


def _gemma3n_facts(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    shares = config["activation_sparsity_pattern"]
    writer.add_activation_sparsity_scale([NormalDist().inv_cdf(one) if one else -math.inf for one in shares])
    writer.add_altup_active_idx(0)
    writer.add_altup_num_inputs(config["altup_num_inputs"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.kv_data[0]["gemma3n.attention.shared_kv_layers"] = gguf.GGUFValue(  # a float in published files
        float(config["num_kv_shared_layers"]), gguf.GGUFValueType.FLOAT32
    )
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern([one == "sliding_attention" for one in config["layer_types"]])


def _gemma4_facts(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """Sizes by layer, in place of those that most architectures have once."""
    facts, size, shared = writer.kv_data[0], config["global_head_dim"], config["num_kv_shared_layers"]
    slides = [one == "sliding_attention" for one in config["layer_types"]]
    full_heads, width = config["num_global_key_value_heads"], config["intermediate_size"]
    doubled = config["use_double_wide_mlp"]
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base"):
        del facts[f"gemma4.{key}"]
    writer.add_rope_freq_base(config["rope_parameters"]["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        add(size)
    for add in (writer.add_key_length_swa, writer.add_value_length_swa, writer.add_rope_dimension_count_swa):
        add(config["head_dim"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(slides)
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    if doubled:
        del facts["gemma4.feed_forward_length"]
        writer.add_feed_forward_length([width * (1 + (i >= len(slides) - shared)) for i in range(len(slides))])
    if full_heads:
        del facts["gemma4.attention.head_count_kv"]
        writer.add_head_count_kv([config["num_key_value_heads"] if one else full_heads for one in slides])


def _mamba_facts(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_context_length(2**20)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
    writer.add_ssm_inner_size(config["intermediate_size"])
    writer.add_ssm_dt_b_c_rms(config["model_type"] == "falcon_mamba")
    for key in ("conv_kernel", "state_size", "time_step_rank"):
        getattr(writer, f"add_{_KEYS[key]}")(config[key])


def _hybrid_facts(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """What the files of hybrids say of their layers."""
    kind, types, facts = config["model_type"], config.get("layer_types"), writer.kv_data[0]
    if kind in ("lfm2", "lfm2_moe", "granitemoehybrid"):
        full, layers = config.get("full_attn_idxs"), range(config["num_hidden_layers"])
        attends = [i in full if full is not None else types[i] in ("attention", "full_attention") for i in layers]
        del facts[f"{writer.arch}.attention.head_count_kv"]
        writer.add_head_count_kv([config["num_key_value_heads"] * one for one in attends])
    if kind == "jamba":
        period, offset = config["attn_layer_period"], config["attn_layer_offset"]
        del facts["jamba.attention.head_count_kv"]
        attends = [i % period == offset for i in range(config["num_hidden_layers"])]
        writer.add_head_count_kv([config["num_key_value_heads"] * one for one in attends])
        writer.add_ssm_inner_size(config["mamba_expand"] * config["hidden_size"])
    if kind == "lfm2":
        del facts["lfm2.feed_forward_length"]
        writer.add_feed_forward_length(config["block_ff_dim"])
    if kind == "lfm2_moe":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if kind == "granitemoehybrid":
        writer.add_ssm_inner_size(config["mamba_expand"] * config["hidden_size"])
        writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")
    if kind in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"):
        writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    if kind == "qwen3_5_text":
        add_sections(writer, config)


def _scaling(writer: gguf.GGUFWriter, config: Mapping[str, Any], scaling: Mapping[str, Any]) -> None:
    kind = scaling.get("type", scaling.get("rope_type"))
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(scaling["factor"])
        if "original_max_position_embeddings" in scaling:
            writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        if "beta_fast" in scaling:
            writer.add_rope_scaling_yarn_beta_fast(scaling["beta_fast"])
            writer.add_rope_scaling_yarn_beta_slow(scaling["beta_slow"])
        if "attention_factor" in scaling and config["model_type"] != "deepseek_v2":  # whose files have none
            writer.add_rope_scaling_yarn_attn_factor(scaling["attention_factor"])
    if kind == "longrope":
        original = config["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        factor = config["max_position_embeddings"] / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(factor) / math.log(original)))


def _tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    names = {at: token for token, at in tokenizer["model"]["vocab"].items()}
    control = {one["id"] for one in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([names[at] for at in range(len(names))])
    kinds = gguf.TokenType
    writer.add_token_types([int(kinds.CONTROL if at in control else kinds.NORMAL) for at in range(len(names))])
    writer.add_token_merges([" ".join(one) for one in tokenizer["model"]["merges"]])
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    writer.add_bos_token_id(vocab[settings["bos_token"]])
    writer.add_eos_token_id(vocab[settings["eos_token"]])
    writer.add_chat_template(settings["chat_template"])
