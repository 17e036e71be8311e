"""Vision towers by model family: each function reads configs into a tower, its names in files and a processor."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import isqrt
from typing import Any

from tokenwright.checkpoints.families.family import TensorSource, activation
from tokenwright.checkpoints.files.json_keys import JsonKeys
from tokenwright.checkpoints.towers import parts
from tokenwright.config import ModelConfig, Rope
from tokenwright.models.op import Matrix, Norm
from tokenwright.models.tower import JoinRows, LearnedGrid, Patches, Pool, Tower
from tokenwright.pictures.processors import Common, Fixed, Grid, LineByLine, MarkedTiles, Smart, Tiled


@dataclass(frozen=True, slots=True)
class NamedTower:
    """A tower with its processor. `names` maps our names of its tensors, without .weight, to the file's."""

    tower: Tower
    names: Mapping[str, TensorSource]
    processor: Common


Token = Callable[[int], str]
Read = Callable[[JsonKeys, JsonKeys, ModelConfig, JsonKeys, Token], NamedTower]


def _siglip(
    keys: JsonKeys, fit: str = "exact", at: str = "vision_tower"
) -> tuple[parts.LayerFacts, Patches, Norm, dict[str, TensorSource]]:
    facts = parts.LayerFacts.read(keys, (12, 1152, 16, 3072)) if at == "vision_model" else parts.LayerFacts.read(keys)
    keys.only("num_channels", 3, why="pictures without three colours")
    side = keys.whole("patch_size", 16, most=parts.MOST_SIDE)
    places = isqrt(keys.whole("num_patches", (keys.whole("image_size", 224, most=parts.MOST_SIDE) // side) ** 2))
    patches = Patches(
        Matrix.single("patches", facts.width, 3 * side * side, True),
        side,
        positions=LearnedGrid(places, fit),  # type: ignore[arg-type]
        colours_last=keys.flag("colours_last", keys.raw("num_patches") is not None),  # SigLIP 2's linear layer
    )
    last = Norm("norm", "layer", facts.width, facts.eps)
    own = parts.of_patches(f"{at}.embeddings.patch_embedding", f"{at}.embeddings.position_embedding")
    names = {**own, **facts.names(replace(parts.SIGLIP, at=f"{at}.encoder.layers.{{i}}"))}
    return facts, patches, last, names | {"norm": TensorSource(f"{at}.post_layernorm")}


def _colours(processing: JsonKeys, resample: int = 2) -> dict[str, Any]:
    processing.only("rescale_factor", 1 / 255, why="another scale of pixels")
    plain = (0.5, 0.5, 0.5)
    usual = _CLIP if resample == 3 else (plain, plain)  # of absent keys, as in transformers' processors
    mean, deviation = (_three(processing, *each) for each in zip(("image_mean", "image_std"), usual, strict=True))
    return {"mean": mean, "deviation": deviation, "resample": processing.whole("resample", resample, least=0, most=5)}


def _three(processing: JsonKeys, name: str, default: tuple[float, ...]) -> tuple[float, ...]:
    found = processing.raw(name) or [*default]
    if not (isinstance(found, list) and len(found) == 3 and all(isinstance(one, int | float) for one in found)):
        raise processing.error(f"{name} must be a list of three numbers")
    return tuple(map(float, found))


def _size(processing: JsonKeys, default: int, *names: str) -> int:
    size = processing.raw("size")
    if isinstance(size, int):
        return size
    found = next((size[name] for name in names if size.get(name)), default) if isinstance(size, dict) else default
    if not isinstance(found, int) or not 0 < found <= parts.MOST_SIDE**2:
        raise processing.error(f"size.{names[0]} must be a whole number of pixels")
    return found


def _token(outer: JsonKeys, token: Token, *names: str, default: int | None = None) -> str:
    at = next((outer.raw(name) for name in names if outer.raw(name) is not None), default)
    if not isinstance(at, int):
        raise outer.error(f"{names[0]} is missing: the token that stands for a picture")
    return token(at)


def gemma3(keys: JsonKeys, outer: JsonKeys, model: ModelConfig, processing: JsonKeys, token: Token) -> NamedTower:
    facts, patches, last, names = _siglip(keys)
    assert patches.positions is not None
    rows = outer.whole("mm_tokens_per_image", 256, most=parts.MOST_SIDE)
    pool = patches.positions.side // isqrt(rows)
    if isqrt(rows) ** 2 != rows or patches.positions.side % isqrt(rows):
        raise outer.error(f"mm_tokens_per_image = {rows} does not divide the tower's grid evenly")
    made = parts.NamedSteps("projector").then(Pool(pool))
    made.norm("multi_modal_projector.mm_soft_emb_norm", facts.width, facts.eps, "rms", plus=1.0)
    made.linear("multi_modal_projector.mm_input_projection_weight!", model.width, facts.width, False)
    names = names | made.names
    matrix = next(name for name in made.names if names[name].name.endswith("!"))
    names[matrix] = TensorSource(names[matrix].name, transpose=True)
    tower = Tower(patches, facts.made(), last, made.made())
    ends = [_token(outer, token, f"{one}_token_index", f"{one}_token_id") for one in ("boi", "eoi", "image")]
    side = patches.side * patches.positions.side
    width, height = (_size(processing, side, name) for name in ("width", "height"))
    processor = Fixed(
        placeholder=ends[0], token=ends[2], before=f"\n\n{ends[0]}", after=f"{ends[1]}\n\n", rows=rows,
        bidirectional=True, width=width, height=height, **_colours(processing),
    )  # fmt: skip
    return NamedTower(tower, names, processor)


def qwen(keys: JsonKeys, outer: JsonKeys, model: ModelConfig, processing: JsonKeys, token: Token) -> NamedTower:
    """Qwen2-VL, Qwen2.5-VL (windows, RMSNorm), Qwen3-VL and Qwen3.5 (learned positions, LayerNorm, deepstack)."""
    first, older = keys.raw("embed_dim") is not None, keys.raw("window_size") is not None
    width = keys.whole("embed_dim" if first else "hidden_size", most=1 << 16)
    side = keys.whole("patch_size", most=parts.MOST_SIDE)
    merge, frames = keys.whole("spatial_merge_size", 2, most=64), keys.whole("temporal_patch_size", 2, most=16)
    out, wide = keys.whole("out_hidden_size", model.width, most=1 << 16), width * merge * merge
    layers, full = keys.whole("depth", most=1 << 10), keys.raw("fullatt_block_indexes") if older else None
    facts = parts.LayerFacts(
        *(layers, width, keys.whole("num_heads", most=1 << 10)),
        keys.whole("intermediate_size", width * keys.whole("mlp_ratio", 4, most=64) if first else None, most=1 << 18),
        activation(keys, "hidden_act", "silu" if older else "quick_gelu" if first else "gelu_pytorch_tanh"),
        norm="rms" if older else "layer",
        gated=older,
        rope=Rope(10000.0),
        full=frozenset(full or ()) if older else None,
    )
    gated = tuple(f"mlp.{one}_proj" for one in ("gate", "up", "down"))
    of = parts.QWEN if first else replace(parts.QWEN, mlp=gated if older else _FC)
    table = None
    if not (first or older):
        table = LearnedGrid(isqrt(keys.whole("num_position_embeddings", most=parts.MOST_SIDE**2)), "linear")
    places = None if table is None else "visual.pos_embed"
    names = {**parts.of_patches("visual.patch_embed.proj", places), **facts.names(of)}
    matrix = Matrix.single("patches", width, 3 * frames * side * side, table is not None)
    made = parts.NamedSteps("projector")
    if table is None:
        made.norm("visual.merger.ln_q", width, 1e-6, facts.norm).then(JoinRows(merge))
        made.linear("visual.merger.mlp.0", wide, wide).then("gelu").linear("visual.merger.mlp.2", out, wide)
    else:
        made.norm("visual.merger.norm", width, 1e-6).then(JoinRows(merge))
        made.linear("visual.merger.linear_fc1", wide, wide).then("gelu").linear("visual.merger.linear_fc2", out, wide)
    deep = []
    for number, layer in enumerate(keys.raw("deepstack_visual_indexes") or ()):
        at = f"visual.deepstack_merger_list.{number}"
        one = parts.NamedSteps(f"deep.{number}").then(JoinRows(merge)).norm(f"{at}.norm", wide, 1e-6)
        one.linear(f"{at}.linear_fc1", wide, wide).then("gelu").linear(f"{at}.linear_fc2", out, wide)
        names |= one.names
        deep.append((layer, one.made()))
    window = keys.whole("window_size", most=parts.MOST_SIDE) // merge // side * merge if older else 0
    patches = Patches(matrix, side, frames, table)
    tower = Tower(patches, facts.made(), None, made.made(), facts.rope, window=window, deep=tuple(deep))
    image = _token(outer, token, "image_token_id")
    ends = [_token(outer, token, f"vision_{one}_token_id") for one in ("start", "end")]
    least, most = (_size(processing, *one) for one in ((3136, "shortest_edge"), (1003520, "longest_edge")))
    most = processing.whole("max_pixels", most)
    processor = Smart(
        placeholder=image, token=image, cell=merge * side, around=(ends[0], ends[1]),
        least=processing.whole("min_pixels", least), most=most, **_colours(processing, 3),
    )  # fmt: skip
    return NamedTower(tower, names | made.names, processor)


def pixtral(keys: JsonKeys, outer: JsonKeys, model: ModelConfig, processing: JsonKeys, token: Token) -> NamedTower:
    facts = parts.LayerFacts.read(
        keys, (24, 1024, 16, 4096), "gelu", eps=1e-5, norm="rms", qkv_bias=False, bias=False, gated=True
    )
    size = keys.whole("head_dim", facts.width // facts.heads, most=1 << 12)
    spelled = keys.raw("rope_parameters")
    theta = spelled.get("rope_theta") if isinstance(spelled, dict) else keys.raw("rope_theta")
    facts = replace(facts, head_size=size, rope=Rope(float(theta or 10000.0)))
    side = keys.whole("patch_size", 16, most=parts.MOST_SIDE)
    merges = outer.text("model_type", "") == "mistral3"  # by a matrix, also if each row stays one
    merge = outer.whole("spatial_merge_size", 2, most=64) if merges else 1
    bias, width = outer.flag("multimodal_projector_bias", not merges), facts.width
    made, at = parts.NamedSteps("projector"), "multi_modal_projector"
    if merges:
        made.norm(f"{at}.norm", width, model.norm_eps, "rms").then(JoinRows(merge, channels_first=True))
        made.linear(f"{at}.patch_merger.merging_layer", width, width * merge * merge, False)
    parts.perceptron(made, width, model.width, model.width, activation(outer, "projector_hidden_act", "gelu"), bias)
    first = Norm("first", "rms", width, 1e-5)
    matrix = Matrix.single("patches", width, 3 * side * side)
    names = {**parts.of_patches("vision_tower.patch_conv"), "first": TensorSource("vision_tower.ln_pre")}
    tower = Tower(Patches(matrix, side, norm=first), facts.made(), None, made.made(), facts.rope, alternate=True)
    image = _token(outer, token, "image_token_index", "image_token_id")
    cell, longest = side * merge, _size(processing, 1540, "longest_edge")
    processor = LineByLine(
        placeholder=image, token=image, cell=cell, longest=longest,
        line_end="[IMG_BREAK]", after="[IMG_END]", **_colours(processing, 3),
    )  # fmt: skip
    return NamedTower(tower, names | facts.names(parts.PIXTRAL) | made.names, processor)


def llava(keys: JsonKeys, outer: JsonKeys, model: ModelConfig, processing: JsonKeys, token: Token) -> NamedTower:
    if keys.text("model_type", "") == "pixtral":
        return pixtral(keys, outer, model, processing, token)
    clip = keys.text("model_type", "clip_vision_model") == "clip_vision_model"
    facts = parts.LayerFacts.read(keys, kind="quick_gelu", eps=1e-5) if clip else parts.LayerFacts.read(keys)
    side = keys.whole("patch_size", 32 if clip else 16, most=parts.MOST_SIDE)
    edge = keys.whole("image_size", 224, most=parts.MOST_SIDE)
    grid, width = LearnedGrid(edge // side, first=clip), facts.width
    first = Norm("first", "layer", width, facts.eps) if clip else None
    patches = Patches(
        Matrix.single("patches", width, 3 * side * side, not clip), side, positions=grid, class_token=clip, norm=first
    )
    at = "vision_tower.embeddings"
    own = parts.of_patches(
        f"{at}.patch_embedding", f"{at}.position_embedding", f"{at}.class_embedding!" if clip else None
    )
    names = {**own, **facts.names(parts.SIGLIP), "first": TensorSource("vision_tower.pre_layrnorm")}
    layer = outer.raw("vision_feature_layer")
    layer = -2 if layer is None else layer
    if not isinstance(layer, int):
        raise outer.error("vision_feature_layer lists several layers, whose rows Tokenwright does not join")
    outer.only("vision_feature_select_strategy", "default", why="rows of the class token")
    count = facts.layers + 1 + layer if layer < 0 else layer
    kind, bias = activation(outer, "projector_hidden_act", "gelu"), outer.flag("multimodal_projector_bias", True)
    made = parts.perceptron(parts.NamedSteps("projector"), width, model.width, model.width, kind, bias)
    tower = Tower(patches, facts.made(count), None, made.made())
    image = _token(outer, token, "image_token_index", "image_token_id")
    processor = Fixed(
        placeholder=image, token=image, rows=(edge // side) ** 2, width=edge, height=edge,
        crop=bool(processing.raw("do_center_crop")), **_colours(processing, 3),
    )  # fmt: skip
    return NamedTower(tower, names | made.names, processor)


def idefics(keys: JsonKeys, outer: JsonKeys, model: ModelConfig, processing: JsonKeys, token: Token) -> NamedTower:
    facts, patches, last, names = _siglip(keys, "bucketed", "vision_model")
    assert patches.positions is not None
    merge = outer.whole("scale_factor", 2, most=64)
    made = parts.NamedSteps("projector").then(JoinRows(merge))
    made.linear("connector.modality_projection.proj", model.width, facts.width * merge * merge, False)
    image = _token(outer, token, "image_token_id")
    tile = processing.raw("max_image_size")
    edge = patches.side * patches.positions.side
    side = tile.get("longest_edge", edge) if isinstance(tile, dict) else edge
    processor = Tiled(
        placeholder=image, token=image, side=side, longest=_size(processing, 4 * side, "longest_edge"),
        rows=(side // patches.side // merge) ** 2, fake="<fake_token_around_image>", whole="<global-img>",
        split=processing.raw("do_image_splitting") is not False, **_colours(processing, 1),
    )  # fmt: skip
    return NamedTower(Tower(patches, facts.made(), last, made.made()), names | made.names, processor)


def lfm2(keys: JsonKeys, outer: JsonKeys, model: ModelConfig, processing: JsonKeys, token: Token) -> NamedTower:
    """LFM2-VL: SigLIP 2 at a picture's own size, cut into tiles if it is much larger."""
    facts, patches, last, names = _siglip(keys, "resized")
    merge, made = outer.whole("downsample_factor", 2, most=64), parts.NamedSteps("projector")
    joined = facts.width * merge * merge
    made.then(JoinRows(merge))
    if outer.flag("projector_use_layernorm", True):
        made.norm("multi_modal_projector.layer_norm", joined, 1e-5)
    kind, hidden = activation(outer, "projector_hidden_act", "gelu"), outer.whole("projector_hidden_size", 2560)
    parts.perceptron(made, joined, hidden, model.width, kind, outer.flag("projector_bias", True))
    image, cell = _token(outer, token, "image_token_id", default=396), merge * patches.side
    least, most = (processing.whole(f"{one}_image_tokens", n) for one, n in (("min", 64), ("max", 256)))
    split, tile = processing.flag("do_image_splitting", True), processing.whole("tile_size", 512, most=parts.MOST_SIDE)
    processor = MarkedTiles(
        placeholder=image, token=image, before="<|image_start|>", after="<|image_end|>", whole_mark="<|img_thumbnail|>",
        cell=cell, least=least * cell**2, most=most * cell**2, side=tile, shortest=cell, grid=False,
        tiles=(processing.whole("min_tiles", 2, most=64), processing.whole("max_tiles", 10, most=64) if split else 1),
        large=processing.number("max_pixels_tolerance", 2.0) * most * cell**2,
        thumbnail=processing.flag("use_thumbnail", True), **_colours(processing),
    )  # fmt: skip
    return NamedTower(Tower(patches, facts.made(), last, made.made()), names | made.names, processor)


def internvl(keys: JsonKeys, outer: JsonKeys, model: ModelConfig, processing: JsonKeys, token: Token) -> NamedTower:
    """InternVL 3: a tower with a class token and scaled layers, over a grid of tiles."""
    keys.only("use_qk_norm", False, why="norms of q and k")
    keys.only("norm_type", "layer_norm", why="another norm")
    keys.only("use_mean_pooling", True, why="a norm behind the tower")
    biased = keys.flag("attention_bias", False)
    facts = parts.LayerFacts.read(keys, (24, 1024, 16, 4096), "gelu", qkv_bias=biased, scaled=True)
    side, edge = (_square(keys, name, default) for name, default in (("patch_size", 14), ("image_size", 448)))
    width, merge = facts.width, round(1 / outer.number("downsample_ratio", 0.5))
    at = "vision_tower.embeddings"
    names = parts.of_patches(f"{at}.patch_embeddings.projection", f"{at}.position_embeddings!", f"{at}.cls_token!")
    matrix = Matrix.single("patches", width, 3 * side * side, True)
    patches = Patches(matrix, side, positions=LearnedGrid(edge // side, first=True), class_token=True)
    joined = width * merge * merge
    made = parts.NamedSteps("projector").then(JoinRows(merge)).norm("multi_modal_projector.layer_norm", joined, 1e-5)
    parts.perceptron(made, joined, model.width, model.width, activation(outer, "projector_hidden_act", "gelu"))
    image = _token(outer, token, "image_token_id")
    tiles = processing.raw("crop_to_patches") is True
    processor = Grid(
        placeholder=image, token=image, side=edge, rows=(edge // side // merge) ** 2, before="<img>", after="</img>",
        least=processing.whole("min_patches", 1), most=processing.whole("max_patches", 12, most=64) if tiles else 1,
        **_colours(processing, 3),
    )  # fmt: skip
    return NamedTower(
        Tower(patches, facts.made(), None, made.made()), {**names, **facts.names(parts.INTERN), **made.names}, processor
    )


def _square(keys: JsonKeys, name: str, default: int) -> int:
    given = keys.raw(name) or default
    first = given[0] if isinstance(given, list) and len(set(given)) == 1 else given
    if not isinstance(first, int) or not 0 < first <= parts.MOST_SIDE:
        raise keys.error(f"{name} must be a whole number, or two equal ones")
    return first


_CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_FC = ("mlp.linear_fc1", "mlp.linear_fc2")
FAMILIES: Mapping[str, Read] = {
    "Gemma3ForConditionalGeneration": gemma3, "Qwen2VLForConditionalGeneration": qwen,
    "Qwen2_5_VLForConditionalGeneration": qwen, "Qwen3VLForConditionalGeneration": qwen,
    "Qwen3VLMoeForConditionalGeneration": qwen, "Qwen3_5ForConditionalGeneration": qwen,
    "Qwen3_5MoeForConditionalGeneration": qwen, "Mistral3ForConditionalGeneration": pixtral,
    "LlavaForConditionalGeneration": llava, "Idefics3ForConditionalGeneration": idefics,
    "SmolVLMForConditionalGeneration": idefics, "InternVLForConditionalGeneration": internvl,
    "Lfm2VlForConditionalGeneration": lfm2,
}  # fmt: skip
