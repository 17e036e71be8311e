"""`bench`: limits and figures of a model as a table and as JSON; what makes no sense is refused."""

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from tests.bench.fixtures import quicken
from tests.cli.conftest import Run
from tests.models.fixtures import make_checkpoint
from tokenwright.bench import shapes
from tokenwright.bench.measures import MEASURES


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A quick measurement, and a cache folder of its own."""
    quicken(monkeypatch)
    monkeypatch.setattr("tokenwright.bench.limits.measure_limits.__defaults__", (0.0, None))
    monkeypatch.setenv("TOKENWRIGHT_CACHE", str(tmp_path / "cache"))
    small = {**shapes.SHAPES["tiny"], "hidden_size": 96, "num_hidden_layers": 2, "intermediate_size": 128}
    monkeypatch.setitem(shapes.SHAPES, "tiny", small)  # type: ignore[arg-type]
    return tmp_path / "cache"


def test_json(run: Run, model: Path) -> None:
    result = run("bench", "--model", model, "--weights", "int8", "--json")
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    found = json.loads(result.stdout)
    assert (found["model"], found["weights"]) == (str(model), "int8")
    limits = found["limits"]
    assert limits["kind"] == ("torch" if found["kernels"] == "reference" else "native")
    assert limits["multiplications"].keys() == {"float32", "bfloat16", "int8", "int4"}
    every = [limits["memory"], limits["cache"], *limits["multiplications"].values()]
    assert all(rate["all_threads"] > 0 and rate["one_thread"] > 0 for rate in every)
    assert found["measures"].keys() == MEASURES.keys()
    assert found["measures"]["decode"]["prompt"] == 512 - 65  # the model's context is 512
    for one in found["measures"].values():
        assert one["value"] > 0 and one["limit"] > 0 and one["share"] > 0 and one["nbytes"] > 0
        assert one["bound"] in ("memory", "matrix")


def test_page(run: Run, model: Path) -> None:
    result = run("bench", "--model", model)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    for name in (
        "memory ",
        "int8 products ",
        "prefill of 511 tokens ",
        "decode after 447 ",
        "8 streams ",
        "16 streams ",
    ):
        assert [line for line in lines if line.startswith(name)], name
    assert f"{model}, " in result.stdout
    [prefill] = [line for line in lines if line.startswith("prefill")]
    assert prefill.count(" tok/s") == 2
    assert "% " in prefill


def test_a_busy_machine_is_told_instead_of_a_figure(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tokenwright.planner.machine_load.quietly", lambda measure, doubt: (measure(), "others were there")
    )
    page = run("bench", "--model", model).stdout
    table = [
        line for line in page.splitlines() if line.startswith(("memory ", "int8 products ", "prefill ", "8 streams "))
    ]
    assert len(table) == 4
    assert all(line.endswith("the machine was busy") for line in table)
    assert "/s" not in page and "%" not in page
    assert page.endswith("the machine was busy: others were there. Run it again when nothing else runs.\n")
    shares = count(20)
    monkeypatch.setattr(
        "tokenwright.planner.machine_load.quietly", lambda measure, doubt: (measure(), f"others took {next(shares)}%")
    )
    assert run("bench", "--model", model).stdout.count("others took") == 1
    monkeypatch.setattr(
        "tokenwright.planner.machine_load.quietly", lambda measure, doubt: (measure(), "others were there")
    )
    found = json.loads(run("bench", "--model", model, "--json").stdout)
    assert found["limits"]["memory"] == {"all_threads": None, "one_thread": None, "busy": "others were there"}
    decode = found["measures"]["decode"]
    assert (decode["value"], decode["limit"], decode["share"], decode["busy"]) == (
        None,
        None,
        None,
        "others were there",
    )


def test_a_shape_is_made_once_and_kept(run: Run, cache: Path) -> None:
    pytest.importorskip("torch")  # which draws the weights
    first, second = (run("bench", "--shape", "tiny") for _ in range(2))
    folder = cache / "benchmarks" / "tiny"
    assert (first.exit_code, second.exit_code) == (0, 0), first.output
    assert first.stderr == f"making tiny with random weights in {folder}\n"
    assert second.stderr == ""
    assert "\ntiny, " in first.stdout
    assert (folder / "model.safetensors").exists()


def test_what_is_refused(refused: Callable[..., str], model: Path, tmp_path: Path, cache: Path) -> None:
    assert "shape 'huge' is not known; use tiny, gpt2, qwen05, llama1b" in refused("bench", "--shape", "huge")
    for given in (("--model", model), ("--model", "stories"), ("stories",), ("--revision", "main")):
        assert "leave out --shape, or the model" in refused("bench", "--shape", "tiny", *given)
    assert "there is no folder" in refused("bench", "--model", tmp_path / "nothing")
    assert "weights 'int2' is not known" in refused("bench", "--model", model, "--weights", "int2")
    short = make_checkpoint(tmp_path / "short", "llama2", changes={"max_position_embeddings": 128}).path
    assert "context of 128 tokens is too short to measure; 129 are needed" in refused("bench", "--model", short)


def test_a_cache_that_cannot_be_written(run: Run, cache: Path) -> None:
    cache.touch()
    result = run("bench", "--shape", "tiny")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "set TOKENWRIGHT_CACHE to another folder" in result.stderr
