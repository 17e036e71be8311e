"""Mixtures of experts in config.json: which layers have experts, what a token meets, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.models.files.originals import ORIGINALS
from tests.models.fixtures import make_checkpoint, make_config
from tokenwright import plan
from tokenwright.backends.layout import read_bytes
from tokenwright.backends.packed import Packed
from tokenwright.backends.torch.border import tensor
from tokenwright.checkpoints.families.registry import parse_config
from tokenwright.checkpoints.folder import Checkpoint
from tokenwright.checkpoints.packing.packer import load_packed
from tokenwright.checkpoints.quantised.published import read_scheme
from tokenwright.cli import app
from tokenwright.errors import CheckpointError
from tokenwright.formats import WeightFormat
from tokenwright.models.experts import Experts

ACTIVE = {  # without the experts that a token does not choose: their cards say 12.9, 2.7 and 3.3 billion
    "mistralai/Mixtral-8x7B-v0.1": 12_879_925_248,
    "Qwen/Qwen1.5-MoE-A2.7B": 2_689_173_504,
    "Qwen/Qwen3-30B-A3B": 3_353_032_704,
    "openai/gpt-oss-20b": 4_187_440_704,  # 3.6 billion by its card, which leaves the embeddings out
}


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters(name: str) -> None:
    config = dict(ORIGINALS[name][0])
    read_scheme(config, name)
    assert parse_config(config).graph.active_parameters == ACTIVE[name]


@pytest.mark.parametrize(
    ("changes", "mixed"),
    [
        ({}, [True, True, True]),
        ({"mlp_only_layers": [1]}, [True, False, True]),
        ({"decoder_sparse_step": 2}, [False, True, False]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, [False, False, False]),
        ({"num_experts": 0}, [False, False, False]),
    ],
)
@pytest.mark.parametrize("kind", ["qwen2-moe", "qwen3-moe"])
def test_which_layers_have_experts(kind: str, changes: dict[str, Any], mixed: list[bool]) -> None:
    graph = parse_config(make_config(kind) | {"mlp_only_layers": []} | changes).graph
    assert [isinstance(op, Experts) for op in graph.blocks[1::2]] == mixed


@pytest.mark.parametrize(
    ("kind", "changes", "windows"),
    [
        ("qwen2-moe", {}, [None, None, None]),
        ("qwen2-moe", {"use_sliding_window": True, "sliding_window": 9}, [9, None, 9]),
        ("qwen2-moe", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}, [9, None, None]),
        ("qwen3-moe", {"sliding_window": 9}, [None, None, None]),
        ("qwen3-moe", {"use_sliding_window": True, "sliding_window": 9}, [9, 9, 9]),
        ("mixtral", {"sliding_window": 9}, [9, 9, 9]),
        ("gpt-oss", {}, [48, None, 48]),
        ("gpt-oss", {"layer_types": None}, [48, None, 48]),
        ("gpt-oss", {"layer_types": ["full_attention"] * 2 + ["sliding_attention"]}, [None, None, 48]),
    ],
)
def test_windows(kind: str, changes: dict[str, Any], windows: list[int | None]) -> None:
    assert [layer.window for layer in parse_config(make_config(kind) | changes).graph.kv] == windows


@pytest.mark.parametrize(
    ("kind", "changes", "complaint"),
    [
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok must be from 1 to 8"),
        ("mixtral", {"intermediate_size": 100}, "experts of intermediate_size 100 .* multiples of 8 and 16"),
        ("mixtral", {"hidden_size": 40}, "hidden_size 40 cannot be packed"),
        ("qwen3-moe", {"moe_intermediate_size": 44}, "experts of moe_intermediate_size 44"),
        ("qwen3-moe", {"mlp_only_layers": [3]}, "mlp_only_layers must be a list of layers from 0 to 2"),
        ("qwen3-moe", {"mlp_only_layers": 1}, "mlp_only_layers must be a list"),
        ("qwen3-moe", {"norm_topk_prob": 1}, "norm_topk_prob must be true or false"),
        ("qwen2-moe", {"qkv_bias": False}, "qkv_bias = false asks for"),
        ("gpt-oss", {"swiglu_limit": 5.0}, "swiglu_limit = 5.0 asks for another limit"),
        ("gpt-oss", {"experts_per_token": 3}, "num_experts_per_tok and experts_per_token differ"),
        ("mixtral", {"n_shared_experts": 1}, "unknown key n_shared_experts"),
    ],
)
def test_what_is_refused(kind: str, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(CheckpointError, match=complaint):
        parse_config(make_config(kind) | changes)


def test_mxfp4_is_copied_into_int8_without_loss(tmp_path: Path) -> None:
    path, model = make_checkpoint(tmp_path / "model", "gpt-oss")
    packed = load_packed(Checkpoint.open(path), WeightFormat("native"), "float32")
    for name, theirs in (("gate_up", "gate_up_proj"), ("down", "down_proj")):
        ours = packed[f"layers.1.mlp.experts.{name}"]
        assert isinstance(ours, Packed)
        assert (ours.format, ours.group) == ("int8", 32)
        right = model.get_parameter(f"model.layers.1.mlp.experts.{theirs}").transpose(1, 2)  # [E, out, in]
        if name == "gate_up":
            right = torch.cat((right[:, ::2], right[:, 1::2]), 1)
        assert torch.equal(tensor(ours.unpack()), right.flatten(0, 1))


def test_a_step_is_planned_to_read_the_experts_it_meets() -> None:
    graph = parse_config(make_config("mixtral")).graph  # 3 layers of 8 experts of 96, two for each row
    form = WeightFormat("bfloat16")
    one, whole = read_bytes(graph, form, 1), read_bytes(graph, form, 512)
    assert whole - one == 3 * 6 * 3 * 64 * 96 * 2
    eight = read_bytes(graph, form, 8)  # 8 (1 - (3/4)^8) = 7.2 experts
    assert eight - one == 3 * 5 * 3 * 64 * 96 * 2


def test_inspect_and_plan_tell_of_them(tmp_path: Path) -> None:
    path, _ = make_checkpoint(tmp_path / "model", "qwen2-moe")
    page = CliRunner().invoke(app, ["inspect", str(path)]).stdout
    assert "experts        10, 40 wide, 4 for each token, and one of 72 that all tokens meet\n" in page
    assert "\nMLP " not in page
    facts = json.loads(CliRunner().invoke(app, ["inspect", str(path), "--json"]).stdout)
    idle = 3 * 6 * 3 * 64 * 40
    assert facts["parameters"] - facts["active_parameters"] == idle
    assert facts["native_step"]
    planned = plan(path)
    assert planned.hindrances == () and planned.facts()["active_parameters"] == facts["active_parameters"]
    assert any("a token meets 4 of 10 experts" in remark for remark in planned.remarks)
    told = CliRunner().invoke(app, ["plan", str(path), "--context", "64"]).stdout
    assert f" a token meets {facts['active_parameters']:,}\n" in told
