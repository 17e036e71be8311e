"""LFM2-VL's sizes and tiles against transformers' rules, which are read from its file: the module needs torchvision."""

import ast
import math
import random
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from PIL import Image

from tokenwright.pictures.processors import MarkedTiles

RULES = ("round_by_factor", "find_closest_aspect_ratio", "_target_ratios", "_get_grid_layout", "smart_resize")
SIZES = {"downsample_factor": 2, "min_image_tokens": 4, "max_image_tokens": 16, "encoder_patch_size": 4}


def theirs() -> Any:
    """The functions of transformers' processor, without their annotations and decorators."""
    package = find_spec("transformers")
    assert package is not None and package.origin is not None
    file = Path(package.origin).parent / "models/lfm2_vl/image_processing_lfm2_vl.py"
    functions = [one for one in ast.walk(ast.parse(file.read_text())) if isinstance(one, ast.FunctionDef)]
    found: dict[str, Any] = {"math": math, "lru_cache": lru_cache}
    for one in functions:
        if one.name in (*RULES, "_is_image_too_large"):
            one.decorator_list, one.returns = [], None
            for argument in one.args.args:
                argument.annotation = None
            exec(compile(ast.Module([one], []), str(file), "exec"), found)
    return SimpleNamespace(**found)


def test_sizes_and_tiles_are_those_of_transformers() -> None:
    rules, draw = theirs(), random.Random(56)
    of = {
        "side": 32,
        "large": 2.0 * 16 * 64,
        "tiles": (2, 6),
        "whole_mark": "",
        "mean": (),
        "deviation": (),
    }
    ours = MarkedTiles(
        placeholder="", token="", resample=2, cell=8, least=4 * 64, most=16 * 64, grid=False, shortest=8, **of
    )
    own = SimpleNamespace(_target_ratios=lambda *tiles: rules._target_ratios(None, *tiles))
    seen = set()
    for _ in range(400):
        width, height = draw.randint(4, 300), draw.randint(4, 300)
        found = [one.pixels for one in ours.layout(Image.new("RGB", (width, height))) if not isinstance(one, str)]
        across, down = rules.smart_resize(None, height, width, **SIZES)
        expected = [(across, down)]
        if rules._is_image_too_large(None, height, width, max_pixels_tolerance=2.0, **{
            name: one for name, one in SIZES.items() if name != "min_image_tokens"
        }):  # fmt: skip
            columns, rows, *_ = rules._get_grid_layout(own, height, width, 2, 6, 32)
            expected = [(32, 32)] * (columns * rows) + expected
            marks = [one for one in ours.layout(Image.new("RGB", (width, height))) if isinstance(one, str)]
            assert marks[-3] == f"<|img_row_{rows}_col_{columns}|>"
        assert [(one.width, one.height) for one in found] == expected, (width, height)
        seen.add(len(expected))
    assert {1, 3, 5, 7} <= seen
