"""What the scripts share: where things are, and how a command is run.

Only the standard library, and nothing that an old Python cannot read: `install` must be able to complain.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = BIN / ("python.exe" if os.name == "nt" else "python")


def say(message: str) -> None:
    print(f"\033[1m{message}\033[0m" if sys.stdout.isatty() else message, flush=True)


def fail(message: str) -> None:
    sys.exit(f"{Path(sys.argv[0]).name}: {message}")


def run(*command: object) -> int:
    """Run a command in the repository's root and return its exit code."""
    return subprocess.run([str(part) for part in command], cwd=ROOT, check=False).returncode


def must(*command: object) -> None:
    """Run a command; where it fails, end with its exit code."""
    code = run(*command)
    if code:
        print(f"{Path(sys.argv[0]).name}: this failed: {' '.join(map(str, command))}", file=sys.stderr)
        sys.exit(code)


def minutes(seconds: float) -> str:
    return f"{seconds / 60:6.2f} min"
