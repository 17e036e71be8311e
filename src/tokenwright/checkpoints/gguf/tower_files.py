"""Reads a vision tower in a GGUF file (mmproj): its metadata as keys of configs, and its tensors' names."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from tokenwright.arrays import Floats, widened
from tokenwright.checkpoints.families.family import TensorSource, head_order, in_layers, named, pairs
from tokenwright.checkpoints.files.json_keys import JsonKeys, shown
from tokenwright.checkpoints.files.safetensors import Stored
from tokenwright.checkpoints.gguf.header import SUFFIX, read_gguf
from tokenwright.checkpoints.quantised.codecs import Compound, Decoded, Parts
from tokenwright.errors import CheckpointError
from tokenwright.models.tower import Tower

_VISION = pairs("""
    embedding_length=hidden_size block_count=num_hidden_layers attention.head_count=num_attention_heads
    image_size=image_size patch_size=patch_size
""")
_LAYER = """
    norm1=ln1 norm2=ln2 q=attn_q k=attn_k v=attn_v out=attn_out gate=ffn_gate up=ffn_up down=ffn_down
    scale1=ls1.weight! scale2=ls2.weight!
"""
_NAMES = in_layers(_LAYER, "v.blk.{i}") | named("""
    patches=v.patch_embd positions=v.position_embd class=v.class_embd! first=v.pre_ln norm=v.post_ln
""")
_QKV = tuple(f"layers.{{i}}.{one}" for one in "qkv")
_FORMATS = re.compile(r"[-_.]?(bf16|f16|f32|q\d_\w+)(?=[-_.])", re.IGNORECASE)  # in names of files


@dataclass(frozen=True, slots=True)
class TowerFile:
    """A file for the `Read` functions. Configs have the index of the first of `tokens` that the vocabulary has.

    projector: the names of its tensors, in the order of its steps.
    """

    kind: str
    vision: dict[str, Any]
    outer: dict[str, Any]
    processing: dict[str, Any]
    tokens: tuple[str, ...]
    projector: tuple[str, ...]
    stored: Mapping[str, Stored]

    def renamed(self, tower: Tower, names: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
        """The names of a family's tensors in this file. q and k of Pixtral are paired as llama.cpp rotates them."""
        of_file, found, deep = iter(self.projector), dict[str, TensorSource](), dict[str, Any]()
        layers, (heads, size) = [layer for layer, _ in tower.deep], tower.head
        fused = "v.blk.0.attn_qkv.weight" in self.stored
        for ours, source in names.items():
            order = rows = None
            if ours.startswith("projector."):
                name = next(of_file)
            elif ours.startswith("deep."):
                number = ours.split(".")[1]
                part = next(deep.setdefault(number, iter(("norm", "fc1", "fc2"))))
                name = f"v.deepstack.{layers[int(number)]}.{part}"
            elif fused and ours in _QKV:
                at = _QKV.index(ours) * heads * size
                name, rows = "v.blk.{i}.attn_qkv", (at, at + heads * size, 3 * heads * size)
            else:
                name = _NAMES[ours].name
                order = head_order(size, size, neighbours=True) if tower.alternate and ours in _QKV[:2] else None
            found[ours] = TensorSource(name, transpose=source.transpose, order=order, rows=rows)
        return found


class _Frames(Decoded):
    """A convolution [out, 3 x 2 x height x width] whose two frames are stored as [out, 3, height, width] each."""

    title, small = "frames", tuple[str, ...]()

    def shape(self, parts: Mapping[str, Stored]) -> tuple[int, ...]:
        out, *inner = parts["0"].shape
        return out, 2 * prod(inner)

    def numbers(self, parts: Parts) -> Floats:
        both: Floats = np.stack([widened(one) for one in parts.values()], 2)
        return np.ascontiguousarray(both.reshape(len(both), -1))


def projector_beside(model: Path) -> Path | None:
    """The file with the tower of a GGUF model in its folder. Raises CheckpointError for several different ones."""
    found = sorted(one for one in model.parent.glob(f"*{SUFFIX}") if "mmproj" in one.name.lower() and one != model)
    if len({_FORMATS.sub("", one.name.lower()) for one in found}) > 1:
        named = ", ".join(one.name for one in found[:4])
        raise CheckpointError(f"{model.parent} has several towers ({named}); name the model's own by mmproj", "mmproj")
    return min(found, key=lambda one: (one.stat().st_size, one.name), default=None)


def read_tower_file(file: Path) -> TowerFile:
    header = read_gguf(file)
    every, tensors = JsonKeys(header.metadata, str(file)), dict(header.tensors)
    if every.text("general.architecture", "") != "clip":
        raise CheckpointError(f"{file} is a model, and no tower; give its mmproj file", "mmproj")
    kind = every.text("clip.vision.projector_type", every.text("clip.projector_type", "mlp"))
    if kind not in _READERS:
        raise every.error(f"its projector {shown(kind)} is none of {', '.join(_READERS)}; texts run without it")
    prefix = "clip.vision."
    keys = JsonKeys({k.removeprefix(prefix): v for k, v in header.metadata.items() if k.startswith(prefix)}, str(file))
    patches, up, down = (tensors.get(f"v.{one}.weight") for one in ("patch_embd", "blk.0.ffn_up", "blk.0.ffn_down"))
    if patches is None or up is None or down is None or len(patches.shape) != 4:
        raise every.error("it has no layers (v.blk) behind patches (v.patch_embd) of a picture")
    if down.shape[0] != keys.whole("embedding_length"):  # the first converters took one for the other
        turn = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
        tensors = {re.sub("ffn_up|ffn_down", lambda one: turn[one[0]], name): one for name, one in tensors.items()}
        up = down
    silu, gelu = (every.flag(f"clip.use_{one}", False) for one in ("silu", "gelu"))
    exact = "gelu" if kind in ("pixtral", "internvl") else "gelu_pytorch_tanh"
    vision = {ours: keys.whole(theirs) for theirs, ours in _VISION.items()} | {
        "intermediate_size": up.shape[0],
        "layer_norm_eps": float(str(np.float32(keys.number("attention.layer_norm_epsilon", 1e-6)))),
        "hidden_act": "silu" if silu else exact if gelu else "quick_gelu",
    }
    model, read = _READERS[kind]
    projector, tokens, more, outer, processing = read(keys, tensors)
    processing |= {name: keys.raw(name) for name in ("image_mean", "image_std")}
    found = f"{model}ForConditionalGeneration", vision | more, outer, processing, tokens, tuple(projector.split())
    return TowerFile(*found, tensors)


Tensors = dict[str, Stored]
Config = dict[str, Any]
ReadTower = tuple[str, tuple[str, ...], Config, Config, Config]  # projector, tokens, the configs


def _gemma3(keys: JsonKeys, _: Tensors) -> ReadTower:
    grid = keys.whole("image_size") // keys.whole("patch_size")
    tokens = ("<start_of_image>", "<end_of_image>", "<image_soft_token> <unused99> <pad>")
    ids = {"boi_token_id": 0, "eoi_token_id": 1, "image_token_id": 2}
    rows = (grid // keys.whole("projector.scale_factor", 4)) ** 2
    return "mm.soft_emb_norm mm.input_projection", tokens, {}, {"mm_tokens_per_image": rows, **ids}, {}


def _qwen(keys: JsonKeys, tensors: Tensors) -> ReadTower:
    """Pictures have 8 to 4,096 tokens, as in llama.cpp, where the file has no limits."""
    first, second = (tensors.get(f"v.patch_embd.weight{one}") for one in ("", ".1"))
    if first is None or second is None or first.shape != second.shape:
        raise keys.error("it has no v.patch_embd.weight.1, the second frame of a patch")
    parts, codec = {"0": first, "1": second}, _Frames()
    shape, nbytes = codec.shape(parts), 2 * first.nbytes
    tensors["v.patch_embd.weight"] = Compound(first.file, first.dtype, shape, first.start, nbytes, parts, codec, None)
    layers, merge = keys.whole("block_count", most=1 << 10), keys.whole("spatial_merge_size", 2)
    cell = (merge * keys.whole("patch_size")) ** 2
    vision: dict[str, Any] = {"depth": layers, "num_heads": keys.whole("attention.head_count")}
    if "v.position_embd.weight" in tensors:
        flags = keys.raw("is_deepstack_layers")
        deep = [at for at, flag in enumerate(flags) if flag] if isinstance(flags, list) else []
        vision["num_position_embeddings"] = tensors["v.position_embd.weight"].shape[0]
        vision["deepstack_visual_indexes"] = deep
    elif keys.raw("n_wa_pattern") is None and keys.raw("window_size") is None:  # Qwen2-VL
        vision["embed_dim"] = keys.whole("embedding_length")
    else:
        step = keys.whole("n_wa_pattern")
        vision["fullatt_block_indexes"] = [*range(step - 1, layers, step)]
        vision["window_size"] = keys.whole("window_size", 112)
    limits = {f"{name}_pixels": keys.whole(f"image_{name}_pixels", n * cell) for name, n in (("min", 8), ("max", 4096))}
    ids = {"image_token_id": 0, "vision_start_token_id": 1, "vision_end_token_id": 2}
    tokens = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>")
    return "v.post_ln mm.0 mm.2", tokens, vision | {"spatial_merge_size": merge}, ids, limits


def _pixtral(keys: JsonKeys, tensors: Tensors) -> ReadTower:
    merged = "mm.patch_merger.weight" in tensors
    outer: dict[str, Any] = {"image_token_id": 0, "multimodal_projector_bias": "mm.1.bias" in tensors}
    outer |= {"model_type": "mistral3", "spatial_merge_size": keys.whole("spatial_merge_size", 2)} if merged else {}
    projector = f"{'mm.input_norm mm.patch_merger ' if merged else ''}mm.1 mm.2"
    processing = {"size": {"longest_edge": keys.whole("image_size")}}
    return projector, ("[IMG]",), {"model_type": "pixtral"}, outer, processing


def _llava(keys: JsonKeys, tensors: Tensors) -> ReadTower:
    """All layers of the file are read: it ends with the one whose rows are projected."""
    several = keys.raw("feature_layer")
    if isinstance(several, list) and len(several) > 1:
        raise keys.error("feature_layer lists several layers, whose rows Tokenwright does not join")
    clip = "v.class_embd" in tensors
    vision = {"model_type": "clip_vision_model" if clip else "siglip_vision_model"}
    outer = {"vision_feature_layer": -1, "image_token_id": 0}
    return "mm.0 mm.2", ("<image> <pad> <unk>",), vision, outer, {"do_center_crop": clip}


def _idefics(keys: JsonKeys, _: Tensors) -> ReadTower:
    side = keys.whole("image_size", most=1 << 14)
    sides = {"size": keys.whole("preproc_image_size", 4 * side), "max_image_size": side}
    outer = {"scale_factor": keys.whole("projector.scale_factor", 2), "image_token_id": 0}
    return "mm.model.fc", ("<image>",), {}, outer, {name: {"longest_edge": one} for name, one in sides.items()}


def _lfm2(keys: JsonKeys, tensors: Tensors) -> ReadTower:
    """Its first layer is a convolution here."""
    vision = {"num_patches": tensors["v.position_embd.weight"].shape[0], "colours_last": False}
    outer = {"downsample_factor": keys.whole("projector.scale_factor", 2), "image_token_id": 0}
    sizes = {"projector_hidden_size": tensors["mm.1.weight"].shape[0]}
    sizes["projector_use_layernorm"] = "mm.input_norm.weight" in tensors
    projector = "mm.input_norm mm.1 mm.2" if sizes["projector_use_layernorm"] else "mm.1 mm.2"
    return projector, ("<image>",), vision, outer | sizes, {}


def _internvl(keys: JsonKeys, tensors: Tensors) -> ReadTower:
    vision = {
        "use_qk_norm": "v.blk.0.attn_q_norm.weight" in tensors,
        "norm_type": "layer_norm" if "v.blk.0.ln1.bias" in tensors else "rms_norm",
        "attention_bias": "v.blk.0.attn_q.bias" in tensors,
    }
    tiles = {f"{one}_patches": keys.whole(f"preproc_{one}_tiles", n) for one, n in (("min", 1), ("max", 12))}
    outer = {"downsample_ratio": 1 / keys.whole("projector.scale_factor", 2), "image_token_id": 0}
    projector = "mm.model.mlp.0 mm.model.mlp.1 mm.model.mlp.3"
    return projector, ("<IMG_CONTEXT>",), vision, outer, {"crop_to_patches": True, **tiles}


_READERS: Mapping[str, tuple[str, Callable[[JsonKeys, Tensors], ReadTower]]] = {
    "gemma3": ("Gemma3", _gemma3), "idefics3": ("Idefics3", _idefics), "internvl": ("InternVL", _internvl),
    "lfm2": ("Lfm2Vl", _lfm2), "mlp": ("Llava", _llava), "pixtral": ("Llava", _pixtral),
    "qwen2.5vl_merger": ("Qwen2_5_VL", _qwen), "qwen2vl_merger": ("Qwen2VL", _qwen),
    "qwen3vl_merger": ("Qwen3VL", _qwen),
}  # fmt: skip
