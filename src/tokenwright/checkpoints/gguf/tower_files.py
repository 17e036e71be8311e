"""A vision tower in a GGUF file beside its model (mmproj): its metadata as keys of configs, and its tensors' names."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tokenwright.arrays import Floats, widened
from tokenwright.checkpoints.families.family import TensorSource, head_order, pairs
from tokenwright.checkpoints.files.json_keys import JsonKeys, shown
from tokenwright.checkpoints.files.safetensors import Stored
from tokenwright.checkpoints.gguf.header import SUFFIX, read_gguf
from tokenwright.checkpoints.quantised.codecs import Compound, Decoded, Parts
from tokenwright.errors import CheckpointError
from tokenwright.models.tower import Tower

_VISION = pairs("""
    embedding_length=hidden_size block_count=num_hidden_layers attention.head_count=num_attention_heads
    image_size=image_size patch_size=patch_size attention.layer_norm_epsilon=layer_norm_eps
""")
_NAMES = pairs("""
    patches=v.patch_embd positions=v.position_embd class=v.class_embd! first=v.pre_ln norm=v.post_ln
""") | {
    f"layers.{{i}}.{ours}": f"v.blk.{{i}}.{theirs}"
    for ours, theirs in pairs("""
        norm1=ln1 norm2=ln2 q=attn_q k=attn_k v=attn_v out=attn_out gate=ffn_gate up=ffn_up down=ffn_down
        scale1=ls1.weight! scale2=ls2.weight!
    """).items()
}
_QKV = tuple(f"layers.{{i}}.{one}" for one in "qkv")
_FORMATS = re.compile(r"[-_.]?(bf16|f16|f32|q\d_\w+)(?=[-_.])", re.IGNORECASE)  # in names of files


@dataclass(frozen=True, slots=True)
class TowerFile:
    """A file as `Read` functions take it. tokens: texts, of which configs have the indices; several: the first known.

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
                name = _NAMES[ours]
                order = head_order(size, size, neighbours=True) if tower.alternate and ours in _QKV[:2] else None
            found[ours] = TensorSource(name, transpose=source.transpose, order=order, rows=rows)
        return found


class _Frames(Decoded):
    """The two frames' parts [out, 3, height, width] of a convolution: [out, 3 x 2 x height x width]."""

    title = "frames"
    small = ()

    def shape(self, parts: Mapping[str, Stored]) -> tuple[int, ...] | None:
        first, *_ = parts.values()
        return (first.shape[0], 2 * 3 * first.shape[-2] * first.shape[-1])

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
    """Raises CheckpointError for a file that cannot be read, and for one without a tower of a known kind."""
    header = read_gguf(file)
    every = JsonKeys(header.metadata, str(file))
    if every.text("general.architecture", "") != "clip":
        raise CheckpointError(f"{file} is a model, and no tower; give its mmproj file", "mmproj")
    kind = header.metadata.get("clip.vision.projector_type", every.text("clip.projector_type", "mlp"))
    if kind not in _READERS:
        raise every.error(f"its projector {shown(kind)} is none of {', '.join(_READERS)}; texts run without it")
    prefix = "clip.vision."
    keys = JsonKeys({k.removeprefix(prefix): v for k, v in header.metadata.items() if k.startswith(prefix)}, str(file))
    tensors = dict(header.tensors)
    up, down = (tensors.get(f"v.blk.0.ffn_{one}.weight") for one in ("up", "down"))
    if up is None or down is None:
        raise every.error("it has no v.blk.0.ffn_up.weight: the tower of a picture is missing")
    if down.shape[0] != keys.whole("embedding_length"):  # the first converters took one for the other
        tensors = {_swapped(name): one for name, one in tensors.items()}
        up = down
    vision = {ours: keys.raw(theirs) for theirs, ours in _VISION.items()} | {"intermediate_size": up.shape[0]}
    vision["layer_norm_eps"] = float(str(np.float32(keys.number("attention.layer_norm_epsilon", 1e-6))))
    colours = {name: keys.raw(name) for name in ("image_mean", "image_std")}
    made = _READERS[kind](_Facts(keys, every, tensors, {name: one for name, one in vision.items() if one is not None}))
    return replace(made, processing=colours | made.processing)


def _swapped(name: str) -> str:
    return re.sub(r"ffn_(up|down)", lambda found: "ffn_down" if found[1] == "up" else "ffn_up", name)


@dataclass(frozen=True, slots=True)
class _Facts:
    keys: JsonKeys  # of clip.vision
    every: JsonKeys
    tensors: dict[str, Stored]
    vision: dict[str, Any]

    def activation(self, tanh: str = "gelu_pytorch_tanh") -> str:
        if self.every.flag("clip.use_silu", False):
            return "silu"
        return tanh if self.every.flag("clip.use_gelu", False) else "quick_gelu"

    @property
    def merge(self) -> int:
        return self.keys.whole("spatial_merge_size", 2)

    def made(
        self, kind: str, projector: str, tokens: tuple[str, ...], vision: dict[str, Any], outer: Mapping[str, Any],
        processing: Mapping[str, Any],
    ) -> TowerFile:  # fmt: skip
        return TowerFile(
            f"{kind}ForConditionalGeneration", self.vision | vision, dict(outer), dict(processing), tokens,
            tuple(projector.split()), self.tensors,
        )  # fmt: skip


def _gemma3(of: _Facts) -> TowerFile:
    grid = of.keys.whole("image_size") // of.keys.whole("patch_size")
    rows = (grid // of.keys.whole("projector.scale_factor", 4)) ** 2
    tokens = ("<start_of_image>", "<end_of_image>", "<image_soft_token> <unused99> <pad>")
    outer = {"mm_tokens_per_image": rows, "boi_token_id": 0, "eoi_token_id": 1, "image_token_id": 2}
    vision = {"hidden_act": of.activation()}
    return of.made("Gemma3", "mm.soft_emb_norm mm.input_projection", tokens, vision, outer, {})


def _qwen(of: _Facts) -> TowerFile:
    older, frames = "v.position_embd.weight" not in of.tensors, "v.patch_embd.weight"
    second = of.tensors.get(f"{frames}.1")
    if second is None:
        raise of.keys.error(f"it has no {frames}.1, the second frame of a patch")
    codec, parts = _Frames(), {"0": of.tensors[frames], "1": second}
    one, shape = parts["0"], codec.shape(parts)
    assert shape is not None
    of.tensors[frames] = Compound(one.file, one.dtype, shape, one.start, 2 * one.nbytes, parts, codec, None)
    layers, cell = of.vision["num_hidden_layers"], of.merge * of.keys.whole("patch_size")
    vision = {"depth": layers, "num_heads": of.vision["num_attention_heads"], "hidden_act": of.activation()}
    vision |= {"spatial_merge_size": of.merge}
    if older:
        every = of.keys.whole("n_wa_pattern")
        full = [*range(every - 1, layers, every)]
        vision |= {"window_size": of.keys.whole("window_size", 112), "fullatt_block_indexes": full}
    else:
        flags = of.keys.raw("is_deepstack_layers") or []
        vision["num_position_embeddings"] = of.tensors["v.position_embd.weight"].shape[0]
        vision["deepstack_visual_indexes"] = [at for at, flag in enumerate(flags) if flag]
    pixels = {  # as llama.cpp: 8 to 4,096 tokens, where the file says nothing
        "min_pixels": of.keys.whole("image_min_pixels", 8 * cell**2),
        "max_pixels": of.keys.whole("image_max_pixels", 4096 * cell**2),
    }
    ids = {"image_token_id": 0, "vision_start_token_id": 1, "vision_end_token_id": 2}
    tokens = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>")
    return of.made("Qwen2_5_VL" if older else "Qwen3VL", "v.post_ln mm.0 mm.2", tokens, vision, ids, pixels)


def _pixtral(of: _Facts) -> TowerFile:
    merged, side = "mm.patch_merger.weight" in of.tensors, of.keys.whole("patch_size")
    merge = of.merge if merged else 1
    outer: dict[str, Any] = {
        "image_token_id": 0,
        "multimodal_projector_bias": "mm.1.bias" in of.tensors,
        "spatial_merge_size": merge,
    }
    outer |= {"model_type": "mistral3"} if merged else {}
    processing: dict[str, Any] = {"size": {"longest_edge": of.keys.whole("image_size")}, "patch_size": side}
    projector = f"{'mm.input_norm mm.patch_merger ' if merged else ''}mm.1 mm.2"
    vision = {"hidden_act": of.activation("gelu"), "model_type": "pixtral"}
    return of.made("Llava", projector, ("[IMG]",), vision, outer, processing)


def _llava(of: _Facts) -> TowerFile:
    """All layers of the file are read: it ends with the one whose rows are projected."""
    several = of.keys.raw("feature_layer") or []
    if len(several) > 1:
        raise of.keys.error("feature_layer lists several layers, whose rows Tokenwright does not join")
    clip = "v.class_embd" in of.tensors
    vision = {"model_type": "clip_vision_model" if clip else "siglip_vision_model", "hidden_act": of.activation()}
    outer = {"vision_feature_layer": -1, "image_token_id": 0}
    return of.made("Llava", "mm.0 mm.2", ("<image> <pad> <unk>",), vision, outer, {"do_center_crop": clip})


def _idefics(of: _Facts) -> TowerFile:
    side = of.keys.whole("image_size")
    longest = of.keys.whole("preproc_image_size", 4 * side)
    processing = {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": side}}
    outer = {"scale_factor": of.keys.whole("projector.scale_factor", 2), "image_token_id": 0}
    return of.made("Idefics3", "mm.model.fc", ("<image>",), {"hidden_act": of.activation()}, outer, processing)


def _internvl(of: _Facts) -> TowerFile:
    vision = {
        "use_qk_norm": "v.blk.0.attn_q_norm.weight" in of.tensors,
        "norm_type": "layer_norm" if "v.blk.0.ln1.bias" in of.tensors else "rms_norm",
        "attention_bias": "v.blk.0.attn_q.bias" in of.tensors,
        "hidden_act": of.activation("gelu"),
    }
    tiles = {f"{one}_patches": of.keys.whole(f"preproc_{one}_tiles", n) for one, n in (("min", 1), ("max", 12))}
    outer = {"downsample_ratio": 1 / of.keys.whole("projector.scale_factor", 2), "image_token_id": 0}
    projector = "mm.model.mlp.0 mm.model.mlp.1 mm.model.mlp.3"
    return of.made("InternVL", projector, ("<IMG_CONTEXT>",), vision, outer, {"crop_to_patches": True, **tiles})


_READERS: Mapping[str, Callable[[_Facts], TowerFile]] = {
    "gemma3": _gemma3, "idefics3": _idefics, "internvl": _internvl, "mlp": _llava, "pixtral": _pixtral,
    "qwen2.5vl_merger": _qwen, "qwen3vl_merger": _qwen,
}  # fmt: skip
