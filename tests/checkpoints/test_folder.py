"""Checkpoints of every family are read as transformers holds them; damaged ones are refused beforehand."""

import json
import math
import re
import shutil
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig, PreTrainedModel

from tests.models import hybrids
from tests.models.fixtures import KINDS, VARIANTS, make_checkpoint, make_config, write_json
from tests.tensors import tensors_of
from tokenwright import plan
from tokenwright.checkpoints.folder import Checkpoint
from tokenwright.errors import CheckpointError

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """One folder of each kind, made once; tests that damage it copy it first."""
    root = tmp_path_factory.mktemp("kinds")

    def folder(kind: str) -> Path:
        if not (root / kind).exists():
            make_checkpoint(root / kind, kind)
        return root / kind

    return folder


@pytest.fixture
def copy(made: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda kind: Path(shutil.copytree(made(kind), tmp_path / kind))


def refusal(folder: str | Path, **options: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder, **options)
    assert len(str(caught.value)) < 1000
    return str(caught.value)


def change_weights(folder: Path, change: Callable[[Tensors], object]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    write_json(file, json.loads(file.read_text()) | changes)


def oracle(model: PreTrainedModel) -> Tensors:
    """transformers' parameters under our names, written out by hand."""
    config, state = model.config.get_text_config(), model.state_dict()
    head = state.pop("lm_head.weight")
    state = {
        name.replace("model.language_model.", "model."): value
        for name, value in state.items()
        if not name.startswith(("model.vision_tower.", "model.multi_modal_projector."))
    }
    theirs = {name.split(".", 1)[1]: value for name, value in state.items()}
    if not config.tie_word_embeddings:
        theirs["head.weight"] = head
    renamed = [
        ("wte.", "embed."), ("wpe.", "positions."), ("ln_f.", "norm."), ("embed_tokens.", "embed."),
        ("ln_1.", "attention_norm."), ("ln_2.", "mlp_norm."), ("input_layernorm.", "attention_norm."),
        ("post_attention_layernorm.", "mlp_norm."), ("attn.c_proj.", "attention.o."),
        ("query_layernorm.", "q_norm."), ("key_layernorm.", "k_norm."),
        ("mlp.gate.", "mlp.router."), ("shared_expert_gate.", "shared_gate."), ("shared_expert.", "shared."),
        ("mlp.c_fc.", "mlp.up."), ("mlp.c_proj.", "mlp.down."), ("self_attn.", "attention."), ("_proj.", "."),
    ]  # fmt: skip
    renamed = [*RENAMED.get(config.model_type, []), *renamed]
    found: Tensors = {}
    for name, value in theirs.items():
        name = f"layers.{name[2:]}" if name.startswith("h.") else name
        for old, new in renamed:
            name = name.replace(old, new)
        value = value.flatten() if "correction" in name else value  # ERNIE's are [1, experts]
        if "gemma" in config.model_type and value.dim() == 1:
            value = value + 1
        linear = config.model_type == "gpt2" and value.dim() == 2 and name.startswith("layers.")
        oss = config.model_type == "gpt_oss" and (".experts." in name or "sinks" in name)
        found |= of_gpt_oss(name, value) if oss else apart(name, value.t() if linear else value)
    turned, neighbours = _turned(config)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if turned < 1 or neighbours:
        order = pairs_of(size, int(size * turned), neighbours)
        for name, value in found.items():
            if name.split(".")[-2] in ("q", "k"):
                found[name] = value.unflatten(0, (-1, size))[:, order].flatten(0, 1)
            elif name.split(".")[-2] in ("q_norm", "k_norm"):  # of each head, or of one
                found[name] = value.view(-1, size)[:, order].flatten()
    return found


def of_gpt_oss(name: str, value: torch.Tensor) -> Tensors:
    """The learned logits of heads; of all experts in one, [E, in, out], each one's, where gate and up take turns."""
    if "sinks" in name:
        return {f"{name}.weight": value}
    at, _, part = name.rpartition(".")
    kind, found = "bias" if "bias" in part else "weight", dict[str, torch.Tensor]()
    for i, one in enumerate(value):
        rows = one.t() if kind == "weight" else one
        halves = {"gate": rows[::2], "up": rows[1::2]} if "gate_up" in part else {"down": rows}
        found |= {f"{at}.{i}.{half}.{kind}": piece for half, piece in halves.items()}
    return found


def apart(name: str, value: torch.Tensor) -> Tensors:
    """The tensors of one that is fused with others, with 4 heads of q of 16 numbers each; itself if it is not."""
    if "c_attn" in name:
        letters = zip(value.split(64), "qkv", strict=True)
        return {name.replace("attn.c_attn", f"attention.{letter}"): part for part, letter in letters}
    if "attention.qkv." in name:  # 2 heads of k and 2 of v
        letters = zip(value.split([64, 32, 32]), "qkv", strict=True)
        return {name.replace("qkv", letter): part for part, letter in letters}
    if "query_key_value" in name:  # of each head q, k and v in turn
        letters = zip(value.unflatten(0, (4, 3, 16)).unbind(1), "qkv", strict=True)
        return {name.replace("query_key_value", letter): part.flatten(0, 1) for part, letter in letters}
    if ".experts." in name:  # of all experts in one
        at, _, part = name.rpartition(".")
        halves = ["gate", "up"] if "gate_up" in part else ["down"]
        each = (
            (i, half, piece)
            for i, one in enumerate(value)
            for half, piece in zip(halves, one.chunk(len(halves)), strict=True)
        )
        return {f"{at}.{i}.{half}.weight": piece for i, half, piece in each}
    if "gate_up" in name:
        return {name.replace("gate_up", half): part for half, part in zip(("gate", "up"), value.chunk(2), strict=True)}
    return {name: value}


AFTER = [("post_attention_layernorm.", "attention_post_norm."), ("post_feedforward_layernorm.", "mlp_post_norm.")]
CORRECTED = [
    (f"mlp.{at}e_score_correction_bias", "mlp.correction.weight") for at in ("gate.moe_statics.", "gate.", "")
] + [("shared_experts.", "shared.")]
RENAMED = {
    **dict.fromkeys(("glm4_moe", "exaone_moe", "minimax_m2", "ernie4_5_moe"), CORRECTED),
    **dict.fromkeys(("olmo2", "olmo3", "exaone4"), AFTER),
    "gemma2": [*AFTER, ("pre_feedforward_layernorm.", "mlp_norm.")],
    "gemma3_text": [*AFTER, ("pre_feedforward_layernorm.", "mlp_norm.")],
    "glm4": [("post_self_attn_layernorm.", "attention_post_norm."), ("post_mlp_layernorm.", "mlp_post_norm.")],
    "bitnet": [("self_attn.attn_sub_norm.", "attention.out_norm."), ("mlp.ffn_sub_norm.", "mlp.down_norm.")],
    "gpt_neox": [
        ("embed_in.", "embed."),
        ("final_layer_norm.", "norm."),
        ("attention.dense.", "attention.o."),
        ("mlp.dense_h_to_4h.", "mlp.up."),
        ("mlp.dense_4h_to_h.", "mlp.down."),
    ],
}


def _turned(config: PreTrainedConfig) -> tuple[float, bool]:
    """The share of a head that turns, and whether neighbours turn together."""
    rope = getattr(config, "rope_parameters", None) or {}
    both = ("cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "glm", "glm4")
    return rope.get("partial_rotary_factor", 1.0), config.model_type in both


def pairs_of(size: int, turned: int, neighbours: bool) -> list[int]:
    """The dimensions of a head in the file's order: the first of each pair, then the second of each pair."""
    pairs = [(2 * i, 2 * i + 1) if neighbours else (i, i + turned // 2) for i in range(turned // 2)]
    still = range(turned, size)
    pairs += zip(still[: len(still) // 2], still[len(still) // 2 :], strict=True)
    return [first for first, _ in pairs] + [second for _, second in pairs]


READ = [
    kind
    for kind in (*KINDS, *VARIANTS)
    if not kind.startswith(("deepseek", "glm4.7", "gemma3n", "gemma4"))
    and kind not in hybrids.CONFIGS | hybrids.VARIANTS
]


@pytest.mark.parametrize(("kind", "spelling"), [*zip(READ, cycle(["old", "new"]), strict=False)])
def test_every_kind_is_read_as_transformers_holds_it(kind: str, spelling: str, tmp_path: Path) -> None:
    """But for latent attention, Gemma 3n and 4, and recurrent layers: tests/oracle holds their logits.

    In the old spelling of a config and the new one by turns: test_families.py has that both mean the same.
    """
    path, model = make_checkpoint(tmp_path, kind, spelling=spelling)
    found = Checkpoint.open(path)
    tensors, expected = tensors_of(found), oracle(model)
    assert list(tensors) == list(found.graph.shapes)
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert tuple(tensor.shape) == found.graph.shapes[name]
        assert tensor.is_contiguous()
        assert torch.equal(tensor, expected[name]), name
    assert found.parameters == sum(one.numel() for one in expected.values())
    assert kind == "gpt-oss" or found.nbytes == 4 * found.parameters


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("model.", "_orig_mod.model."), ("", "module._orig_mod."), ("", "base_model.model."), ("model.", "llm.model."),
        ("layers.0.", "layers.0._orig_mod."), ("q_proj.", "q_proj.base_layer."),
    ],
)  # fmt: skip
def test_names_of_a_wrapped_model_are_read(name: str, other: str, copy: Callable[[str], Path]) -> None:
    """torch.compile, DistributedDataParallel, PEFT and models of several parts put names around a model's."""
    folder = copy("llama3")
    expected, file = tensors_of(Checkpoint.open(folder)), folder / "model.safetensors"
    save_file({one.replace(name, other, 1): value for one, value in load_file(file).items()}, file)
    assert all(torch.equal(one, expected[at]) for at, one in tensors_of(Checkpoint.open(folder)).items())


def qwen_vl(tensors: Tensors, config: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
    """Names and keys as Qwen2.5-VL's files have them."""
    names = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}
    mrope = {"mrope_section": [2, 3, 3], "type": "mrope"}
    return tensors, config | names | {"rope_scaling": mrope, "vision_config": {"depth": 1}, "image_token_id": 7}


def mistral3(tensors: Tensors, config: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
    """Names and keys as Mistral Small 3.1's files have them."""
    outer = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "spatial_merge_size": 2}
    inner = {key: value for key, value in config.items() if key != "architectures"}
    return {f"language_model.{name}": one for name, one in tensors.items()}, outer | {"text_config": inner}


@pytest.mark.parametrize(
    ("kind", "beside", "tower"), [("qwen2", qwen_vl, "visual"), ("mistral", mistral3, "vision_tower")]
)
def test_a_text_model_beside_an_encoder_is_read_alone(
    kind: str, beside: Callable[[Tensors, Any], tuple[Tensors, Any]], tower: str, copy: Callable[[str], Path]
) -> None:
    folder = copy(kind)
    alone, expected = Checkpoint.open(folder), tensors_of(Checkpoint.open(folder))
    tensors, config = beside(load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text()))
    save_file(tensors | {f"{tower}.patch_embed.proj.weight": torch.ones(2, 2)}, folder / "model.safetensors")
    write_json(folder / "config.json", config)
    found = Checkpoint.open(folder)
    turns = [replace(one, sections=()) for one in found.graph.ropes]  # the three positions of a text's token are one
    assert (turns, found.graph.shapes) == ([*alone.graph.ropes], alone.graph.shapes)
    assert found.skipped == {tower: 1}
    assert all(torch.equal(one, expected[name]) for name, one in tensors_of(found).items())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sharded_half_precision_is_read_and_converted(dtype: str, tmp_path: Path) -> None:
    path, model = make_checkpoint(tmp_path, "gpt2", dtype=dtype, shards=3)
    found = Checkpoint.open(path)
    assert found.config.dtype == dtype
    assert found.nbytes == 2 * found.parameters
    assert {one.dtype for one in tensors_of(found).values()} == {getattr(torch, dtype)}
    expected = oracle(model)
    for name, tensor in tensors_of(found, torch.float32).items():
        assert torch.equal(tensor, expected[name]), name


def test_the_stored_dtype_counts_not_the_config(copy: Callable[[str], Path]) -> None:
    folder = copy("qwen2")
    change_config(folder, torch_dtype="bfloat16")
    assert Checkpoint.open(folder).config.dtype == "float32"


def test_progress_is_reported_in_bytes_up_to_all(made: Callable[[str], Path]) -> None:
    found = Checkpoint.open(made("gpt2"))
    seen: list[tuple[int, int]] = []
    found.tensors(report=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (found.nbytes, found.nbytes)


def test_the_pieces_of_a_fused_tensor_do_not_keep_it_alive(made: Callable[[str], Path]) -> None:
    tensors = tensors_of(Checkpoint.open(made("gpt2")))
    for name, tensor in tensors.items():
        assert tensor.untyped_storage().nbytes() == tensor.numel() * 4, name


def test_generation_defaults_come_from_both_files(made: Callable[[str], Path]) -> None:
    found = Checkpoint.open(made("llama3"))
    assert found.generation.eos_ids == (2, 4)
    assert found.generation.bos_id == 1


def test_a_folder_without_generation_config_is_served(copy: Callable[[str], Path]) -> None:
    folder = copy("llama2")
    (folder / "generation_config.json").unlink()
    assert Checkpoint.open(str(folder)).generation.eos_ids == (2,)


def test_the_model_inside_is_called_stories(
    made: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tokenwright.checkpoints.files.local.STORIES", made("llama2"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stories").mkdir()
    assert Checkpoint.open("stories").path == made("llama2")
    assert "config.json is missing" in refusal("./stories")


def test_a_head_in_the_file_of_a_tied_model_is_one_if_it_differs(copy: Callable[[str], Path]) -> None:
    folder = copy("qwen3")
    change_weights(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    found = Checkpoint.open(folder)
    assert "head.weight" not in tensors_of(found)
    assert found.nbytes == 4 * found.parameters
    change_weights(folder, lambda t: t["lm_head.weight"].add_(1))
    assert "head.weight" in tensors_of(Checkpoint.open(folder))
    change_weights(folder, lambda t: t.update({"lm_head.weight": t["lm_head.weight"].half()}))
    assert "head.weight" in tensors_of(Checkpoint.open(folder))


UP, NORM = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"
# The kind, what becomes of its tensors, what changes in its config, and what is told.
SPOILT: list[tuple[str, Callable[[Tensors], object], dict[str, Any], str]] = [
    ("qwen3", len, {"tie_word_embeddings": False}, "the head is absent"),
    ("llama2", lambda t: t.pop(UP), {}, "1 missing (layers.1.mlp.up_proj.weight)"),
    (
        "llama2",
        lambda t: t.update({"model.layers.1.mlp.up.weight": t.pop(UP)}),
        {},
        '1 not of this model ("layers.1.mlp.up',
    ),
    ("llama2", lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}), {}, "q_proj.bias"),
    (
        "gpt2",
        lambda t: t.update({"h.0.attn.c_attn.weight": torch.zeros(192, 64)}),
        {},
        "[192, 64], but [64, 192] by config",
    ),
    ("gpt2", len, {"vocab_size": 321}, "wte.weight is [320, 64], but [321, 64]"),
    ("gpt2", len, {"n_layer": 500}, "5964 missing"),
    ("llama2", lambda t: t.update({NORM: t[NORM].double()}), {}, "1 neither F32, F16 nor BF16 (norm.weight is F64)"),
    ("llama2", lambda t: t.update({NORM: torch.ones(64, dtype=torch.bool)}), {}, "norm.weight is BOOL"),
    ("gpt2", lambda t: t.update({"transformer.wte.weight": t["wte.weight"].clone()}), {}, "lies twice"),
]


@pytest.mark.parametrize(("kind", "change", "config", "told"), SPOILT, ids=[told for *_, told in SPOILT])
def test_tensors_that_are_not_those_of_the_config_are_refused(
    kind: str, change: Callable[[Tensors], object], config: dict[str, Any], told: str, copy: Callable[[str], Path]
) -> None:
    folder = copy(kind)
    change_weights(folder, change)
    change_config(folder, **config)
    assert told in refusal(folder)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_that_are_not_finite_are_refused_by_name(
    value: float, dtype: torch.dtype, copy: Callable[[str], Path]
) -> None:
    folder = copy("llama2")

    def spoil(tensors: Tensors) -> None:
        for name in tensors:
            tensors[name] = tensors[name].to(dtype)
        tensors["model.layers.2.mlp.down_proj.weight"][3, 5] = value

    change_weights(folder, spoil)
    with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.down_proj\.weight .* not finite"):
        tensors_of(Checkpoint.open(folder))


def test_values_too_large_for_float16_are_told_apart(copy: Callable[[str], Path]) -> None:
    folder = copy("llama2")
    change_weights(folder, lambda t: t["model.norm.weight"].fill_(1e6))
    with pytest.raises(CheckpointError, match=r"does not fit float16; give dtype bfloat16"):
        tensors_of(Checkpoint.open(folder), torch.float16)
    assert tensors_of(Checkpoint.open(folder), torch.bfloat16)


def test_a_truncated_shard_is_told_by_how_much(tmp_path: Path) -> None:
    path, _ = make_checkpoint(tmp_path, "mistral", shards=3)
    shard = path / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-5])
    message = refusal(path)
    assert shard.name in message
    assert "truncated: 5 of" in message


def test_missing_shards_and_an_index_that_leaves_the_folder_are_refused(tmp_path: Path) -> None:
    path, _ = make_checkpoint(tmp_path, "mistral", shards=3)
    (path / "model-00002-of-00003.safetensors").unlink()
    assert "lacks 1 of 3 shards (model-00002-of-00003.safetensors)" in refusal(path)
    index = path / "model.safetensors.index.json"
    for bad in ("../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "model.bin", "..", 7):
        write_json(index, {"weight_map": {"lm_head.weight": bad}})
        assert "not a safetensors file beside it" in refusal(path)
    for empty in ({}, [], None):
        write_json(index, {"weight_map": empty})
        assert "no weight_map" in refusal(path)


def test_weight_files_need_no_index_and_no_common_name(tmp_path: Path) -> None:
    """As vLLM reads them; Mistral's second copy is none."""
    path, _ = make_checkpoint(tmp_path / "a", "mistral", shards=3)
    expected, files = tensors_of(Checkpoint.open(path)), sorted(path.glob("*.safetensors"))
    (path / "model.safetensors.index.json").unlink()
    (path / "consolidated.safetensors").write_bytes(b"")
    (path / "config.json").write_bytes(b"\xef\xbb\xbf" + (path / "config.json").read_bytes())
    found = tensors_of(Checkpoint.open(path))
    assert found.keys() == expected.keys() and all(torch.equal(one, expected[name]) for name, one in found.items())
    files[1].unlink()
    assert "has 2 shards, the last of them model-00003-of-00003" in refusal(path)
    for at, file in enumerate(sorted(make_checkpoint(tmp_path / "b", "mistral", shards=2).path.glob("*.safetensors"))):
        file.rename(file.with_name(f"weights{at}.safetensors"))
    (tmp_path / "b" / "model.safetensors.index.json").unlink()
    assert tensors_of(Checkpoint.open(tmp_path / "b")).keys() == expected.keys()


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    path, _ = make_checkpoint(tmp_path, "mistral", shards=2)
    one, two = (path / f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    tensors = load_file(two)
    save_file(tensors | dict([next(iter(load_file(one).items()))]), two)
    assert "lies twice" in refusal(path)


def test_pickles_and_pointers_are_named(copy: Callable[[str], Path]) -> None:
    folder = copy("llama2")
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "git lfs pull" in refusal(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "only as pickles" in refusal(folder)
    (folder / "pytorch_model.bin").unlink()
    assert "has no model.safetensors" in refusal(folder)


def test_damaged_configs_are_refused(copy: Callable[[str], Path]) -> None:
    folder = copy("llama2")
    file = folder / "config.json"
    text = file.read_text()
    for damaged in (text[:40], "[1]", "{" * 100_000, "", '{"n_layer": ' + "9" * 5000 + "}"):
        file.write_text(damaged)
        assert "config.json" in refusal(folder)
    file.write_bytes(b"\xff\xfe\x00")
    assert "not valid JSON" in refusal(folder)
    file.write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "git lfs pull" in refusal(folder)
    file.unlink()
    assert "config.json is missing" in refusal(folder)
    file.mkdir()
    assert "cannot read" in refusal(folder)


def test_a_gigantic_config_file_is_not_read(copy: Callable[[str], Path]) -> None:
    folder = copy("llama2")
    with (folder / "config.json").open("r+b") as file:
        file.truncate(1 << 33)
    assert "too many" in refusal(folder)


PLACES: list[tuple[str | Path, str]] = [
    ("no-such-model", "there is no folder"),
    ("/nowhere/at/all", "there is no folder"),
    ("", "the name of the model is empty; give a model's folder"),
    (None, "the name of the model is NoneType, not text; give"),
    ("./owner/name", "there is no folder"),
    (Path("owner/name"), "there is no folder"),
    ("a/b/c", "there is no folder"),
    ("../owner", "there is no folder"),
    ("nul\0byte", "there is no folder"),
    ("x" * 5000, "cannot look at"),
    ("~no-such-user/model", "cannot look at"),
]


@pytest.mark.parametrize(("place", "words"), PLACES, ids=range(len(PLACES)))
def test_places_that_hold_no_model_are_refused(
    place: str | Path, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert words in refusal(place)


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (("a-Q4_0.gguf", "mmproj-a.gguf"), "but a-Q4_0.gguf; give that file itself"),
        (("a-Q8_0.gguf", "a-Q4_0.gguf"), "but a-Q4_0.gguf, a-Q8_0.gguf; give one of these files"),
        (("a-00001-of-00002.gguf", "a-00002-of-00002.gguf"), "but a-00001-of-00002.gguf; give that file"),
        (("params.json", "consolidated.safetensors"), "but params.json: it is in Mistral's own format"),
    ],
)
def test_a_model_in_another_form_is_named(files: tuple[str, ...], told: str, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).write_bytes(b"")
    assert f"has no config.json, {told}" in refusal(tmp_path)
    with pytest.raises(CheckpointError, match=re.escape(told)):
        plan(tmp_path)
    if "params.json" not in files:
        write_json(tmp_path / "config.json", make_config("llama2"))
        assert f"has no model.safetensors, {told}" in refusal(tmp_path)


def test_a_file_and_a_revision_of_a_folder_are_refused(made: Callable[[str], Path]) -> None:
    assert "is a file" in refusal(made("llama2") / "config.json")
    assert "no revision 'main'" in refusal(made("llama2"), revision="main")


def test_nothing_is_allocated_for_a_model_that_is_refused(copy: Callable[[str], Path]) -> None:
    folder = copy("llama2")
    change_config(folder, vocab_size=1 << 24, hidden_size=1 << 16)
    tracemalloc.start()
    try:
        assert "of another shape" in refusal(folder)
        assert tracemalloc.get_traced_memory()[1] < 1 << 21
    finally:
        tracemalloc.stop()


def test_a_file_that_changes_after_opening_is_an_error_not_a_fault(copy: Callable[[str], Path]) -> None:
    folder = copy("llama2")
    found = Checkpoint.open(folder)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(5000)
    with pytest.raises(CheckpointError, match="became shorter"):
        tensors_of(found)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="cannot read"):
        tensors_of(found)
