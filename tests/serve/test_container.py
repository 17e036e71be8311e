"""docs/Containerfile: linters' rules, paths, ports; where a container runtime answers, the image is built and run."""

import json
import re
import shutil
import subprocess
import threading
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
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


def complaints(text: str) -> list[str]:
    """What linters such as hadolint say of a file, by the rules that we hold."""
    lines, found = lines_of(text), list[str]()
    stages = [re.fullmatch(r"(\S+?)(?:\s+AS\s+(\S+))?", what, re.IGNORECASE) for name, what in lines if name == "FROM"]
    names = [stage[2] for stage in stages if stage and stage[2]]
    for stage in stages:
        if stage is None or not re.search(r":(?!latest$)[\w.-]+$|@sha256:", stage[1]):
            found.append("an image needs a tag that is not latest")
        elif "/" not in stage[1]:
            found.append("an image needs its registry: names are looked up differently by podman and docker")
    if len(set(names)) < len(names):
        found.append("two stages have one name")
    last = max(at for at, (name, _) in enumerate(lines) if name == "FROM")
    users = [what for name, what in lines[last:] if name == "USER"]
    if not users or users[-1].split(":")[0] in ("root", "0"):
        found.append("the last USER must not be root")
    for name in ("CMD", "ENTRYPOINT", "HEALTHCHECK"):
        given = [what for one, what in lines[last:] if one == name]
        if len(given) > 1:
            found.append(f"there are {len(given)} {name}, and the last one counts")
        if given and not re.search(r"(?:^|CMD )\[.*\]$|^NONE$", given[-1]):
            found.append(f"{name} must be a JSON list, so that signals reach the program")
    for (before, _), (after, _) in pairwise(lines):
        if before == after == "RUN":
            found.append("two RUN in a row make two layers")
    return found + [text for name, what in lines for text in _of_line(name, what, names)]


def _of_line(name: str, what: str, stages: list[str]) -> list[str]:
    rules = [
        (name == "ADD", "ADD fetches and unpacks; use COPY"),
        (name == "MAINTAINER", "MAINTAINER is gone; use LABEL"),
        (name == "WORKDIR" and not what.startswith("/"), "WORKDIR must be absolute"),
        (name == "EXPOSE" and not all(0 < int(port) < 65_536 for port in re.findall(r"\d+", what)), "a port is wrong"),
        (name == "RUN" and re.search(r"\bsudo\b|\bapt\s", what), "use apt-get, without sudo"),
        (name == "RUN" and re.search(r"\bcd\s", what), "use WORKDIR instead of cd"),
        (name == "RUN" and "|" in what.replace("||", "") and "pipefail" not in what, "a pipe hides a failure"),
        (name == "RUN" and "pip install" in what and "--no-cache-dir" not in what, "pip keeps its cache in the image"),
    ]
    if name == "RUN" and "apt-get install" in what:
        rules += [
            ("apt-get update" not in what, "apt-get install needs apt-get update in its layer"),
            (not re.search(r"install\b[^&]*-y", what), "apt-get install needs -y"),
            ("--no-install-recommends" not in what, "apt-get install needs --no-install-recommends"),
            ("rm -rf /var/lib/apt/lists/*" not in what, "the lists of apt-get stay in the image"),
        ]
    if name == "COPY" and (source := re.match(r"--from=(\S+)", what)):
        rules.append((source[1] not in stages, f"COPY --from={source[1]}: there is no such stage"))
    return [text for broken, text in rules if broken]


@pytest.fixture(scope="module")
def image() -> str:
    return (ROOT / "docs" / "Containerfile").read_text(encoding="utf-8")


def test_linters_have_nothing_to_say(image: str) -> None:
    assert complaints(image) == []


@pytest.mark.parametrize(
    ("line", "by", "says"),
    [
        ("FROM docker.io/library/python:3.12-slim\n", "FROM docker.io/library/python\n", "tag"),
        ("FROM docker.io/library/python:3.12-slim\n", "FROM docker.io/library/python:latest\n", "tag"),
        ("FROM docker.io/library/python:3.12-slim\n", "FROM python:3.12-slim\n", "registry"),
        (USER, "", "root"),
        (USER, "USER root\n", "root"),
        ("--no-cache-dir ", "", "cache"),
        (USER, f"RUN apt-get update && apt-get install -y --no-install-recommends g++\n{USER}", "lists"),
        (USER, f"RUN apt-get update && apt-get install -y g++\n{USER}", "recommends"),
        (USER, f"COPY --from=built /a /b\n{USER}", "no such stage"),
        (USER, f"ADD . /source\n{USER}", "COPY"),
        ('ENTRYPOINT ["tokenwright", "serve"', 'ENTRYPOINT tokenwright serve "', "JSON list"),
    ],
)
def test_a_planted_fault_is_seen(image: str, line: str, by: str, says: str) -> None:
    assert line in image
    assert any(says in one for one in complaints(image.replace(line, by, 1)))


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


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"status": "ok"}')

    def log_message(self, *_: object) -> None: ...


@pytest.mark.parametrize("runtimes", [{}, {"docker": 1}, {"docker": 1, "podman": 0}, {"docker": 0, "podman": 0}])
def test_a_runtime_is_used_if_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtimes: dict[str, int]
) -> None:
    """With programs in their place: each says by its exit code whether it answers, and prints what real ones do."""
    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = f'port) echo "127.0.0.1:{server.server_port}";;'
        for name, code in runtimes.items():
            asked = f'echo "{name} $1" >> {tmp_path}/asked'
            script = f'#!/bin/sh\n{asked}\ncase "$1" in info) exit {code};; run) echo x;; {port} esac\n'
            (tmp_path / name).write_text(script, encoding="utf-8")
            (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        program = runtime()
        assert program == next((name for name, code in runtimes.items() if code == 0), None)
        if program is not None:
            with container(program, tmp_path / "keys") as address:
                assert healthy(address)
            asked = (tmp_path / "asked").read_text(encoding="utf-8").splitlines()
            assert [line for line in asked if line.startswith(program)] == [
                f"{program} {one}" for one in ("info", "build", "run", "port", "rm")
            ]
        server.shutdown()
