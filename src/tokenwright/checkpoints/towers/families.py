"""Vision towers by model family: each function reads configs into a tower, its names in files and a processor."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import isqrt
from typing import Any

from tokenwright.checkpoints.families.family import Order, TensorSource, activation, in_layers, named
from tokenwright.checkpoints.files.json_keys import JsonKeys
from tokenwright.checkpoints.towers import parts
from tokenwright.config import ModelConfig, Rope
from tokenwright.models.op import Matrix, Norm
from tokenwright.models.tower import BOUNDS, LearnedGrid, Patches, Squares, Tower
from tokenwright.pictures.processors import Common, Filling, Fixed, Grid, LineByLine, MarkedTiles, Smart, Tiled


@dataclass(frozen=True, slots=True)
class NamedTower:
    """A tower with its processor. `names` maps our names of its tensors, without .weight, to the file's."""

    tower: Tower
    names: Mapping[str, TensorSource]
    processor: Common


Token = Callable[[int], str]
Read = Callable[[JsonKeys, JsonKeys, ModelConfig, JsonKeys, Token], NamedTower]


def _siglip(
    keys: JsonKeys, fit: str = "exact", at: str = "vision_tower", width: int = 768, clip: bool = False
) -> tuple[parts.LayerFacts, Patches, Norm, dict[str, TensorSource]]:
    own: dict[str, Any] = {"kind": "quick_gelu", "eps": 1e-5} if clip else {}
    facts = parts.LayerFacts.read(keys, (12, width, 12 if width == 768 else 16, 3072), **own)
    keys.only("num_channels", 3, why="pictures without three colours")
    side = keys.whole("patch_size", 32 if clip else 16, most=parts.MOST_SIDE)
    places = isqrt(keys.whole("num_patches", (keys.whole("image_size", 224, most=parts.MOST_SIDE) // side) ** 2))
    first, last = (Norm(name, "layer", facts.width, facts.eps) for name in ("first", "norm"))
    patches = Patches(
        Matrix.single("patches", facts.width, 3 * side * side, not clip),
        side,
        positions=LearnedGrid(places, fit, clip),  # type: ignore[arg-type]
        class_token=clip,
        norm=first if clip else None,
        colours_last=keys.flag("colours_last", keys.raw("num_patches") is not None),  # SigLIP 2's linear layer
    )
    names = named(f"""
        patches={at}.embeddings.patch_embedding positions={at}.embeddings.position_embedding
        class={at}.embeddings.class_embedding! first={at}.pre_layrnorm norm={at}.post_layernorm
    """)
    return facts, patches, last, names | in_layers(parts.SIGLIP, f"{at}.encoder.layers.{{i}}")


def _usual(
    outer: JsonKeys, token: Token, processing: JsonKeys, resample: int = 2, default: int | None = None
) -> dict[str, Any]:
    """The fields of all processors. resample, default: of absent keys, as in transformers' processors."""
    processing.only("rescale_factor", 1 / 255, why="another scale of pixels")
    image, plain = _token(outer, token, "image", default), (0.5, 0.5, 0.5)
    usual = zip(("image_mean", "image_std"), _CLIP if resample == 3 else (plain, plain), strict=True)
    mean, deviation = (_three(processing, *each) for each in usual)
    resample = processing.whole("resample", resample, least=0, most=5)
    return {"placeholder": image, "token": image, "mean": mean, "deviation": deviation, "resample": resample}


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


def _token(outer: JsonKeys, token: Token, name: str, default: int | None = None) -> str:
    at = next((at for kind in ("index", "id") if (at := outer.raw(f"{name}_token_{kind}")) is not None), default)
    if not isinstance(at, int):
        raise outer.error(f"{name}_token_id is missing: the token that stands for a picture")
    return token(at)


def gemma3(keys: JsonKeys, outer: JsonKeys, model: ModelConfig, processing: JsonKeys, token: Token) -> NamedTower:
    facts, patches, last, names = _siglip(keys)
    assert patches.positions is not None
    rows = outer.whole("mm_tokens_per_image", 256, most=parts.MOST_SIDE)
    pool = patches.positions.side // isqrt(rows)
    if isqrt(rows) ** 2 != rows or patches.positions.side % isqrt(rows):
        raise outer.error(f"mm_tokens_per_image = {rows} does not divide the tower's grid evenly")
    made = parts.NamedSteps("projector").then(Squares(pool, mean=True))
    made.norm("multi_modal_projector.mm_soft_emb_norm", facts.width, facts.eps, "rms", plus=1.0)
    made.linear("multi_modal_projector.mm_input_projection_weight!", model.width, facts.width, False, transpose=True)
    tower = Tower(patches, facts.made(), last, made.made())
    first, after = (_token(outer, token, one) for one in ("boi", "eoi"))
    side = patches.side * patches.positions.side
    width, height = (_size(processing, side, name) for name in ("width", "height"))
    processor = Fixed(
        **_usual(outer, token, processing) | {"placeholder": first}, before=f"\n\n{first}", after=f"{after}\n\n",
        rows=rows, bidirectional=True, width=width, height=height,
    )  # fmt: skip
    return NamedTower(tower, names | made.names, processor)


def gemma4(keys: JsonKeys, outer: JsonKeys, model: ModelConfig, processing: JsonKeys, token: Token) -> NamedTower:
    """Norms around a layer's halves and over heads, clipped matrices; a table of positions for each axis."""
    facts = parts.LayerFacts.read(
        keys, (16, 768, 12, 3072), activation=activation(keys, "hidden_activation", "gelu_pytorch_tanh"), norm="rms",
        eps=keys.number("rms_norm_eps", 1e-6), qkv_bias=False, bias=False, gated=True, rope=_axial(keys, 100.0),
        around=True, clipped=keys.flag("use_clipped_linears", False),
    )  # fmt: skip
    keys.only("num_key_value_heads", facts.heads, why="heads that share keys")
    side, width = keys.whole("patch_size", 16, most=parts.MOST_SIDE), facts.width
    table = LearnedGrid(keys.whole("position_embedding_size", 10240, most=parts.MOST_SIDE), "summed")
    patches = Patches(Matrix.single("patches", width, 3 * side * side), side, positions=table, colours_last=True)
    names = in_layers(parts.GEMMA4, "vision_tower.encoder.layers.{i}") | named("""
        patches=vision_tower.patch_embedder.input_proj positions=vision_tower.patch_embedder.position_embedding_table!
    """)
    clips = [(at, one.name.removesuffix(".linear")) for at, one in names.items() if one.name.endswith(".linear")]
    names |= {f"{at}.{one}": TensorSource(f"{of}.{one}!") for at, of in clips for one in BOUNDS}
    quarter = range(facts.size // 4)  # a file has each axis' pairs side by side, and the columns' first
    order = Order(facts.size, tuple(at * len(quarter) + one for at in (2, 0, 3, 1) for one in quarter))
    turned = (f"layers.{{i}}.{one}" for one in ("q", "k", "q_norm", "k_norm"))
    names |= {at: replace(names[at], order=order) for at in turned}
    pool, made = keys.whole("pooling_kernel_size", 3, most=64), parts.NamedSteps("projector")
    even = Norm("even", "rms", width, facts.eps / width, weighted=False)  # of rows times the width's root
    made.then(Squares(pool, mean=True), even).linear("embed_vision.embedding_projection", model.width, width, False)
    keys.only("standardize", False, why="rows shifted and scaled by learned numbers")
    text = JsonKeys(outer.raw("text_config") or {}, outer.where)
    text.only("pad_token_id", 0, why="inputs of layers from another token where a picture is")
    text.only("use_bidirectional_attention", why="pictures whose rows read each other in some layers only")
    processing.only("do_normalize", False, why="normalised pixels")
    before, after = (_token(outer, token, one) for one in ("boi", "eoi"))
    rows = processing.whole("max_soft_tokens", 280, most=table.side // pool)
    processor = Filling(
        **_usual(outer, token, processing, 3) | dict.fromkeys(("mean", "deviation"), (0.5,) * 3), before=before,
        after=after, cell=pool * side, least=0, most=rows * (pool * side) ** 2, grid=False,
    )  # fmt: skip
    return NamedTower(Tower(patches, facts.made(), None, made.made(), facts.rope), names | made.names, processor)


def _axial(keys: JsonKeys, default: float) -> Rope:
    spelled = keys.raw("rope_parameters")
    theta = spelled.get("rope_theta") if isinstance(spelled, dict) else keys.raw("rope_theta")
    return Rope(float(theta or default))


def qwen(keys: JsonKeys, outer: JsonKeys, model: ModelConfig, processing: JsonKeys, token: Token) -> NamedTower:
    """Qwen2-VL, Qwen2.5-VL (windows, RMSNorm), Qwen3-VL and Qwen3.5 (learned positions, LayerNorm, deepstack)."""
    first, older = keys.raw("embed_dim") is not None, keys.raw("window_size") is not None
    width = keys.whole("embed_dim" if first else "hidden_size", most=1 << 16)
    side = keys.whole("patch_size", most=parts.MOST_SIDE)
    merge, frames = keys.whole("spatial_merge_size", 2, most=64), keys.whole("temporal_patch_size", 2, most=16)
    out, wide = keys.whole("out_hidden_size", model.width, most=1 << 16), width * merge * merge
    layers, full = keys.whole("depth", most=1 << 10), keys.raw("fullatt_block_indexes") if older else None
    facts = parts.LayerFacts(
        *(layers, width, heads := keys.whole("num_heads", most=1 << 10), width // heads),
        keys.whole("intermediate_size", width * keys.whole("mlp_ratio", 4, most=64) if first else None, most=1 << 18),
        activation(keys, "hidden_act", "silu" if older else "quick_gelu" if first else "gelu_pytorch_tanh"),
        norm="rms" if older else "layer",
        gated=older,
        rope=Rope(10000.0),
        full=frozenset(full or ()) if older else None,
    )
    own = "up=mlp.linear_fc1 down=mlp.linear_fc2"
    if first or older:
        own = "up=mlp.fc1 down=mlp.fc2" if first else "gate=mlp.gate_proj up=mlp.up_proj down=mlp.down_proj"
    table = None
    if not (first or older):
        table = LearnedGrid(isqrt(keys.whole("num_position_embeddings", most=parts.MOST_SIDE**2)), "linear")
    names = named("patches=visual.patch_embed.proj positions=visual.pos_embed")
    names |= in_layers(f"{parts.QWEN} {own}", "visual.blocks.{i}")
    for place, one in enumerate("qkv"):  # of one matrix
        at = f"layers.{{i}}.{one}"
        names[at] = replace(names[at], rows=(place * width, (place + 1) * width, 3 * width))
    merger = ("ln_q", "mlp.0", "mlp.2") if table is None else ("norm", "linear_fc1", "linear_fc2")
    norm, up, down = (f"visual.merger.{one}" for one in merger)
    made = parts.NamedSteps("projector").norm(norm, width, 1e-6, facts.norm).then(Squares(merge))
    made.linear(up, wide, wide).then("gelu").linear(down, out, wide)
    deep = []
    for number, layer in enumerate(keys.raw("deepstack_visual_indexes") or ()):
        at = f"visual.deepstack_merger_list.{number}"
        merged = parts.NamedSteps(f"deep.{number}").then(Squares(merge)).norm(f"{at}.norm", wide, 1e-6)
        merged.linear(f"{at}.linear_fc1", wide, wide).then("gelu").linear(f"{at}.linear_fc2", out, wide)
        names |= merged.names
        deep.append((layer, merged.made()))
    window = keys.whole("window_size", most=parts.MOST_SIDE) // merge // side * merge if older else 0
    patches = Patches(Matrix.single("patches", width, 3 * frames * side * side, table is not None), side, frames, table)
    tower = Tower(patches, facts.made(), None, made.made(), facts.rope, window=window, deep=tuple(deep))
    start, end = (_token(outer, token, f"vision_{one}") for one in ("start", "end"))
    least, most = (_size(processing, *one) for one in ((3136, "shortest_edge"), (1003520, "longest_edge")))
    least, most = processing.whole("min_pixels", least), processing.whole("max_pixels", most)
    usual = _usual(outer, token, processing, 3)
    processor = Smart(cell=merge * side, around=(start, end), least=least, most=most, **usual)
    return NamedTower(tower, names | made.names, processor)


def pixtral(keys: JsonKeys, outer: JsonKeys, model: ModelConfig, processing: JsonKeys, token: Token) -> NamedTower:
    facts = parts.LayerFacts.read(
        keys, (24, 1024, 16, 4096), "gelu", eps=1e-5, norm="rms", qkv_bias=False, bias=False, gated=True,
        rope=_axial(keys, 10000.0),
    )  # fmt: skip
    side = keys.whole("patch_size", 16, most=parts.MOST_SIDE)
    merges = outer.text("model_type", "") == "mistral3"  # by a matrix, also if each row stays one
    merge = outer.whole("spatial_merge_size", 2, most=64) if merges else 1
    bias, width = outer.flag("multimodal_projector_bias", not merges), facts.width
    made, at = parts.NamedSteps("projector"), "multi_modal_projector"
    if merges:
        made.norm(f"{at}.norm", width, model.norm_eps, "rms").then(Squares(merge, channels_first=True))
        made.linear(f"{at}.patch_merger.merging_layer", width, width * merge * merge, False)
    parts.perceptron(made, width, model.width, model.width, outer, bias)
    first = Norm("first", "rms", width, 1e-5)
    matrix = Matrix.single("patches", width, 3 * side * side)
    names = named("patches=vision_tower.patch_conv first=vision_tower.ln_pre")
    tower = Tower(Patches(matrix, side, norm=first), facts.made(), None, made.made(), facts.rope, alternate=True)
    cell, longest, usual = side * merge, _size(processing, 1540, "longest_edge"), _usual(outer, token, processing, 3)
    processor = LineByLine(cell=cell, longest=longest, line_end="[IMG_BREAK]", after="[IMG_END]", **usual)
    return NamedTower(
        tower, names | in_layers(parts.PIXTRAL, "vision_tower.transformer.layers.{i}") | made.names, processor
    )


def llava(keys: JsonKeys, outer: JsonKeys, model: ModelConfig, processing: JsonKeys, token: Token) -> NamedTower:
    if keys.text("model_type", "") == "pixtral":
        return pixtral(keys, outer, model, processing, token)
    clip = keys.text("model_type", "clip_vision_model") == "clip_vision_model"
    facts, patches, _, names = _siglip(keys, clip=clip)
    assert patches.positions is not None
    edge, width = keys.whole("image_size", 224, most=parts.MOST_SIDE), facts.width
    layer = outer.raw("vision_feature_layer")
    layer = -2 if layer is None else layer
    if not isinstance(layer, int):
        raise outer.error("vision_feature_layer lists several layers, whose rows Tokenwright does not join")
    outer.only("vision_feature_select_strategy", "default", why="rows of the class token")
    count = facts.layers + 1 + layer if layer < 0 else layer
    made, bias = parts.NamedSteps("projector"), outer.flag("multimodal_projector_bias", True)
    parts.perceptron(made, width, model.width, model.width, outer, bias)
    tower = Tower(patches, facts.made(count), None, made.made())
    rows, crop = patches.positions.side**2, bool(processing.raw("do_center_crop"))
    processor = Fixed(rows=rows, width=edge, height=edge, crop=crop, **_usual(outer, token, processing, 3))
    return NamedTower(tower, names | made.names, processor)


def idefics(keys: JsonKeys, outer: JsonKeys, model: ModelConfig, processing: JsonKeys, token: Token) -> NamedTower:
    facts, patches, last, names = _siglip(keys, "bucketed", "vision_model", 1152)
    assert patches.positions is not None
    merge = outer.whole("scale_factor", 2, most=64)
    made = parts.NamedSteps("projector").then(Squares(merge))
    made.linear("connector.modality_projection.proj", model.width, facts.width * merge * merge, False)
    tile = processing.raw("max_image_size")
    edge = patches.side * patches.positions.side
    side = tile.get("longest_edge", edge) if isinstance(tile, dict) else edge
    processor = Tiled(
        side=side, longest=_size(processing, 4 * side, "longest_edge"), **_usual(outer, token, processing, 1),
        rows=(side // patches.side // merge) ** 2, fake="<fake_token_around_image>", whole="<global-img>",
        split=processing.raw("do_image_splitting") is not False,
    )  # fmt: skip
    return NamedTower(Tower(patches, facts.made(), last, made.made()), names | made.names, processor)


def lfm2(keys: JsonKeys, outer: JsonKeys, model: ModelConfig, processing: JsonKeys, token: Token) -> NamedTower:
    """LFM2-VL: SigLIP 2 at a picture's own size, cut into tiles if it is much larger."""
    facts, patches, last, names = _siglip(keys, "resized")
    merge, made = outer.whole("downsample_factor", 2, most=64), parts.NamedSteps("projector")
    joined = facts.width * merge * merge
    made.then(Squares(merge))
    if outer.flag("projector_use_layernorm", True):
        made.norm("multi_modal_projector.layer_norm", joined, 1e-5)
    hidden, bias = outer.whole("projector_hidden_size", 2560), outer.flag("projector_bias", True)
    parts.perceptron(made, joined, hidden, model.width, outer, bias)
    cell = merge * patches.side
    least, most = (processing.whole(f"{one}_image_tokens", n) for one, n in (("min", 64), ("max", 256)))
    split, tile = processing.flag("do_image_splitting", True), processing.whole("tile_size", 512, most=parts.MOST_SIDE)
    processor = MarkedTiles(
        before="<|image_start|>", after="<|image_end|>", whole_mark="<|img_thumbnail|>",
        cell=cell, least=least * cell**2, most=most * cell**2, side=tile, shortest=cell, grid=False,
        tiles=(processing.whole("min_tiles", 2, most=64), processing.whole("max_tiles", 10, most=64) if split else 1),
        large=processing.number("max_pixels_tolerance", 2.0) * most * cell**2,
        thumbnail=processing.flag("use_thumbnail", True), **_usual(outer, token, processing, default=396),
    )  # fmt: skip
    return NamedTower(Tower(patches, facts.made(), last, made.made()), names | made.names, processor)


def internvl(keys: JsonKeys, outer: JsonKeys, model: ModelConfig, processing: JsonKeys, token: Token) -> NamedTower:
    """InternVL 3: a tower with a class token and scaled layers, over a grid of tiles."""
    keys.only("use_qk_norm", False, why="norms of q and k")
    keys.only("norm_type", "layer_norm", why="another norm")
    keys.only("use_mean_pooling", True, why="a norm behind the tower")
    biased = keys.flag("attention_bias", False)
    facts = parts.LayerFacts.read(keys, (24, 1024, 16, 4096), "gelu", qkv_bias=biased, scaled=True)
    sides = {one: keys.raw(one) for one in ("patch_size", "image_size")}  # numbers, or two equal ones
    single = {name: one[0] if isinstance(one, list) and len(set(one)) == 1 else one for name, one in sides.items()}
    square = JsonKeys(single, keys.where)
    side, edge = (square.whole(*one, most=parts.MOST_SIDE) for one in (("patch_size", 14), ("image_size", 448)))
    width, merge = facts.width, round(1 / outer.number("downsample_ratio", 0.5))
    names = in_layers(parts.INTERN, "vision_tower.encoder.layer.{i}") | named("""
        patches=vision_tower.embeddings.patch_embeddings.projection class=vision_tower.embeddings.cls_token!
        positions=vision_tower.embeddings.position_embeddings!
    """)
    matrix = Matrix.single("patches", width, 3 * side * side, True)
    patches = Patches(matrix, side, positions=LearnedGrid(edge // side, first=True), class_token=True)
    joined = width * merge * merge
    made = parts.NamedSteps("projector").then(Squares(merge)).norm("multi_modal_projector.layer_norm", joined, 1e-5)
    parts.perceptron(made, joined, model.width, model.width, outer)
    tiles = processing.raw("crop_to_patches") is True
    processor = Grid(
        side=edge, rows=(edge // side // merge) ** 2, before="<img>", after="</img>",
        least=processing.whole("min_patches", 1), most=processing.whole("max_patches", 12, most=64) if tiles else 1,
        **_usual(outer, token, processing, 3),
    )  # fmt: skip
    return NamedTower(Tower(patches, facts.made(), None, made.made()), names | made.names, processor)


_CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
FAMILIES: Mapping[str, Read] = {
    "Gemma3ForConditionalGeneration": gemma3, "Gemma4ForConditionalGeneration": gemma4,
    "Qwen2VLForConditionalGeneration": qwen, "Qwen2_5_VLForConditionalGeneration": qwen,
    "Qwen3VLForConditionalGeneration": qwen, "Qwen3VLMoeForConditionalGeneration": qwen,
    "Qwen3_5ForConditionalGeneration": qwen, "Qwen3_5MoeForConditionalGeneration": qwen,
    "Mistral3ForConditionalGeneration": pixtral, "LlavaForConditionalGeneration": llava,
    "Idefics3ForConditionalGeneration": idefics, "SmolVLMForConditionalGeneration": idefics,
    "InternVLForConditionalGeneration": internvl, "Lfm2VlForConditionalGeneration": lfm2,
}  # fmt: skip
LACKING = {f"Llava{one}ForConditionalGeneration": "rows of tiles joined by line" for one in ("Next", "Onevision")}
