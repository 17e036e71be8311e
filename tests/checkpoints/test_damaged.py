"""Damaged files of quantised weights are refused with a reason or read, in memory that their size bounds."""

import json
import random
import re
import resource
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.files.gguf_files import Kind, write_gguf
from tests.models.files.published_files import CASES, SIZES, write
from tests.models.fixtures import make_checkpoint
from tests.profiles import some
from tests.tensors import tensors_of
from tokenwright.checkpoints.folder import Checkpoint
from tokenwright.checkpoints.gguf.header import read_gguf
from tokenwright.checkpoints.packing.packer import load_packed
from tokenwright.errors import CheckpointError
from tokenwright.formats import WeightFormat

WIDE = (0, 1, 3, 255, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 62, 1 << 63, (1 << 64) - 1)
TRACED, RESIDENT = 24 << 20, 256 << 20  # bytes: of Python's objects in one case, and of the process over all of them
PUBLISHED = ("gptq-32", "gptq-order", "awq", "fp8-blocks", "compressed-zeros", "compressed-8", "nf4", "bitsandbytes-8")
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (0, 64), (64, 0), (0, 2, 2), (1 << 18, 0, 0))
SAID = r"(?<=[: \[])(\d+(?=[,}\]])|true|false|null)"  # numbers and flags in a config.json
Damage = Callable[[random.Random], bytes]


def patched(raw: bytes, at: int, new: bytes) -> bytes:
    return raw[:at] + new + raw[at + len(new) :]


def damages(raw: bytes, header: int) -> list[Damage]:
    """Ways to damage a file whose header has so many bytes; the first two truncate it."""

    def forged_at(chance: random.Random, first: int, last: int, form: str) -> bytes:
        new = struct.pack(form, chance.choice(WIDE) & (1 << 8 * struct.calcsize(form)) - 1)
        return patched(raw, chance.randrange(first, last), new)

    return [
        lambda chance: raw[: chance.randrange(len(raw))],
        lambda chance: raw[: chance.randrange(header)],
        lambda chance: patched(raw, chance.randrange(len(raw)), bytes([chance.randrange(256)])),
        lambda chance: patched(raw, chance.randrange(header), bytes([chance.randrange(256)])),
        lambda chance: forged_at(chance, 8, header - 8, "<Q"),
        lambda chance: patched(
            raw, chance.randrange(8, header - 4), struct.pack("<I", chance.choice(WIDE) & 0xFFFFFFFF)
        ),
        lambda chance: patched(raw, chance.choice((0, 8, 16)), struct.pack("<Q", chance.choice(WIDE))),
        lambda chance: raw + bytes(chance.randrange(64, 200)),
    ]


def forged(raw: bytes, pattern: str, replacements: tuple[str, ...]) -> Damage:
    """The text of a JSON header (or of a JSON file) with one match replaced, its length corrected."""
    start = 8 if raw[:1] != b"{" else 0
    end = start + int.from_bytes(raw[:8], "little") if start else len(raw)
    text = raw[start:end].decode()
    found = list(re.finditer(pattern, text))

    def damaged(chance: random.Random) -> bytes:
        match = chance.choice(found)
        new = (text[: match.start()] + chance.choice(replacements) + text[match.end() :]).encode()
        return (len(new).to_bytes(8, "little") if start else b"") + new + raw[end:]

    return damaged


def outcome(opened: Path) -> str:
    """The refusal, or "read"; any other end is a failure, as is too much memory."""
    tracemalloc.start()
    try:
        found = Checkpoint.open(opened)
        found.tokenizer()
        tensors_of(found)
        load_packed(found, WeightFormat("native"), found.config.dtype)
    except CheckpointError as error:
        return str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < TRACED, f"{peak:,} bytes"
    return "read"


def resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def outcomes(file: Path, opened: Path, ways: list[Damage], count: int) -> list[str]:
    """What becomes of `count` damaged versions of a file, which is whole again afterwards."""
    whole, chance = file.read_bytes(), random.Random(count)
    outcome(opened)
    before, ends = resident(), []
    for at in range(count):
        file.write_bytes(ways[at % len(ways)](chance))
        ends.append(outcome(opened))
    file.write_bytes(whole)
    assert resident() - before < RESIDENT
    assert all(40 < len(end) < 1200 for end in ends if end != "read")
    assert "read" not in ends[0 :: len(ways)], "a truncated file was read"
    print(f"{count} damaged versions of {file.name} ({len(whole):,} bytes): {count - ends.count('read')} refused")
    return ends


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("damaged") / "model", "llama2", changes=SIZES).path


@pytest.mark.parametrize("count", [120, pytest.param(1600, marks=pytest.mark.sweep)])
def test_damaged_gguf_files(count: int, model: Path, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", model, Kind.Q8_0)
    ends = outcomes(file, file, damages(file.read_bytes(), read_gguf(file).data), count)
    assert ends.count("read") < count // 2


@pytest.mark.parametrize("kind", ["MXFP4", "Q5_0", "Q4_1"])
@pytest.mark.parametrize("count", [24, pytest.param(400, marks=pytest.mark.sweep)])
def test_a_damaged_part_of_a_model(kind: str, count: int, model: Path, tmp_path: Path) -> None:
    first = write_gguf(tmp_path / "model.gguf", model, Kind[kind], split=12)
    first, second, *_ = sorted(tmp_path.glob("model-*.gguf"))
    outcomes(second, first, damages(second.read_bytes(), read_gguf(second).data), count)


@pytest.mark.parametrize("case", [*PUBLISHED, "mlx-4", "mlx-mxfp8", "modelopt", "quark-mxfp4"])
def test_tensors_of_other_sizes_are_refused_or_read(case: str, model: Path, tmp_path: Path) -> None:
    """A file of a few bytes may say that it has 2**20 matrices, of no numbers."""
    method, options, _ = CASES[case]
    write(shutil.copytree(model, tmp_path / "model"), tmp_path / "plain", method, **options)
    file = tmp_path / "model/model.safetensors"
    tensors = load_file(file)
    names = [one for one in tensors if "layers.1.mlp.down_proj" in one]
    each, first = list(product(names, SHAPES)), list(CASES).index(case) % 5  # in CI each case has others of them
    for name, shape in some(each[first:] + each[:first], 5):
        save_file(tensors | {name: torch.zeros(shape, dtype=tensors[name].dtype)}, file)
        outcome(file.parent)


@pytest.mark.parametrize("count", [16, pytest.param(280, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("case", PUBLISHED)
def test_damaged_folders_of_other_tools(case: str, count: int, model: Path, tmp_path: Path) -> None:
    method, options, _ = CASES[case]
    folder = tmp_path / "model"
    folder.mkdir()
    for one in model.iterdir():
        (folder / one.name).write_bytes(one.read_bytes())
    write(folder, tmp_path / "plain", method, **options)
    file, config = folder / "model.safetensors", folder / "config.json"
    raw = file.read_bytes()
    header = 8 + int.from_bytes(raw[:8], "little")
    numbers = ("0", "1", "7", "-1", "65536", "9223372036854775807", "1e300", "null")
    dtypes = ('"I32"', '"F32"', '"I8"', '"F8_E4M3"', '"BF16"', '"I64"', '"Q9"', "[]")
    named = r'"(I32|F16|F32|U8|I8|F8_E4M3)"'
    ways = [*damages(raw, header)[:4], forged(raw, r"(?<=[\[,])\d+", numbers), forged(raw, named, dtypes)]
    outcomes(file, folder, ways, count)
    text = json.dumps(json.loads(config.read_text())["quantization_config"])
    whole = config.read_bytes()
    for at in range(count // 4):
        chance = random.Random(at)
        said = json.loads(forged(text.encode(), SAID, (*numbers, "true", "{}", "[]"))(chance))
        config.write_text(json.dumps(json.loads(whole) | {"quantization_config": said}))
        assert outcome(folder)
