"""Mixtures of experts in config.json: which layers have experts, what a token meets, and what is refused."""

import json
import re
import shutil
from functools import reduce
from itertools import count, product, takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from tests.checkpoints.test_published_configs import graph_of
from tests.models.files.published_files import METHODS
from tests.models.fixtures import make_checkpoint, make_config, write_tokenizer
from tests.models.random_models import PLAIN, plain_model
from tests.models.weights import make_model
from tests.tensors import tensors_of, unpacked
from tokenwright import LLM, plan
from tokenwright.backends.layout import read_bytes
from tokenwright.backends.packed import Packed
from tokenwright.backends.torch.border import tensor
from tokenwright.checkpoints.families.registry import parse_config
from tokenwright.checkpoints.folder import Checkpoint
from tokenwright.checkpoints.packing.folder_writer import write_folder
from tokenwright.checkpoints.packing.packer import load_packed
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
    assert graph_of(name).active_parameters == ACTIVE[name]


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


def test_mxfp4_is_copied_without_loss(tmp_path: Path) -> None:
    path, model = make_checkpoint(tmp_path / "model", "gpt-oss")
    packed = load_packed(Checkpoint.open(path), WeightFormat("native"), "float32")
    for name, theirs in (("gate_up", "gate_up_proj"), ("down", "down_proj")):
        ours = packed[f"layers.1.mlp.experts.{name}"]
        assert isinstance(ours, Packed)
        assert (ours.format, ours.group) == ("fp4", 32)
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


# Names and shapes of other writers

MIXED = (
    *("mixtral", "minimax-m2", "qwen2-moe", "qwen3-moe", "olmoe", "ernie-moe", "glm4.5", "exaone-moe", "glm4.7-flash"),
    *("deepseek2", "deepseek3", "qwen3-next", "qwen3.5-moe", "granite4", "jamba"),
)
PLAINER = ("afmoe", "dots1", "granitemoe", "hunyuan_v1_moe", "hy_v3", "flex_olmo", "solar_open")


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return tensors_of(Checkpoint.open(folder), torch.float32)


@pytest.mark.parametrize("kind", [*MIXED, *PLAINER])
def test_both_formats_of_transformers_hold_the_same_tensors(kind: str, tmp_path: Path) -> None:
    oracle = make_model(plain_model(kind) if kind in PLAINER else make_config(kind), 1)
    found = []
    for original in (True, False):
        oracle.save_pretrained(tmp_path / str(original), save_original_format=original)
        write_tokenizer(tmp_path / str(original))
        found.append(tensors_in(tmp_path / str(original)))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(one, found[1][name]) for name, one in found[0].items())


MATRICES = r"(_proj|embed_q|unembed_out)\.weight$"
MLX = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}  # of an expert


def of_heads(name: str, one: torch.Tensor, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    heads = one.unflatten(0, (config["num_attention_heads"], -1)).split(
        [config["qk_nope_head_dim"], config["v_head_dim"]], 1
    )
    at = name.removesuffix("kv_b_proj.weight")
    return {f"{at}embed_q.weight": heads[0].transpose(1, 2), f"{at}unembed_out.weight": heads[1]}


def stacked(tensors: dict[str, torch.Tensor], at: str, part: str) -> dict[str, torch.Tensor]:
    each = takewhile(tensors.__contains__, (f"{at}.experts.{expert}.{part}.weight" for expert in count()))
    own = {"up_proj": "fc1", "down_proj": "fc2"} if at.endswith("mixer") else MLX
    return {f"{at}.switch_mlp.{own.get(part, part)}.weight": torch.stack([tensors[one] for one in each])}


def of_gpt_oss(name: str, one: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gate and up apart, and matrices as [experts, out, in]."""
    at, part, bias = re.fullmatch(r"(.+\.)(gate_up|down)_proj(_bias)?", name).groups()  # type: ignore[union-attr]
    turned, end = (one, "bias") if bias else (one.transpose(1, 2), "weight")
    parts = {"down": turned} if part == "down" else {"gate": turned[:, ::2], "up": turned[:, 1::2]}
    return {f"{at}{part}_proj.{end}": rows for part, rows in parts.items()}


def of_gemma4(name: str, one: torch.Tensor) -> dict[str, torch.Tensor]:
    at, part = re.fullmatch(r"(.+\.experts\.)(gate_up|down)_proj", name).groups()  # type: ignore[union-attr]
    parts = {"down": one} if part == "down" else dict(zip(("gate", "up"), one.chunk(2, 1), strict=True))
    return {f"{at}switch_glu.{part}_proj.weight": rows for part, rows in parts.items()}


def as_mlx(folder: Path, to: Path, bits: int | None) -> None:
    """The folder as mlx-lm converts it: experts stacked, convolutions turned, 1 in the norms; perhaps quantised."""
    shutil.copytree(folder, to)
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    kimi, adds = (any(part in name for name in tensors) for part in ("q_conv1d", "linear_attn.conv1d"))
    found: dict[str, torch.Tensor] = {}
    for name, one in tensors.items():
        if match := re.fullmatch(r"(.+)\.experts\.0\.(\w+)\.weight", name):
            found |= stacked(tensors, match[1], match[2])
        elif name.endswith("kv_b_proj.weight"):
            found |= of_heads(name, one, config)
        elif re.search(r"\.mlp\.experts\.(gate_up|down)_proj(_bias)?$", name):
            found |= of_gpt_oss(name, one)
        elif re.search(r"\.experts\.(gate_up|down)_proj$", name):
            found |= of_gemma4(name, one)
        elif "conv1d" in name or name.endswith("conv.conv.weight"):
            found[name] = one if one.dim() < 3 else one.movedim(2, 1).contiguous()
        elif adds and name.endswith(("norm.weight", "layernorm.weight")) and "linear_attn" not in name:
            found[name] = one + 1
        elif ".experts." not in name:
            found[name] = one
    if kimi:
        other = (("block_sparse_moe.gate.e_", "mlp.e_"), ("block_sparse_moe", "mlp"), ("_conv1d", "_conv.conv"))
        found = {reduce(lambda text, pair: text.replace(*pair), other, name): one for name, one in found.items()}
    if bits is not None:
        quantise, config = METHODS["mlx"]({"bits": bits, "group": 32})
        for name in [one for one in found if re.search(MATRICES, one) and found[one].shape[-1] % 32 == 0]:
            base, weight = name.removesuffix(".weight"), found.pop(name).float()
            _, parts = quantise(weight.flatten(0, -2), {"name": name})
            found |= {f"{base}.{part}": one.unflatten(0, weight.shape[:-1]) for part, one in parts.items()}
        settings = json.loads((to / "config.json").read_text())
        (to / "config.json").write_text(json.dumps(settings | {"quantization": config}))
    save_file({name: one.contiguous() for name, one in found.items()}, to / "model.safetensors")


ADDING = ("qwen3-moe", "qwen3-next", "qwen3.5-moe")
AS_MLX = ("mixtral", "jamba", "kimi-linear", "nemotron-h", "nemotron", "lfm2", "gpt-oss-plain", "gemma4", "deepseek3")


@pytest.mark.parametrize(
    ("kind", "bits"),
    [*product(ADDING, (None, 4, 6)), *product(AS_MLX, (None,)), ("glm4.7-flash", 4)],
)
def test_what_mlx_lm_writes_is_read(kind: str, bits: int | None, tmp_path: Path) -> None:
    made = make_model(plain_model(kind) if kind in PLAIN else make_config(kind), 1)
    made.save_pretrained(tmp_path / "published")
    write_tokenizer(tmp_path / "published")
    as_mlx(tmp_path / "published", tmp_path / "mlx", bits)
    ours, theirs = tensors_in(tmp_path / "mlx"), tensors_in(tmp_path / "published")
    assert ours.keys() == theirs.keys()
    for name, one in theirs.items():
        step = 0 if bits is None else (one.amax() - one.amin()) / ((1 << bits) - 1)
        assert (ours[name] - one).abs().max() <= step + 1e-6, name


@pytest.mark.parametrize("kind", ["plain", "square", "mxfp4"])
def test_stacks_of_turned_experts_are_read(kind: str, tmp_path: Path) -> None:
    """As Qwen3-VL's mixtures are published: [experts, in, out]. Where gate and up are a square, down says how."""
    config = make_config("qwen3-moe")
    width = config["moe_intermediate_size"] if kind == "plain" else config["hidden_size"] // 2
    oracle = make_model(config | {"moe_intermediate_size": width}, 1)
    oracle.save_pretrained(tmp_path / "plain", save_original_format=False)
    write_tokenizer(tmp_path / "plain")
    tensors = load_file(tmp_path / "plain/model.safetensors")
    turned = {name: one.transpose(1, 2).contiguous() if one.dim() == 3 else one for name, one in tensors.items()}
    if kind == "mxfp4":
        quantise, described = METHODS["quark"]({})
        for name in [one for one in turned if turned[one].dim() == 3]:
            *sizes, last = turned[name].shape
            numbers, parts = quantise(turned.pop(name).reshape(-1, last), {})
            tensors[name] = numbers.reshape(*sizes, last).transpose(1, 2).contiguous()
            turned[name] = parts["weight"].reshape(*sizes, -1)
            turned[f"{name}_weight_scale"] = parts["weight_scale"].reshape(*sizes, -1)
    save_file(tensors, tmp_path / "plain/model.safetensors")
    expected = tensors_in(tmp_path / "plain")
    save_file(turned, tmp_path / "plain/model.safetensors")
    if kind == "mxfp4":
        settings = json.loads((tmp_path / "plain/config.json").read_text()) | {"quantization_config": described}
        (tmp_path / "plain/config.json").write_text(json.dumps(settings))
        checkpoint = Checkpoint.open(tmp_path / "plain")
        packed = unpacked(checkpoint.graph, load_packed(checkpoint, WeightFormat("native"), "float32"))
        assert all(torch.equal(one, expected[name]) for name, one in packed.items())
    ours = tensors_in(tmp_path / "plain")
    assert ours.keys() == expected.keys() and all(torch.equal(one, expected[name]) for name, one in ours.items())


def test_experts_in_fp8_as_transformers_saves_them_are_read(tmp_path: Path) -> None:
    """All of a layer in one tensor, with a scale for each block of each."""
    oracle = make_model(make_config("qwen3-moe"), 1)
    oracle.save_pretrained(tmp_path / "plain", save_original_format=False)
    write_tokenizer(tmp_path / "plain")
    shutil.copytree(tmp_path / "plain", tmp_path / "fp8")
    tensors = load_file(tmp_path / "plain/model.safetensors")
    numbers, quantised = dict(tensors), dict(tensors)
    for name in [one for one in tensors if one.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        scales = tensors[name].abs().amax((1, 2), keepdim=True) / 448
        quantised[name] = (tensors[name] / scales).to(torch.float8_e4m3fn)
        quantised[f"{name}_scale_inv"] = scales
        numbers[name] = quantised[name].float() * scales
    save_file(numbers, tmp_path / "plain/model.safetensors")
    save_file(quantised, tmp_path / "fp8/model.safetensors")
    settings = json.loads((tmp_path / "fp8/config.json").read_text())
    settings["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "fp8/config.json").write_text(json.dumps(settings))
    ours, theirs = tensors_in(tmp_path / "fp8"), tensors_in(tmp_path / "plain")
    assert all(torch.equal(one, theirs[name]) for name, one in ours.items())


def test_weights_that_mlx_lm_multiplied_are_refused(tmp_path: Path) -> None:
    """Falcon-H1's factors of config.json are in them, and would be taken again."""
    make_checkpoint(tmp_path / "published", "falcon-h1")
    as_mlx(tmp_path / "published", tmp_path / "mlx", None)
    with pytest.raises(CheckpointError, match="mlx-lm's copy of this model has the factors"):
        Checkpoint.open(tmp_path / "mlx")


def test_a_layout_that_is_not_read_is_refused_without_blaming_the_files(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3-moe").path
    tensors = load_file(folder / "model.safetensors")
    other = {name.replace(".experts.", ".specialists."): one for name, one in tensors.items()}
    save_file(other, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="in a layout that Tokenwright does not read") as caught:
        Checkpoint.open(folder)
    assert "damaged" not in str(caught.value) and "belongs to" not in str(caught.value)


def test_a_tied_model_may_have_the_head_alone(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama2", changes={"tie_word_embeddings": True}).path
    expected = tensors_in(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, folder / "model.safetensors")
    assert torch.equal(tensors_in(folder)["embed.weight"], expected["embed.weight"])


def test_a_head_that_differs_from_the_embeddings_is_used_as_transformers_does(tmp_path: Path) -> None:
    """Though config.json ties them; a copy is no head, in whichever dtype."""
    folder, model = make_checkpoint(tmp_path / "model", "llama2", changes={"tie_word_embeddings": True})
    tensors = load_file(folder / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    for head in (table.clone(), table.bfloat16()):
        bare = {name: one.to(head.dtype) for name, one in tensors.items()} | {
            "model.embed_tokens.weight": head.float().clone()
        }
        save_file(bare | {"lm_head.weight": head}, folder / "model.safetensors")
        assert Checkpoint.open(folder).graph.tied_head
    save_file(tensors | {"lm_head.weight": table.flip(0)}, folder / "model.safetensors")
    ids = [1, 20, 300, 45, 77, 12]
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = oracle(torch.tensor([ids])).logits[0].log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])
        tied = model(torch.tensor([ids])).logits[0].log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])
    with LLM(folder, dtype="float32") as llm:
        ours = torch.from_numpy(llm.score(ids)).float()
    assert (ours - expected[:, 0]).abs().max() < 1e-4 < (tied - expected).abs().max()
    checkpoint, form = Checkpoint.open(folder), WeightFormat.parse("int8")
    write_folder(checkpoint, tmp_path / "packed", form, load_packed(checkpoint, form, "float32"))
    assert not Checkpoint.open(tmp_path / "packed").graph.tied_head


@pytest.mark.parametrize("kind", ["qwen2", "ernie", "llama2"])
@pytest.mark.parametrize(("joint", "both"), [("qkv_proj", "gate_up_proj"), ("W_pack", None)])
def test_joined_parts_of_a_layer_are_read(kind: str, joint: str, both: str | None, tmp_path: Path) -> None:
    """q, k and v of one tensor, with grouped heads, biases and rows that turn in pairs; perhaps gate and up as well."""
    changes = {"num_key_value_heads": 2}
    folder = make_checkpoint(tmp_path / "model", kind, changes=changes).path
    expected, found = tensors_in(folder), load_file(folder / "model.safetensors")
    for layer, kind_of in product(range(len(found)), ("weight", "bias")):
        at = f"model.layers.{layer}"
        for parts, name in ((("q_proj", "k_proj", "v_proj"), joint), (("gate_proj", "up_proj"), both)):
            place = f"{at}.self_attn" if name == joint else f"{at}.mlp"
            if name and all(f"{place}.{one}.{kind_of}" in found for one in parts):
                found[f"{place}.{name}.{kind_of}"] = torch.cat([found.pop(f"{place}.{one}.{kind_of}") for one in parts])
    assert not any("q_proj" in name for name in found)
    save_file(found, folder / "model.safetensors")
    ours = tensors_in(folder)
    assert all(torch.equal(one, ours[name]) for name, one in expected.items())
