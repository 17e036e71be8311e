"""Finds the RAM that this process may still use, within the limits of its control groups and address space."""

import mmap
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_NO_LIMIT = 1 << 60  # bytes: v1's "no limit" is larger


class _Files(NamedTuple):
    limit: str
    used: str
    inactive: str


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files("memory.max", "memory.current", "inactive_file")


def free_ram(root: Path = Path("/")) -> int | None:
    """Bytes that this process may still write; None if unknown. root: the folder with proc and sys."""
    found = [_available(root), *_of_groups(root), _of_address_space(root)]
    return min((max(0, free) for free in found if free is not None), default=None)


def _available(root: Path) -> int | None:
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _of_groups(root: Path) -> Iterator[int | None]:
    mounts = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            yield from (_left(folder, _V2) for folder in _ancestors(mounts, path))
        elif "memory" in controllers.split(","):
            yield from (_left(folder, _V1) for folder in _ancestors(mounts / "memory", path))


def _ancestors(mount: Path, path: str) -> Iterator[Path]:
    inside = PurePosixPath(path.lstrip("/"))
    yield from (mount / one for one in (inside, *inside.parents))


def _left(folder: Path, files: _Files) -> int | None:
    limit, used = (_text(folder / name).strip() for name in (files.limit, files.used))
    if not (limit.isdigit() and used.isdigit()) or int(limit) >= _NO_LIMIT:  # v2 writes "max"
        return None
    stat = dict(line.split(maxsplit=1) for line in _text(folder / "memory.stat").splitlines() if " " in line)
    return int(limit) - int(used) + int(stat.get(files.inactive, "0"))  # the system drops inactive file pages


def _of_address_space(root: Path) -> int | None:
    """Bytes left of the address space (ulimit -v), which counts mapped memory, written or not."""
    pages = _text(root / "proc/self/statm").split()
    for line in _text(root / "proc/self/limits").splitlines():
        name, limit = line[:26].rstrip(), line[26:].partition(" ")[0]
        if name == "Max address space" and limit.isdigit() and pages:
            return int(limit) - int(pages[0]) * mmap.PAGESIZE
    return None


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
