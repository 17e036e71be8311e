"""Programs of npm and PyPI, installed into a test's own folder; a test skips where a registry cannot be reached."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

OFFLINE = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ECONNRESET", "ETIMEDOUT", "ENETUNREACH", "ENOTCACHED")
UNREACHED = "connection broken by"  # pip's warning before each new try


def npm_programs(folder: Path, *packages: str) -> Path:
    """The folder of the packages' programs."""
    quiet = ("--no-audit", "--no-fund", "--prefer-offline", "--fetch-retries=1", "--prefix", str(folder))
    done = subprocess.run(
        ["npm", "install", *quiet, *packages], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        code = re.search(r"code (E\w+)", done.stderr)
        assert code is not None and code[1] in OFFLINE, done.stderr
        pytest.skip(f"npm's registry cannot be reached ({code[1]})")
    return folder / "node_modules/.bin"


def pypi_programs(folder: Path, *packages: str) -> Path:
    """The folder of the packages' programs and of their Python, in a virtual environment."""
    subprocess.run([sys.executable, "-m", "venv", folder / "own"], check=True)
    programs = folder / "own/bin"
    quiet = ("--quiet", "--disable-pip-version-check", "--retries=1")
    done = subprocess.run(
        [programs / "python", "-m", "pip", "install", *quiet, *packages], capture_output=True, text=True, check=False
    )
    if done.returncode:
        assert UNREACHED in done.stderr, done.stderr
        pytest.skip("PyPI cannot be reached")
    return programs
