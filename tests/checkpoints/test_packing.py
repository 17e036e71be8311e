"""Packed weights as they are loaded, cached and written to folders: always what the checkpoint's own tensors say."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.fixtures import KINDS, make_checkpoint, write_json
from tests.processes import running
from tests.tensors import tensors_of, unpacked
from tokenwright.arrays import Array, widened
from tokenwright.backends.layout import Weights, empty_weights, nbytes, weight_bytes
from tokenwright.backends.packed import Packed
from tokenwright.checkpoints.folder import Checkpoint
from tokenwright.checkpoints.packing import packer, weight_cache
from tokenwright.checkpoints.packing.folder_writer import write_folder
from tokenwright.checkpoints.packing.packer import load_packed, pack_checkpoint
from tokenwright.checkpoints.packing.weight_cache import WeightCache
from tokenwright.errors import CheckpointError, RequestError
from tokenwright.formats import WeightFormat
from tokenwright.regular_file import draft_file

INT8, INT4, NATIVE = WeightFormat.parse("int8"), WeightFormat.parse("int4"), WeightFormat("native")


@pytest.fixture
def model(tmp_path: Path) -> Checkpoint:
    """A small Qwen2.5: biases, grouped heads, a tied head."""
    return Checkpoint.open(make_checkpoint(tmp_path / "model", "qwen2.5").path)


@pytest.fixture
def cache(tmp_path: Path) -> WeightCache:
    return WeightCache(tmp_path / "cache" / "weights", smallest=0)


def same(ours: Weights, theirs: Weights) -> bool:
    """Whether all memory holds the same."""
    assert ours.keys() == theirs.keys()
    return all(all(map(np.array_equal, _parts(ours[name]), _parts(theirs[name]))) for name in ours)


def _parts(one: Array | Packed) -> list[Array]:
    if not isinstance(one, Packed):
        return [one]
    return [one.codes, one.scales, *([] if one.bias is None else [one.bias])]


@pytest.mark.parametrize("slab", [1, packer.SLAB_BYTES])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_packed_as_it_is_read(
    kind: str, slab: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32 nothing is lost, so every number must come back: joined, transposed, cut from fused tensors, in slabs."""
    monkeypatch.setattr(packer, "SLAB_BYTES", slab)
    found = Checkpoint.open(make_checkpoint(tmp_path, kind, shards=2).path)
    weights = load_packed(found, NATIVE, "float32")
    ours, theirs = unpacked(found.graph, weights), tensors_of(found)
    assert list(ours) == list(theirs)
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
    assert ("head" not in weights) == found.config.tied_head


@pytest.mark.parametrize("form", ["bfloat16", "float16", "int8", "int8:32", "int4", "int4:64"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_format_from_every_dtype(form: str, dtype: str, tmp_path: Path) -> None:
    """The same bytes as when whole tensors are packed one after the other."""
    found = Checkpoint.open(make_checkpoint(tmp_path, "gpt2", dtype=dtype).path)
    chosen = WeightFormat.parse(form)
    weights = load_packed(found, chosen, "float32")
    tensors, expected = found.tensors(), empty_weights(found.graph, chosen)
    joined = [f"layers.1.attention.{letter}" for letter in "qkv"]
    qkv, embed = expected["layers.1.attention.qkv"], expected["embed"]
    assert isinstance(qkv, Packed)
    assert isinstance(embed, Packed)
    qkv.pack_rows(0, np.concatenate([tensors[f"{name}.weight"] for name in joined]))
    embed.pack_rows(0, tensors["embed.weight"])
    bias = np.concatenate([widened(tensors[f"{name}.bias"]) for name in joined])
    for name, one in (("layers.1.attention.qkv", qkv), ("embed", embed)):
        loaded = weights[name]
        assert isinstance(loaded, Packed)
        assert (loaded.out, loaded.inner, loaded.format, loaded.group) == (one.out, one.inner, one.format, one.group)
        assert np.array_equal(loaded.codes, one.codes)
        assert np.array_equal(loaded.scales, one.scales)
    assert np.array_equal(_parts(weights["layers.1.attention.qkv"])[2], bias)
    assert all(one.dtype == np.float32 for one in weights.values() if not isinstance(one, Packed))
    assert nbytes(weights) == weight_bytes(found.graph, chosen)


def test_keys(model: Checkpoint) -> None:
    weights = load_packed(model, INT8, "float32")
    layer = {name.removeprefix("layers.0.") for name in weights if name.startswith("layers.0.")}
    assert layer == {
        "attention.qkv", "attention.o", "mlp.gate_up", "mlp.down", "attention_norm.weight", "mlp_norm.weight"
    }  # fmt: skip
    assert {name for name in weights if not name.startswith("layers.")} == {"embed", "norm.weight"}, "a tied head"
    gpt2 = {name.split(".", 2)[2] for name in _of("gpt2", model.path.parent) if name.startswith("layers.0.")}
    assert {"mlp.up", "mlp.down", "attention.qkv", "attention_norm.bias"} <= gpt2
    assert "positions.weight" in _of("gpt2", model.path.parent / "again")


def _of(kind: str, folder: Path) -> Weights:
    return load_packed(Checkpoint.open(make_checkpoint(folder / kind, kind).path), NATIVE, "bfloat16")


def test_under_int4_the_embedding_stays_finer(tmp_path: Path) -> None:
    weights = load_packed(Checkpoint.open(make_checkpoint(tmp_path, "llama2").path), INT4, "float32")
    forms = {name: (one.format, one.group) for name, one in weights.items() if isinstance(one, Packed)}
    assert forms["embed"] == forms["head"] == ("int8", 64)
    assert {form for name, form in forms.items() if name.startswith("layers.")} == {("int4", 32)}


def test_progress_is_told_in_bytes_up_to_all(model: Checkpoint) -> None:
    seen: list[tuple[int, int]] = []
    load_packed(model, INT8, "float32", report=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (model.nbytes, model.nbytes)


def test_no_more_than_a_slab_is_read_at_a_time(model: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies in memory beside the weights is what the two threads have read last."""
    read: list[int] = []

    def spied(*arguments: Any) -> Array:
        rows = real(*arguments)
        read.append(rows.nbytes)
        return rows

    real = packer.read_rows
    monkeypatch.setattr(packer, "read_rows", spied)
    monkeypatch.setattr(packer, "SLAB_BYTES", 8192)
    load_packed(model, INT8, "float32")
    assert max(read) == 8192
    assert sum(read) == model.nbytes


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    "name", ["model.layers.2.mlp.down_proj.weight", "model.norm.weight", "model.embed_tokens.weight"]
)
@pytest.mark.parametrize("form", ["native", "int8", "int4"])
def test_values_that_are_not_finite_are_refused_by_name(form: str, name: str, value: float, model: Checkpoint) -> None:
    change_weights(model.path, lambda tensors: tensors[name].view(-1)[35].fill_(value))
    with pytest.raises(CheckpointError, match=name.removeprefix("model.") + r" in .* not finite"):
        load_packed(Checkpoint.open(model.path), WeightFormat.parse(form), "bfloat16")


@pytest.mark.parametrize("form", ["float16", "int8", "int4"])
def test_values_too_large_for_a_format_are_told_apart(form: str, model: Checkpoint) -> None:
    name = "model.layers.2.mlp.down_proj.weight"
    change_weights(model.path, lambda tensors: tensors[name].mul_(1e9))
    found = Checkpoint.open(model.path)
    option = "dtype bfloat16" if form == "float16" else "weights bfloat16"
    with pytest.raises(CheckpointError, match=rf"down_proj.* does not fit {form}; give {option}"):
        load_packed(found, WeightFormat.parse(form), "float32")
    assert load_packed(found, WeightFormat("bfloat16"), "float32")


def test_a_file_that_becomes_shorter_is_told(model: Checkpoint) -> None:
    file = model.path / "model.safetensors"
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 1)
    with pytest.raises(CheckpointError, match="became shorter while it was read"):
        load_packed(model, INT8, "float32")


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


# The cache


def test_the_second_load_packs_nothing(model: Checkpoint, cache: WeightCache, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_packed(model, INT8, "float32", cache=cache)
    assert cache.nbytes == sum(file.stat().st_size for file in cache.folder.glob("*.safetensors")) > nbytes(first)

    def never(*arguments: Any) -> Any:
        raise AssertionError("called")

    monkeypatch.setattr(packer, "pack_checkpoint", never)
    monkeypatch.setattr(weight_cache, "digest_of", never)  # remembered
    seen: list[tuple[int, int]] = []
    second = load_packed(model, INT8, "float32", lambda done, total: seen.append((done, total)), cache)
    assert same(first, second)
    assert "head" not in second, "it is tied"
    assert seen[-1][0] == seen[-1][1]
    with pytest.raises(AssertionError, match="called"):
        load_packed(model, INT4, "float32", cache=cache)


def test_native_weights_and_small_ones_are_not_kept(model: Checkpoint, cache: WeightCache) -> None:
    load_packed(model, NATIVE, "float32", cache=cache)
    load_packed(model, INT8, "float32", cache=WeightCache(cache.folder))
    assert not cache.folder.exists()
    assert cache.nbytes == 0


def test_a_moved_model_is_found_by_its_contents(model: Checkpoint, cache: WeightCache) -> None:
    load_packed(model, INT8, "float32", cache=cache)
    moved = model.path.rename(model.path.with_name("moved"))
    again = Checkpoint.open(moved)
    assert cache.load(again, INT8) is not None
    assert len(list(cache.folder.glob("*.safetensors"))) == 1


def test_other_contents_are_other_weights(model: Checkpoint, cache: WeightCache) -> None:
    load_packed(model, INT8, "float32", cache=cache)
    change_weights(model.path, lambda tensors: tensors["model.norm.weight"].mul_(2))
    changed = Checkpoint.open(model.path)
    assert cache.load(changed, INT8) is None
    again = load_packed(changed, INT8, "float32", cache=cache)
    assert same(again, pack_checkpoint(changed, INT8))
    settings = json.loads((model.path / "config.json").read_text())
    write_json(model.path / "config.json", settings | {"rms_norm_eps": 1e-3})
    assert cache.load(Checkpoint.open(model.path), INT8) is None


def damaged(content: bytearray) -> bytes:
    content[-100] ^= 1
    return bytes(content)


@pytest.mark.parametrize(
    "damage",
    [damaged, lambda content: bytes(content[:-1]), lambda content: b"", lambda content: bytes(content) + b"x"],
    ids=["one bit", "truncated", "empty", "longer"],
)
def test_a_damaged_file_is_told_and_made_again(
    damage: Callable[[bytearray], bytes], model: Checkpoint, cache: WeightCache, caplog: pytest.LogCaptureFixture
) -> None:
    whole = load_packed(model, INT8, "float32", cache=cache)
    [file] = cache.folder.glob("*.safetensors")
    content = file.read_bytes()
    file.write_bytes(damage(bytearray(content)))
    assert same(load_packed(model, INT8, "float32", cache=cache), whole)
    assert "cached weights cannot be used and are made again" in caplog.text
    assert file.read_bytes() == content


@pytest.mark.parametrize("foreign", ["another format", "no metadata", "another model"])
def test_a_foreign_file_is_told_and_made_again(
    foreign: str, model: Checkpoint, cache: WeightCache, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = load_packed(model, INT8, "float32", cache=cache)
    [file] = cache.folder.glob("*.safetensors")
    other = WeightCache(tmp_path / "other", smallest=0)
    if foreign == "another format":
        load_packed(model, WeightFormat("int8", 32), "float32", cache=other)
    elif foreign == "another model":
        load_packed(Checkpoint.open(make_checkpoint(tmp_path / "m", "llama2").path), INT8, "float32", cache=other)
    else:
        other.folder.mkdir()
        save_file(load_file(file), other.folder / "x.safetensors")
    next(other.folder.glob("*.safetensors")).replace(file)
    assert same(load_packed(model, INT8, "float32", cache=cache), whole)
    assert "made again" in caplog.text


def test_a_folder_that_cannot_be_written_is_told(
    model: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    weights = load_packed(model, INT8, "float32", cache=WeightCache(tmp_path / "file" / "weights", smallest=0))
    assert "set TOKENWRIGHT_CACHE to another folder" in caplog.text
    assert same(weights, pack_checkpoint(model, INT8))


def test_what_killed_writers_left_is_removed(model: Checkpoint, cache: WeightCache) -> None:
    cache.folder.mkdir(parents=True)
    left = cache.folder / ".x.safetensors.draft-1-1"
    left.touch()
    with draft_file(cache.folder / "y.safetensors") as written:
        load_packed(model, INT8, "float32", cache=cache)
        assert not left.exists()
        assert written.exists(), "its writer is alive"


def test_pipes_and_links_in_the_place_of_drafts_do_no_harm(model: Checkpoint, cache: WeightCache) -> None:
    """Another user may have made them: a pipe is not waited for, and a link is removed itself."""
    cache.folder.mkdir(parents=True)
    (kept := cache.folder / "kept").touch()
    os.mkfifo(cache.folder / ".x.safetensors.draft-1-1")
    (link := cache.folder / ".y.safetensors.draft-1-1").symlink_to(kept)
    code = f"""
from pathlib import Path
from tokenwright.checkpoints.packing.weight_cache import WeightCache
WeightCache(Path({str(cache.folder)!r}), smallest=0).sweep()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert kept.exists() and not link.is_symlink()


def test_weights_that_others_may_have_changed_are_not_used(
    model: Checkpoint, cache: WeightCache, caplog: pytest.LogCaptureFixture
) -> None:
    load_packed(model, INT8, "float32", cache=cache)
    cache.folder.chmod(0o777)
    assert cache.load(model, INT8) is None
    assert "are not used: all users may write to it" in caplog.text


def test_damaged_memory_of_digests_does_no_harm(model: Checkpoint, cache: WeightCache) -> None:
    load_packed(model, INT8, "float32", cache=cache)
    [memory] = cache.folder.glob("*.json")
    for content in ("", "[]", "{", json.dumps({"file": 3}), '{"digest": 4}'):
        memory.write_text(content)
        assert cache.load(model, INT8) is not None
        assert json.loads(memory.read_text())["digest"]


def test_several_processes_share_a_cache(model: Checkpoint, cache: WeightCache) -> None:
    """All load at once, and load and save again and again; each gets right weights, and no rests are left."""
    code = f"""
import numpy as np
from pathlib import Path
from tokenwright.formats import WeightFormat
from tokenwright.regular_file import draft_file
from tokenwright.checkpoints.folder import Checkpoint
from tokenwright.checkpoints.packing.packer import load_packed, pack_checkpoint
from tokenwright.checkpoints.packing.weight_cache import WeightCache, log
log.warning = lambda *arguments: exit(arguments)  # all finds whole files
model, cache = Checkpoint.open({str(model.path)!r}), WeightCache(Path({str(cache.folder)!r}), smallest=0)
form = WeightFormat.parse("int8")
right = pack_checkpoint(model, form)
for _ in range(10):
    weights = load_packed(model, form, "float32", cache=cache)
    assert all(np.array_equal(weights[name].codes, one.codes) for name, one in right.items() if hasattr(one, "codes"))
    cache.save(model, form, weights)
"""
    command = [sys.executable, "-c", code]
    with running(command) as first, running(command) as second:
        assert [first.wait(), second.wait()] == [0, 0]
    assert {file.suffix for file in cache.folder.iterdir()} == {".safetensors", ".json"}
    assert len(list(cache.folder.iterdir())) == 2


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"TOKENWRIGHT_CACHE": "/here"}, "/here/weights"),
        ({"XDG_CACHE_HOME": "/there"}, "/there/tokenwright/weights"),
        ({"XDG_CACHE_HOME": "", "HOME": "/nowhere"}, "/nowhere/.cache/tokenwright/weights"),
    ],
)
def test_where_the_cache_is(variables: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TOKENWRIGHT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert WeightCache.default() == WeightCache(Path(folder))


# Folders of packed weights


@pytest.fixture
def folder(model: Checkpoint, tmp_path: Path) -> Path:
    place = tmp_path / "packed"
    write_folder(model, place, INT4, pack_checkpoint(model, INT4))
    return place


def test_a_packed_folder_opens_like_any_other(model: Checkpoint, folder: Path) -> None:
    found = Checkpoint.open(folder)
    assert (found.packed, found.config, found.generation) == (INT4, model.config, model.generation)
    assert found.nbytes == weight_bytes(model.graph, INT4)
    for form in (NATIVE, INT4):
        assert same(load_packed(found, form, "float32"), pack_checkpoint(model, INT4))
    names = {file.name for file in folder.iterdir()}
    assert names == {file.name for file in model.path.iterdir()}
    assert (folder / "tokenizer.json").read_bytes() == (model.path / "tokenizer.json").read_bytes()


def test_the_dtype_of_before_is_kept(tmp_path: Path) -> None:
    model = Checkpoint.open(make_checkpoint(tmp_path / "m", "gpt2", dtype="bfloat16").path)
    write_folder(model, tmp_path / "packed", INT8, pack_checkpoint(model, INT8))
    assert Checkpoint.open(tmp_path / "packed").config == model.config


def test_packed_weights_do_not_become_others(model: Checkpoint, folder: Path, tmp_path: Path) -> None:
    found = Checkpoint.open(folder)
    with pytest.raises(RequestError, match="kept as int4 and cannot become int8"):
        load_packed(found, INT8, "float32")
    with pytest.raises(CheckpointError, match="packed as int4"):
        tensors_of(found)
    with pytest.raises(RequestError, match="quantised already"):
        write_folder(found, tmp_path / "other", INT8, {})
    with pytest.raises(RequestError, match="is no quantised format"):
        write_folder(model, tmp_path / "other", NATIVE, {})
    assert not (tmp_path / "other").exists()


def test_nothing_is_overwritten_or_left_half_done(
    model: Checkpoint, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(folder.iterdir())
    with pytest.raises(RequestError, match="exists already and is not overwritten"):
        write_folder(model, folder, INT8, pack_checkpoint(model, INT8))
    assert sorted(folder.iterdir()) == before

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tokenwright.checkpoints.packing.folder_writer.write_weights", full)
    others = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match="No space left on device"):
        write_folder(model, tmp_path / "new", INT8, {})
    assert sorted(tmp_path.iterdir()) == others


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_packed(Checkpoint.open(folder), NATIVE, "float32")
    assert len(str(caught.value)) < 1000
    return str(caught.value)


def test_a_changed_bit_is_found_by_name(folder: Path) -> None:
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 64  # of the last tensor
    file.write_bytes(content)
    assert "norm.weight in " in refusal(folder)
    assert "is damaged: its checksum is another" in refusal(folder)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"version": "0"}, 'packed in version "0", and this Tokenwright reads version 1'),
        ({"version": None}, "packed in version null"),
        ({"weights": "int3"}, "weights 'int3' is not known"),
        ({"weights": "int8"}, "holds no int8 weights"),
        ({"dtype": "int8"}, 'dtype = "int8" is not one of'),
        ({"quant_method": "other"}, 'quantised by "other"'),
    ],
)
def test_other_settings_are_refused(changes: dict[str, Any], told: str, folder: Path) -> None:
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] |= changes
    write_json(folder / "config.json", settings)
    assert told in refusal(folder)


def test_weights_that_do_not_fit_are_refused_by_name(folder: Path) -> None:
    settings = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", settings | {"intermediate_size": 160})
    assert '"layers.0.mlp.down.codes" is not as it should be' in refusal(folder)
    write_json(folder / "config.json", settings | {"num_hidden_layers": 5})
    assert "does not fit config.json" in refusal(folder)
    (folder / "model.safetensors").unlink()
    assert "model.safetensors is missing" in refusal(folder)


def test_a_missing_checksum_is_refused(folder: Path, model: Checkpoint) -> None:
    tensors = load_file(folder / "model.safetensors")
    about = {"format": "tokenwright", "version": "1", "weights": "int4", "crc32": "{}"}
    save_file(tensors, folder / "model.safetensors", metadata=about)
    assert "the list of its checksums" in refusal(folder)


def test_a_damaged_quantised_folder_is_not_to_be_downloaded(model: Checkpoint, tmp_path: Path) -> None:
    """We wrote it, so the error says to write it again."""
    form = WeightFormat.parse("int8")
    write_folder(model, tmp_path / "q", form, pack_checkpoint(model, form))
    file = tmp_path / "q" / "model.safetensors"
    content = file.read_bytes()
    for kept in (content[:-1], b"", b"x" * 200):
        file.write_bytes(kept)
        with pytest.raises(CheckpointError, match=r"; quantise the model again$") as caught:
            Checkpoint.open(tmp_path / "q")
        assert "download" not in str(caught.value)
