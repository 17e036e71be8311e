"""`quantize`, and `--weights` of the commands that compute: what is written opens, and says what it is."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tokenwright import LLM
from tokenwright.backends.layout import weight_bytes
from tokenwright.checkpoints.folder import Checkpoint
from tokenwright.checkpoints.packing.weight_cache import WeightCache
from tokenwright.formats import WeightFormat


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own for each test."""
    monkeypatch.setenv("TOKENWRIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "weights"


@pytest.mark.parametrize("form", ["int8", "int4:64"])
def test_a_quantised_folder_writes_as_the_model_does(form: str, run: Run, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "quantised"
    result = run("quantize", model, folder, "--weights", form)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"{folder}: {form} weights, ")
    with LLM(folder) as packed, LLM(model, weights=form) as loaded:
        assert str(packed.weights) == form
        assert packed.weight_bytes == loaded.weight_bytes
        texts = [llm.generate(["Once"], llm.sampling(temperature=0, max_tokens=20))[0] for llm in (packed, loaded)]
    assert texts[0].token_ids == texts[1].token_ids
    again = run("generate", "Once", "--model", folder, "-n", 20, "--temperature", 0, "--quiet")
    assert again.stdout == texts[0].text + "\n"


def test_inspect_tells_the_bytes(run: Run, model: Path, tmp_path: Path, place: Path) -> None:
    run("quantize", model, tmp_path / "q", "--weights", "int4")
    graph = Checkpoint.open(model).graph
    found = json.loads(run("inspect", tmp_path / "q", "--json").stdout)
    planned = json.loads(run("inspect", model, "--weights", "int4", "--json").stdout)
    for one in (found, planned):
        assert one["weights"] == "int4"
        assert one["weight_bytes"] == sum(_sizes(tmp_path / "q"))
    native = json.loads(run("inspect", model, "--json").stdout)
    assert (native["weights"], native["weight_bytes"]) == ("float32", 4 * graph.parameters)
    assert native["weight_cache"] == {"folder": str(place), "bytes": 0}
    assert "weights        " in run("inspect", tmp_path / "q").stdout


def _sizes(folder: Path) -> list[int]:
    return [one.nbytes for one in Checkpoint.open(folder).stored.values()]


def test_weights_of_other_commands(run: Run, model: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The option reaches the engine, the facts tell it, and what was quantised is kept."""
    monkeypatch.setattr(WeightCache, "default", lambda: WeightCache(place, smallest=0))
    result = run("generate", "Once", "--model", model, "-n", 3, "--weights", "int8", "--json")
    facts = json.loads(result.stdout)["facts"]
    assert facts["weights"] == "int8"
    assert facts["weight_bytes"] == weight_bytes(Checkpoint.open(model).graph, WeightFormat.parse("int8"))
    [kept] = place.glob("*.safetensors")
    assert json.loads(run("inspect", model, "--json").stdout)["weight_cache"]["bytes"] == kept.stat().st_size
    line = run("generate", "Once", "--model", model, "-n", 3, "--weights", "int8").stderr
    assert "KiB (int8) · KV cache" in line
    raced = run("race", "Once", "--model", model, "-n", 5, "--weights", "int8")
    assert ", int8 weights" in raced.stdout, raced.output


def test_what_is_refused(refused: Callable[..., str], run: Run, model: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    assert "exists already and is not overwritten" in refused("quantize", model, tmp_path / "there")
    assert "reads GGUF files and writes none" in refused("quantize", model, tmp_path / "q.gguf")
    assert "no quantised format" in refused("quantize", model, tmp_path / "q", "--weights", "bfloat16")
    assert "weights 'int2' is not known" in refused("quantize", model, tmp_path / "q", "--weights", "int2")
    assert "weights 'int2' is not known" in refused("generate", "x", "--model", model, "--weights", "int2")
    assert "weights 'int2' is not known" in refused("inspect", model, "--weights", "int2")
    assert "in groups of 32 or 64" in refused("generate", "x", "--model", model, "--weights", "int8:16")
    assert run("quantize", model, tmp_path / "q").exit_code == 0
    assert "quantised already" in refused("quantize", tmp_path / "q", tmp_path / "r")
    assert "cannot become int4" in refused("generate", "x", "--model", tmp_path / "q", "--weights", "int4")
    assert "cannot become int4" in refused("inspect", tmp_path / "q", "--weights", "int4")
    file = tmp_path / "q" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert "is damaged: its checksum is another" in refused("generate", "x", "--model", tmp_path / "q")
    assert not (tmp_path / "r").exists()


def test_the_model_is_an_argument_or_an_option(run: Run, model: Path, tmp_path: Path) -> None:
    assert run("quantize", "-m", model, tmp_path / "q").exit_code == 0
    assert (tmp_path / "q" / "config.json").is_file()
    for words in ((tmp_path / "r",), ("a", "b", "c"), (model, tmp_path / "r", "-m", "stories")):
        assert run("quantize", *words).exit_code == 2
    assert not (tmp_path / "r").exists()


def test_what_a_killed_one_left_is_removed_by_the_next_to_the_same_place(run: Run, model: Path, tmp_path: Path) -> None:
    code = f"""
import os, signal, sys
from tokenwright.checkpoints.packing import folder_writer
def killed(file, *_):
    file.write_bytes(bytes(10_000))
    os.kill(os.getpid(), signal.SIGKILL)
folder_writer.write_weights = killed
sys.argv = ["tokenwright", "quantize", {str(model)!r}, {str(tmp_path / "q")!r}]
from tokenwright.cli import main
main()
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    [left] = tmp_path.iterdir()
    assert left.name.startswith(".q.draft-")
    others = [tmp_path / name for name in (".q.draft-mine", ".q2.draft-1-1")]
    for other in others:
        other.mkdir()
    assert run("quantize", model, tmp_path / "q").exit_code == 0
    assert {*tmp_path.iterdir()} == {tmp_path / "q", *others}, "what is of another place stays"


def test_a_model_without_a_tokenizer_is_refused_before_any_work(run: Run, model: Path, tmp_path: Path) -> None:
    """What it would write could not be opened."""
    bare = tmp_path / "bare"
    shutil.copytree(model, bare)
    (bare / "tokenizer.json").unlink()
    result = run("quantize", bare, tmp_path / "q", "--weights", "int8")
    assert result.exit_code != 0
    assert "has no tokenizer.json" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["bare"]
