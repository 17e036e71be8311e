"""Names on the hub, against a server of our own that speaks its protocol: fetched, cached, refused."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants as settings
import pytest
import torch

from tests.models.files.fake_hub import FakeHub, Files, commit_of
from tests.models.fixtures import make_checkpoint
from tests.tensors import tensors_of
from tokenwright.checkpoints.files.hub import download, is_hub_name, read_name
from tokenwright.checkpoints.folder import Checkpoint
from tokenwright.errors import CheckpointError

NAME = "maker/small"


def contents(folder: Path) -> Files:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return contents(make_checkpoint(tmp_path_factory.mktemp("single"), "llama2").path)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return contents(make_checkpoint(tmp_path_factory.mktemp("sharded"), "qwen2", shards=3).path)


@pytest.fixture
def hub(single: Files, sharded: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with one model of two branches; huggingface_hub is pointed at it, with an empty cache."""
    litter = {"README.md": b"#", "pytorch_model.bin": b"\x80\x04", "consolidated.safetensors": b"twice"}
    nested = {"onnx/model.safetensors": b"other", "modeling_evil.py": b"raise SystemExit"}
    with FakeHub({NAME: {"main": single | litter | nested, "three": sharded}}) as served:
        monkeypatch.setattr(settings, "ENDPOINT", served.url)
        template = served.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(settings, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(settings, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(settings, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(settings, "HF_HUB_OFFLINE", False)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.chdir(tmp_path)
        yield served


def refusal(name: str, revision: str | None = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(name, revision)
    return str(caught.value)


def test_a_name_is_fetched_and_read(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    found = Checkpoint.open(NAME)
    assert found.config.architecture == "LlamaForCausalLM"
    assert found.path.name == commit_of(NAME, "main")
    assert all(torch.isfinite(tensor).all() for tensor in tensors_of(found).values())
    assert capsys.readouterr().err == ""


def test_only_the_files_that_we_read_are_fetched(hub: FakeHub) -> None:
    Checkpoint.open(NAME)
    assert hub.fetched() == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors",
    }


def test_a_revision_is_a_branch_or_a_commit(hub: FakeHub) -> None:
    by_branch = Checkpoint.open(NAME, "three")
    assert by_branch.config.architecture == "Qwen2ForCausalLM"
    assert len({one.file for one in by_branch.stored.values()}) == 3
    assert Checkpoint.open(NAME, commit_of(NAME, "three")).path == by_branch.path


def test_the_second_run_fetches_nothing_and_works_offline(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Checkpoint.open(NAME)
    hub.requests.clear()
    again = Checkpoint.open(NAME)
    assert again.path == first.path
    assert hub.fetched() == set()
    monkeypatch.setattr(settings, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    offline = Checkpoint.open(NAME)
    assert offline.path == first.path
    assert hub.requests == []
    assert torch.equal(tensors_of(offline)["norm.weight"], tensors_of(first)["norm.weight"])


def test_a_hub_out_of_reach_is_served_from_the_cache(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Checkpoint.open(NAME)
    monkeypatch.setattr(settings, "ENDPOINT", "http://127.0.0.1:1")
    assert Checkpoint.open(NAME).path == first.path
    assert "not complete in the local cache" in refusal("maker/other")


def test_a_hub_that_is_gone_is_asked_once_and_told_once(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the library has not kept the list of files, and would ask for it again and again."""
    first = Checkpoint.open(NAME)
    for trees in (tmp_path / "cache").rglob("trees"):
        shutil.rmtree(trees)

    def waits(_: float) -> None:
        raise AssertionError("it tries again")

    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", waits)
    monkeypatch.setattr(settings, "ENDPOINT", "http://127.0.0.1:1")
    assert Checkpoint.open(NAME).path == first.path
    [line] = caplog.messages
    assert line.startswith("the hub cannot be reached (") and line.endswith(f"): {NAME} is taken from the local cache")
    (first.path / "model.safetensors").unlink()
    said = refusal(NAME)
    assert f"{NAME} is not complete in the local cache, and the hub cannot be reached (" in said
    assert caplog.messages == [line]  # the error says it, and nothing else
    with pytest.raises(CheckpointError, match=f"{NAME} cannot be fetched: the hub cannot be reached"):
        download(NAME, None, False, lambda folder: None, again=True)


def test_the_address_of_a_page_is_a_name(hub: FakeHub) -> None:
    by_name = Checkpoint.open(NAME, "three")
    assert Checkpoint.open(f"https://huggingface.co/{NAME}/tree/three").path == by_name.path
    assert Checkpoint.open(f"hf.co/{NAME}", "three").path == by_name.path
    assert "names the revision three, and revision is main" in refusal(f"hf.co/{NAME}/tree/three", "main")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("https://huggingface.co/Qwen/Qwen3-0.6B", ("Qwen/Qwen3-0.6B", None)),
        ("http://www.huggingface.co/Qwen/Qwen3-0.6B/", ("Qwen/Qwen3-0.6B", None)),
        ("HF.co/Qwen/Qwen3-0.6B?library=vllm#x", ("Qwen/Qwen3-0.6B", None)),
        ("hf.co/a/b/blob/v1/config.json", ("a/b", "v1")),
        ("huggingface.co/a/b/resolve/main/model.safetensors", ("a/b", "main")),
        ("https://huggingface.co/a/b/discussions/3", ("a/b", None)),
        ("https://huggingface.co/datasets/a", None),
        ("https://huggingface.co/gpt2", None),
        ("huggingface.co/gpt2", None),
        ("hf.co/a/b:Q4_K_M", None),
        ("https://example.org/a/b", None),
        ("https://huggingface.co.evil.org/a/b", None),
    ],
)
def test_addresses(text: str, found: tuple[str, str | None] | None) -> None:
    assert read_name(text) == found


def test_offline_without_a_cached_snapshot_says_so(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "HF_HUB_OFFLINE", True)
    message = refusal(NAME)
    assert "not complete in the local cache" in message
    assert "HF_HUB_OFFLINE" in message


def test_an_interrupted_download_is_not_taken_for_a_model(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)  # between its tries after a 500
    hub.broken[NAME] = 403
    assert "does not let you read" in refusal(NAME)
    hub.broken[NAME] = 500
    assert "500" in refusal(NAME)
    monkeypatch.setattr(settings, "HF_HUB_OFFLINE", True)
    assert "not complete" in refusal(NAME)


def test_unknown_models_and_revisions_are_told_apart(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "there is no model maker/none on the hub, nor a folder" in refusal("maker/none")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert "there is no model maker/none on the hub, nor a folder" in refusal("maker/none")
    assert "no revision 'v9'" in refusal(NAME, "v9")
    assert hub.fetched() == set()


def test_a_name_that_is_nearly_known_is_hinted_at(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model inside, folders beside the path, models in the hub's cache, and published ones that we run."""
    Checkpoint.open(NAME)
    (tmp_path / "models" / "llama-tuned").mkdir(parents=True)
    (tmp_path / "models" / "llama-tuned" / "config.json").touch()
    (tmp_path / "models" / "llama-tunes").mkdir()  # no model
    (tmp_path / "small.gguf").touch()
    for wrong, meant in {
        "storie": "stories",
        "Stories": "stories",
        "./models/lama-tuned": "./models/llama-tuned",
        "smal.gguf": "small.gguf",
        "maker/smal": NAME,
        "smalll": NAME,
        "Qwen/Qwen3-0.6": "Qwen/Qwen3-0.6B",
        "deepseek-ai/DeepSeek-V": "deepseek-ai/DeepSeek-V3",
    }.items():
        assert f"id you mean {meant}?" in refusal(wrong), wrong
    for wrong in ("models/nothing/like/it", "x" * 300):
        assert "id you mean" not in refusal(wrong), wrong
    monkeypatch.setattr(settings, "HF_HUB_OFFLINE", True)
    said = refusal("maker/smal")
    assert "(HF_HUB_OFFLINE is set); did you mean maker/small? Or fetch it once" in said


def test_a_damaged_file_in_the_cache_is_removed_first(hub: FakeHub) -> None:
    """What is in the cache is not fetched again."""
    config = Checkpoint.open(NAME).path / "config.json"
    config.unlink()
    config.write_text("{")
    assert refusal(NAME).endswith(f"remove it with `tokenwright rm {NAME}`, and the next use fetches it again")


@pytest.mark.parametrize("revision", ["../../x", "", "a b", "x\n", "a..b", "/etc/passwd"])
def test_revisions_that_are_none_never_leave_this_machine(hub: FakeHub, revision: str) -> None:
    assert "is not a revision" in refusal(NAME, revision)
    assert hub.requests == []


def test_a_gated_model_asks_for_a_token(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.gated.add(NAME)
    message = refusal(NAME)
    assert "gated" in message
    assert "HF_TOKEN" in message
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert Checkpoint.open(NAME).parameters > 0
    assert hub.tokens[-1] == "Bearer hf_secret"


def test_a_repository_with_pickles_alone_is_named_and_nothing_large_is_fetched(
    hub: FakeHub, single: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {name: data for name, data in single.items() if name != "model.safetensors"}
    hub.repositories["maker/pickled"] = {"main": files | {"pytorch_model.bin": b"\x80\x04evil"}}
    assert "only as pickles" in refusal("maker/pickled")
    assert "pytorch_model.bin" not in hub.fetched()
    hub.repositories["maker/empty"] = {"main": files}
    assert "has no model.safetensors" in refusal("maker/empty")
    monkeypatch.setattr(settings, "HF_HUB_OFFLINE", True)  # then the list of files cannot be had
    assert "maker/pickled is not complete in the local cache" in refusal("maker/pickled")


def test_a_model_that_we_cannot_run_is_refused_before_its_weights(hub: FakeHub, single: Files) -> None:
    config = json.loads(single["config.json"]) | {"architectures": ["RwkvForCausalLM"]}
    hub.repositories["maker/rwkv"] = {"main": single | {"config.json": json.dumps(config).encode()}}
    assert "RwkvForCausalLM" in refusal("maker/rwkv")
    assert "model.safetensors" not in hub.fetched()


def test_a_repository_without_a_config_is_no_model(hub: FakeHub) -> None:
    hub.repositories["maker/data"] = {"main": {"README.md": b"#"}}
    assert "no config.json" in refusal("maker/data")


def test_a_missing_shard_is_told(hub: FakeHub, sharded: Files) -> None:
    hole = {name: data for name, data in sharded.items() if "00002" not in name}
    hub.repositories["maker/hole"] = {"main": hole}
    assert "lacks 1 of 3 shards (model-00002-of-00003.safetensors)" in refusal("maker/hole")


def test_an_index_cannot_ask_for_files_elsewhere(hub: FakeHub, sharded: Files) -> None:
    index = json.dumps({"weight_map": {"x": "../../secret.safetensors"}}).encode()
    hub.repositories["maker/evil"] = {"main": sharded | {"model.safetensors.index.json": index}}
    assert "not a safetensors file beside it" in refusal("maker/evil")


def test_a_damaged_download_names_the_file(hub: FakeHub, single: Files) -> None:
    hub.repositories["maker/cut"] = {"main": single | {"model.safetensors": single["model.safetensors"][:-1]}}
    assert "truncated: 1 of" in refusal("maker/cut")


def test_a_folder_of_that_name_comes_first(hub: FakeHub, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / NAME, "gpt2")
    assert Checkpoint.open(NAME).config.architecture == "GPT2LMHeadModel"
    assert hub.requests == []


def test_the_environment_of_huggingface_hub_is_heeded(hub: FakeHub, tmp_path: Path) -> None:
    """In a process of its own: HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE, and progress on stderr only."""
    script = (
        "import sys; from pathlib import Path; from tokenwright.checkpoints.files.hub import download; "
        "assert not sys.modules.get('torch'); "
        f"print(download({NAME!r}, None, True, lambda folder: None).name)"
    )
    environment = os.environ | {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "home"),
        "TQDM_POSITION": "-1",
    }
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)

    def run(**more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", script]
        return subprocess.run(command, env=environment | more, capture_output=True, text=True, check=True, timeout=120)

    first = run()
    assert first.stdout.strip() == commit_of(NAME, "main")
    assert "Fetching" in first.stderr
    hub.requests.clear()
    assert run(HF_HUB_OFFLINE="1").stdout == first.stdout
    assert hub.requests == []


def test_names_of_the_hub_have_an_owner() -> None:
    assert is_hub_name("Qwen/Qwen3-0.6B")
    assert is_hub_name("meta-llama/Llama-3.2-1B")
    for other in ("gpt2", "a/b/c", "../x", "/x/y", "./x/y", "~/x", "a/", "/b", "a/..", "ä/b", "a/b\n"):
        assert not is_hub_name(other), other
