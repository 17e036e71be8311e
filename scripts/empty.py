"""Empty environments for wheels: one on this processor, and one for aarch64 that qemu runs, without compiler and Node.

The aarch64 one is a folder with Debian's arm64 Python, unpacked and not installed, beside the wheels that pip downloads
for that processor. It works on Debian and systems like it.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import debian
from common import ROOT, fail, must

GOLDEN = ROOT / "tests" / "golden" / "stories.json"
TOKENS = 40  # of the golden story that a wheel must write
PROGRAM = """
import json, sys
from tokenwright import LLM
with LLM("stories") as llm:
    [story] = llm.generate([sys.argv[1]], temperature=0.0, max_tokens=int(sys.argv[2]), ignore_eos=True)
    print(json.dumps([story.token_ids, story.text]))
"""
FLAGS = {"avx2": "avx2", "avxvnni": "avx_vnni", "avx512": "avx512_vnni", "amx": "amx_bf16"}  # of /proc/cpuinfo
Command = tuple[str, ...]
Variables = dict[str, str]


def try_wheel(wheel: Path, processor: str, work: Path) -> None:
    """Write the golden story, and compute the published bits, with a wheel in an empty environment."""
    if processor == platform.machine():
        python, variables = here(wheel, work / "empty")
    else:
        python, variables = emulated(wheel, work / "empty-aarch64")
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    told = ran((*python, "-c", PROGRAM, golden["prompt"], str(TOKENS)), variables)
    ids, text = json.loads(told)
    print(f"{golden['prompt']}{text}")
    if ids != golden["token_ids"][:TOKENS]:
        fail(f"{wheel.name} does not write the golden story")
    print(ran((*python, "-m", "tokenwright", "--version"), variables), end="")
    for isa in instruction_sets(processor):
        told = ran((*python, "-m", "tokenwright", "verify"), variables | {"TOKENWRIGHT_ISA": isa})
        print(told.splitlines()[-1])


def instruction_sets(processor: str) -> list[str]:
    """The kernels that a wheel must have: the portable ones, and the kernels of this processor or of qemu's."""
    if processor != "x86_64":
        return ["portable", "dotprod"]
    flags = re.findall(r"^flags\s*: (.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)[0].split()
    return ["portable", *(isa for isa, flag in FLAGS.items() if flag in flags)]


def here(wheel: Path, folder: Path, *requirements: str) -> tuple[Command, Variables]:
    """A virtual environment with a wheel; PATH has nothing but its programs."""
    shutil.rmtree(folder, ignore_errors=True)
    must(sys.executable, "-m", "venv", folder)
    pip = (folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    must(*pip, "-c", ROOT / "constraints.txt", wheel, *requirements)
    return (str(folder / "bin" / "python"),), {"PATH": str(folder / "bin"), "HOME": str(folder)}


def emulated(wheel: Path, folder: Path) -> tuple[Command, Variables]:
    """Debian's arm64 Python under qemu with a wheel and its dependencies."""
    if not shutil.which("qemu-aarch64"):
        debian.install("qemu-user")
    qemu = shutil.which("qemu-aarch64") or fail("qemu-aarch64 not found (Debian: qemu-user)")
    root, site = folder / "root", folder / "site"
    if not root.exists():
        unpack_debian("arm64", root, folder / "apt", "python3.11", "libstdc++6")  # NumPy needs the latter
    shutil.rmtree(site, ignore_errors=True)
    platforms = [f"--platform=manylinux_2_{minor}_aarch64" for minor in range(17, 37)]  # Debian 12 has 2.36
    platforms += ["--platform=manylinux2014_aarch64", "--platform=any"]
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", site)
    must(*pip, *platforms, "--python-version=3.11", "--only-binary=:all:", "-c", ROOT / "constraints.txt", wheel)
    python = (str(qemu), "-L", str(root), str(root / "usr" / "bin" / "python3.11"))
    return python, {"PATH": "/nonexistent", "HOME": str(folder), "PYTHONPATH": str(site)}


def unpack_debian(architecture: str, root: Path, state: Path, *packages: str) -> None:
    """Unpack Debian packages of another architecture, and their dependencies. The system installs nothing."""
    for part in ("lists/partial", "cache/archives/partial"):
        (state / part).mkdir(parents=True, exist_ok=True)
    (state / "status").touch()
    options = {
        "APT::Architecture": architecture,
        "APT::Architectures": architecture,
        "Dir::State::lists": state / "lists",
        "Dir::State::status": state / "status",
        "Dir::Cache": state / "cache",
        "Debug::NoLocking": "1",
    }
    apt = ("apt-get", "-qq", *(f"-o{name}={value}" for name, value in options.items()))
    must(*apt, "update")
    must(*apt, "install", "-y", "--no-install-recommends", "--download-only", *packages)
    for archive in sorted((state / "cache" / "archives").glob("*.deb")):
        must("dpkg-deb", "-x", archive, root)


def ran(command: Command, variables: Variables) -> str:
    """The output of a program in an empty environment."""
    settings = {**variables, "LANG": "C.UTF-8"}
    done = subprocess.run(command, cwd=variables["HOME"], env=settings, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        fail(f"this ended with {done.returncode}: {' '.join(command)}\n{done.stdout}")
    return done.stdout
