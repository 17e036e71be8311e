"""Checkpoints of published shapes with random weights: what speed and memory need, and nothing to download.

    python benchmarks/shapes.py qwen05 build/qwen05

The tokenizer is the small model's that ships inside; its ids are the first of the vocabulary.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import tokenwright
from tokenwright.models.families import parse_config
from tokenwright.planner.known import KNOWN

STORIES = Path(tokenwright.__file__).parent / "stories"
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "gpt2": KNOWN["openai-community/gpt2"],
    "qwen05": KNOWN["Qwen/Qwen2.5-0.5B"],
}


def make(shape: str, folder: Path) -> Path:
    """Write a checkpoint of that shape in bfloat16, weights of unit gain; returns the folder."""
    config = dict(SHAPES[shape])
    family, parsed = parse_config(config)
    random = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for name, source in family.sources(parsed).items():
        if source.name in tensors:
            continue
        stored = source.stored(parsed.shapes[name])
        if len(stored) == 1:
            values = torch.ones(stored)
        else:
            values = torch.randn(stored, generator=random) / parsed.shapes[name][1] ** 0.5
        tensors[source.name] = values.bfloat16()
    folder.mkdir(parents=True, exist_ok=True)
    save_file({f"{family.prefix}{name}": one for name, one in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(STORIES / name, folder / name)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    print(make(arguments.shape, arguments.folder))


if __name__ == "__main__":
    main()
