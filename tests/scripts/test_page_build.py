"""scripts/page.py, with a Node and an npm that only pretend: what a build of the package notes about the page."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILDS = 'if [ "$1" = run ]; then mkdir -p dist/assets && touch dist/index.html dist/assets/page.js; fi'

pytestmark = pytest.mark.skipif(os.name == "nt", reason="the pretended programs are shell scripts")


def program(path: Path, lines: str) -> None:
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o755)


def made(folder: Path, npm: str = BUILDS, node: str = "v20.19.0") -> dict[str, str]:
    """The notes after page.py has run where nothing but this node and this npm is installed."""
    for name, lines in (("node", f"echo {node}"), ("npm", f'PATH=/usr/bin:/bin\necho "npm $@" >> log\n{npm}')):
        program(folder / name, lines)
    notes = folder / "notes.json"
    notes.write_text('{"cxx": "GNU 12.2.0"}')
    command = [sys.executable, "-S", str(ROOT / "scripts" / "page.py"), str(folder / "web"), str(notes)]
    subprocess.run(command, check=True, env={"PATH": str(folder)})
    told: dict[str, str] = json.loads(notes.read_text())
    assert told.pop("cxx") == "GNU 12.2.0"
    return told


def test_the_page_is_built_in_a_copy(tmp_path: Path) -> None:
    assert made(tmp_path) == {"web": "2 files, built with Node v20.19.0"}
    copied = {path.name for path in (tmp_path / "web").iterdir()} - {"dist", "log"}
    assert copied == {path.name for path in (ROOT / "web").iterdir()} - {"dist", "node_modules"}
    assert "npm ci" in (tmp_path / "web" / "log").read_text()
    assert not (ROOT / "web" / "log").exists()


@pytest.mark.parametrize(
    ("npm", "why"),
    [
        ('if [ "$1" = ci ]; then echo "npm error code ECONNREFUSED"; exit 1; fi', "npm ci ended with ECONNREFUSED; "),
        ('if [ "$1" = ping ]; then echo "npm error code FETCH_ERROR"; fi; exit 1', "npm ping ended with FETCH_ERROR; "),
        ('if [ "$1" = ci ]; then exit 7; fi', "npm ci ended with 7; see that the npm registry can be reached"),
        (f'{BUILDS}; if [ "$1" = run ]; then exit 2; fi', "npm run build ended with 2; try it in web/"),
        ("exit 0", "npm run build made no index.html; try it in web/"),
    ],
)
def test_what_failed_is_noted(tmp_path: Path, npm: str, why: str) -> None:
    told = made(tmp_path, npm)
    assert told["web"] == ""
    assert told["web_missing"].startswith(why)
    assert told["web_missing"].endswith("then install Tokenwright again")
    assert not (tmp_path / "web" / "dist").exists()


@pytest.mark.parametrize("ping", ["exit 0", "echo npm error code E404; exit 1"])
def test_what_npm_has_not_is_asked_for(tmp_path: Path, ping: str) -> None:
    cold = 'case "$*" in ping*) ' + ping + ";; *--offline) exit 1;; esac"
    assert made(tmp_path, f"{cold}\n{BUILDS}") == {"web": "2 files, built with Node v20.19.0"}
    said = (tmp_path / "web" / "log").read_text().splitlines()
    assert [line.split()[1] for line in said] == ["ci", "ping", "ci", "run"]


@pytest.mark.parametrize("node", ["v18.19.1", "v20.18.3", "nonsense"])
def test_an_old_node_is_none(tmp_path: Path, node: str) -> None:
    told = made(tmp_path, node=node)
    assert told["web_missing"].startswith("Node 20.19 or newer with npm was not found; install it")
