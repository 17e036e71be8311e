"""`models`, `pull`, `rm` and `cache`: what is on this machine, one more, one less; against a hub of our own."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants as settings
import pytest

from tests.checkpoints.test_hub import NAME, hub, sharded, single  # noqa: F401
from tests.cli.conftest import Run
from tests.models.files.fake_hub import FakeHub, Files, commit_of
from tokenwright.bench import shapes
from tokenwright.checkpoints.packing.weight_cache import WeightCache
from tokenwright.regular_file import draft_file, draft_folder

Refused = Callable[..., str]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own."""
    monkeypatch.setenv("TOKENWRIGHT_CACHE", str(tmp_path / "ours"))
    small = {**shapes.SHAPES["tiny"], "hidden_size": 96, "num_hidden_layers": 2, "intermediate_size": 128}
    monkeypatch.setitem(shapes.SHAPES, "tiny", small)  # type: ignore[arg-type]
    return tmp_path / "ours"


def listed(run: Run) -> dict[str, dict[str, Any]]:
    result = run("models", "--json")
    assert result.exit_code == 0, result.output
    return {one["name"]: one for one in json.loads(result.stdout)["models"]}


def test_models_come_and_go(run: Run, refused: Refused, hub: FakeHub) -> None:  # noqa: F811
    assert list(listed(run)) == ["stories"]
    pulled = run("pull", f"https://huggingface.co/{NAME}")
    assert pulled.exit_code == 0, pulled.output
    assert "LlamaForCausalLM" in pulled.stdout
    assert run("pull", NAME, "--revision", "three").exit_code == 0
    found = json.loads(run("models", "--json").stdout)["models"]
    assert {(one["name"], one["revision"], one["runs"]) for one in found[1:]} == {
        (NAME, commit_of(NAME, branch), True) for branch in ("main", "three")
    }
    page = run("models").stdout
    assert f"{NAME} ({commit_of(NAME, 'three')[:8]})" in page and "Qwen2ForCausalLM" in page
    assert f"{NAME} was not removed; add --yes" in refused("rm", NAME)
    assert run("rm", NAME, "--revision", "three", "--yes").exit_code == 0
    assert listed(run)[NAME]["revision"] == commit_of(NAME, "main")
    assert "there is no maker/smal to remove; did you mean maker/small?" in refused("rm", "maker/smal", "--yes")
    assert f"removed hf.co/{NAME}: " in run("rm", f"hf.co/{NAME}", "--yes").stderr
    assert list(listed(run)) == ["stories"]
    assert "there is no maker/small to remove; `tokenwright models` lists" in refused("rm", NAME, "--yes")


def test_what_does_not_run_is_listed_with_the_reason(run: Run, hub: FakeHub, single: Files) -> None:  # noqa: F811
    config = json.loads(single["config.json"]) | {"architectures": ["RwkvForCausalLM"]}
    hub.repositories["maker/rwkv"] = {"main": single | {"config.json": json.dumps(config).encode()}}
    assert run("pull", "maker/rwkv").exit_code == 2
    assert "model.safetensors" not in hub.fetched()
    found = listed(run)["maker/rwkv"]
    assert not found["runs"] and "RwkvForCausalLM" in found["about"]
    assert "does not run: " in run("models").stdout


def test_pull_needs_the_hub(refused: Refused, run: Run, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    assert run("pull", NAME).exit_code == 0
    monkeypatch.setattr(settings, "ENDPOINT", "http://127.0.0.1:1")
    assert "cannot be fetched: the hub cannot be reached" in refused("pull", NAME)
    assert "stories is not a model on the hub; give owner/name" in refused("pull", "stories")
    assert "storis is not a model on the hub; give owner/name" in refused("pull", "storis"), "a hint that can be pulled"
    assert "smal is not a model on the hub; did you mean maker/small?" in refused("pull", "smal")
    assert "); did you mean maker/small?" in refused("pull", "maker/smal")


def test_a_model_of_bench_is_listed_and_removed(run: Run, refused: Refused, cache: Path, hub: FakeHub) -> None:  # noqa: F811
    shapes.ready("tiny", cache / "benchmarks")
    assert listed(run)["tiny"]["source"] == "bench"
    assert listed(run)["tiny"]["runs"]
    assert "stories is part of the package" in refused("rm", "stories", "--yes")
    assert run("rm", "tiny", "--yes").exit_code == 0
    assert not (cache / "benchmarks" / "tiny").exists()


def litter(cache: Path) -> tuple[Path, ...]:
    """What killed writers leave, as their processes left it."""
    code = f"""
import os, signal
from pathlib import Path
from tokenwright.regular_file import draft_file, draft_folder
weights, models = Path({str(cache / "weights")!r}), Path({str(cache / "benchmarks")!r})
weights.mkdir(parents=True)
with draft_file(weights / "a.safetensors") as file, draft_folder(models / "tiny") as folder:
    file.write_bytes(bytes(1000))
    (folder / "model.safetensors").write_bytes(bytes(2000))
    os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", code], check=False)
    assert killed.returncode == -9
    left = (*(cache / "weights").iterdir(), *(cache / "benchmarks").iterdir())
    assert len(left) == 2
    return left


def test_the_cache_is_listed_and_cleared(run: Run, cache: Path) -> None:
    assert "nothing is kept" in run("cache").stdout
    left = litter(cache)
    foreign = (cache / "weights" / "mine.txt", cache / "benchmarks" / "mine")
    for file in foreign:
        file.write_text("mine")
    digest = "0" * 40
    (cache / "weights" / f"{digest}.safetensors").write_bytes(b"12345")
    (cache / "weights" / f"{digest}.json").write_text("{}")
    (cache / "benchmarks" / "gpt2").mkdir()
    with draft_file(cache / "weights" / "b.safetensors") as live, draft_folder(cache / "benchmarks" / "new") as made:
        shown = json.loads(run("cache", "--json").stdout)["kept"]
        assert sorted(one["bytes"] for one in shown) == [0, 2, 5, 1000, 2000]
        assert {one["what"] for one in shown if one["path"] in map(str, left)} == {"unfinished, its writer was killed"}
        cleared = run("cache", "--clear")
        assert cleared.exit_code == 0 and "removed" in cleared.stdout
        assert live.exists() and made.exists(), "they are being written"
    assert "nothing is kept" in run("cache").stdout
    kept = {*foreign, cache / "weights" / "b.safetensors", cache / "benchmarks" / "new"}
    assert {file for file in cache.rglob("*") if file.parent != cache} == kept


def test_what_cannot_be_removed_is_told(run: Run, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    litter(cache)
    monkeypatch.setattr("tokenwright.regular_file.remove", lambda path: False)
    result = run("cache", "--clear")
    assert result.exit_code == 2
    assert "cannot remove " in result.stderr and "and 1 more" in result.stderr


def test_the_next_writer_of_weights_removes_what_a_killed_one_left(cache: Path) -> None:
    litter(cache)
    WeightCache.default().sweep()
    assert list((cache / "weights").iterdir()) == []
