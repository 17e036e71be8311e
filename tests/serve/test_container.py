"""docs/Containerfile: linters' rules, paths, ports; where a container runtime answers, the image is built and run."""

import json
import re
import shutil
import subprocess
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

import httpx
import pytest

from tokenwright.environment import Environment
from tokenwright.serve.settings import Settings
from tokenwright.serve.transport.guard import OPEN

ROOT = Path(__file__).resolve().parents[2]
USER = "USER tokenwright\n"
Line = tuple[str, str]  # an instruction and what it says


def lines_of(text: str) -> list[Line]:
    """The instructions, each in one line."""
    joined = re.sub(r"\\\n\s*", "", re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE))
    words = [line.split(None, 1) for line in joined.splitlines() if line.strip()]
    return [(one[0].upper(), one[1] if len(one) > 1 else "") for one in words]


@pytest.fixture(scope="module")
def image() -> str:
    return (ROOT / "docs" / "Containerfile").read_text(encoding="utf-8")


def test_its_images_are_pinned_and_its_program_gets_the_signals_as_no_root(image: str) -> None:
    """What linters such as hadolint ask of a file like this."""
    lines = lines_of(image)
    images = [what.split()[0] for name, what in lines if name == "FROM"]
    assert all(re.fullmatch(r"[\w.-]+/\S+:(?!latest$)[\w.-]+|\S+@sha256:\w+", one) for one in images), "which image"
    last = max(at for at, (name, _) in enumerate(lines) if name == "FROM")
    users = [what for name, what in lines[last:] if name == "USER"]
    assert users and users[-1].split(":")[0] not in ("root", "0")
    assert all(what.startswith("[") for name, what in lines if name in ("CMD", "ENTRYPOINT")), "a shell keeps signals"
    runs = [what for name, what in lines if name == "RUN"]
    assert all("--no-cache-dir" in what for what in runs if "pip install" in what)
    assert not [name for name, _ in lines if name == "ADD"] and not [what for what in runs if "apt" in what]


def test_what_it_names_exists(image: str) -> None:
    ignored = [one for one in (ROOT / ".dockerignore").read_text().splitlines() if one and not one.startswith("#")]
    assert ignored[0] == "*", "the image takes nothing of a checkout but what follows"
    for path in re.findall(r"/source/([\w.]+)", image):
        assert f"!{path}" in ignored
        assert path == "dist" or (ROOT / path).is_file()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [entry] = [json.loads(what) for name, what in lines_of(image) if name == "ENTRYPOINT"]
    assert entry[0] in project["scripts"]
    [python] = re.findall(r"python:3\.(\d+)-slim", image)
    assert int(python) >= int(re.findall(r">=3\.(\d+)", project["requires-python"])[0])


def test_its_wheel_has_the_name_that_the_release_gives(image: str) -> None:
    [pattern] = re.findall(r"/source/dist/(.+?\.whl)", image)
    release = (ROOT / "scripts" / "release").read_text(encoding="utf-8")
    for processor in ("x86_64", "aarch64"):
        wheel = pattern.replace('"$(uname -m)"', processor)
        assert fnmatch(f"tokenwright_engine-0.1.0-py3-none-manylinux_2_28_{processor}.whl", wheel)
        assert f'"manylinux_2_28_{processor}"' in release


def test_its_settings_are_ours(image: str) -> None:
    lines = lines_of(image)
    [environment] = [what for name, what in lines if name == "ENV"]
    variables = dict(word.split("=", 1) for word in environment.split())
    [volume] = [what for name, what in lines if name == "VOLUME"]
    assert all(path.startswith(f"{volume}/") for path in variables.values())
    assert Environment.read(variables).cache == Path(variables["TOKENWRIGHT_CACHE"])
    [port] = [int(what) for name, what in lines if name == "EXPOSE"]
    assert port == Settings().port
    [health] = [what for name, what in lines if name == "HEALTHCHECK"]
    [(asked, path)] = re.findall(r"http://127\.0\.0\.1:(\d+)(/\w+)", health)
    assert (int(asked), path in OPEN) == (port, True), "it is asked without a key"
    compile(json.loads(health[health.index("[") :])[2], "the health check", "exec")


HEALTHY_S = 300.0  # seconds from the start of a container; only a hang takes so long
IMAGE = "tokenwright-test"


def runtime() -> str | None:
    """The container runtime that can be used here, if there is one."""
    for name in ("docker", "podman"):
        if shutil.which(name) and subprocess.run([name, "info"], capture_output=True, check=False).returncode == 0:
            return name
    return None


def said(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


@contextmanager
def container(program: str, keys: Path) -> Iterator[str]:
    """Build the image and run it with a file of keys; the address at which it can be reached."""
    said(program, "build", "-f", str(ROOT / "docs" / "Containerfile"), "-t", IMAGE, str(ROOT))
    identity = said(program, "run", "-d", "-p", "127.0.0.1::8000", "-v", f"{keys}:/run/keys:ro", IMAGE)
    try:
        yield said(program, "port", identity, "8000").splitlines()[0]
    finally:
        said(program, "rm", "-f", identity)


def healthy(address: str) -> bool:
    """Wait until the server says that it is well, with its model loaded."""
    until = time.monotonic() + HEALTHY_S
    while time.monotonic() < until:
        try:
            if httpx.get(f"http://{address}/health").json()["status"] == "ok":
                return True
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    return False


@pytest.mark.slow
def test_the_image_is_built_and_answers(tmp_path: Path) -> None:
    program = runtime()
    if program is None:
        pytest.skip("no container runtime answers here, so the file is only linted")
    if not list((ROOT / "dist").glob("*.whl")):
        pytest.skip("the image installs a wheel that scripts/release makes, and dist/ has none")
    (tmp_path / "keys").write_text("a-key-of-the-tests\n", encoding="utf-8")
    with container(program, tmp_path / "keys") as address:
        assert healthy(address)
        assert httpx.get(f"http://{address}/v1/models").status_code == 401
