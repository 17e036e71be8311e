"""The benchmarks of the native kernels: what a case computes and counts, and that each writes what it promises."""

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import kernels, limits, models
from tests.backends.native import needs_native
from tests.bench.fixtures import quicken
from tokenwright.backends import Dense, ReferenceKernels
from tokenwright.backends.native.kernels import NativeKernels, find_kernels
from tokenwright.bench import model, shapes
from tokenwright.bench.limits import Bound, Least, Limits, Rate, Work
from tokenwright.bench.measures import Measure
from tokenwright.formats import WeightFormat

REFERENCE = ReferenceKernels(wide=torch.float64)


@pytest.fixture
def native() -> NativeKernels:
    found = find_kernels()
    assert found is not None
    return found


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)
    monkeypatch.setattr(kernels, "TURN", 0.0)


def test_limits_are_told_by_unit() -> None:
    rate = Rate(2e9, 1e9)
    found = Limits("torch", 2, rate, None, 0, {"float32": rate})
    assert limits.rates(found) == {"GB/s read": {"memory": rate}, "G multiplications/s": {"float32": rate}}
    assert "| memory, GB/s read | 2.0 | 1.0 |" in limits.report(found)


def test_limits_write_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["limits", "--seconds", "0", "--out", str(tmp_path)])
    limits.main()
    record = json.loads((tmp_path / "limits.json").read_text())
    assert record["memory"]["all_threads"] > 0
    assert record["multiplications"].keys() == {"float32", "bfloat16", "int8", "int4"}
    assert (tmp_path / "limits.svg").read_text().startswith("<?xml")


@needs_native
@pytest.mark.parametrize("form", kernels.WEIGHTS, ids=str)
def test_a_linear_case_is_a_linear_layer(native: NativeKernels, form: WeightFormat) -> None:
    packed = kernels.filled(64, 256, form)
    case = kernels.linear_case(native, packed, str(form), 3)
    case.run()
    _, x, y = case.keeps
    assert isinstance(x, torch.Tensor)
    assert isinstance(y, torch.Tensor)
    right = REFERENCE.linear(x.double(), Dense(packed.unpack().double(), None))
    assert (y - right).norm() < 0.02 * right.norm()  # some formats round their rows
    assert case.work == Work(packed.nbytes, weights=3 * 64 * 256)


@needs_native
@pytest.mark.parametrize("form", kernels.CACHES)
def test_attention_reads_every_text_once(native: NativeKernels, form: str) -> None:
    texts = kernels.Texts(native, form, 100 * kernels.PAGE * 1024)
    one, chunk = texts.case(64, 1, 1000), texts.case(64, 16, 1)
    assert one.calls == texts.pages * kernels.PAGE // 64
    assert one.work == Work(one.calls * 64 * texts.bytes_per_token)
    assert chunk.work.nbytes == 64 * texts.bytes_per_token
    assert chunk.work.attention == 2 * 14 * 64 * sum(range(49, 65))
    for case in (one, chunk):
        case.run()
        _, _, out = case.keeps
        assert isinstance(out, torch.Tensor)
        assert out.isfinite().all() and out.abs().max() > 0


@needs_native
def test_a_share_is_of_the_limit_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "best_seconds", lambda run, seconds: 2.0)
    monkeypatch.setattr(Bound, "__call__", lambda self, work: Least(0.5, 1.0))
    found = kernels.measure(kernels.Case("linear", "int8", 4, Work(8e9, 4e9), int, 2), Bound(64), 3)
    assert (found.share, found.of_reading, found.bound) == (0.5, 0.25, "matrix")
    assert (found.microseconds, found.gb_per_second, found.g_multiplications_per_second) == (1e6, 4.0, 2.0)


@needs_native
def test_kernels_write_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ["--rows", "1", "17", "--contexts", "512", "--rounds", "1", "--mib", "1"]
    monkeypatch.setattr(sys, "argv", ["kernels", *sizes, "--out", str(tmp_path)])
    monkeypatch.setattr(kernels, "SMALL", (64, 64))
    kernels.main()
    points = json.loads((tmp_path / "kernels.json").read_text())["points"]
    found = {(one["kernel"], one["form"], one["size"]) for one in points}
    assert {("linear", str(form), rows) for form in kernels.WEIGHTS for rows in (1, 17)} < found
    assert {(f"attention, {rows}", form, 512) for form in kernels.CACHES for rows in ("1 row", "512 rows")} < found
    assert {one["kernel"] for one in points} > {"norm", "gated", "summary"}
    assert all(one["share"] > 0 for one in points)
    assert (tmp_path / "kernels.svg").exists()


def test_models_write_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {**shapes.SHAPES["tiny"], "hidden_size": 96, "num_hidden_layers": 2, "intermediate_size": 128}
    monkeypatch.setitem(shapes.SHAPES, "tiny", small)  # type: ignore[arg-type]
    monkeypatch.setattr(models, "alone", models.measured)  # a fresh process would not have it smaller
    monkeypatch.setattr(model, "MEASURES", {name: Measure(1, 8, 3) for name in models.MEASURES})
    monkeypatch.setattr(sys, "argv", ["models", "--shapes", "tiny", "--rounds", "2", "--root", str(tmp_path),
                                      "--out", str(tmp_path)])  # fmt: skip
    models.main()
    runs = json.loads((tmp_path / "models.json").read_text())["runs"]
    assert [run["weights"] for run in runs] == ["bf16", "int8", "int4"] * 2
    assert runs[0]["weight_bytes"] > runs[1]["weight_bytes"] > runs[2]["weight_bytes"]
    assert all(run["figures"].keys() == models.MEASURES.keys() for run in runs)
    assert all(run["peak_bytes"] > run["weight_bytes"] for run in runs)
    assert (tmp_path / "models.svg").exists()
