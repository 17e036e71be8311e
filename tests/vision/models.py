"""Small random models that see, as transformers writes them, with a tokenizer of bytes and a chat template."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

VOCAB, START, END, IMAGE, BEFORE, AFTER, VIDEO = 300, 280, 281, 290, 292, 293, 291
_SPECIAL = {"<start>": START, "<end>": END, "<pic>": IMAGE, "<video>": VIDEO, "<in>": BEFORE, "<out>": AFTER}
_TEXT = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "pad_token_id": 0,
    "num_key_value_heads": 1, "head_dim": 16, "num_hidden_layers": 2, "max_position_embeddings": 1024,
}  # fmt: skip
_TOWER = {
    "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 2, "num_hidden_layers": 2, "patch_size": 4,
    "image_size": 32,
}  # fmt: skip
_WINDOWS = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 32,
    "query_pre_attn_scalar": 16,
}
_BLOCKS = {
    "depth": 3, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "out_hidden_size": 32,
}  # fmt: skip
_MROPE = {"rope_type": "default", "rope_theta": 10000.0}
_QWEN = {
    "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": BEFORE, "vision_end_token_id": AFTER,
}  # fmt: skip
_SMART = {
    "size": {"shortest_edge": 256, "longest_edge": 2560}, "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2,
    "resample": 3, "image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28],
}  # fmt: skip
# The model's class, its config's other keys, and the settings of its processor and what the template prints for one.
KINDS: Mapping[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "gemma3": (
        "Gemma3",
        {
            "text_config": _TEXT | _WINDOWS,
            "vision_config": _TOWER | {"vision_use_head": False},
            "mm_tokens_per_image": 16,
            "image_token_id": IMAGE,
            "boi_token_id": BEFORE,
            "eoi_token_id": AFTER,
        },
        {"size": {"height": 32, "width": 32}, "resample": 2},
        "<in>",
    ),
    "gemma4": (
        "Gemma4",
        {
            "text_config": _TEXT
            | {
                "layer_types": _WINDOWS["layer_types"], "sliding_window": 32, "global_head_dim": 32,
                "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB,
            },
            "vision_config": {key: one for key, one in _TOWER.items() if key != "image_size"}
            | {
                "head_dim": 12, "num_key_value_heads": 2, "pooling_kernel_size": 2, "position_embedding_size": 140,
                "use_clipped_linears": True,
            },
            "image_token_id": IMAGE, "boi_token_id": BEFORE, "eoi_token_id": AFTER,
        },
        {"max_soft_tokens": 70, "patch_size": 4, "pooling_kernel_size": 2},
        "<pic>",
    ),
    "qwen2_vl": (
        "Qwen2VL",
        _QWEN
        | {
            "text_config": _TEXT | {"rope_parameters": _MROPE | {"mrope_section": [2, 3, 3]}},
            "vision_config": {"depth": 3, "embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2, "num_heads": 2}
            | {name: _BLOCKS[name] for name in ("patch_size", "spatial_merge_size", "temporal_patch_size")},
        },
        _SMART,
        "<in><pic><out>",
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        _QWEN
        | {
            "text_config": _TEXT | {"rope_parameters": _MROPE | {"mrope_section": [2, 3, 3]}},
            "vision_config": _BLOCKS | {"window_size": 16, "fullatt_block_indexes": [1]},
        },
        _SMART,
        "<in><pic><out>",
    ),
    "qwen3_vl": (
        "Qwen3VL",
        _QWEN
        | {
            "text_config": _TEXT
            | {"rope_parameters": _MROPE | {"mrope_section": [4, 2, 2], "mrope_interleaved": True}},
            "vision_config": _BLOCKS | {"num_position_embeddings": 36, "deepstack_visual_indexes": [0, 2]},
        },
        _SMART,
        "<in><pic><out>",
    ),
    "qwen3_5": (
        "Qwen3_5",
        _QWEN
        | {
            "text_config": _TEXT
            | {
                "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
                "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"],
                "rope_parameters": _MROPE
                | {"mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.5},
            },
            "vision_config": _BLOCKS | {"num_position_embeddings": 36},
        },
        _SMART,
        "<in><pic><out>",
    ),
    "mistral3": (
        "Mistral3",
        {
            "text_config": _TEXT | {"model_type": "mistral"},
            "vision_config": _TOWER | {"model_type": "pixtral", "hidden_size": 32, "head_dim": 16, "image_size": 64},
            "image_token_index": IMAGE, "tie_word_embeddings": False, "spatial_merge_size": 2,
            "vision_feature_layer": -1,
        },
        {"size": {"longest_edge": 64}, "patch_size": {"height": 8, "width": 8}},
        "<pic>",
    ),
    "pixtral": (
        "Llava",
        {
            "text_config": _TEXT | {"model_type": "mistral"},
            "vision_config": _TOWER | {"model_type": "pixtral", "hidden_size": 32, "head_dim": 16, "image_size": 64},
            "image_token_index": IMAGE, "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
        },
        {"size": {"longest_edge": 32}, "patch_size": {"height": 4, "width": 4}},
        "<pic>",
    ),
    "llava": (
        "Llava",
        {
            "text_config": _TEXT | {"model_type": "llama"},
            "vision_config": _TOWER | {"model_type": "clip_vision_model", "num_hidden_layers": 3, "projection_dim": 16},
            "image_token_index": IMAGE, "vision_feature_layer": -2,
        },
        {
            "size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}, "do_center_crop": True,
            "resample": 3, "image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28],
        },
        "<pic>",
    ),
    "smolvlm": (
        "SmolVLM",
        {
            "text_config": _TEXT | {"model_type": "llama"}, "vision_config": _TOWER,
            "scale_factor": 2, "image_token_id": IMAGE,
        },
        {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}, "resample": 1},
        "<pic>",
    ),
    "lfm2_vl": (
        "Lfm2Vl",
        {
            "text_config": _TEXT
            | {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
            "vision_config": {key: one for key, one in _TOWER.items() if key != "image_size"}
            | {"model_type": "siglip2_vision_model", "num_patches": 36, "vision_use_head": False},
            "image_token_id": IMAGE, "projector_hidden_size": 40, "downsample_factor": 2,
        },
        {
            "encoder_patch_size": 4, "tile_size": 32, "min_image_tokens": 4, "max_image_tokens": 16, "max_tiles": 4,
            "max_pixels_tolerance": 2.0, "resample": 2,
        },
        "<pic>",
    ),
    "internvl": (
        "InternVL",
        {
            "text_config": _TEXT | {"model_type": "qwen2"}, "tie_word_embeddings": False,
            "vision_config": _TOWER | {"image_size": [32, 32], "patch_size": [4, 4], "layer_scale_init_value": 0.5},
            "image_token_id": IMAGE,
        },
        {"size": {"height": 32, "width": 32}, "crop_to_patches": True, "max_patches": 4, "resample": 3},
        "<pic>",
    ),
}  # fmt: skip
# Kinds whose pictures are refused.
LACKING = {
    "onevision": (
        "LlavaOnevision",
        {
            "text_config": _TEXT | {"model_type": "qwen2"}, "image_token_id": IMAGE, "tie_word_embeddings": False,
            "vision_config": _TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False},
        },
        {},
        "<pic>",
    ),
}  # fmt: skip
_TEMPLATE = """{%% for m in messages %%}<start>{{ m['role'] }}
{%% if m['content'] is string %%}{{ m['content'] }}{%% else %%}{%% for i in m['content'] %%}\
{%% if i['type'] == 'image' %%}%s{%% elif i['type'] == 'text' %%}{{ i['text'] }}{%% endif %%}{%% endfor %%}\
{%% endif %%}<end>
{%% endfor %%}{%% if add_generation_prompt %%}<start>model
{%% endif %%}"""


def make_model(
    folder: Path,
    kind: str,
    seed: int = 0,
    config: Mapping[str, Any] | None = None,
    processor: Mapping[str, Any] | None = None,
) -> transformers.PreTrainedModel:
    """Write a folder with a model, and return the oracle. config, processor: other settings."""
    name, own, usual, placeholder = {**KINDS, **LACKING}[kind]
    config, processor = config or own, processor or usual
    torch.manual_seed(seed)
    made = getattr(transformers, f"{name}ForConditionalGeneration")(getattr(transformers, f"{name}Config")(**config))
    with torch.no_grad():
        for weight in made.parameters():
            wide = weight.dim() > 1
            weight.copy_(torch.randn(weight.shape) * (0.2 if wide else 0.1) + (0 if wide or weight.mean() < 0.5 else 1))
        for at, buffer in made.named_buffers():  # Gemma 4's
            if at.endswith(("put_min", "put_max")):
                buffer.copy_((1 + torch.rand(())) * (1 if at.endswith("max") else -1))
    made.save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: at for at, letter in enumerate(letters)}
    names = {at: name for name, at in _SPECIAL.items()}
    vocabulary |= {names.get(at, f"<unused{at}>"): at for at in range(len(letters), VOCAB)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in _SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": _TEMPLATE % placeholder, "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return made.float().eval()


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """A random picture, smooth enough that its resized forms differ little between filters."""
    rough = np.random.default_rng(seed).integers(0, 255, (height // 4 + 1, width // 4 + 1, 3), dtype=np.uint8)
    return Image.fromarray(rough).resize((width, height), Image.Resampling.BILINEAR)


def question(*parts: object, role: str = "user") -> list[dict[str, Any]]:
    """A conversation of one message: texts and pictures."""
    content = [
        {"type": "text", "text": one} if isinstance(one, str) else {"type": "image", "image": one} for one in parts
    ]
    return [{"role": role, "content": content}]
