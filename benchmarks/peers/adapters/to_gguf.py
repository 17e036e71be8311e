"""Convert a checkpoint of `bench/shapes.py` to a GGUF file for llama.cpp: run it in that peer's environment.

    python to_gguf.py MODEL bf16|q8_0|q4_0|q4_k_m|q5_k_m|q6_k TARGET

Matrices stay in bfloat16, vectors become float32; the other formats are llama.cpp's own quantisation of that file, with
its defaults (which give a tied head more bits).
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy

ARCHITECTURES = {
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Qwen2ForCausalLM": gguf.MODEL_ARCH.QWEN2,
    "GPT2LMHeadModel": gguf.MODEL_ARCH.GPT2,
    "Qwen3MoeForCausalLM": gguf.MODEL_ARCH.QWEN3MOE,
    "GraniteMoeHybridForCausalLM": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "Qwen3_5ForCausalLM": gguf.MODEL_ARCH.QWEN35,
}
QUANTISED = {
    "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "q4_k_m": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
    "q5_k_m": llama_cpp.LLAMA_FTYPE_MOSTLY_Q5_K_M,
    "q6_k": llama_cpp.LLAMA_FTYPE_MOSTLY_Q6_K,
}
STATES = {  # the names of tensors in layers that keep a state, behind the layer's own
    "GraniteMoeHybridForCausalLM": {
        "mamba.in_proj.weight": "ssm_in.weight",
        "mamba.conv1d.weight": "ssm_conv1d.weight",
        "mamba.conv1d.bias": "ssm_conv1d.bias",
        "mamba.A_log.weight": "ssm_a",
        "mamba.D.weight": "ssm_d",
        "mamba.dt_bias.weight": "ssm_dt.bias",
        "mamba.norm.weight": "ssm_norm.weight",
        "mamba.out_proj.weight": "ssm_out.weight",
        "shared_mlp.output_linear.weight": "ffn_down.weight",
    },
    "Qwen3_5ForCausalLM": {
        "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
        "linear_attn.in_proj_z.weight": "attn_gate.weight",
        "linear_attn.in_proj_b.weight": "ssm_beta.weight",
        "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
        "linear_attn.conv1d.weight": "ssm_conv1d.weight",
        "linear_attn.A_log.weight": "ssm_a",
        "linear_attn.dt_bias.weight": "ssm_dt.bias",
        "linear_attn.norm.weight": "ssm_norm.weight",
        "linear_attn.out_proj.weight": "ssm_out.weight",
        "post_attention_layernorm.weight": "post_attention_norm.weight",
    },
}
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+\.weight)")
TRANSPOSED = re.compile(r"(c_attn|c_proj|c_fc)\.weight$")  # GPT-2 stores [in, out]


def read_tensors(path: Path) -> dict[str, numpy.ndarray]:
    """The tensors of a bfloat16 safetensors file as uint16, in the file's shapes."""
    raw = numpy.memmap(path, mode="r")
    length = int.from_bytes(raw[:8].tobytes(), "little")
    header = json.loads(raw[8 : 8 + length].tobytes())
    header.pop("__metadata__", None)
    found = {}
    for name, one in header.items():
        start, end = (8 + length + at for at in one["data_offsets"])
        found[name] = raw[start:end].view(numpy.uint16).reshape(one["shape"])
    return found


def stacked(tensors: dict[str, numpy.ndarray]) -> dict[str, numpy.ndarray]:
    """The tensors, with a layer's experts as one [experts, out, in]."""
    found: dict[str, numpy.ndarray] = {}
    each: dict[str, list[numpy.ndarray]] = {}
    for name, tensor in tensors.items():
        expert = EXPERT.fullmatch(name)
        if expert is None:
            found[name] = tensor
        else:
            each.setdefault(f"{expert[1]}.{expert[3]}", []).append(tensor)
            assert len(each[f"{expert[1]}.{expert[3]}"]) == int(expert[2]) + 1, "experts lie in their order"
    return found | {name: numpy.stack(one) for name, one in each.items()}


def paired(rows: numpy.ndarray, heads: int) -> numpy.ndarray:
    """Reorder the rows of q or k: llama.cpp rotates adjacent dimensions, a checkpoint the two halves of a head."""
    split = rows.reshape(heads, 2, -1, *rows.shape[1:])  # [heads, half, pair, ...]
    return split.swapaxes(1, 2).reshape(rows.shape)


def hybrid(tensors: dict[str, numpy.ndarray], config: dict[str, Any]) -> dict[str, numpy.ndarray]:
    """The tensors of a hybrid by llama.cpp's names where its layers have some of their own, in llama.cpp's form."""
    found: dict[str, numpy.ndarray] = {}
    names = STATES[config["architectures"][0]]
    for name, bits in tensors.items():
        layer = LAYER.fullmatch(name)
        if layer is not None and layer[2] == "shared_mlp.input_linear.weight":
            gate, up = numpy.split(bits, 2)
            found |= {f"blk.{layer[1]}.ffn_gate.weight": gate, f"blk.{layer[1]}.ffn_up.weight": up}
        elif layer is not None and (target := names.get(layer[2])) is not None:
            found[f"blk.{layer[1]}.{target}"] = state_form(target, bits, config)
        else:
            found[name] = bits
    return found


def state_form(target: str, bits: numpy.ndarray, config: dict[str, Any]) -> numpy.ndarray:
    """A tensor of such a layer as llama.cpp keeps it: in float32, but for the matrices of linears."""
    if bits.ndim == 2:
        return bits
    values, groups = widened(bits), config.get("mamba_n_groups")
    if target == "ssm_conv1d.weight":
        return values.squeeze(1)  # [channels, taps]
    if target == "ssm_a":
        values = -numpy.exp(values)
    if groups and target in ("ssm_a", "ssm_d"):
        return values[:, None]  # [heads, 1]
    return values.reshape(groups, -1) if groups and target == "ssm_norm.weight" else values


def widened(bits: numpy.ndarray) -> numpy.ndarray:
    return (bits.astype(numpy.uint32) << 16).view(numpy.float32)


def frequency_factors(config: dict[str, Any]) -> numpy.ndarray:
    """The factors by which Llama 3's scaling divides the rotary frequencies, [head size / 2]."""
    scaling, size = config["rope_scaling"], config["head_dim"]
    wavelengths = 2 * numpy.pi * config["rope_theta"] ** (numpy.arange(0, size, 2) / size)
    low, high, factor = (float(scaling[key]) for key in ("low_freq_factor", "high_freq_factor", "factor"))
    turns = scaling["original_max_position_embeddings"] / wavelengths
    smooth = numpy.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 / ((1 - smooth) / factor + smooth)).astype(numpy.float32)


def add_facts(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Write the config's values as GGUF keys; GPT-2 has its own names for them."""
    heads = config.get("num_attention_heads") or config["n_head"]
    width = config.get("hidden_size") or config["n_embd"]
    writer.add_block_count(layers(config))
    writer.add_context_length(config.get("max_position_embeddings") or config["n_positions"])
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(config.get("intermediate_size", 4 * width))
    writer.add_head_count(heads)
    attends = [kind == "attention" for kind in config.get("layer_types", ())]
    kv_heads = config.get("num_key_value_heads", heads)
    writer.add_head_count_kv([kv_heads * one for one in attends] if attends else kv_heads)
    if "n_embd" in config:
        writer.add_layer_norm_eps(1e-5)
    else:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        rope, size = config.get("rope_parameters", config), config.get("head_dim", width // heads)
        writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
        writer.add_rope_dimension_count(int(size * rope.get("partial_rotary_factor", 1.0)))
        writer.add_key_length(config.get("head_dim", width // heads))
        writer.add_value_length(config.get("head_dim", width // heads))
    if "mamba_d_state" in config:
        add_mamba_facts(writer, config)
    if "linear_num_key_heads" in config:
        add_delta_facts(writer, config)
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def add_mamba_facts(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])
    writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_group_count(config["mamba_n_groups"])
    writer.add_ssm_inner_size(config["mamba_expand"] * config["hidden_size"])
    writer.add_ssm_time_step_rank(config["mamba_n_heads"])


def add_delta_facts(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_full_attention_interval(config["full_attention_interval"])
    writer.add_rope_dimension_sections([*config["rope_parameters"]["mrope_section"], 0])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_num_value_heads"] * config["linear_value_head_dim"])


def layers(config: dict[str, Any]) -> int:
    return config.get("num_hidden_layers") or config["n_layer"]


def add_tokenizer(writer: gguf.GGUFWriter, model: Path, config: dict[str, Any]) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    names = {at: token for token, at in tokenizer["model"]["vocab"].items()}
    control = {one["id"]: one["content"] for one in tokenizer["added_tokens"]}
    names |= control
    size = config["vocab_size"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([names[at] for at in range(size)])
    kinds = (gguf.TokenType.CONTROL if at in control else gguf.TokenType.NORMAL for at in range(size))
    writer.add_token_types([int(kind) for kind in kinds])
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])


def add_tensors(writer: gguf.GGUFWriter, model: Path, config: dict[str, Any], arch: gguf.MODEL_ARCH) -> None:
    names = gguf.get_tensor_name_map(arch, layers(config))
    if config.get("rope_scaling"):
        writer.add_tensor("rope_freqs.weight", frequency_factors(config))
    tensors = stacked(read_tensors(model / "model.safetensors"))
    if config["architectures"][0] in STATES:
        tensors = hybrid(tensors, config)
    for name, bits in tensors.items():
        if bits.dtype == numpy.float32:
            centred = arch == gguf.MODEL_ARCH.QWEN35 and name.endswith("post_attention_norm.weight")
            writer.add_tensor(name, bits + numpy.float32(centred))
            continue
        target = (
            name
            if name.startswith("blk.")
            else names.get_name(name.replace("model.lm_head", "lm_head"), try_suffixes=(".weight", ".bias"))
        )
        if target is None:
            raise SystemExit(f"llama.cpp has no name for {name}")
        if TRANSPOSED.search(name):
            bits = numpy.ascontiguousarray(bits.T)
        if arch == gguf.MODEL_ARCH.LLAMA and (which := re.search(r"\.([qk])_proj\.weight$", name)):
            bits = paired(bits, config["num_attention_heads" if which[1] == "q" else "num_key_value_heads"])
        if bits.ndim == 1:
            writer.add_tensor(target, widened(bits) + numpy.float32(arch == gguf.MODEL_ARCH.QWEN35))  # around zero
        else:
            raw = numpy.ascontiguousarray(bits).view(numpy.uint8)
            writer.add_tensor(target, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)


def write(model: Path, target: Path) -> None:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    arch = ARCHITECTURES[config["architectures"][0]]
    writer = gguf.GGUFWriter(target, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    add_facts(writer, config)
    add_tokenizer(writer, model, config)
    add_tensors(writer, model, config, arch)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantise(source: Path, form: str, target: Path) -> None:
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = QUANTISED[form], 2
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), params) != 0:
        raise SystemExit(f"llama.cpp cannot quantise {source} to {form}")


def main() -> None:
    model, form, target = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    if form == "bf16":
        write(model, target)
        return
    source = target.with_name(f"{target.name}.bf16")
    write(model, source)
    quantise(source, form, target)
    source.unlink()


if __name__ == "__main__":
    main()
