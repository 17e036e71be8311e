"""Latent attention: what the cache keeps of it, what its files become, and what is refused.

The arithmetic is compared with transformers in tests/oracle, and cached with naive runs in tests/equality.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from tests.models.files.published_files import write
from tests.models.fixtures import make_checkpoint, make_config
from tests.oracle.harness import prompt_of
from tests.tensors import kv_memory, tensors_of, unpacked
from tokenwright import LLM, plan
from tokenwright.backends.packed import Packed
from tokenwright.backends.torch import kv_codec
from tokenwright.backends.torch.border import tensor
from tokenwright.cache import KVStore, layer_specs
from tokenwright.checkpoints.families.registry import parse_config
from tokenwright.checkpoints.folder import Checkpoint
from tokenwright.checkpoints.packing.packer import load_packed
from tokenwright.cli import app
from tokenwright.config import Latent, Mixture
from tokenwright.errors import CheckpointError, RequestError
from tokenwright.formats import KVFormat, WeightFormat
from tokenwright.models.latent import LatentAttention

CPU = torch.device("cpu")
GREEDY: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}


def mixture_of(kind: str, **changes: Any) -> Mixture:
    config = parse_config(make_config(kind) | changes).config
    assert config.mixture is not None
    return config.mixture


@pytest.mark.parametrize(
    ("kv", "row"),
    [("native", 96 * 4), ("bfloat16", 96 * 2), ("fp8", 96), ("int8", 96 + 2 * 3), ("int4", 48 + 2 * 3)],
)
def test_a_token_takes_one_row_in_each_layer(kv: str, row: int, tmp_path: Path) -> None:
    """64 numbers of the latent and 32 that turn; the plan, the engine and its memory count the same bytes."""
    path, _ = make_checkpoint(tmp_path / "model", "deepseek3")
    assert plan(path, kv=kv).kv_bytes_per_token == 3 * row
    specs = layer_specs(Checkpoint.open(path).graph, "float32", KVFormat.parse(kv))
    store = KVStore(specs, 5, 16)
    assert sum(one.nbytes for one in kv_memory(store, 0)) == store.nbytes == 6 * 16 * 3 * row
    with LLM(path, weights="float32", kv=kv) as llm:
        assert llm.costs.bytes_per_token == 3 * row


@pytest.mark.parametrize("kv", ["native", "int8", "int4", "fp8"])
def test_values_are_the_first_numbers_of_the_rows(kv: str) -> None:
    graph = parse_config(make_config("deepseek2")).graph
    store = KVStore(layer_specs(graph, "float32", KVFormat.parse(kv)), 2, 4)
    [part], slots = store.view(1).parts, torch.tensor([7, 2, 3])
    rows = torch.randn(3, 1, 40)
    kv_codec.write(part.k, slots, rows)
    assert torch.equal(
        kv_codec.read(part.v, slots, torch.float32), kv_codec.read(part.k, slots, torch.float32)[..., :32]
    )
    held = kv_codec.read(part.k, slots, torch.float32)
    kv_codec.write(part.v, slots, rows[..., :32])
    assert torch.equal(kv_codec.read(part.k, slots, torch.float32), held), (
        "the same bytes, where values are written too"
    )


def test_one_latent_has_one_format(tmp_path: Path) -> None:
    path, _ = make_checkpoint(tmp_path / "model", "deepseek2")
    for refuses in (plan, LLM):
        with pytest.raises(RequestError, match="keeps one latent for K and V together; give one kv format"):
            refuses(path, kv="k=int8,v=int4")


@pytest.mark.parametrize("nope", [24, 1])
def test_the_halves_of_kv_b_are_those_of_the_heads(nope: int, tmp_path: Path) -> None:
    """Of each head its keys' matrix transposed, and its values'."""
    path, model = make_checkpoint(tmp_path / "model", "deepseek3", changes={"qk_nope_head_dim": nope})
    stored = model.get_parameter("model.layers.1.self_attn.kv_b_proj.weight").view(4, nope + 32, 64)
    packed = load_packed(Checkpoint.open(path), WeightFormat("float32"), "float32")
    for name, right in (("k_up", stored[:, :nope].transpose(1, 2)), ("v_up", stored[:, nope:])):
        ours = packed[f"layers.1.attention.{name}"]
        assert isinstance(ours, Packed)
        assert torch.equal(tensor(ours.unpack()), right.flatten(0, 1))


def test_fp8_in_blocks_is_decoded(tmp_path: Path) -> None:
    """As V3's files are: numbers of e4m3, a scale for each block, the bias of the choice in fp32."""
    make_checkpoint(tmp_path / "model", "deepseek3")
    folder, plain = write(tmp_path / "model", tmp_path / "plain", "fp8", block=[128, 128]), tmp_path / "plain"
    names = load_file(folder / "model.safetensors").keys()
    assert "model.layers.1.self_attn.kv_b_proj.weight_scale_inv" in names
    ours, theirs = Checkpoint.open(folder), Checkpoint.open(plain)
    expected = tensors_of(theirs, torch.float32)
    decoded = unpacked(ours.graph, load_packed(ours, WeightFormat("native"), "float32"))
    assert all(torch.equal(one, expected[name]) for name, one in decoded.items())
    oracle = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager")
    prompt = list(prompt_of(30))
    with LLM(folder, weights="float32", dtype="float32") as llm, torch.no_grad():
        logits, right = tensor(llm.model(prompt)[0]), oracle(torch.tensor([prompt])).logits[0]
    assert (logits - right).abs().max() < 1e-4


def test_what_predicts_a_second_token_is_skipped_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, _ = make_checkpoint(tmp_path / "model", "deepseek3")
    opened = Checkpoint.open(path)
    assert opened.skipped == {"MTP layers": 5}
    assert "skipped MTP layers (5 tensors)" in caplog.text
    assert any("(MTP)" in remark for remark in plan(path).remarks)
    page = CliRunner().invoke(app, ["inspect", str(path)]).stdout
    assert "heads          4 of size 56, over one latent of 64 and 32 numbers that turn\n" in page
    assert "skipped        MTP layers (5 tensors)" in page
    assert "step           one call of the native kernels, where compiled\n" in page
    config = json.loads((path / "config.json").read_text()) | {"num_nextn_predict_layers": 0}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"5 not of this model .\"layers\.3\."):
        Checkpoint.open(path)


def test_the_bias_of_the_choice_is_not_rounded(tmp_path: Path) -> None:
    path, model = make_checkpoint(tmp_path / "model", "deepseek3", dtype="bfloat16")
    right = model.get_buffer("model.layers.1.mlp.gate.e_score_correction_bias")
    assert not torch.equal(right, right.bfloat16().float())
    name = "layers.1.mlp.correction.weight"
    assert torch.equal(tensors_of(Checkpoint.open(path))[name], right)


def test_which_layers_have_experts_and_how_they_are_chosen() -> None:
    assert mixture_of("deepseek2").layers == (False, True, True)
    assert mixture_of("deepseek2", first_k_dense_replace=0, moe_layer_freq=2).layers == (True, False, True)
    assert parse_config(make_config("deepseek2") | {"n_routed_experts": None}).config.mixture is None
    greedy = mixture_of("deepseek2", n_group=4, topk_group=2)
    assert (greedy.groups, greedy.chosen_groups, greedy.shared_width) == (1, 1, 48), "greedy has no groups"
    groups = mixture_of("deepseek2-groups")
    assert (groups.groups, groups.chosen_groups, groups.group_best, groups.factor) == (4, 2, 1, 1.6)
    assert mixture_of("deepseek2-groups", norm_topk_prob=True).factor == 1, "V2 normalises or scales"
    alone = mixture_of("deepseek2-groups", norm_topk_prob=True, num_experts_per_tok=1)
    assert (alone.renormalise, alone.factor) == (False, 1.6), "and V2 scales where one expert is chosen"
    third = mixture_of("deepseek3")
    assert (third.group_best, third.corrected, third.factor, third.scores) == (2, True, 2.5, "sigmoid")


@pytest.mark.parametrize(
    ("kind", "changes", "complaint"),
    [
        ("deepseek2", {"kv_lora_rank": 40}, "kv_lora_rank is 40: Tokenwright needs a multiple of 32"),
        ("deepseek2", {"v_head_dim": 20}, "v_head_dim is 20: Tokenwright packs"),
        ("deepseek2", {"kv_lora_rank": None}, "kv_lora_rank is missing"),
        ("deepseek2", {"qk_rope_head_dim": 7}, "rotary positions turn pairs of dimensions"),
        ("deepseek2", {"head_dim": 16}, "head_dim is 16, but by the other sizes it is 8"),
        ("deepseek2", {"num_key_value_heads": 2}, "num_key_value_heads is 2, but latent attention has one cache row"),
        ("deepseek2", {"attention_bias": True}, "attention_bias = true asks for biases of attention"),
        ("deepseek2", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'; Tokenwright has greedy and group"),
        ("deepseek2", {"scoring_func": "sigmoid"}, 'scoring_func = "sigmoid" asks for other scores'),
        ("deepseek3", {"n_group": 5}, "16 experts cannot be divided into 5 groups"),
        ("deepseek3", {"n_group": 16}, "16 experts cannot be divided into 16 groups"),
        ("deepseek3", {"n_group": 65}, "n_group must be from 1 to 64"),
        ("deepseek3", {"topk_group": 5}, "topk_group must be from 1 to 4"),
        ("deepseek3", {"num_experts_per_tok": 9}, "num_experts_per_tok must be from 1 to 8"),
        ("deepseek3", {"moe_intermediate_size": 20}, "experts of moe_intermediate_size 20"),
        ("deepseek3", {"rope_interleave": False}, "rope_interleave = false asks for rotation of the halves"),
        ("deepseek3", {"index_topk": 2048}, "unknown key index_topk"),
    ],
)
def test_what_is_refused(kind: str, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(CheckpointError, match=complaint):
        parse_config(make_config(kind) | changes)


@pytest.mark.parametrize("part", ["q_proj", "kv_b_proj"])
def test_adapters_of_what_is_held_transposed_are_refused(part: str, tmp_path: Path) -> None:
    path, model = make_checkpoint(tmp_path / "model", "deepseek2")
    module = f"model.layers.1.self_attn.{part}"
    out, inner = model.get_parameter(f"{module}.weight").shape
    tensors = {"lora_A": torch.randn(2, inner), "lora_B": torch.randn(out, 2)}
    (tmp_path / "adapter").mkdir()
    named = {f"base_model.model.{module}.{side}.weight": one for side, one in tensors.items()}
    save_file(named, tmp_path / "adapter/adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": [module]}
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(settings))
    if part == "kv_b_proj":
        with pytest.raises(CheckpointError, match=r"kv_b_proj.*latent attention holds transposed"):
            Checkpoint.open(path).adapter(tmp_path / "adapter")
        return
    merged = tensors_of(Checkpoint.open(path).merged([tmp_path / "adapter"]))["layers.1.attention.q.weight"]
    with torch.no_grad():
        model.get_parameter(f"{module}.weight").add_(tensors["lora_B"] @ tensors["lora_A"])
        prompt = list(prompt_of(20))
        right = model(torch.tensor([prompt])).logits[0]
    assert merged.shape == (out, inner)
    with LLM(path, weights="float32", adapters={"one": tmp_path / "adapter"}, lora=[tmp_path / "adapter"]) as llm:
        ours = tensor(llm.model(prompt)[0])
    assert (ours - right).abs().max() < 1e-3


def test_a_windowed_latent_writes_on_without_end(tmp_path: Path) -> None:
    path, _ = make_checkpoint(tmp_path / "model", "deepseek3")
    with LLM(path, weights="int8", kv="int8", window=20, sinks=3) as llm:
        [cached], [naive] = (llm.generate([list(prompt_of(40))], cache=cache, **GREEDY) for cache in (True, False))
    assert cached.token_ids == naive.token_ids


def test_the_op_tells_its_layout_and_work() -> None:
    graph = parse_config(make_config("deepseek3")).graph
    op = graph.blocks[0]
    assert isinstance(op, LatentAttention)
    assert op.kv.layout == Latent(64, 32)
    assert graph.rotary_size == 32
    assert op.pair_flops == 2 * 4 * (96 + 64)
    assert op.multiplied == 64 * (40 + 96) + 40 * 4 * 56 + 4 * 64 * 24 + 4 * 32 * 64 + 4 * 32 * 64
    assert replace(op, q_up=None).q_rows == 40
