"""GGUF files of the random models in `fixtures.py`, written by the `gguf` package."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy
from safetensors.torch import load_file
from torch import Tensor

Kind = gguf.GGMLQuantizationType
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}


def write_gguf(
    file: Path,
    folder: Path,
    kind: Kind = Kind.F32,
    only: str = "",
    metadata: Mapping[str, Any] | None = None,
    split: int = 0,
) -> Path:
    """The model of a folder as a GGUF file, with matrices of a type; with `only`, those whose name has it, else F32.

    metadata: strings and whole numbers to add or replace. split: the most tensors of one of several files.
    """
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(file, config["model_type"], split_max_tensors=split)
    _facts(writer, config)
    _tokenizer(writer, folder)
    for key, value in (metadata or {}).items():
        kind_of = gguf.GGUFValueType.STRING if isinstance(value, str) else gguf.GGUFValueType.UINT32
        writer.kv_data[0][key] = gguf.GGUFValue(value, kind_of)  # also over what is there
    names = gguf.get_tensor_name_map(ARCHITECTURES[config["model_type"]], config["num_hidden_layers"])
    if (scaling := config.get("rope_scaling")) and scaling.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _factors(config, scaling))
    for name, tensor in load_file(folder / "model.safetensors").items():
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if target is not None:
            _add(writer, target, _ordered(tensor, name, config), kind if only in target else Kind.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add(writer: gguf.GGUFWriter, name: str, tensor: Tensor, kind: Kind) -> None:
    numbers = tensor.float().numpy()
    if numbers.ndim == 1 or numbers.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
        kind = Kind.F32
    writer.add_tensor(name, numpy.ascontiguousarray(gguf.quants.quantize(numbers, kind)), raw_dtype=kind)


def _ordered(tensor: Tensor, name: str, config: Mapping[str, Any]) -> Tensor:
    """q and k with neighbouring rows of a head in a pair, as files of llama have them."""
    if config["model_type"] != "llama" or not any(part in name for part in ("q_proj", "k_proj")):
        return tensor
    heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
    return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def _factors(config: Mapping[str, Any], scaling: Mapping[str, Any]) -> numpy.ndarray[Any, Any]:
    size = config["head_dim"]
    turns = scaling["original_max_position_embeddings"] / (
        2 * numpy.pi * config["rope_theta"] ** (numpy.arange(0, size, 2) / size)
    )
    smooth = numpy.clip((turns - scaling["low_freq_factor"]) / (scaling["high_freq_factor"] - 1), 0, 1)
    return numpy.asarray(1 / ((1 - smooth) / scaling["factor"] + smooth), dtype=numpy.float32)


def _facts(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    heads = config["num_attention_heads"]
    size = config.get("head_dim", config["hidden_size"] // heads)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads", heads))
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_theta", 10000.0))
    writer.add_rope_dimension_count(size)
    scaling = config.get("rope_scaling") or {}
    if scaling.get("type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling["type"]))
        writer.add_rope_scaling_factor(scaling["factor"])
        if "original_max_position_embeddings" in scaling:
            writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])


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
