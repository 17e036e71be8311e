"""GGUF files of more architectures, written as llama.cpp converts them, are read as the folders they are from."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoints.gguf.test_gguf import LLAMA3
from tests.models.files.gguf_files import write_gguf
from tests.models.fixtures import KINDS, VARIANTS, make_checkpoint, of_texts, write_json, write_tokenizer
from tests.models.next_layers import make_next_layer
from tests.models.random_models import nemotron_h, plain_model
from tests.models.weights import make_model
from tests.tensors import tensors_of
from tokenwright import LLM
from tokenwright.checkpoints.folder import Checkpoint
from tokenwright.checkpoints.gguf.tensor_names import layout_of
from tokenwright.checkpoints.next_layer import next_layer_of

_ONES = ("attention_in", "attention_out", "embedding", "key", "lm_head", "ssm_in", "ssm_out")
PLAIN_FACTORS: dict[str, Any] = {f"{name}_multiplier": 1.0 for name in _ONES} | {
    "mlp_multipliers": [1.0, 1.0],
    "ssm_multipliers": [1.0] * 5,
}
MAKERS = {"nemotron_h": nemotron_h}
MIXED = ["linear_attention", "moe", "full_attention", "linear_attention", "moe"]
MINICPM = {"architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm", "scale_emb": 12, "scale_depth": 1.4}
MINICPM |= {"dim_model_base": 32}
BASE = {"original_max_position_embeddings": 8192, "rope_theta": 1.2e7}
UNSCALED = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "attention_factor": 1.0}
# A kind of the fixtures, or an architecture of `PLAIN`, and changes to its config: what the metadata cannot tell.
# `_arch`: the file's architecture, where it is that of another model with the same arithmetic.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek2": ("deepseek2", {}),
    "deepseek2-first": ("deepseek2", {"_whole_kv_b": True, "_first": True}),
    "deepseek2-unscaled": ("deepseek2", {"rope_scaling": UNSCALED}),
    "deepseek2-groups": ("deepseek2-groups", {}),
    "deepseek3": ("deepseek3", {}),
    "deepseek3-first": ("deepseek3", {"_first": True, "_whole_kv_b": True, "n_group": 1, "topk_group": 1}),
    "glm4.7-flash": ("glm4.7-flash", {}),
    "youtu": ("youtu", {}),
    "glm4.5": ("glm4.5", {}),
    "glm4.5-air": ("glm4.5-air", {}),
    "bailingmoe2": ("glm4.5", {"_arch": "bailingmoe2", "n_group": 4, "topk_group": 2, "attention_bias": False}),
    "dots1": ("dots1", {}),
    "exaone-moe": ("exaone-moe", {}),
    "afmoe": ("afmoe", {"num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}),
    "minimax-m2": ("minimax-m2", {}),
    "ernie-moe": ("ernie-moe", {}),
    "hunyuan-moe": ("hunyuan_v1_moe", {}),
    "internlm2": ("tinyllama", {"_arch": "internlm2"}),
    "xverse": ("llama2", {"_arch": "xverse"}),
    "exaone": ("tinyllama", {"_arch": "exaone"}),
    "arcee": ("arcee", {}),
    "ministral3": ("ministral3", {}),
    "mistral3": ("tinyllama", {"_arch": "mistral3"}),
    "minicpm": ("tinyllama", {"_config": MINICPM}),
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
    "stablelm": ("stablelm", {}),
    "nemotron": ("nemotron", {}),
    "jais2": ("jais2", {}),
    "apertus": (
        "apertus",
        {"rope_parameters": LLAMA3 | BASE},
    ),
    "fused": ("qwen2", {"_fused": True}),
    "fused-experts": ("qwen3.5-moe", {"_both": True}),
    "mamba2": ("mamba2", {}),
    "nemotron-h": ("nemotron-h", {}),
    "nemotron-h-moe": ("nemotron_h", {"_arch": "nemotron_h_moe", "layers_block_type": MIXED}),
    "falcon-h1": ("falcon-h1", PLAIN_FACTORS),
    "qwen3.5-moe": ("qwen3.5-moe", {}),
}


def make(folder: Path, kind: str, changes: dict[str, Any]) -> Path:
    """The folder of a model; its config.json has the changes that begin with an underscore too, and `_config`."""
    model = {key: one for key, one in changes.items() if not key.startswith("_")}
    if kind in KINDS | VARIANTS:
        make_checkpoint(folder, kind, changes=model)
    else:
        config = MAKERS[kind](Random(1)) if kind in MAKERS else plain_model(kind)
        make_model(config | model).save_pretrained(folder)
        write_tokenizer(folder)
    config = json.loads((folder / "config.json").read_text())
    more = {key: one for key, one in changes.items() if key.startswith("_")}
    write_json(folder / "config.json", config | more | more.pop("_config", {}))
    return folder


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_file_of_each_architecture_is_the_folder_that_it_was_written_from(kind: str, tmp_path: Path) -> None:
    path = make(tmp_path / "model", *FAMILIES[kind])
    theirs, ours = Checkpoint.open(path), Checkpoint.open(write_gguf(tmp_path / "model.gguf", path))
    assert replace(of_texts(ours.graph), architecture="") == replace(of_texts(theirs.graph), architecture="")
    tensors = tensors_of(ours, torch.float32)
    for name, tensor in tensors_of(theirs, torch.float32).items():
        if name.endswith("a_log.weight"):  # the file has minus its exponentials
            torch.testing.assert_close(tensors[name], tensor, rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(tensors[name], tensor), name


@pytest.mark.parametrize("kind", ["deepseek3", "glm4.5", "bailingmoe2", "qwen3-next", "qwen3.5", "qwen3.5-moe"])
def test_the_layer_that_predicts_further_tokens_is_that_of_the_folder(kind: str, tmp_path: Path) -> None:
    changes = {"qwen3-next": {"mlp_only_layers": []}, "bailingmoe2": {"attention_bias": False}}.get(kind)
    made = make_next_layer(tmp_path / "model", "glm4.5" if kind == "bailingmoe2" else kind, changes=changes)
    config = json.loads((path := made.path).joinpath("config.json").read_text())
    write_json(path / "config.json", config | {"_next": 1} | ({"_arch": kind} if kind == "bailingmoe2" else {}))
    theirs, ours = Checkpoint.open(path), Checkpoint.open(write_gguf(tmp_path / "model.gguf", path))
    assert ours.following and ours.graph.shapes == theirs.graph.shapes
    one, other = (next_layer_of(found, ends=True) for found in (ours, theirs))
    assert replace(of_texts(one.graph), architecture="") == replace(of_texts(other.graph), architecture="")
    tensors = tensors_of(one, torch.float32)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in tensors_of(other, torch.float32).items())


def test_constant_factors_that_a_file_has_in_its_weights(tmp_path: Path) -> None:
    path, prompt = make(tmp_path / "model", "falcon-h1", {}), list(range(20, 60))
    logits = []
    for one in (path, write_gguf(tmp_path / "model.gguf", path)):
        with LLM(one, weights="float32") as llm:
            logits.append(llm.model(prompt)[0])
    assert logits[0].std() > 1
    np.testing.assert_allclose(logits[0], logits[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("facts", "groups"),
    [({}, (8, 4)), ({"n_group": 1, "topk_group": 1}, (1, 1)), ({"n_routed_experts": 384}, (1, 1))],
)
def test_the_first_files_of_a_published_model_have_its_groups(facts: dict[str, int], groups: tuple[int, int]) -> None:
    layout = layout_of("deepseek2", {})
    assert layout is not None
    sizes = {"num_hidden_layers": 61, "n_routed_experts": 256, "num_attention_heads": 128}
    found = layout.more({"head_dim": 192, "_turns": 64, "_value": 128, "_scores": 2, **sizes, **facts}, {})
    assert (found["n_group"], found["topk_group"], found["qk_nope_head_dim"], found["v_head_dim"]) == (
        *groups,
        128,
        128,
    )
