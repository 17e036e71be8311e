"""GGUF files of more architectures, written as llama.cpp converts them, are read as the folders they are from."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.fixtures import make_checkpoint, write_json, write_tokenizer
from tests.models.gguf_files import write_gguf
from tests.models.random_models import plain_model
from tests.models.weights import make_model
from tests.tensors import tensors_of
from tokenwright.checkpoints.folder import Checkpoint

_ONES = ("attention_in", "attention_out", "embedding", "key", "lm_head", "ssm_in", "ssm_out")
PLAIN_FACTORS: dict[str, Any] = {f"{name}_multiplier": 1.0 for name in _ONES} | {
    "mlp_multipliers": [1.0, 1.0],
    "ssm_multipliers": [1.0] * 5,
}
# A kind of the fixtures, or an architecture of `PLAIN`, and changes to its config: what the metadata cannot tell.
# `_arch`: the file's architecture, where it is that of another model with the same arithmetic.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek2": ("deepseek2", {}),
    "deepseek2-first": ("deepseek2", {"_whole_kv_b": True, "_first": True}),
    "deepseek2-groups": ("deepseek2-groups", {}),
    "deepseek3": ("deepseek3", {"_next": 0}),
    "deepseek3-first": ("deepseek3", {"_next": 0, "_first": True, "_whole_kv_b": True, "n_group": 1, "topk_group": 1}),
    "glm4.7-flash": ("glm4.7-flash", {"_next": 0}),
    "youtu": ("youtu", {}),
    "glm4.5": ("glm4.5", {"_next": 0}),
    "glm4.5-air": ("glm4.5-air", {"_next": 0}),
    "bailingmoe2": ("glm4.5", {"_arch": "bailingmoe2", "_next": 0, "n_group": 4, "topk_group": 2, "attention_bias": False}),
    "dots1": ("dots1", {}),
    "exaone-moe": ("exaone-moe", {"_next": 0}),
    "afmoe": ("afmoe", {"num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}),
    "minimax-m2": ("minimax-m2", {}),
    "ernie-moe": ("ernie-moe", {"_next": 0}),
    "hunyuan-moe": ("hunyuan_v1_moe", {}),
    "internlm2": ("tinyllama", {"_arch": "internlm2"}),
    "xverse": ("llama2", {"_arch": "xverse"}),
    "exaone": ("tinyllama", {"_arch": "exaone"}),
    "arcee": ("arcee", {}),
    "ministral3": ("ministral3", {}),
    "mistral3": ("tinyllama", {"_arch": "mistral3"}),
    "qwen2vl": ("qwen2", {"_arch": "qwen2vl"}),
    "qwen3vl": ("qwen3", {"_arch": "qwen3vl"}),
    "qwen3vlmoe": ("qwen3-moe", {"_arch": "qwen3vlmoe", "mlp_only_layers": []}),
    "gemma": ("gemma", {}),
    "seed-oss": ("seed-oss", {}),
    "glm": ("glm", {}),
    "olmo": ("olmo", {}),
    "olmoe": ("olmoe", {}),
    "granitemoe": ("granitemoe", {}),
    "granitemoeshared": ("granitemoeshared", {}),
    "dbrx": ("dbrx", {}),
    "stablelm": ("stablelm", {}),
    "nemotron": ("nemotron", {}),
    "jais2": ("jais2", {}),
    "mamba2": ("mamba2", {}),
    "nemotron-h": ("nemotron-h", {}),
    "falcon-h1": ("falcon-h1", PLAIN_FACTORS),
    "qwen3.5-moe": ("qwen3.5-moe", {"rope_parameters": None, "rope_theta": 1e7, "partial_rotary_factor": 0.25}),
}


def make(folder: Path, kind: str, changes: dict[str, Any]) -> Path:
    """The folder of a model; its config.json has the changes that begin with an underscore too."""
    model = {key: one for key, one in changes.items() if not key.startswith("_")}
    from tests.models.fixtures import KINDS, VARIANTS

    if kind in KINDS | VARIANTS:
        path = make_checkpoint(folder, kind, changes=model).path
    else:
        from tests.models.random_models import dbrx
        from random import Random

        config = dbrx(Random(1)) if kind == "dbrx" else plain_model(kind) | model
        made = make_model(config)
        made.save_pretrained(path := folder)
        write_tokenizer(path)
        saved = json.loads((path / "config.json").read_text())
        write_json(path / "config.json", saved)
    config = json.loads((path / "config.json").read_text())
    write_json(path / "config.json", config | {key: one for key, one in changes.items() if key.startswith("_")})
    return path


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_file_of_each_architecture_is_the_folder_that_it_was_written_from(kind: str, tmp_path: Path) -> None:
    path = make(tmp_path / "model", *FAMILIES[kind])
    theirs, ours = Checkpoint.open(path), Checkpoint.open(write_gguf(tmp_path / "model.gguf", path))
    assert replace(ours.graph, architecture="") == replace(theirs.graph, architecture="")
    tensors = tensors_of(ours, torch.float32)
    for name, tensor in tensors_of(theirs, torch.float32).items():
        if name.endswith("a_log.weight"):  # the file has minus its exponentials
            torch.testing.assert_close(tensors[name], tensor, rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(tensors[name], tensor), name
