"""What `tokenwright --version` says: the versions, and what the build of this installation did without."""

import importlib.metadata
import json
import platform
from collections.abc import Iterable
from pathlib import Path

import tokenwright


def version_text(folders: Iterable[str] = tokenwright.__path__) -> str:
    """The versions of this installation; `folders` are where the build's own notes may lie."""
    lines = [
        f"tokenwright {tokenwright.__version__}",
        f"Python {platform.python_version()}, torch {_torch_version()}",
        *_build_lines(folders),
    ]
    return "\n".join(lines)


def _torch_version() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "is not installed; run: pip install torch"


def _build_lines(folders: Iterable[str]) -> list[str]:
    notes = next((note for folder in folders if (note := Path(folder, "_build.json")).exists()), None)
    if notes is None:
        return ["not installed: running from a folder of sources"]
    build = json.loads(notes.read_text(encoding="utf-8"))
    lines = []
    if found := [name for name in (build["cxx"], build["node"] and f"Node {build['node']}") if name]:
        lines.append(f"built with {' and '.join(found)}")
    if not build["cxx"]:
        lines.append(
            "built without a C++ compiler: nothing is lost today, the kernels run in torch; native kernels "
            "will need one (install g++ or clang++, then reinstall)"
        )
    if not build["node"]:
        lines.append(
            "built without Node: nothing is lost today; the explorer's page will need it (install Node 20 or "
            "newer, then reinstall)"
        )
    return lines
