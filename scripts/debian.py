"""Installs Debian and Ubuntu packages for scripts that need a missing program. Only the standard library."""

import subprocess
import sys

from common import ROOT


def output(*command: str) -> str:
    """A command's stdout; '' if it failed."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def run(*command: str) -> bool:
    """Run a command; print it and all its output to stderr, because stdout is for results only."""
    print(f"{sys.argv[0].rpartition('/')[2]}: {' '.join(command)}", file=sys.stderr, flush=True)
    return subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False).returncode == 0


def apt_get() -> tuple[str, ...]:
    """The start of an apt-get command; empty if apt-get is missing or needs a password."""
    sudo = () if output("id", "-u") == "0" else ("sudo", "-n")
    command = (*sudo, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get")
    return command if output(*command, "--version") else ()


def install(*packages: str) -> bool:
    """Install packages; update the package lists and retry if that fails. False if it fails again."""
    apt = apt_get()
    command = (*apt, "install", "-y", "--no-install-recommends", *packages)
    return bool(apt) and (run(*command) or (run(*apt, "update") and run(*command)))
