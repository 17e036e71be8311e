"""GGUF files on the hub, against a server of our own: found by name or kind, fetched alone, refused with near names."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints.test_hub import refusal
from tests.models.files.fake_hub import FakeHub, Files
from tests.models.files.gguf_files import Kind, write_gguf
from tests.models.fixtures import make_checkpoint
from tokenwright.checkpoints.files.hub_gguf import download_gguf, read_gguf_name
from tokenwright.checkpoints.folder import Checkpoint

NAME = "maker/small-GGUF"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Three kinds, one of them in several files in a folder of its own, and litter."""
    place = tmp_path_factory.mktemp("gguf")
    model = make_checkpoint(place / "model", "llama2").path
    whole = write_gguf(place / "whole.gguf", model, Kind.Q8_0).read_bytes()
    (place / "BF16").mkdir()
    write_gguf(place / "BF16" / "small-BF16.gguf", model, Kind.BF16, split=9)
    split = {f"BF16/{one.name}": one.read_bytes() for one in (place / "BF16").iterdir()}
    assert len(split) > 2
    others = {"small-F16.gguf": whole, "small-Q8_0.gguf": whole, "README.md": b"#", "model.safetensors": b"no"}
    return others | split | {"small-Q4_K_M.gguf": b"GGUF", "small-Q4_K_S.gguf": b"GGUF"}


@pytest.fixture
def hub(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    import huggingface_hub.constants as settings

    with FakeHub({NAME: {"main": dict(files)}, "maker/none": {"main": {"README.md": b"#"}}}) as served:
        monkeypatch.setattr(settings, "ENDPOINT", served.url)
        template = served.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(settings, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(settings, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(settings, "HF_HUB_OFFLINE", False)
        monkeypatch.chdir(tmp_path)
        yield served


def test_a_file_is_fetched_alone_and_then_opens_offline(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants as settings

    found = Checkpoint.open(f"{NAME}:small-Q8_0.gguf")
    assert hub.fetched() == {"small-Q8_0.gguf"}
    assert found.tokenizer().encode("the model")
    monkeypatch.setattr(settings, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    assert Checkpoint.open(f"{NAME}:q8_0").path == found.path
    assert hub.requests == []
    assert f"{NAME} in the local cache" in (said := refusal(f"{NAME}:small-F16.gguf")) and "HF_HUB_OFFLINE" in said


def test_a_kind_is_the_one_file_with_that_name_and_all_its_parts(hub: FakeHub, files: Files) -> None:
    found = Checkpoint.open(f"{NAME}:BF16")
    parts = {name for name in files if name.startswith("BF16/")}
    assert hub.fetched() == {name.removeprefix("BF16/") for name in parts} == {one.name for one in found.stamps}
    assert Checkpoint.open(f"https://huggingface.co/{NAME}:{max(parts)}").path == found.path
    assert download_gguf(f"{NAME}:{max(parts).removeprefix('BF16/')}", None, False) == found.path
    assert download_gguf(f"{NAME}:f16", None, False).name == "small-F16.gguf"  # not BF16, though that contains it


def test_other_names_are_refused_with_those_that_are_there(hub: FakeHub, files: Files) -> None:
    said = refusal(f"{NAME}:Q4_K")
    assert "Q4_K fits 2 files" in said and "small-Q4_K_M.gguf, small-Q4_K_S.gguf" in said
    said = refusal(f"{NAME}:Q8_1")
    assert "did you mean small-Q8_0.gguf? It has BF16/small-BF16-00001-of-" in said
    assert "did you mean small-F16.gguf? It has" in refusal(f"{NAME}:smal-F16.gguf")
    assert "leave out :Q8_0" in refusal("maker/none:Q8_0")
    assert "there is no model maker/absent on the hub" in refusal("maker/absent:Q8_0")
    assert "no revision 'v9'" in refusal(f"{NAME}:Q8_0", "v9")
    missing = max(name for name in files if name.startswith("BF16/"))
    del hub.repositories[NAME]["main"][missing]
    assert f"lacks {missing}" in refusal(f"{NAME}:BF16")
    assert not any(name.endswith(".gguf") and "BF16" not in name for name in hub.fetched())


def test_names_of_files() -> None:
    assert read_gguf_name("a/b:Q4_K_M") == ("a/b", "Q4_K_M")
    assert read_gguf_name("https://huggingface.co/a/b:x/y.gguf") == ("https://huggingface.co/a/b", "x/y.gguf")
    for other in ("a/b", "a:b", "a/b:", "a/b:../x.gguf", "a/b:x*", "../a:b", "a/b:c:d", "a/b:[x]", "C:/a/b"):
        assert read_gguf_name(other) is None, other
