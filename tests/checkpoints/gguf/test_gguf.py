"""GGUF files written by the `gguf` package are read as the folders they are from; damaged ones are refused."""

import json
import re
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import gguf
import numpy
import numpy as np
import pytest
import torch

from tests.models.files.gguf_files import NEWER, Kind, random_blocks, write_gguf
from tests.models.fixtures import make_checkpoint, write_json, write_tokenizer
from tests.models.random_models import lfm2_moe
from tests.models.weights import make_model
from tests.tensors import tensors_of, unpacked
from tokenwright import LLM
from tokenwright.backends.layout import nbytes, weight_bytes
from tokenwright.backends.packed import Packed
from tokenwright.checkpoints.files.safetensors import Stored
from tokenwright.checkpoints.fingerprint import about
from tokenwright.checkpoints.folder import Checkpoint, read_rows
from tokenwright.checkpoints.gguf import header
from tokenwright.checkpoints.gguf.blocks import FORMS
from tokenwright.checkpoints.gguf.checkpoint import read_model
from tokenwright.checkpoints.gguf.header import BLOCKS, part_names, read_gguf
from tokenwright.checkpoints.packing.packer import load_packed
from tokenwright.checkpoints.tensor_reader import forms_of, read_codes
from tokenwright.errors import CheckpointError, RequestError
from tokenwright.formats import WeightFormat
from tokenwright.models.rotary import RotaryTable
from tokenwright.planner import plan

NATIVE = WeightFormat("native")
LLAMA3 = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3"}
CHANGES: dict[str, dict[str, Any]] = {
    "llama3": {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 8192}},
    "linear": {"num_key_value_heads": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with grouped heads."""
    changes = {"num_key_value_heads": 2}
    return make_checkpoint(tmp_path_factory.mktemp("llama") / "model", "smollm2", changes=changes).path


def refusal(file: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(file)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["llama2", "llama3", "linear", "yarn", "qwen2", "qwen2.5", "qwen3", "smollm2"])
def test_a_file_is_the_folder_that_it_was_written_from(kind: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", kind, changes=CHANGES.get(kind)).path
    theirs, ours = Checkpoint.open(path), Checkpoint.open(write_gguf(tmp_path / "model.gguf", path))
    assert (ours.config, ours.graph) == (theirs.config, theirs.graph)
    tensors = tensors_of(ours)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in tensors_of(theirs).items())
    assert ours.generation.eos_ids == theirs.generation.eos_ids[:1]


# Changes to kinds whose configs say what GGUF's metadata cannot: llama.cpp has it built in, or does not have it.
LONG = {"type": "longrope", "short_factor": [1 + i / 16 for i in range(8)], "long_factor": [1 + i for i in range(8)]}
PLAIN_ROPE = {"rope_parameters": None, "rope_theta": 1e7, "partial_rotary_factor": 0.25}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "mixtral": {},
    "qwen2-moe": {},
    "qwen3-moe": {"mlp_only_layers": []},
    "gpt-oss-plain": {},
    "gemma2": {"query_pre_attn_scalar": 32},  # the head's size
    "gemma3": {"query_pre_attn_scalar": 32},
    "gemma3n": {},
    "gemma4": {},
    "gemma4-keys": {
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "hidden_size_per_layer_input": 0,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_global_key_value_heads": 1,
        "num_kv_shared_layers": 0,
        "top_k_experts": 2,
        "use_double_wide_mlp": False,
    },
    "phi3": {},
    "phi3-long": {"rope_scaling": LONG},
    "phi4-mini": {"rope_scaling": LONG | {key: LONG[key][:6] for key in ("short_factor", "long_factor")}},
    "cohere": {},
    "cohere-norms": {},
    "cohere2": {},
    "glm4": {},
    "neox": {},
    "neox-serial": {},
    "starcoder2": {"sliding_window": None, "rope_theta": 999999.44},
    "olmo2": {},
    "olmo3": {},
    "granite": {},
    "smollm3": {"no_rope_layers": None},
    "exaone4": CHANGES["llama3"],
    "ernie": {},
    "hunyuan": {"rope_scaling": None},
    "lfm2": {"block_auto_adjust_ff_dim": False},
    "granite4": {},
    "granite4-dense": {"num_local_experts": 0, "num_experts_per_tok": 0},
    "kimi-linear": {"max_position_embeddings": 512},
    "qwen3-next": {"mlp_only_layers": []},
    "qwen3.5": {},
    "jamba": {},
    "mamba": {},
    "falcon-mamba": {},
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_file_of_each_family_is_the_folder_that_it_was_written_from(kind: str, tmp_path: Path) -> None:
    dtype = "bfloat16" if kind.startswith("gemma") else "float32"  # its embeddings are scaled as in that dtype
    path = make_checkpoint(
        tmp_path / "model", re.sub("-(dense|keys)$", "", kind), changes=FAMILIES[kind], dtype=dtype
    ).path
    theirs, ours = Checkpoint.open(path), Checkpoint.open(write_gguf(tmp_path / "model.gguf", path))
    assert ours.graph == theirs.graph
    tensors = tensors_of(ours, torch.float32)
    for name, tensor in tensors_of(theirs, torch.float32).items():
        if name.endswith("a_log.weight"):  # the file has minus its exponentials
            torch.testing.assert_close(tensors[name], tensor, rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(tensors[name], tensor), name


def test_keys_and_values_of_a_latent_in_one_matrix(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", "kimi-linear", changes=FAMILIES["kimi-linear"]).path
    apart = Checkpoint.open(write_gguf(tmp_path / "apart.gguf", path))
    config = json.loads((path / "config.json").read_text())
    write_json(path / "config.json", config | {"_whole_kv_b": True})
    whole = Checkpoint.open(write_gguf(tmp_path / "whole.gguf", path))
    assert any(name.endswith("attn_kv_b.weight") for name in read_gguf(tmp_path / "whole.gguf").tensors)
    assert whole.graph == apart.graph
    tensors = tensors_of(apart)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in tensors_of(whole).items())


@pytest.mark.parametrize(
    ("key", "value"), [("key_length_swa", 0), ("shared_kv_layers", "two"), ("sliding_window_pattern", "x")]
)
def test_metadata_of_a_wrong_kind_are_refused(key: str, value: Any, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", "gemma4").path
    file = write_gguf(tmp_path / "model.gguf", path, metadata={f"gemma4.attention.{key}": value})
    with pytest.raises(CheckpointError, match="wrong kind"):
        Checkpoint.open(file)


def test_short_convolutions_beside_experts(tmp_path: Path) -> None:
    config = lfm2_moe(Random(3)) | {"tie_word_embeddings": True, "use_expert_bias": True}
    make_model(config, 3).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    write_json(tmp_path / "config.json", saved | {"rope_theta": saved.pop("rope_parameters")["rope_theta"]})
    theirs, ours = Checkpoint.open(tmp_path), Checkpoint.open(write_gguf(tmp_path / "model.gguf", tmp_path))
    assert ours.graph == theirs.graph
    tensors = tensors_of(ours)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in tensors_of(theirs).items())


def test_value_heads_that_a_file_has_in_turn_compute_the_same(tmp_path: Path) -> None:
    """Files of Qwen3.5 have the first value head of each key head, then the second: our op reads them in that order."""
    path = make_checkpoint(tmp_path / "model", "qwen3.5", changes=PLAIN_ROPE | {"linear_num_key_heads": 2}).path
    file, prompt = write_gguf(tmp_path / "model.gguf", path), list(range(20, 60))
    assert Checkpoint.open(file).graph != Checkpoint.open(path).graph
    logits = []
    for one in (path, file):
        with LLM(one, weights="float32") as llm:
            logits.append(llm.model(prompt)[0])
    np.testing.assert_allclose(logits[0], logits[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "form"), [("mixtral", Kind.Q8_0), ("mixtral", Kind.Q4_0), ("gpt-oss-plain", Kind.MXFP4)]
)
def test_experts_are_copied_as_they_lie(kind: str, form: Kind, tmp_path: Path) -> None:
    """Each expert is read by itself; gpt-oss' experts in MXFP4 are the numbers of its folder."""
    path = make_checkpoint(tmp_path / "model", kind).path
    found = Checkpoint.open(write_gguf(tmp_path / "model.gguf", path, form, only="_exps.weight"))
    weights, decoded = load_packed(found, NATIVE, found.config.dtype), tensors_of(found, torch.float32)
    assert {part for part in found.as_stored if ".experts." in part} == set(found.as_stored) != set()
    assert all(torch.equal(one, decoded[name]) for name, one in unpacked(found.graph, weights).items())
    if form is Kind.MXFP4:
        assert all(
            torch.equal(one, decoded[name]) for name, one in tensors_of(Checkpoint.open(path), torch.float32).items()
        )


def test_the_first_files_of_mixtral_have_each_expert_by_itself(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", "mixtral").path
    header = read_gguf(write_gguf(tmp_path / "model.gguf", path))
    apart: dict[str, Stored] = {}
    for name, one in header.tensors.items():
        if "_exps" not in name:
            apart[name] = one
            continue
        count, _, _ = one.shape
        for e in range(count):
            at, each = name.replace("_exps.weight", f".{e}.weight"), one.nbytes // count
            apart[at] = replace(one, shape=one.shape[1:], start=one.start + e * each, nbytes=each)
    found = read_model(replace(header, tensors=apart), "a.gguf", lambda _: [])
    assert all(found.stored[source.name].shape == found.graph.shapes[ours] for ours, source in found.sources.items())


@pytest.mark.parametrize(
    ("kind", "dtype"), [("llama2", "float32"), ("llama2", "float16"), ("llama2", "bfloat16"), ("qwen3", "float32")]
)
def test_logits_are_those_of_the_folder(kind: str, dtype: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", kind, dtype=dtype).path
    kinds = {"float32": Kind.F32, "float16": Kind.F16, "bfloat16": Kind.BF16}
    file = write_gguf(tmp_path / "model.gguf", path, kinds[dtype])
    with LLM(path) as theirs, LLM(str(file)) as ours:
        assert (ours.dtype, ours.weights) == (theirs.dtype, theirs.weights)
        text = "the model said hello 12"
        assert ours.tokenizer.encode(text) == theirs.tokenizer.encode(text)
        asked: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "logprobs": 5, "ignore_eos": True}
        assert _logprobs(ours, text, asked) == _logprobs(theirs, text, asked)


def _logprobs(llm: LLM, text: str, asked: dict[str, Any]) -> Any:
    completion = llm.generate(text, **asked)[0]
    assert completion.logprobs and len(completion.token_ids) == 12
    return completion.token_ids, completion.logprobs


def one_tensor(file: Path, raw: Any, kind: Kind) -> Stored:
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tensor("one", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_gguf(file).tensors["one"]


def by_hand(raw: Any, kind: str) -> Any:
    """Rows of Q1_0 and Q2_0, which the package does not decode: number by number, as ggml defines them."""
    size, bits = (18, 1) if kind == "Q1_0" else (gguf.GGML_QUANT_SIZES[NEWER][1], 2)
    count, rows = (size - 2) * 8 // bits, []
    for row in raw:
        numbers = []
        for block in row.reshape(-1, size):
            d = numpy.frombuffer(block[:2].tobytes(), numpy.float16)[0].astype(numpy.float32)
            for j in range(count):
                code = block[2 + j * bits // 8] >> j * bits % 8 & (1 << bits) - 1
                numbers.append(d * numpy.float32(2 * int(code) - 1 if bits == 1 else int(code) - 1))
        rows.append(numbers)
    return numpy.array(rows, numpy.float32)


@pytest.mark.parametrize("kind", ["Q1_0", "Q2_0", "Q2_0_g128"])
def test_types_that_the_package_lacks_are_decoded_by_their_definition(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of PrismML have larger blocks under the number of Q2_0; only the tensors' places tell them apart."""
    if kind.endswith("g128"):
        monkeypatch.setitem(gguf.GGML_QUANT_SIZES, NEWER, (128, 34))
    name = kind.removesuffix("_g128")
    raw = random_blocks(name, 40, 4).reshape(40, -1)
    one = one_tensor(tmp_path / "one.gguf", raw, Kind[name])
    assert one.dtype == kind
    expected = by_hand(raw, name)
    assert numpy.array_equal(read_rows(one, 0, 40), expected)
    [form] = forms_of(one)
    packed = Packed.empty(40, one.shape[1], form)
    assert packed.put_codes(0, *read_codes(one, 0, 40, form)) == 0
    assert numpy.array_equal(packed.unpack(), expected)
    assert packed.nbytes == raw.nbytes // 40 * 48  # with the outputs of whole blocks


@pytest.mark.parametrize("kind", ["Q1_0", "Q2_0", "Q2_0_g128", "TQ1_0", "TQ2_0"])
def test_a_file_of_ternary_weights_opens_and_computes(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copied whole; the text is the same cached and naive, and near to that of the decoded numbers."""
    if kind.endswith("g128"):
        monkeypatch.setitem(gguf.GGML_QUANT_SIZES, NEWER, (128, 34))
    path = make_checkpoint(tmp_path / "model", "qwen3", changes=LARGER | {"head_dim": 64}).path
    file = write_gguf(tmp_path / "model.gguf", path, blocks={"token_embd": "Q6_K", "": kind.removesuffix("_g128")})
    found = Checkpoint.open(file)
    assert {str(form) for form in found.as_stored.values()} == {"int6:16/256", str(FORMS[kind][0])}
    assert all(row.copied for row in found.held(NATIVE, "bfloat16") if row.type != "F32")
    weights, decoded = load_packed(found, NATIVE, "float32"), tensors_of(found, torch.float32)
    assert all(torch.equal(tensor, decoded[name]) for name, tensor in unpacked(found.graph, weights).items())
    assert nbytes(weights) == weight_bytes(found.graph, WeightFormat("float32"), found.as_stored)
    asked: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    with LLM(file) as ours, LLM(file, weights="float32") as theirs:
        ids = ours.generate("the model", **asked)[0].token_ids
        assert ours.generate("the model", cache=False, **asked)[0].token_ids == ids
        text = list(range(10, 60))
        assert abs(ours.score(text) - theirs.score(text)).mean() < 0.1


def test_ternary_numbers_of_bitnet_cpp_have_one_scale_behind_them(tmp_path: Path) -> None:
    """Four to a byte: numbers 0, 32, 64 and 96 of a block of 128 in its first, the first in the highest bits."""
    changes = {"hidden_size": 128, "intermediate_size": 256}
    path = make_checkpoint(tmp_path / "model", "bitnet", changes=changes).path
    blocks = dict.fromkeys(
        ("attn_q.", "attn_k.", "attn_v.", "attn_output", "ffn_gate.", "ffn_up.", "ffn_down."), "I2_S"
    )
    file = write_gguf(tmp_path / "model.gguf", path, blocks=blocks)
    found = Checkpoint.open(file)
    codes = random_blocks("I2_S", 128, 2)  # of the projection to the width
    expected = numpy.empty((128, 256), numpy.float32)
    for row, block, byte, place in numpy.ndindex(128, 2, 32, 4):
        expected[row, 128 * block + 32 * place + byte] = int(codes[row, block, byte] >> 6 - 2 * place & 3) - 1
    decoded = tensors_of(found, torch.float32)
    assert numpy.array_equal(decoded["layers.0.mlp.down.weight"].numpy(), expected * numpy.float32(0.03))
    assert {str(form) for form in found.as_stored.values()} == {"int2:64/64+factor"}
    weights = load_packed(found, NATIVE, "float32")
    assert all(torch.equal(tensor, decoded[name]) for name, tensor in unpacked(found.graph, weights).items())
    asked: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    with LLM(file) as llm:
        ids = llm.generate("the model", **asked)[0].token_ids
        assert llm.generate("the model", cache=False, **asked)[0].token_ids == ids


@pytest.mark.parametrize("type_", ["NVFP4", "Q8_0"])
def test_scales_of_matrices_and_of_experts_multiply_their_blocks(type_: str, tmp_path: Path) -> None:
    """As llama.cpp converts NVFP4: a number for a matrix, or for each expert; those of inputs change nothing."""
    path = make_checkpoint(tmp_path / "model", "mixtral", changes={"intermediate_size": 128}).path
    blocks = {"token_embd": "", "ffn_gate_inp": "", "": type_}
    plain, scaled = (
        Checkpoint.open(write_gguf(tmp_path / f"{some}.gguf", path, blocks=blocks, scaled=some))
        for some in (False, True)
    )
    before, after = tensors_of(plain, torch.float32), tensors_of(scaled, torch.float32)
    for name, one in before.items():
        expert = re.search(r"experts\.(\d+)", name)
        matrix = name == "head.weight" or (".attention." in name and "norm" not in name)
        factor = numpy.linspace(0.7, 1.9, 8, dtype=numpy.float32)[int(expert[1])] if expert else 0.7 if matrix else 1.0
        assert torch.equal(after[name], one * numpy.float32(factor)), name
    assert set(map(str, scaled.as_stored.values())) == ({"fp4:16+factor"} if type_ == "NVFP4" else set())
    weights = load_packed(scaled, NATIVE, "float32")
    assert all(torch.equal(tensor, after[name]) for name, tensor in unpacked(scaled.graph, weights).items())


@pytest.mark.parametrize("kind", sorted(kind for kind in BLOCKS if not kind.startswith(("Q1_0", "Q2_0", "I2_S"))))
def test_blocks_are_decoded_as_the_gguf_package_does(kind: str, tmp_path: Path) -> None:
    count, size = gguf.GGML_QUANT_SIZES[Kind[kind]]
    raw = numpy.random.default_rng(0).integers(0, 256, (40, 2 * size), dtype=numpy.uint8)
    one = one_tensor(tmp_path / "one.gguf", raw, Kind[kind])
    assert one.shape == (40, 2 * count)
    with numpy.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw[7:29], Kind[kind])
    assert numpy.array_equal(read_rows(one, 7, 29).view(numpy.int32), expected.view(numpy.int32))


@pytest.mark.parametrize(
    ("kind", "form"),
    [(kind, form) for kind, forms in FORMS.items() for form in forms if kind not in ("Q2_0_g128", "I2_S")],
    ids=str,
)
def test_the_forms_of_a_type_hold_its_numbers_to_the_bit(kind: str, form: WeightFormat, tmp_path: Path) -> None:
    one = one_tensor(tmp_path / "one.gguf", random_blocks(kind, 40, 8).reshape(40, -1), Kind[kind])
    assert forms_of(one) == FORMS[kind]
    packed = Packed.empty(40, one.shape[1], form)
    for first, last in ((0, 9), (9, 40)):
        assert packed.put_codes(first, *read_codes(one, first, last, form)) == 0
    assert numpy.array_equal(packed.unpack(), read_rows(one, 0, 40))


@pytest.mark.parametrize(("lowest", "highest"), [(104, 143), (103, 143), (104, 144)])
def test_mxfp4_is_copied_where_float16_holds_its_scales(lowest: int, highest: int, tmp_path: Path) -> None:
    raw = random_blocks("MXFP4", 40, 64)
    raw[3, :2, 0], raw[4, 5] = (lowest, highest), 0  # a block of zeros may have any scale
    one = one_tensor(tmp_path / "one.gguf", raw.reshape(40, -1), Kind.MXFP4)
    assert bool(forms_of(one)) == ((lowest, highest) == (104, 143))


@pytest.mark.parametrize("kind", ["IQ3_XXS", "IQ1_S", "IQ1_M", "IQ2_S"])
def test_types_whose_scales_float16_does_not_hold_in_parts_are_decoded(kind: str, tmp_path: Path) -> None:
    raw = random_blocks(kind, 40, 8)
    if kind == "IQ1_M":
        raw[3, 1, 49:56:2] = (0x10, 0, 0, 0)
    else:
        raw[3, 1, :2] = (1, 0)
    assert forms_of(one_tensor(tmp_path / "one.gguf", raw.reshape(40, -1), Kind[kind])) == ()


@pytest.mark.parametrize(("kind", "form"), [(Kind.Q8_0, "int8:32"), (Kind.Q4_0, "int4"), (Kind.Q5_0, "int5:32")])
def test_blocks_of_our_forms_are_copied(kind: Kind, form: str, folder: Path, tmp_path: Path) -> None:
    found = Checkpoint.open(weakened(write_gguf(tmp_path / "model.gguf", folder, kind), "blk.0.ffn_down.weight"))
    assert {str(one) for one in found.as_stored.values()} == {form}
    weights = load_packed(found, NATIVE, found.config.dtype)
    packed = [one for one in weights.values() if isinstance(one, Packed)]
    assert {one.format for one in packed} == {form.partition(":")[0]}
    decoded = tensors_of(found, torch.float32)
    assert all(torch.equal(tensor, decoded[name]) for name, tensor in unpacked(found.graph, weights).items())
    assert nbytes(weights) == weight_bytes(found.graph, WeightFormat("bfloat16"), found.as_stored)
    if kind is Kind.Q8_0:  # the extreme of a group is 127 there too: quantising again gives the same bytes
        again = load_packed(found, WeightFormat.parse("int8:32"), found.config.dtype)
        for name, one in weights.items():
            other = again[name]
            if isinstance(one, Packed) and isinstance(other, Packed) and name != "layers.0.mlp.down":
                assert np.array_equal(one.codes, other.codes) and np.array_equal(one.scales, other.scales)


def weakened(file: Path, name: str) -> Path:
    """The file with codes in one tensor that are far below their scales, as quantising again would not leave them."""
    one, raw = read_gguf(file).tensors[name], bytearray(file.read_bytes())
    size = {"Q8_0": 34, "Q4_0": 18, "Q5_0": 22}[one.dtype]
    for block in range(one.start, one.start + one.nbytes, size):
        for at in range(block + 2, block + size):
            raw[at] = raw[at] & 15 if one.dtype == "Q8_0" else (raw[at] & 0x11) + 0x22
    file.write_bytes(raw)
    return file


@pytest.fixture(scope="module")
def parts(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The model in several files."""
    file = write_gguf(tmp_path_factory.mktemp("parts") / "model.gguf", folder, Kind.Q8_0, split=8)
    return sorted(file.parent.glob("*.gguf"))


def test_any_part_opens_the_whole_model(folder: Path, parts: list[Path], tmp_path: Path) -> None:
    assert [file.name for file in parts] == part_names(parts[-1].name) and len(parts) > 2
    whole = Checkpoint.open(write_gguf(tmp_path / "model.gguf", folder, Kind.Q8_0))
    expected = tensors_of(whole, torch.float32)
    for file in parts:
        found = Checkpoint.open(file)
        assert (found.path, set(found.stamps)) == (parts[0], set(parts))
        assert found.tokenizer().encode("the model") == whole.tokenizer().encode("the model")
        tensors = tensors_of(found, torch.float32)
        assert all(torch.equal(tensors[name], one) for name, one in expected.items())
    assert about(found, {}, (), 16) == about(Checkpoint.open(parts[0]), {}, (), 16)


def test_parts_that_do_not_fit_together_are_refused_by_name(folder: Path, parts: list[Path], tmp_path: Path) -> None:
    def beside(changes: Mapping[int, bytes | None]) -> Path:
        for at, file in enumerate(parts):
            (tmp_path / file.name).unlink(missing_ok=True)
            if (data := changes.get(at, file.read_bytes())) is not None:
                (tmp_path / file.name).write_bytes(data)
        return tmp_path / parts[0].name

    first, second = parts[0].read_bytes(), parts[1].read_bytes()
    assert f"lacks 1 of the model's {len(parts)} files ({parts[1].name})" in refusal(beside({1: None}))
    assert f"{parts[1].name} does not belong to the files beside it: its split.no is 0" in refusal(beside({1: first}))
    twice = rekeyed(second, "split.no", 2)
    assert "is in model-00002-of-" in refusal(beside({2: twice}))
    assert "its split.count is" in refusal(beside({1: rekeyed(second, "split.count", 9)}))
    assert "split.tensors.count is 7, not" in refusal(beside({1: rekeyed(second, "split.tensors.count", 7)}))
    assert "model-00002" in refusal(beside({1: second[:100]}))
    odd = beside({}).rename(tmp_path / "model-00001-of-00002.gguf")
    assert "and its name stands for 2" in refusal(odd)


def rekeyed(raw: bytes, key: str, value: int) -> bytes:
    """A file with another number under a key of the metadata."""
    at = raw.index(key.encode()) + len(key)
    size = {2: 2, 3: 2, 4: 4, 5: 4}[raw[at]]
    return raw[: at + 4] + value.to_bytes(size, "little") + raw[at + 4 + size :]


MIXED = {
    "attn_v": "Q6_K",
    "ffn_down": "Q6_K",
    "token_embd": "Q6_K",
    "attn_output": "Q5_K",
    "output": "Q8_0",
    "": "Q4_K",
}
LARGER = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}


def test_a_mixture_of_k_quants_is_copied_and_computed(tmp_path: Path) -> None:
    """All of it, q, k and v of two types included; and the text is that of the decoded numbers, but for rounding."""
    path = make_checkpoint(tmp_path / "model", "llama2", changes=LARGER).path
    file = write_gguf(tmp_path / "model.gguf", path, blocks=MIXED)
    found = Checkpoint.open(file)
    forms = {name.split(".", 2)[-1]: str(form) for name, form in found.as_stored.items()}
    assert forms["attention.q"] == forms["attention.v"] == "int6:16/256+min"
    assert (forms["mlp.up"], forms["mlp.down"], forms["attention.o"]) == (
        "int4:32/256+min", "int6:16/256", "int5:32/256+min",
    )  # fmt: skip
    assert all(row.copied for row in found.held(NATIVE, "bfloat16") if row.type != "F32")
    weights, decoded = load_packed(found, NATIVE, "float32"), tensors_of(found, torch.float32)
    assert all(torch.equal(tensor, decoded[name]) for name, tensor in unpacked(found.graph, weights).items())
    assert nbytes(weights) == weight_bytes(found.graph, WeightFormat("float32"), found.as_stored)
    asked: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    with LLM(file) as ours, LLM(file, weights="float32") as theirs:
        ids = ours.generate("the model", **asked)[0].token_ids
        assert ours.generate("the model", cache=False, **asked)[0].token_ids == ids
        text = list(range(10, 60))
        assert abs(ours.score(text) - theirs.score(text)).mean() < 0.1


def test_a_joined_matrix_of_types_without_a_common_form_is_decoded(folder: Path, tmp_path: Path) -> None:
    found = Checkpoint.open(write_gguf(tmp_path / "model.gguf", folder, Kind.Q8_0, only="attn_q"))
    assert found.as_stored == {}
    kinds = {row.type: row for row in found.held(NATIVE, "bfloat16")}
    assert kinds["Q8_0"].converted and kinds["Q8_0"].format == "bfloat16"
    assert not kinds["F32"].converted
    assert found.main_format(NATIVE, "float32") == WeightFormat("float32")


def test_a_quantised_file_generates_cached_and_naive_alike(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_gguf(tmp_path / "model.gguf", folder, Kind.Q4_0, only="ffn")
    asked: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    with LLM(file) as llm:
        ids = llm.generate("the model", **asked)[0].token_ids
        assert llm.generate("the model", cache=False, **asked)[0].token_ids == ids
        assert llm.loaded.copies and "convert" not in caplog.text
    with LLM(file, weights="float32"):
        assert "Q4_0" in caplog.text and "converted as float32" in caplog.text and "twice" not in caplog.text
    with LLM(file, weights="int4"):
        assert re.search(r"Q4_0 .* converted as int4: .* rounded twice, .* leave weights out", caplog.text)
        assert not re.search(r"F32 .* rounded twice", caplog.text)


def test_other_rotary_factors_than_llama_3s_are_taken_as_they_are(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", "llama3").path  # of 64 tokens, which no published model has
    ours = Checkpoint.open(write_gguf(tmp_path / "model.gguf", path))
    graphs = (ours.graph, Checkpoint.open(path).graph)
    cosines = [RotaryTable(one.positions, one.rotary_size).rows(np.arange(200), 200).cos for one in graphs]
    assert np.abs(cosines[0] - cosines[1]).max() < 1e-4
    (path / "config.json").unlink()
    file = (tmp_path / "model.gguf").replace(path / "model.gguf")
    assert f"but {file.name}; give that file" in refusal(path)


def test_what_changes_no_arithmetic_changes_no_graph(folder: Path, tmp_path: Path) -> None:
    """Numbers that are listed for each layer, neutral factors, and bytes behind the last tensor."""
    file = write_gguf(tmp_path / "model.gguf", folder)
    file.write_bytes(file.read_bytes() + bytes(70))
    found, expected = read_gguf(file), Checkpoint.open(file).graph
    metadata, of = found.metadata, f"{found.metadata['general.architecture']}."
    listed = {key: [metadata[key]] * 3 for key in (f"{of}attention.head_count", f"{of}feed_forward_length")}
    neutral = {f"{of}{key}": 1.0 for key in ("embedding_scale", "residual_scale", "logit_scale")}
    for more in (listed, neutral, {f"{of}rope.dimension_sections": [0] * 4}):
        assert read_model(replace(found, metadata={**metadata, **more}), "a file", lambda _: []).graph == expected
    with pytest.raises(CheckpointError, match="embedding_scale"):
        read_model(replace(found, metadata={**metadata, f"{of}embedding_scale": 2.0}), "a file", lambda _: [])


def test_codes_that_no_quantiser_writes_are_refused(folder: Path, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", folder, Kind.Q8_0)
    one = read_gguf(file).tensors["blk.0.ffn_up.weight"]
    raw = bytearray(file.read_bytes())
    raw[one.start + 5] = 0x80
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match="-128"):
        load_packed(Checkpoint.open(file), NATIVE, "float32")


def test_a_plan_counts_the_bytes_as_they_lie(folder: Path, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", folder, Kind.Q8_0)
    found = plan(file)
    assert str(found.weights) == "int8:32" and any("copied as int8:32" in remark for remark in found.remarks)
    assert found.weight_bytes < plan(file, weights="float16").weight_bytes


def test_a_file_is_not_quantised_into_a_folder(folder: Path, tmp_path: Path) -> None:
    from tokenwright.checkpoints.packing.folder_writer import check_quantising

    found = Checkpoint.open(write_gguf(tmp_path / "model.gguf", folder))
    with pytest.raises(RequestError, match="GGUF"):
        check_quantising(found, tmp_path / "out", WeightFormat.parse("int8"))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("split.count", 3, "one of 3 files by its metadata"),
        ("llama.expert_count", 8, "experts"),
        ("llama.attention.value_length", 8, "lacks that"),
        ("llama.rope.scaling.type", "longrope", "longrope"),
        ("llama.clamp", 3, "unknown key clamp = 3"),
        ("tokenizer.ggml.pre", "viking", "'viking'; Tokenwright has gpt-2"),
        ("tokenizer.ggml.model", "t5", "t5"),
        ("tokenizer.ggml.bos_token_id", 1 << 30, "none of the"),
        ("general.architecture", "rwkv7", '"rwkv7" needs RWKV\'s recurrence, which'),
        ("general.architecture", "mpt", '"mpt" needs biases of scores by the distance (ALiBi), which'),
        ("general.architecture", "gpt9", '"gpt9" is none that Tokenwright knows. It reads afmoe'),
        ("general.alignment", 3, "power of two"),
        ("general.alignment", 0, "power of two"),
    ],
)
def test_what_we_lack_is_refused_by_name(key: str, value: Any, words: str, folder: Path, tmp_path: Path) -> None:
    assert words in refusal(write_gguf(tmp_path / "model.gguf", folder, metadata={key: value}))


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "no GGUF"),
        (b"GGUF", "no GGUF"),
        (b"version https://git-lfs.github.com/spec/v1", "git lfs pull"),
        (b"GGUF\1\0\0\0" + bytes(16), "version 1"),
        (b"GGUF\0\0\0\3" + bytes(16), "big-endian"),
        (b"tjgg\3\0\0\0" + bytes(16), "a GGJT file, a format before GGUF"),
        (b"GGUF\3\0\0\0" + struct.pack("<QQQcIQIQ", 1, 0, 1, b"t", 1, 256, 15, 0) + bytes(100), "Q8_K (15)"),
        (b"GGUF\3\0\0\0" + struct.pack("<QQQcIQIQ", 1, 0, 1, b"t", 1, 256, 38, 0) + bytes(100), "TL1 of bitnet.cpp"),
        (b"GGUF\3\0\0\0" + struct.pack("<QQ", 0, 1 << 63), "9,223,372,036,854,775,808 keys"),
        (b"GGUF\3\0\0\0" + struct.pack("<QQQ", 0, 1, 1 << 62) + bytes(40), "more than 65,536"),
        (b"GGUF\3\0\0\0" + struct.pack("<QQQcIIQ", 0, 1, 1, b"a", 9, 8, 1 << 60), "strings"),
        (b"GGUF\3\0\0\0" + struct.pack("<QQQcIIQ", 0, 1, 1, b"a", 9, 9, 0), "type 9"),
        (b"GGUF\3\0\0\0" + struct.pack("<QQQcIIQ", 0, 1, 1, b"a", 0xFFFFFFFF, 8, 1), "unknown type 4294967295"),
        (b"GGUF\3\0\0\0" + struct.pack("<QQQcIBQcIB", 0, 2, 1, b"a", 0, 7, 1, b"a", 0, 7), "twice"),
        (b"GGUF\3\0\0\0" + struct.pack("<QQQcI4QIQ", 1, 0, 1, b"t", 4, *[1 << 40] * 4, 0, 0), "sizes"),
        (b"GGUF\3\0\0\0" + struct.pack("<QQQcI4QIQ", 1, 0, 1, b"t", 4, *[1 << 30] * 4, 0, 0), "truncated"),
        (b"GGUF\3\0\0\0" + struct.pack("<QQQcIQIQ", 1, 0, 1, b"t", 1, 4, 0, 64) + bytes(100), "offset 64"),
        (b"GGUF\3\0\0\0" + struct.pack("<QQQcIQIQ", 1, 0, 1, b"t", 1, 4, 77, 0) + bytes(100), "type 77"),
    ],
    ids=lambda value: value if isinstance(value, str) else "file",
)  # fmt: skip
def test_forged_headers_are_refused(raw: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(raw)
    assert words in refusal(tmp_path / "bad.gguf")


def test_a_file_that_shrinks_after_opening_is_an_error(folder: Path, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", folder, Kind.Q8_0)
    found = Checkpoint.open(file)
    file.write_bytes(file.read_bytes()[:-4096])
    with pytest.raises(CheckpointError, match="shorter"):
        load_packed(found, NATIVE, "float32")


def of_strings(file: Path, *strings: bytes) -> Path:
    """A GGUF file without tensors, whose only key has a list of strings."""
    each = b"".join(struct.pack("<Q", len(one)) + one for one in strings)
    raw = b"GGUF\3\0\0\0" + struct.pack("<QQQcIIQ", 0, 1, 1, b"a", 9, 8, len(strings)) + each
    file.write_bytes(raw + bytes(-len(raw) % 32))
    return file


STRANGE = (b"", b"a\0b", "é€𝄞".encode(), b"\n" * 90, b" ", b"z" * 300, b"\0", b"", "ÿ".encode())


@pytest.mark.parametrize("ahead", [1, 8, 9, 40, 77, 1 << 20])
def test_strings_are_read_alike_however_many_bytes_are_read_ahead(
    ahead: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(header, "_READ_AHEAD", ahead)
    strings = Random(ahead).choices(STRANGE, k=200)
    assert read_gguf(of_strings(tmp_path / "a.gguf", *strings)).metadata == {"a": [one.decode() for one in strings]}


@pytest.mark.parametrize("bad", [b"\xff", b"\xe2\x82", b"\xed\xa0\x80", b"\xc3"])
@pytest.mark.parametrize("at", [0, 7, 99])
def test_a_string_that_is_not_utf_8_is_named_by_its_place(bad: bytes, at: int, tmp_path: Path) -> None:
    """Also where the beginning of the next string would complete it."""
    strings = [b"ab"] * 100
    strings[at] = bad
    told = refusal(of_strings(tmp_path / "a.gguf", *strings))
    assert f'the value of "a" at byte {49 + 10 * at + 8:,} is not UTF-8' in told


def test_a_list_of_strings_that_ends_early_is_refused(tmp_path: Path) -> None:
    file = of_strings(tmp_path / "a.gguf", *[b"ab"] * 100)
    file.write_bytes(file.read_bytes()[: 49 + 1000 - 1])
    assert 'the value of "a" at byte 1,047 has 2 bytes, and 1 remain' in refusal(file)


def calls_of(run: Callable[[], object]) -> int:
    """How many functions of Python and C a call has called."""
    count = 0

    def counted(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def test_a_vocabulary_costs_no_call_for_each_of_its_tokens(tmp_path: Path) -> None:
    few, many = (
        of_strings(tmp_path / f"{size}", *(f"token {at}".encode() for at in range(size))) for size in (9, 9999)
    )
    assert calls_of(lambda: read_gguf(many)) <= calls_of(lambda: read_gguf(few)) + 9
