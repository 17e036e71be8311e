"""The pairs of GGUF files that llama.cpp's converter makes of a model that sees: its text model, and its tower."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.files.gguf_files import write_gguf

# By kind: keys of the text model's config, the names of the tokens, the projector's type, and facts of the tower.
_QWEN_TOKENS = {"<pic>": "<|image_pad|>", "<in>": "<|vision_start|>", "<out>": "<|vision_end|>"}
FILES: Mapping[str, tuple[dict[str, Any], dict[str, str], str, dict[str, Any]]] = {
    "gemma3": (
        {"model_type": "gemma3_text", "rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_parameters": {}},
        {"<in>": "<start_of_image>", "<out>": "<end_of_image>", "<pic>": "<image_soft_token>"},
        "gemma3",
        {"use_gelu": True, "projector_scale_factor": 2},
    ),
    "qwen2_vl": (
        {"model_type": "qwen2", "_arch": "qwen2vl"}, _QWEN_TOKENS, "qwen2vl_merger",
        {"min_pixels": 256, "max_pixels": 2560},
    ),
    "lfm2_vl": (
        {"model_type": "lfm2", "norm_eps": 1e-5, "block_ff_dim": 48}, {"<pic>": "<image>"}, "lfm2",
        {"use_gelu": True, "projector_scale_factor": 2},
    ),
    "qwen2_5_vl": (
        {"model_type": "qwen2", "_arch": "qwen2vl"}, _QWEN_TOKENS, "qwen2.5vl_merger",
        {"use_silu": True, "n_wa_pattern": 2, "window_size": 16, "min_pixels": 256, "max_pixels": 2560},
    ),
    "qwen3_vl": (
        {"model_type": "qwen3", "_arch": "qwen3vl", "_deep": 2}, _QWEN_TOKENS, "qwen3vl_merger",
        {"use_gelu": True, "min_pixels": 256, "max_pixels": 2560, "is_deepstack_layers": [True, False, True]},
    ),
    "qwen3_5": (
        {"model_type": "qwen3_5_text", "full_attention_interval": 2}, _QWEN_TOKENS, "qwen3vl_merger",
        {"use_gelu": True, "min_pixels": 256, "max_pixels": 2560},
    ),
    "mistral3": ({"model_type": "llama"}, {"<pic>": "[IMG]"}, "pixtral", {"use_gelu": True, "spatial_merge_size": 2}),
    "pixtral": ({"model_type": "llama"}, {"<pic>": "[IMG]"}, "pixtral", {"use_gelu": True}),
    "llava": ({"model_type": "llama"}, {"<pic>": "<image>"}, "mlp", {"block_count": 2}),
    "smolvlm": (
        {"model_type": "llama"}, {"<pic>": "<image>"}, "idefics3",
        {"use_gelu": True, "projector_scale_factor": 2, "preproc_image_size": 64},
    ),
    "internvl": (
        {"model_type": "qwen2"}, {"<pic>": "<IMG_CONTEXT>"}, "internvl",
        {"use_gelu": True, "projector_scale_factor": 2, "preproc_min_tiles": 1, "preproc_max_tiles": 4},
    ),
}  # fmt: skip
_RENAMED = (  # to names that the gguf package maps
    ("model.visual.", "visual."),
    ("model.connector.", "model.connector."),
    ("vision_tower.embeddings.patch_embeddings", "model.vision_tower.embeddings.patch_embeddings"),
    ("vision_tower.embeddings.position_embeddings", "model.vision_tower.embeddings.position_embeddings"),
    ("vision_tower.embeddings.cls", "model.vision_tower.embeddings.cls"),
    ("vision_tower.encoder.layer.", "model.vision_tower.encoder.layer."),
    ("vision_tower.embeddings.", "vision_tower.vision_model.embeddings."),
    ("vision_tower.encoder.", "vision_tower.vision_model.encoder."),
    ("vision_tower.post_", "vision_tower.vision_model.post_"),
    ("vision_tower.pre_", "vision_tower.vision_model.pre_"),
)
_PROJECTORS = {
    "llava": {"linear_1": "mm.0", "linear_2": "mm.2"},
    "internvl": {"layer_norm": "mm.model.mlp.0", "linear_1": "mm.model.mlp.1", "linear_2": "mm.model.mlp.3"},
}
_TEXT = (
    "model.language_model.",
    "language_model.model.",
    "model.text_model.",
    "model.layers.",
    "model.embed",
    "model.norm",
)


def write_pair(folder: Path, target: Path, kind: str) -> Path:
    """Write both files of a folder's model; returns the text model's."""
    more, tokens, _, _ = FILES[kind]
    config = json.loads((folder / "config.json").read_text())
    target.mkdir(parents=True, exist_ok=True)
    inner = target / "text"
    inner.mkdir()
    text = config["text_config"] | {"tie_word_embeddings": False} | more
    (inner / "config.json").write_text(json.dumps(text))
    tensors = load_file(folder / "model.safetensors")
    heads = {name.removeprefix("language_model."): one for name, one in tensors.items() if "lm_head" in name}
    own = {_text_name(name): one for name, one in tensors.items() if name.startswith(_TEXT) and "visual" not in name}
    save_file(own | heads, inner / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        written = (folder / name).read_text()
        for ours, theirs in tokens.items():
            written = written.replace(ours, theirs)
        (inner / name).write_text(written)
    tokenizer = json.loads((inner / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["\u0120" * 2] = vocabulary.pop("<unused299>")  # of two spaces: such files have merges
    tokenizer["model"]["merges"] = [["\u0120", "\u0120"]]
    (inner / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((inner / "tokenizer_config.json").read_text())
    (inner / "tokenizer_config.json").write_text(json.dumps(settings | {"bos_token": "<start>"}))
    write_tower(folder, target / "mmproj-model-F32.gguf", kind)
    pattern = {"gemma3.attention.sliding_window_pattern": 2} if kind == "gemma3" else {}
    return write_gguf(target / "model-F32.gguf", inner, metadata=pattern)


def _text_name(name: str) -> str:
    prefix = next(one for one in _TEXT if name.startswith(one))
    return name if prefix.startswith("model.") and "_model." not in prefix else "model." + name.removeprefix(prefix)


def write_tower(folder: Path, file: Path, kind: str, swapped: bool = False) -> None:
    """swapped: ffn_up and ffn_down take each other's names, as the first converters wrote them."""
    config = json.loads((folder / "config.json").read_text())
    processing = json.loads((folder / "preprocessor_config.json").read_text())
    vision, (_, _, projector, facts) = config["vision_config"], FILES[kind]
    writer = gguf.GGUFWriter(file, "clip")
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type(projector)
    side, size = (
        one[0] if isinstance(one, list) else one for one in (vision["patch_size"], vision.get("image_size", 32))
    )
    found = {
        "projection_dim": 32, "patch_size": side, "image_size": size,
        "embedding_length": vision.get("embed_dim", vision["hidden_size"]),
        "feed_forward_length": vision.get("intermediate_size", 0),
        "block_count": vision.get("depth", vision.get("num_hidden_layers")),
        "head_count": vision.get("num_heads", vision.get("num_attention_heads")),
        "attention_layernorm_eps": 1e-5 if projector in ("pixtral", "mlp") else 1e-6,
        "image_mean": processing.get("image_mean") or _colours(kind)[0],
        "image_std": processing.get("image_std") or _colours(kind)[1],
    }  # fmt: skip
    if kind in ("mistral3", "pixtral"):
        found["image_size"] = processing["size"]["longest_edge"]
    for name, value in (found | facts).items():
        getattr(writer, f"add_vision_{name}")(value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 8)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in _tower(tensors, kind, vision):
        at = name if name.startswith(("v.", "mm.")) else names.get_name(name, try_suffixes=(".weight", ".bias"))
        if at is None or (kind == "llava" and at.startswith(("v.blk.2.", "v.post_ln"))):
            continue  # another part, or behind the layer that is read
        if swapped:
            at = at.replace("ffn_up", "ffn_?").replace("ffn_down", "ffn_up").replace("ffn_?", "ffn_down")
        writer.add_tensor(at, numpy.ascontiguousarray(tensor.float().numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _colours(kind: str) -> tuple[list[float], list[float]]:
    clip = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
    return clip if kind in ("mistral3", "pixtral", "internvl") else ([0.5] * 3, [0.5] * 3)


def _tower(tensors: Mapping[str, Tensor], kind: str, vision: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors under names that the package maps, or the names in files, with what the converter changes."""
    for name, tensor in tensors.items():
        if kind == "lfm2_vl":
            name = name.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.")
        for ours, theirs in _RENAMED:
            if name.startswith(ours):
                name = theirs + name.removeprefix(ours)
                break
        if name.startswith("visual."):
            yield from _of_qwen(name, tensor, kind, vision)
        elif kind in ("mistral3", "pixtral") and ("attention.q_proj" in name or "attention.k_proj" in name):
            yield name, tensor.unflatten(0, (vision["num_attention_heads"], 2, -1)).transpose(1, 2).flatten(0, 2)
        elif name.startswith("multi_modal_projector.l") and kind in _PROJECTORS:
            _, part, last = name.split(".")
            yield f"{_PROJECTORS[kind][part]}.{last}", tensor
        elif kind == "lfm2_vl" and name.endswith("patch_embedding.weight"):
            side = vision["patch_size"]
            yield name, tensor.unflatten(1, (side, side, 3)).permute(0, 3, 1, 2)
        elif name.endswith(("mm_input_projection_weight", "lambda_1", "lambda_2", "position_embeddings")):
            yield name.removesuffix("_weight") + ".weight", tensor
        elif name.endswith("mm_soft_emb_norm.weight"):
            yield name, tensor.float() + 1
        else:
            yield name, tensor


def _of_qwen(name: str, tensor: Tensor, kind: str, vision: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    last = name.rsplit(".", 1)[-1]
    if name == "visual.patch_embed.proj.weight":
        yield "v.patch_embd.weight", tensor[:, :, 0]
        yield "v.patch_embd.weight.1", tensor[:, :, 1]
    elif ".qkv." in name and kind in ("qwen2_vl", "qwen2_5_vl"):
        for part, rows in zip("qkv", tensor.chunk(3), strict=True):
            yield name.replace("qkv", part), rows
    elif name.startswith("visual.merger.norm"):
        yield f"v.post_ln.{last}", tensor
    elif name.startswith("visual.merger.linear_fc"):
        yield f"mm.{(int(name.split('fc')[1][0]) - 1) * 2}.{last}", tensor
    elif name.startswith("visual.deepstack"):
        layer = vision["deepstack_visual_indexes"][int(name.split(".")[2])]
        yield f"v.deepstack.{layer}.{name.split('.')[3].removeprefix('linear_')}.{last}", tensor
    else:
        yield name, tensor
