"""The text of `tokenwright --version`: the versions, and the optional parts that this installation lacks."""

import platform
from collections.abc import Iterable

import tokenwright
from tokenwright.errors import RequestError
from tokenwright.llm.web_page import build_notes, why_no_page


def version_text(folders: Iterable[str] = tokenwright.__path__) -> str:
    """The versions of this installation; `folders` are searched for the build's `_build.json`."""
    torch = f"Python {platform.python_version()}, torch {_torch_version()}"
    return "\n".join([f"tokenwright {tokenwright.__version__}", torch, _gpu_line(), *_build_lines(folders)])


def _gpu_line() -> str:
    """The adapter that device gpu computes on, or why there is none."""
    from tokenwright.backends.device import accelerator_of, resolve_device

    try:
        return f"GPU: {accelerator_of(resolve_device('gpu')).name}"
    except RequestError as error:
        return f"GPU: {error}"


def _torch_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torch")
    except PackageNotFoundError:
        return "is not installed (an optional extra)"


def _build_lines(folders: Iterable[str]) -> list[str]:
    notes = build_notes(folders)
    if not notes:
        return ["not installed: running from a folder of sources"]
    lines = []
    if notes["cxx"]:
        lines.append(f"native kernels, built with {notes['cxx']}")
    else:
        lines.append(
            "built without a C++ compiler: no native kernels, the slow reference kernels in torch are used "
            "(install g++ or clang++, then Tokenwright again)"
        )
    web = notes.get("web")
    lines.append(f"the web page: {web}" if web else f"built without the web page: {why_no_page(notes)}")
    return lines
