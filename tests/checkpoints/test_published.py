"""Folders that other tools quantised hold the numbers of the formats' definitions, and lose nothing where we say so."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.models.files.published_files import CASES, METHODS, SIZES, write
from tests.models.fixtures import make_checkpoint
from tests.tensors import tensors_of, unpacked
from tokenwright import LLM
from tokenwright.backends.layout import nbytes, weight_bytes
from tokenwright.checkpoints.folder import Checkpoint
from tokenwright.checkpoints.packing.packer import load_packed
from tokenwright.errors import CheckpointError
from tokenwright.formats import WeightFormat
from tokenwright.planner import plan

NATIVE = WeightFormat("native")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("published") / "model", "llama2", changes=SIZES).path


def written(model: Path, folder: Path, case: str) -> tuple[Path, Path]:
    """The quantised folder, and the one with the numbers that its codes stand for."""
    method, options, _ = CASES[case]
    tensors = load_file(model / "model.safetensors")
    (folder / "model").mkdir()
    for file in model.iterdir():
        (folder / "model" / file.name).write_bytes(file.read_bytes())
    save_file(tensors, folder / "model/model.safetensors")
    return write(folder / "model", folder / "plain", method, **options), folder / "plain"


@pytest.mark.parametrize("case", CASES)
def test_the_numbers_are_those_of_the_definition(model: Path, case: str, tmp_path: Path) -> None:
    folder, plain = written(model, tmp_path, case)
    ours, theirs = Checkpoint.open(folder), Checkpoint.open(plain)
    expected = tensors_of(theirs, torch.float32)
    assert all(torch.equal(one, expected[name]) for name, one in tensors_of(ours, torch.float32).items())
    form = CASES[case][2]
    assert {str(one) for one in ours.as_stored.values()} == ({form} if form else set())
    assert all(torch.equal(one, expected[name]) for name, one in decoded(ours).items())
    kept = {row.copied for row in ours.held(NATIVE, "float32") if row.type not in ("F32", "F16")}
    assert kept == {form is not None}


def decoded(checkpoint: Checkpoint, form: WeightFormat = NATIVE) -> dict[str, torch.Tensor]:
    """The weights as they are in memory, decoded to fp32."""
    weights = load_packed(checkpoint, form, "float32")
    resolved = form.resolved("float32")
    assert nbytes(weights) == weight_bytes(checkpoint.graph, resolved, checkpoint.kept(form))
    return unpacked(checkpoint.graph, weights)


@pytest.mark.parametrize(
    "case",
    [
        "gptq-128",
        "gptq-order",
        "awq",
        "fp8-blocks",
        "compressed-4",
        "nf4",
        "modelopt",
        "mlx-4",
        "compressed-nvfp4",
        "bitnet",
    ],
)
def test_logits_are_those_of_the_numbers_in_transformers(model: Path, case: str, tmp_path: Path) -> None:
    """In fp32: what is copied as int4 or int8 is decoded first, as its kernels would round activations."""
    folder, plain = written(model, tmp_path, case)
    oracle = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager")
    with LLM(folder, weights="float32", dtype="float32") as llm:
        ids = llm.tokenizer.encode("the model said hello 12, and then nothing for a long time")
        with torch.no_grad():
            rows = oracle(torch.tensor([ids])).logits[0].log_softmax(-1)
        expected = rows[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        ours = torch.from_numpy(llm.score(ids)).float()
    assert (ours - expected).abs().max() < 1e-4


def test_a_folder_says_what_becomes_of_it_and_generates(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, _ = written(model, tmp_path, "awq")
    asked: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    with caplog.at_level("INFO", "tokenwright"), LLM(folder) as llm:
        assert "AWQ int4" in caplog.text and "copied as int4:32/128+min" in caplog.text
        assert len(llm.generate("the model", **asked)[0].token_ids) == 8


def test_a_plan_counts_what_is_copied(model: Path, tmp_path: Path) -> None:
    folder, _ = written(model, tmp_path, "gptq-128")
    found = plan(str(folder))
    with LLM(folder) as llm:
        assert found.weight_bytes == llm.weight_bytes
    config = tmp_path / "config.json"
    config.write_bytes((folder / "config.json").read_bytes())
    assert "another tool quantised" in " ".join(plan(str(config)).remarks)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "auto-round", "packing_format": "auto_round:exllamav2"}, "packing_format is"),
        ({"checkpoint_format": "gptq_p"}, 'checkpoint_format is "gptq_p"'),
        ({"checkpoint_format": "marlin"}, "Tokenwright reads gptq and gptq_v2"),
        ({"quant_method": "aqlm"}, 'quantised by "aqlm"; Tokenwright reads gptq'),
        ({"quant_method": "awq", "version": "gemv"}, 'version is "gemv"; Tokenwright reads gemm'),
        ({"quant_method": "awq", "backend": "llm-awq"}, "backend is llm-awq, with another order"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "ModelOpt's W4A8_AWQ"),
        ({"quant_method": "bitnet", "use_rms_norm": True}, "a norm of its own before each linear"),
        ({"algo_config": [{"name": "rotation", "r1": True, "r4": True}]}, "r4 asks for inputs that are rotated"),
        ({"algo_config": [{"online_config": {"online_rotation_layers": ["q"]}}]}, "online_rotation_layers asks for"),
        ({"quant_method": "modelopt"}, "ModelOpt's format without quant_algo"),
        ({"quant_method": "mlx", "mode": "mxfp6"}, 'MLX.s mode "mxfp6"; Tokenwright reads affine'),
    ],
)
def test_what_is_not_read_is_refused_by_name(
    model: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder, _ = written(model, tmp_path, "gptq-32")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    "damage", ["no scales", "short zeros", "group beyond", "bad state", "no object", "deep state", "no absmax"]
)
def test_damaged_folders_are_refused(model: Path, tmp_path: Path, damage: str) -> None:
    of_gptq = damage in ("no scales", "short zeros", "group beyond")
    folder, _ = written(model, tmp_path, "gptq-32" if of_gptq else "nf4")
    tensors = load_file(folder / "model.safetensors")
    at = "model.layers.1.mlp.down_proj"
    match damage:
        case "no scales":
            del tensors[f"{at}.scales"]
        case "short zeros":
            tensors[f"{at}.qzeros"] = tensors[f"{at}.qzeros"][1:].contiguous()
        case "group beyond":
            tensors[f"{at}.g_idx"][5] = 99
        case "bad state":
            tensors[f"{at}.weight.quant_state.bitsandbytes__nf4"][0] = 7
        case "no object" | "deep state":
            text = b"[1]" if damage == "no object" else b"[" * 60_000
            tensors[f"{at}.weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
        case _:
            del tensors[f"{at}.weight.absmax"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=at.removeprefix("model.")) as caught:
        Checkpoint.open(folder)
    assert "is damaged" not in str(caught.value), "a whole file may be in another format"


@pytest.mark.parametrize("case", ["compressed-fp8", "compressed-4", "fp8-whole", "gptq-128"])
@pytest.mark.parametrize("name", ["{}_scale", "{}_proj.{}_scale", "{}_proj.output_scale", "{}_zero_point"])
def test_scales_of_a_cache_are_left_out(model: Path, case: str, name: str, tmp_path: Path) -> None:
    """llm-compressor, ModelOpt, AutoFP8 and Quark write them for K and V."""
    folder, plain = written(model, tmp_path, case)
    tensors = load_file(folder / "model.safetensors")
    at = "model.layers.1.self_attn."
    save_file(tensors | {at + name.format(one, one): torch.ones(1) for one in "kv"}, folder / "model.safetensors")
    expected = tensors_of(Checkpoint.open(plain), torch.float32)
    assert all(torch.equal(one, expected[name]) for name, one in tensors_of(Checkpoint.open(folder)).items())


@pytest.mark.parametrize("case", ["gptq-128", "awq", "modelopt"])
def test_a_description_may_lie_beside_the_config(model: Path, case: str, tmp_path: Path) -> None:
    """And GPTQ's first writers have biases of zeros, and no order where it is the usual one."""
    folder, plain = written(model, tmp_path, case)
    settings = json.loads((folder / "config.json").read_text())
    if described := settings.pop("quantization_config", None):
        name = "quantize_config.json" if described.pop("quant_method") == "gptq" else "quant_config.json"
        (folder / name).write_text(json.dumps(described))
        (folder / "config.json").write_text(json.dumps(settings))
    tensors = load_file(folder / "model.safetensors")
    zeros = {f"{name.rpartition('.')[0]}.bias": torch.zeros(128) for name in tensors if name.endswith("q_proj.scales")}
    orders = {name: torch.empty(0, dtype=torch.int32) for name in tensors if name.endswith("g_idx")}
    save_file(tensors | zeros | orders, folder / "model.safetensors")
    expected = tensors_of(Checkpoint.open(plain), torch.float32)
    ours = tensors_of(Checkpoint.open(folder), torch.float32)
    assert ours.keys() == expected.keys() and all(torch.equal(one, expected[name]) for name, one in ours.items())
    ones = {"a.bias": torch.ones(1)} | {name: one + 1 for name, one in zeros.items()}
    save_file(tensors | ones, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="not of this model"):
        Checkpoint.open(folder)


KV = {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}


@pytest.mark.parametrize(
    "said",
    [
        {"quant_method": "compressed-tensors", "config_groups": {}, "ignore": [], **KV},
        {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
    ],
)
def test_a_cache_alone_may_be_quantised(model: Path, said: dict[str, Any], tmp_path: Path) -> None:
    settings = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"quantization_config": said}))
    tensors = load_file(model / "model.safetensors")
    scales = {f"model.layers.0.self_attn.{one}_scale": torch.ones(1) for one in "kv"}
    save_file(tensors | scales, tmp_path / "model.safetensors")
    ours, theirs = (tensors_of(Checkpoint.open(one), torch.float32) for one in (tmp_path, model))
    assert all(torch.equal(one, theirs[name]) for name, one in ours.items())


def test_each_matrix_has_the_codec_of_its_tensors(model: Path, tmp_path: Path) -> None:
    """llm-compressor's mixed precision: fp8 attention beside int4 MLPs, each group with a format of its own."""
    tensors = load_file(model / "model.safetensors")
    kinds = {"self_attn": "float-quantized", "mlp": "pack-quantized"}
    made = {
        part: METHODS["compressed"]({"format": kind, "bits": 4 if part == "mlp" else 8}) for part, kind in kinds.items()
    }
    numbers, groups = dict(tensors), {}
    for part, (quantise, config) in made.items():
        groups[part] = config["config_groups"]["group_0"] | {"format": kinds[part]}
        for name in [one for one in tensors if f".{part}." in one and one.endswith("_proj.weight")]:
            numbers[name], parts = quantise(tensors.pop(name).float(), {})
            tensors |= {f"{name.removesuffix('.weight')}.{end}": one.contiguous() for end, one in parts.items()}
    settings = json.loads((model / "config.json").read_text())
    quantised = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    for folder, some, more in (("mixed", tensors, {"quantization_config": quantised}), ("plain", numbers, {})):
        (tmp_path / folder).mkdir()
        save_file(some, tmp_path / folder / "model.safetensors")
        (tmp_path / folder / "config.json").write_text(json.dumps(settings | more))
    ours, theirs = (tensors_of(Checkpoint.open(tmp_path / one), torch.float32) for one in ("mixed", "plain"))
    assert all(torch.equal(one, theirs[name]) for name, one in ours.items())
