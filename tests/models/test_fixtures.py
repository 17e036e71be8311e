"""The fixtures are worth testing against: peaked attention, wide logits, files like the originals."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from tests.models.fixtures import KINDS, make_checkpoint
from tests.profiles import some

LENGTH = 200


@pytest.mark.parametrize("kind", some(list(KINDS)))
def test_attention_is_peaked_and_logits_are_wide(kind: str, tmp_path: Path) -> None:
    _, model = make_checkpoint(tmp_path, kind)
    ids = torch.randint(5, 300, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        output = model(ids, output_attentions=True)
    assert output.logits.std() >= 1
    if kind == "mamba2":  # it has no attention
        return
    attention = torch.stack(output.attentions).double()[..., 10:, :]
    entropy = -(attention * attention.clamp(min=1e-30).log()).sum(-1)
    assert (entropy / torch.arange(11, LENGTH + 1).log()).median() <= 0.5


def names(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


def test_old_gpt2_files_have_no_prefix_but_mask_buffers(tmp_path: Path) -> None:
    path, _ = make_checkpoint(tmp_path / "old", "gpt2")
    assert {"wte.weight", "h.2.attn.bias", "h.0.attn.masked_bias"} <= names(path)
    assert "lm_head.weight" not in names(path)
    path, _ = make_checkpoint(tmp_path / "new", "gpt2", spelling="new")
    assert "transformer.wte.weight" in names(path)


def test_old_llama_files_have_rotary_buffers_and_new_ones_rope_parameters(tmp_path: Path) -> None:
    path, _ = make_checkpoint(tmp_path / "old", "llama3")
    assert "model.layers.2.self_attn.rotary_emb.inv_freq" in names(path)
    assert "lm_head.weight" not in names(path)
    assert "rope_scaling" in json.loads((path / "config.json").read_text())
    path, _ = make_checkpoint(tmp_path / "new", "llama3", spelling="new")
    config = json.loads((path / "config.json").read_text())
    assert config["rope_parameters"]["rope_type"] == "llama3"
    assert not {"rope_scaling", "rope_theta", "torch_dtype"} & config.keys()


@pytest.mark.parametrize("kind", ["llama3", "mixtral", "qwen2-moe", "qwen3-moe", "deepseek3"])
def test_transformers_reads_the_written_files_as_the_oracle_holds_them(kind: str, tmp_path: Path) -> None:
    path, model = make_checkpoint(tmp_path, kind, dtype="bfloat16", shards=2)
    read = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for name, weight in model.state_dict().items():
        assert torch.equal(read.state_dict()[name], weight), name
