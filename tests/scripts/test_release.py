"""scripts/release and the build backend: links for an index, names of wheels; what hosts read names what exists."""

import hashlib
import re
import sys
import tomllib
import zipfile
from base64 import urlsafe_b64encode
from pathlib import Path

import pytest
import yaml

import tokenwright
from tests.scripts.test_scripts import SCRIPTS, script

ROOT = SCRIPTS.parent
README = "# A\n\n![a picture](docs/a.webp)\n\nSee [the tour](docs/tour.md#top) and [a page](https://example.org/).\n"


@pytest.fixture(autouse=True)
def _scripts_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


def test_links_of_the_readme_lead_to_the_address() -> None:
    made = script("release").for_index(README, "https://example.org/a/b", "1.2.3")
    assert "![a picture](https://example.org/a/b/raw/v1.2.3/docs/a.webp)" in made
    assert "[the tour](https://example.org/a/b/blob/v1.2.3/docs/tour.md#top)" in made
    assert "[a page](https://example.org/)" in made


def test_without_an_address_links_become_text() -> None:
    made = script("release").for_index(README, "", "1.2.3")
    assert made == "# A\n\nSee the tour and [a page](https://example.org/).\n"


def test_our_readme_has_no_relative_link_on_an_index() -> None:
    release = script("release")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for url in ("", "https://example.org/a/b"):
        targets = re.findall(r"\]\(([^)]+)\)", release.for_index(readme, url, "1.2.3"))
        assert all(target.startswith("https://") for target in targets), targets
        assert bool(targets) == bool(url)


def test_the_metadata_has_the_address() -> None:
    release = script("release")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    made = tomllib.loads(release.with_urls(project, "https://example.org/a/b"))["project"]
    assert made["urls"]["Repository"] == "https://example.org/a/b"
    assert made["urls"]["Issues"] == "https://example.org/a/b/issues"
    assert made["scripts"] == tomllib.loads(project)["project"]["scripts"]
    assert release.with_urls(project, "") == project


def recorded(name: str, content: bytes) -> str:
    digest = urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(content)}"


def wheel_of(path: Path, *more: str) -> Path:
    """A wheel as scikit-build-core makes it, with files `more`."""
    files = dict.fromkeys(["tokenwright/__init__.py", *more], b"content\n")
    tags = b"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-linux_x86_64\n\n"
    files["tokenwright_engine-1.dist-info/WHEEL"] = tags
    record = [recorded(name, content) for name, content in files.items()]
    files["tokenwright_engine-1.dist-info/RECORD"] = "\n".join(
        [*record, "tokenwright_engine-1.dist-info/RECORD,,"]
    ).encode()
    with zipfile.ZipFile(path, "w") as packed:
        for name, content in files.items():
            packed.writestr(name, content)
    return path


@pytest.mark.parametrize("kernels", [False, True])
def test_a_wheel_without_kernels_is_for_any_platform(kernels: bool, tmp_path: Path) -> None:
    module = script("wheel_name.py")
    name = "tokenwright_engine-1-py3-none-linux_x86_64.whl"
    found = module.named_rightly(wheel_of(tmp_path / name, *([module.LIBRARY] if kernels else []))).name
    assert found == (name if kernels else "tokenwright_engine-1-py3-none-any.whl")
    assert [path.name for path in tmp_path.iterdir()] == [found]
    with zipfile.ZipFile(tmp_path / found) as packed:
        tags = packed.read("tokenwright_engine-1.dist-info/WHEEL")
        lines = packed.read("tokenwright_engine-1.dist-info/RECORD").decode().splitlines()
        assert lines[:-1] == [recorded(name, packed.read(name)) for name in packed.namelist()[:-1]]
    assert (b"Tag: py3-none-any\n" in tags, b"Root-Is-Purelib: true" in tags) == (not kernels, not kernels)


def test_what_hosts_read_is_right() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert citation["version"] == tokenwright.__version__
    assert citation["license"] == project["license"]
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    job = workflow["jobs"]["test"]
    assert job["steps"][-1] == {"run": ".ci/run"}
    pythons = [one.rpartition(" ")[2] for one in project["classifiers"] if re.search(r":: 3\.\d+$", one)]
    assert job["strategy"]["matrix"]["python"] == pythons
    assert project["requires-python"] == f">={pythons[0]}"


TEXTS = (".py", ".md", ".toml", ".yml", ".yaml", ".ipynb", ".ts", ".tsx", ".html", ".sh", "")
EXTRA = re.compile(r"\btokenwright(?:-engine)?\[(?!\d|\\)")
BY_INDEX = re.compile(
    r"\b(?:(?:pip3?|conda|mamba|uv pip) install|pipx (?:install|run)|(?:uv|poetry|pdm) add|uv tool \w+|uvx)"
    r"(?:(?: +[^\s;|&`]+)*? +|\s+)['\"]?tokenwright(?:-engine)?(?![\w./-]|_)"
)


def installs(text: str) -> list[str]:
    """The places of a text that would install Tokenwright from a package index, where that name is not ours."""
    return [found[0] for pattern in (EXTRA, BY_INDEX) for found in pattern.finditer(text)]


def test_no_text_installs_from_an_index() -> None:
    tops = ("src", "tests", "web", "benchmarks", "scripts", "recipes", "examples", "docs", ".ci", ".github")
    made = {"node_modules", "dist", "__pycache__"}
    files = [path for path in ROOT.iterdir() if path.suffix in (".md", ".toml", ".yml")]
    files += [path for top in tops for path in (ROOT / top).rglob("*") if not made & set(path.parts)]
    texts = [path for path in files if path.is_file() and path.suffix in TEXTS and path != Path(__file__)]
    assert len(texts) > 900
    found = {path.relative_to(ROOT).as_posix(): installs(path.read_text(encoding="utf-8")) for path in texts}
    assert {name: places for name, places in found.items() if places} == {}


@pytest.mark.parametrize(
    "text",
    [
        "run: pip install 'tokenwright[torch]'",
        "(`pip install\n'tokenwright[cluster]'`)",
        "pip install tokenwright",
        "uv pip install --upgrade tokenwright-engine",
        "pipx install tokenwright==1.0",
        "uvx tokenwright serve",
        "the extra `tokenwright[uvloop]`",
    ],
)
def test_an_install_from_an_index_is_found(text: str) -> None:
    assert installs(text)


def test_the_distribution_has_its_own_name() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == "tokenwright-engine"
    assert set(project["scripts"]) == {"tokenwright"}
    said = "The package `tokenwright` on the package index is another project."
    assert said in (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
