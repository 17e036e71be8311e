"""Random LoRA adapters, as PEFT would write them."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tokenwright.checkpoints.families.registry import family_of
from tokenwright.checkpoints.folder import Checkpoint


def write_adapter(model: str, folder: Path, rank: int, seed: int) -> Path:
    """An adapter of every linear layer of attention and MLPs."""
    random = torch.Generator().manual_seed(seed)
    checkpoint = Checkpoint.open(model)
    graph, tensors, names = checkpoint.graph, {}, set()
    sources = family_of(checkpoint.config.architecture).sources(graph)
    for matrix in (one for op in graph.blocks for one in op.matrices):
        for part, _ in matrix.parts:
            source = sources[f"{part}.weight"]
            out = graph.shapes[f"{part}.weight"][0] if source.rows is None else source.rows[2]
            name = source.name.removesuffix(".weight")
            names.add(name.rpartition(".")[2])
            tensors[f"base_model.model.model.{name}.lora_A.weight"] = torch.randn(rank, matrix.inner, generator=random)
            tensors[f"base_model.model.model.{name}.lora_B.weight"] = torch.randn(out, rank, generator=random) / 100
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 1, "target_modules": sorted(names)}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
