"""`pull`, `models`, `plan`, `inspect` and `rm` with GGUF files of the hub by name or kind, against a hub of our own."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoints.gguf.test_hub_gguf import NAME, files, hub  # noqa: F401
from tests.cli.conftest import Run
from tests.models.files.fake_hub import FakeHub, Files, commit_of
from tokenwright.planner import plan


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENWRIGHT_CACHE", str(tmp_path / "ours"))


def listed(run: Run) -> dict[str, bool]:
    return {one["name"]: one["runs"] for one in json.loads(run("models", "--json").stdout)["models"]}


def test_files_come_and_go_one_by_one(run: Run, hub: FakeHub, files: Files) -> None:  # noqa: F811
    pulled = run("pull", f"{NAME}:Q8_0")
    assert pulled.exit_code == 0, pulled.output
    assert "LlamaForCausalLM" in pulled.stdout and pulled.stdout.endswith("small-Q8_0.gguf\n")
    assert hub.fetched() == {"small-Q8_0.gguf"}
    assert run("pull", f"{NAME}:BF16").exit_code == 0
    parts = min(name for name in files if name.startswith("BF16/"))
    assert listed(run) == {"stories": True, f"{NAME}:small-Q8_0.gguf": True, f"{NAME}:{parts}": True}
    removed = run("rm", f"{NAME}:small-Q8_0.gguf", "--yes")
    assert removed.exit_code == 0 and "removed" in removed.stderr
    assert listed(run) == {"stories": True, f"{NAME}:{parts}": True}
    assert run("rm", f"{NAME}:{parts}", "--yes").exit_code == 0
    assert listed(run) == {"stories": True}


def test_a_file_that_shares_its_bytes_with_another_leaves_them(run: Run, hub: FakeHub) -> None:  # noqa: F811
    """The hub's cache keeps equal files once."""
    for kind in ("Q8_0", "F16"):
        assert run("pull", f"{NAME}:{kind}").exit_code == 0
    assert run("rm", f"{NAME}:small-Q8_0.gguf", "--yes").exit_code == 0
    assert listed(run) == {"stories": True, f"{NAME}:small-F16.gguf": True}


def test_a_file_of_one_revision_is_removed_alone(run: Run, hub: FakeHub, files: Files) -> None:  # noqa: F811
    hub.repositories[NAME]["old"] = dict(files)
    for kind, revision in (("Q8_0", "main"), ("Q8_0", "old"), ("F16", "old")):
        assert run("pull", f"{NAME}:{kind}", "--revision", revision).exit_code == 0
    assert run("rm", f"{NAME}:small-Q8_0.gguf", "--revision", "old", "--yes").exit_code == 0
    models = json.loads(run("models", "--json").stdout)["models"]
    found = sorted((one["name"], one["revision"], one["runs"]) for one in models if one["source"] == "hub")
    old, new = commit_of(NAME, "old"), commit_of(NAME, "main")
    assert found == [(f"{NAME}:small-F16.gguf", old, True), (f"{NAME}:small-Q8_0.gguf", new, True)]


def test_plan_and_inspect_tell_of_the_file_that_was_named(run: Run, hub: FakeHub) -> None:  # noqa: F811
    planned = json.loads(run("plan", f"{NAME}:small-Q8_0.gguf", "--json").stdout)
    assert hub.fetched() == {"small-Q8_0.gguf"}
    shown = json.loads(run("inspect", f"{NAME}:Q8_0", "--json").stdout)
    assert planned["weights"] == shown["weights"] == "int8:32"
    assert planned["weight_bytes"] == shown["weight_bytes"] == plan(f"{NAME}:Q8_0").weight_bytes
    assert "Q8_0" in planned["remarks"][0] and "Q8_0" in shown["types"][0]


def test_other_names_are_refused(refused: Callable[..., str], hub: FakeHub) -> None:  # noqa: F811
    for command in ("pull", "plan"):
        assert "did you mean small-Q8_0.gguf? It has" in refused(command, f"{NAME}:Q8_1")
        assert "Q4_K fits 2 files" in refused(command, f"{NAME}:Q4_K")
    assert f"there is no {NAME}:small-Q8_0.gguf to remove" in refused("rm", f"{NAME}:small-Q8_0.gguf", "--yes")
