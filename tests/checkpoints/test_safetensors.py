"""Headers of safetensors files, damaged in every way we know of: refused before anything is allocated."""

import json
import pickle
import struct
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.profiles import examples
from tokenwright.checkpoints.files.safetensors import Stored, read_header
from tokenwright.errors import CheckpointError


def write(file: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return file


def entry(shape: object = (2,), offsets: object = (0, 8), dtype: object = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def refusal(file: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_header(file)
    assert str(file) in str(caught.value)
    return str(caught.value)


def test_a_good_file_is_read_as_the_library_wrote_it(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    tensors = {"x": torch.zeros(2, 3), "y": torch.ones(4, dtype=torch.bfloat16), "z": torch.tensor(1.0)}
    save_file(tensors, file, metadata={"format": "pt"})
    found = read_header(file)
    assert {name: one.shape for name, one in found.items()} == {"x": (2, 3), "y": (4,), "z": ()}
    assert {name: one.dtype for name, one in found.items()} == {"x": "F32", "y": "BF16", "z": "F32"}
    y = found["y"]
    assert file.read_bytes()[y.start : y.start + y.nbytes] == b"\x80\x3f" * 4


@pytest.mark.parametrize("length", [0x480, 0x580])
def test_a_header_whose_length_begins_like_a_pickle_is_no_pickle(tmp_path: Path, length: int) -> None:
    text = json.dumps({"x": entry()}).encode().ljust(length)
    file = write(tmp_path / "a.safetensors", text, bytes(8))
    assert file.read_bytes()[:2] in (b"\x80\x04", b"\x80\x05")
    assert read_header(file) == {"x": Stored(file, "F32", (2,), 8 + length, 8)}


LENGTHS: list[tuple[int, str]] = [
    (0, "does not begin"),
    (1, "does not begin"),
    (7, "damaged"),
    (100_000_001, "does not begin"),
    (1 << 63, "does not begin"),
    (1000, "does not begin"),
]


@pytest.mark.parametrize(("length", "words"), LENGTHS)
def test_a_wrong_header_length_is_refused(tmp_path: Path, length: int, words: str) -> None:
    assert words in refusal(write(tmp_path / "a.safetensors", {"x": entry()}, bytes(8), length))


@pytest.mark.parametrize("size", [0, 3, 7, 8, 9])
def test_a_file_too_short_for_a_header_is_refused(tmp_path: Path, size: int) -> None:
    file = tmp_path / "a.safetensors"
    file.write_bytes(bytes(size))
    assert f"only {size} bytes" in refusal(file)


NOT_HEADERS: list[object] = [
    b"{}" * 4,
    b'{"x": ',
    b"\xff\xfe{}  ",
    b"{" * 100_000,
    b'{"x": 1, "x": 1}',
    {"x": 3},
    {"x": entry(shape="2")},
    {"x": entry(shape=[-2])},
    {"x": entry(shape=[2.0])},
    {"x": entry(shape=[True, 2])},
    {"x": entry(shape=[1] * 9 + [2])},
    {"x": entry(shape=[1 << 63])},
    b"[1, 2, 3, 4]",
    b' {"x": {}}',
    {"x": entry(shape=[3])},
    {"x": entry(shape=[1 << 61] * 8)},
    {"x": entry(offsets=[8, 0])},
    {"x": entry(offsets=[-8, 0])},
    {"x": entry(offsets=[0])},
    {"x": entry(offsets=None)},
    {"x": entry(dtype="F13")},
    {"x": entry(dtype=None)},
    {"x": entry(offsets=[4, 12])},
    {"x": entry(), "y": entry()},
    {"x": entry(), "y": entry(offsets=[4, 12])},
    {"x": entry(), "y": entry(offsets=[16, 24])},
]


@pytest.mark.parametrize("header", NOT_HEADERS, ids=range(len(NOT_HEADERS)))
def test_damaged_headers_are_refused(tmp_path: Path, header: object) -> None:
    refusal(write(tmp_path / "a.safetensors", header, bytes(24)))


@pytest.mark.parametrize("shape", [[1], [3], []])
def test_a_shape_that_is_not_the_bytes_is_refused(tmp_path: Path, shape: list[int]) -> None:
    assert "has 8" in refusal(write(tmp_path / "a.safetensors", {"x": entry(shape)}, bytes(8)))


def test_a_gap_cannot_make_up_for_a_missing_end(tmp_path: Path) -> None:
    header = {"x": entry(), "y": entry(offsets=[16, 24])}
    assert "gap" in refusal(write(tmp_path / "a.safetensors", header, bytes(16)))


def test_a_truncated_file_is_told_by_how_much(tmp_path: Path) -> None:
    file = write(tmp_path / "a.safetensors", {"x": entry()}, bytes(7))
    assert "1 of" in refusal(file)
    assert "bytes are missing" in refusal(file)
    assert "3 bytes after" in refusal(write(file, {"x": entry()}, bytes(11)))


def test_other_kinds_of_files_are_named(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "git lfs pull" in refusal(file)
    file.write_bytes(pickle.dumps({"x": [1.0] * 20}))
    assert "pickle" in refusal(file)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("data.pkl", b"x" * 50)
    assert "pickle" in refusal(file)
    file.write_bytes(b"GGUF\x03\x00\x00\x00" + bytes(50))
    assert "GGUF" in refusal(file)


def test_missing_and_unreadable_files_are_refused(tmp_path: Path) -> None:
    assert "missing" in refusal(tmp_path / "none.safetensors")
    assert "cannot read" in refusal(tmp_path)


def test_a_huge_claim_takes_no_memory(tmp_path: Path) -> None:
    file = write(tmp_path / "a.safetensors", {"x": entry([1 << 38], [0, 1 << 40])}, bytes(8))
    tracemalloc.start()
    try:
        assert "truncated" in refusal(file)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@examples(200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 200), value=st.integers(0, 255), cut=st.integers(0, 40))
def test_a_flipped_byte_is_refused_or_stays_within_the_file(tmp_path: Path, at: int, value: int, cut: int) -> None:
    file = tmp_path / "a.safetensors"
    save_file({"x": torch.zeros(2, 3), "y": torch.ones(4, dtype=torch.bfloat16)}, file)
    content = bytearray(file.read_bytes())
    content[at % len(content)] = value
    file.write_bytes(content[: len(content) - cut])
    try:
        found = read_header(file)
    except CheckpointError:
        return
    assert all(one.start + one.nbytes <= file.stat().st_size for one in found.values())
