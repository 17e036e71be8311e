"""LoRA adapters beside the model, chosen by name with each request. This one is drawn at random, in PEFT's form."""

import json
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tokenwright import LLM

SETTINGS = {"peft_type": "LORA", "r": 4, "lora_alpha": 64, "target_modules": ["q_proj"]}


def make(folder: Path, layers: int, width: int, inner: int) -> None:
    """An adapter of rank 4 for the queries of all layers."""
    draw, tensors = np.random.default_rng(0), {}
    for layer in range(layers):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = draw.normal(0, 0.3, (4, width)).astype(np.float32)
        tensors[f"{name}.lora_B.weight"] = draw.normal(0, 0.3, (inner, 4)).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(SETTINGS))


with tempfile.TemporaryDirectory() as folder:
    with LLM("stories") as llm:
        config = llm.config
    make(Path(folder), config.layers, config.width, config.heads * config.head_size)
    with LLM("stories", adapters={"odd": folder}) as llm:
        names = [None, "odd"]
        both = llm.generate(["Once upon a time"] * 2, adapter=names, max_tokens=12, temperature=0)
        for name, done in zip(names, both, strict=True):
            print(f"{name or 'the model':>9}:{done.text}")
