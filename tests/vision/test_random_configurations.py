"""Random configurations of every family that sees, against transformers in fp32."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.vision.models import KINDS, make_model, picture, question
from tests.vision.test_logits import BLOCKS, TOLERANCE, of_spans, oracle, pixels, scored
from tokenwright import LLM

SEEDS = [pytest.param(seed, marks=[] if seed < len(KINDS) else pytest.mark.sweep) for seed in range(200)]
FIXED = ("qwen2_vl", "qwen2_5_vl", "lfm2_vl")  # whose heads divide the width


def text_of(kind: str, base: Mapping[str, Any], draw: random.Random) -> dict[str, Any]:
    sizes = (16, 32) if "rope_parameters" in base else (8, 16, 32)
    heads, size, layers = draw.choice((1, 2, 4)), draw.choice(sizes), draw.choice((2, 3))
    found = base | {
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice([n for n in (1, 2, 4) if heads % n == 0]),
        "head_dim": size,
        "hidden_size": heads * size if kind in FIXED else draw.choice((24, 32, 48)),
        "intermediate_size": draw.choice((40, 48, 72)),
        "num_hidden_layers": layers,
        "max_position_embeddings": 4096,
    }
    if (kinds := base.get("layer_types")) is not None:
        found["layer_types"] = [*draw.choices(kinds, k=layers - 1), kinds[-1]]
    if "query_pre_attn_scalar" in base:
        found |= {"query_pre_attn_scalar": draw.choice((8, 16)), "sliding_window": draw.choice((7, 32, 64))}
    if (rope := base.get("rope_parameters")) is not None:
        half = int(size * rope.get("partial_rotary_factor", 1)) // 2
        third = draw.randint(1, half // 3) if "mrope_interleaved" in rope else draw.randint(1, half // 2)
        other = draw.randint(1, half // 3) if "mrope_interleaved" in rope else draw.randint(1, half - third - 1 or 1)
        sections = [half - third - other, third, other]
        found["rope_parameters"] = rope | {"mrope_section": sections, "rope_theta": draw.choice((100.0, 10000.0))}
    return found


def configured(kind: str, draw: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config and the processor's settings."""
    _, base, processing, _ = KINDS[kind]
    text, tower, processor = text_of(kind, base["text_config"], draw), dict(base["vision_config"]), dict(processing)
    config, patch, heads = dict(base), draw.choice((4, 6)), draw.choice((1, 2, 3))
    merge, grid = draw.choice((1, 2, 3)), draw.choice((1, 2, 3))
    width = heads * draw.choice((8, 16))
    tower |= {"num_hidden_layers": draw.choice((1, 2, 3)), "hidden_size": width, "num_attention_heads": heads}
    tower |= {"intermediate_size": draw.choice((24, 40)), "patch_size": patch, "image_size": patch * merge * grid}
    side = {"height": patch * merge * grid, "width": patch * merge * grid}
    match kind:
        case "gemma3":
            config["mm_tokens_per_image"], processor["size"] = grid * grid, side
        case _ if kind in BLOCKS:
            depth, frames = draw.choice((1, 2, 4)), draw.choice((1, 2))
            tower = dict(base["vision_config"]) | {"patch_size": patch, "spatial_merge_size": merge}
            tower |= {"depth": depth, "num_heads": heads, "temporal_patch_size": frames}
            tower |= (
                {"embed_dim": width, "hidden_size": text["hidden_size"]}
                if kind == "qwen2_vl"
                else {
                    "hidden_size": width,
                    "out_hidden_size": text["hidden_size"],
                    "intermediate_size": draw.choice((24, 40)),
                }
            )
            if kind == "qwen2_5_vl":
                tower["window_size"] = patch * merge * draw.choice((1, 2, 3))
                tower["fullatt_block_indexes"] = draw.sample(range(depth), draw.randint(0, depth))
            if "num_position_embeddings" in tower:
                tower["num_position_embeddings"] = draw.choice((2, 5, 6)) ** 2
            if "deepstack_visual_indexes" in tower:
                tower["deepstack_visual_indexes"] = sorted(draw.sample(range(depth), draw.randint(0, min(depth, 2))))
            cell = patch * merge
            processor |= {"patch_size": patch, "merge_size": merge, "temporal_patch_size": frames}
            processor["size"] = {"shortest_edge": 2 * cell**2, "longest_edge": draw.choice((6, 20, 60)) * cell**2}
        case "gemma4":
            merge = max(merge, 2)  # transformers keeps the padding of rows that it does not pool
            text |= {"sliding_window": draw.choice((7, 90))}
            text |= {"attention_k_eq_v": draw.random() < 0.5, "hidden_size_per_layer_input": draw.choice((0, 8))}
            tower = dict(base["vision_config"]) | {name: tower[name] for name in tower if name != "image_size"}
            tower |= {"num_key_value_heads": heads, "head_dim": draw.choice((4, 16)), "pooling_kernel_size": merge}
            tower |= {"position_embedding_size": 70 * merge}
            tower |= {"use_clipped_linears": draw.random() < 0.7}
            processor |= {"patch_size": patch, "pooling_kernel_size": merge}
        case "mistral3" | "pixtral":
            merge = merge if kind == "mistral3" else 1
            tower |= {"head_dim": width // heads, "image_size": 16 * patch}
            config["spatial_merge_size"] = merge
            processor |= {"size": {"longest_edge": draw.choice((3, 8)) * patch * merge}}
            processor["patch_size"] = {"height": patch * merge, "width": patch * merge}
        case "llava":
            tower["image_size"] += draw.choice((0, 1)) * (patch - 1)
            side = dict.fromkeys(side, tower["image_size"])
            config["vision_feature_layer"] = -draw.randint(1, tower["num_hidden_layers"])
            processor |= {"crop_size": side, "size": {"shortest_edge": side["height"]}}
        case "smolvlm":
            config["scale_factor"] = merge
            longest = side["height"] * draw.choice((1, 2, 3))
            processor |= {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": side["height"]}}
        case "lfm2_vl":
            tower = {name: one for name, one in tower.items() if name != "image_size"}
            tower |= {"num_patches": draw.choice((4, 5, 6)) ** 2, "patch_size": 4}
            config |= {"downsample_factor": (merge := min(merge, 2)), "projector_hidden_size": draw.choice((24, 40))}
            config["projector_use_layernorm"] = draw.random() < 0.5
            processor |= {"tile_size": 4 * merge * draw.choice((2, 4)), "max_tiles": draw.choice((2, 4))}
            processor |= {"min_image_tokens": 2, "max_image_tokens": draw.choice((8, 16))}
        case "internvl":
            side = {"height": 2 * patch * grid, "width": 2 * patch * grid}
            tower |= {"image_size": [2 * patch * grid] * 2, "patch_size": [patch] * 2}
            tower |= {"attention_bias": draw.random() < 0.5}
            processor |= {"size": side, "max_patches": draw.choice((1, 2, 5)), "crop_to_patches": draw.random() < 0.7}
    if kind != "lfm2_vl" and draw.random() < 0.5:  # its oracle has its own
        processor |= {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.25]}
    return config | {"text_config": text, "vision_config": tower}, processor


@pytest.mark.parametrize("seed", SEEDS)
def test_transformers_agrees_on_a_random_configuration(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    kind = [*KINDS][seed % len(KINDS)]
    config, processor = configured(kind, draw)
    model = make_model(tmp_path, kind, seed, config, processor)
    pictures = [picture(draw.randint(6, 120), draw.randint(6, 120), at) for at in range(draw.randint(1, 3))]
    talk = question("See ", *(part for one in pictures for part in (one, " and ")), "what?")
    with LLM(tmp_path, dtype="float32", token_budget=draw.choice((200, 512)), page_size=draw.choice((1, 8, 16))) as llm:
        rendered, ours = llm.render(talk), scored(llm, talk)
    given = of_spans(rendered.pictures) if kind == "lfm2_vl" else pixels(kind, pictures, processor)
    theirs = oracle(kind, model, list(rendered.ids), given)
    allowed = 4 * TOLERANCE if kind == "gemma4" else TOLERANCE  # transformers' own rounding moves it by 1.7e-4
    assert np.abs(np.array(ours[: len(theirs)]) - theirs).max() < allowed, (kind, config, processor)
