"""The results of a library's kernels, from tests/backends/cpp/check.cpp, to compare processors."""

from __future__ import annotations

import subprocess
from pathlib import Path

import debian
from common import NATIVE, PYTHON, ROOT, fail, must

CHECK = ROOT / "tests" / "backends" / "cpp" / "check.cpp"
Results = dict[str, tuple[str, list[str]]]  # by name: '=' or '~', and the numbers


def installed() -> Path:
    """The library for this processor."""
    ask = "from tokenwright.backends.native.library import find; print(find() or '')"
    path = debian.output(str(PYTHON), "-c", ask)
    if not path:
        fail("no native kernels are installed; install g++ and run scripts/install test")
    return Path(path)


def check_program(folder: Path, name: str, compiler: str) -> str:
    """The check, compiled into a folder."""
    check = folder / f"check-{name}"
    must(compiler, "-std=gnu++17", "-O1", f"-I{NATIVE}", CHECK, "-o", check, "-ldl")
    return str(check)


def results(name: str, *command: str | Path) -> Results:
    """The results of a library's kernels, from a check program."""
    ended = subprocess.run(list(map(str, command)), cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if ended.returncode:
        fail(f"the kernels for {name} ended with {ended.returncode}")
    found: Results = {}
    for line in ended.stdout.splitlines():
        words = line.split()
        mark = next(i for i, word in enumerate(words) if word in "=~")
        found[" ".join(words[:mark])] = words[mark], words[mark + 1 :]
    return found
