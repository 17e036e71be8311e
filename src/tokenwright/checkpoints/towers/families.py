"""The towers of model families: each reads its configs into a tower, its names in files and a processor."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any

from tokenwright.checkpoints.families.family import TensorSource
from tokenwright.checkpoints.files.json_keys import JsonKeys
from tokenwright.checkpoints.towers.parts import MOST_SIDE, SIGLIP, LayerFacts, Named, of_patches
from tokenwright.config import ModelConfig
from tokenwright.models.op import Matrix, Norm
from tokenwright.models.tower import LearnedGrid, Patches, Pool, Tower
from tokenwright.pictures.processors import Fixed


@dataclass(frozen=True, slots=True)
class Sight:
    """A tower with its processor. names: our names of the tower's tensors without .weight, and the file's."""

    tower: Tower
    names: Mapping[str, TensorSource]
    processor: Fixed


Token = Callable[[int], str]
Read = Callable[[JsonKeys, JsonKeys, ModelConfig, JsonKeys, Token], Sight]


def _siglip(keys: JsonKeys, fit: str = "exact") -> tuple[LayerFacts, Patches, Norm, dict[str, TensorSource]]:
    """A SigLIP tower with a convolution and a learned table of positions: its facts, patches, last norm and names."""
    facts = LayerFacts.read(keys)
    keys.only("num_channels", 3, why="pictures without three colours")
    side = keys.whole("patch_size", 16, most=MOST_SIDE)
    grid = LearnedGrid(keys.whole("image_size", 224, most=MOST_SIDE) // side, fit)  # type: ignore[arg-type]
    patches = Patches(Matrix.single("patches", facts.width, 3 * side * side, True), side, positions=grid)
    last = Norm("norm", "layer", facts.width, facts.eps)
    at = "vision_tower.embeddings"
    names = {**of_patches(f"{at}.patch_embedding", f"{at}.position_embedding"), **facts.names(SIGLIP)}
    return facts, patches, last, names | {"norm": TensorSource("vision_tower.post_layernorm")}


def _colours(processing: JsonKeys) -> dict[str, Any]:
    """Mean, deviation and filter of a processor."""
    processing.only("rescale_factor", 1 / 255, why="another scale of pixels")
    mean, deviation = (_three(processing, name, 0.5) for name in ("image_mean", "image_std"))
    return {"mean": mean, "deviation": deviation, "resample": processing.whole("resample", 2, least=0, most=5)}


def _three(processing: JsonKeys, name: str, default: float) -> tuple[float, ...]:
    found = processing.raw(name) or 3 * [default]
    if not (isinstance(found, list) and len(found) == 3 and all(isinstance(one, int | float) for one in found)):
        raise processing.error(f"{name} must be a list of three numbers")
    return tuple(map(float, found))


def _size(processing: JsonKeys, *names: str, default: int) -> int:
    """A number of the processor's `size`, under the first of the names that it has."""
    size = processing.raw("size")
    if isinstance(size, int):
        return size
    found = next((size[name] for name in names if size.get(name)), default) if isinstance(size, dict) else default
    if not isinstance(found, int) or not 0 < found <= MOST_SIDE**2:
        raise processing.error(f"size.{names[0]} must be a whole number of pixels")
    return found


def _token(outer: JsonKeys, token: Token, *names: str, default: int | None = None) -> str:
    """The text of a token whose id the config has under one of the names."""
    at = next((outer.raw(name) for name in names if outer.raw(name) is not None), default)
    if not isinstance(at, int):
        raise outer.error(f"{names[0]} is missing: the token that stands for a picture")
    return token(at)


def gemma3(keys: JsonKeys, outer: JsonKeys, model: ModelConfig, processing: JsonKeys, token: Token) -> Sight:
    facts, patches, last, names = _siglip(keys)
    assert patches.positions is not None
    rows = outer.whole("mm_tokens_per_image", 256, most=MOST_SIDE)
    pool = patches.positions.side // isqrt(rows)
    if isqrt(rows) ** 2 != rows or patches.positions.side % isqrt(rows):
        raise outer.error(f"mm_tokens_per_image = {rows} does not divide the tower's grid evenly")
    made = Named("projector").then(Pool(pool))
    made.norm("multi_modal_projector.mm_soft_emb_norm", facts.width, facts.eps, "rms", plus=1.0)
    made.linear("multi_modal_projector.mm_input_projection_weight!", model.width, facts.width, False)
    names = names | made.names
    matrix = next(name for name in made.names if names[name].name.endswith("!"))
    names[matrix] = TensorSource(names[matrix].name, transpose=True)
    tower = Tower(patches, facts.made(), last, made.made())
    ends = [_token(outer, token, f"{one}_token_index", f"{one}_token_id") for one in ("boi", "eoi", "image")]
    side = patches.side * patches.positions.side
    width, height = (_size(processing, name, default=side) for name in ("width", "height"))
    processor = Fixed(
        placeholder=ends[0], token=ends[2], before=f"\n\n{ends[0]}", after=f"{ends[1]}\n\n", rows=rows, whole=True,
        width=width, height=height, **_colours(processing),
    )  # fmt: skip
    return Sight(tower, names, processor)


FAMILIES: Mapping[str, Read] = {"Gemma3ForConditionalGeneration": gemma3}
