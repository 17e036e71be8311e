"""Paths and helpers that the scripts share.

Only the standard library, and only syntax that an old Python parses: `install` must be able to report its version.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = BIN / ("python.exe" if os.name == "nt" else "python")
# Each contains a digest of the files that determine an installation: for the tests, or for the engine's tests only.
STAMPS = {kind: VENV / f"installed-for-{kind}" for kind in ("test", "dev")}
PACKAGE = ROOT / "src" / "tokenwright"
NATIVE = PACKAGE / "backends" / "native" / "cpp"  # the C++ kernels


def say(message: str) -> None:
    print(f"\033[1m{message}\033[0m" if sys.stdout.isatty() else message, flush=True)


def fail(message: str) -> NoReturn:
    sys.exit(f"{Path(sys.argv[0]).name}: {message}")


def run(*command: object) -> int:
    """Run a command in the repository's root and return its exit code."""
    return subprocess.run([str(part) for part in command], cwd=ROOT, check=False).returncode


def must(*command: object) -> None:
    """Run a command; exit with its code if it fails."""
    code = run(*command)
    if code:
        print(f"{Path(sys.argv[0]).name}: this failed: {' '.join(map(str, command))}", file=sys.stderr)
        sys.exit(code)


def cmake() -> str:
    """CMake from the system or .venv; installed into .venv if both lack it."""
    path = shutil.which("cmake") or shutil.which("cmake", path=str(BIN))
    if not path:
        must(PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "cmake")
        path = str(BIN / "cmake")
    return path


def differs_from_last_commit(*paths: Path, root: Path = ROOT) -> bool:
    """Whether tracked files under the paths differ from the commit before HEAD; True if git fails."""
    compare = ["git", "diff", "--quiet", "HEAD~", "--", *map(str, paths)]
    try:
        return subprocess.run(compare, cwd=root, stderr=subprocess.DEVNULL, check=False).returncode != 0
    except OSError:  # git is not installed
        return True


def minutes(seconds: float) -> str:
    return f"{seconds / 60:6.2f} min"
