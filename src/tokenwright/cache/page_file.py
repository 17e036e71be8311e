"""Pages on a disk for one process, in files without a name, which vanish when the process ends.

A file has slots of one size, for the pages of all groups with that size. It grows up to the quota of all files and
never into the last tenth of the disk; then a page takes the slot that was used longest ago. A reader notices
a slot that another page has taken.
"""

import errno
import logging
import os
import tempfile
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from secrets import token_bytes

from tokenwright.cache.page_folder import OVERHEAD, HashRows, PageSeal, taken
from tokenwright.environment import Environment
from tokenwright.errors import RequestError

_SHARE = 2  # the quota is half of the free bytes above the last tenth of the disk
_LEAST = 64 << 20
_IN_MEMORY = ("tmpfs", "ramfs")

log = logging.getLogger(__name__)


def free_of(status: os.statvfs_result) -> int:
    return max(0, (status.f_bavail - status.f_blocks // 10) * status.f_frsize)


def disk_place(most: int | None) -> tuple[Path, int] | None:
    """The first folder on a disk with room for unnamed files, and their quota, at most `most`; None: none has."""
    if most is not None and most < _LEAST:
        raise RequestError(f"kv_disk_size is {most:,} bytes; give {_LEAST:,} or more", "kv_disk_size")
    for folder in _folders():
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                found = os.fstat(file.fileno()).st_dev
                room = free_of(os.fstatvfs(file.fileno())) // _SHARE
                if room >= _LEAST and f"{os.major(found)}:{os.minor(found)}" not in _devices_in_memory():
                    return folder, room if most is None else min(most, room)
        except OSError:  # it cannot be written to
            continue
    return None


def _folders() -> list[Path]:
    try:
        own = [Environment.read().cache_folder("kv")]
    except RequestError:  # there is no home
        own = []
    return [*own, Path("/var/tmp"), Path(tempfile.gettempdir())]


def _devices_in_memory(mounts: Path = Path("/proc/self/mountinfo")) -> set[str]:
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    fields = [line.split() for line in lines]
    return {one[2] for one in fields if "-" in one and one[one.index("-") + 1] in _IN_MEMORY}


class FileSlots:
    """{page: slot of a file}, the page that was used longest ago first."""

    def __init__(self) -> None:
        self.count = 0
        self.free: list[int] = []
        self.pages: OrderedDict[bytes, int] = OrderedDict()

    def take(self, key: bytes, *, grow: bool) -> tuple[int, bytes | None] | None:
        """A slot for a page, and the page that loses it; None: there is no slot, and the file may not grow."""
        lost = None
        if self.free:
            slot = self.free.pop()
        elif grow:
            slot, self.count = self.count, self.count + 1
        elif self.pages:
            lost, slot = self.pages.popitem(last=False)
        else:
            return None
        self.pages[key] = slot
        return slot, lost

    def drop(self, key: bytes) -> None:
        if (slot := self.pages.pop(key, None)) is not None:
            self.free.append(slot)

    def touch(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            if key in self.pages:
                self.pages.move_to_end(key)


class PageFile:
    """Pages in files without a name in a folder. One thread may write and remove, and others read."""

    lasts = False

    def __init__(self, folder: Path, quota: int, model: bytes) -> None:
        self.folder = folder
        self.quota = quota
        self.model = model
        self.seal = PageSeal(token_bytes(32))
        self.pages: set[bytes] = set()
        self.used = 0
        self._files: dict[int, tuple[int, FileSlots]] = {}  # by the size of a slot: descriptor and slots
        self._damaged = False

    def held(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self.pages for key in keys]

    def read(self, key: bytes, whole: memoryview, hash_rows: HashRows | None = None) -> bool:
        """Read a page into `whole`, as `PageFolder.read` does. Several threads may."""
        size = taken(len(whole) - 1)
        if size not in self._files:
            return False
        place, slots = self._files[size]
        slot = slots.pages.get(key)
        if slot is None:
            return False
        try:
            length, why = os.preadv(place, [whole[:-1]], slot * size), "it is damaged"
        except OSError as error:
            length, why = 0, error.strerror or str(error)
        if length == len(whole) - 1 and self.seal.holds(self.model, key, whole[:-1], hash_rows):
            return True
        self.pages.discard(key)
        if slots.pages.get(key) == slot and not self._damaged:  # no other page has taken the slot meanwhile
            self._damaged = True
            log.warning("a page of the KV cache in %s is skipped, and others silently: %s", self.folder, why)
        return False

    def write(self, pages: Sequence[tuple[bytes, bytes]]) -> int:
        """Write the contents of pages that it lacks, by key; returns their count. Raises OSError, as on a full disk."""
        count = 0
        for key, contents in pages:
            if key not in self.pages:
                count += self._write(key, contents, taken(OVERHEAD + len(contents)))
        return count

    def _write(self, key: bytes, contents: bytes, size: int) -> bool:
        if size not in self._files:
            self._files[size] = _open_unnamed(self.folder), FileSlots()
        place, slots = self._files[size]
        slots.drop(key)
        before = slots.count
        grow = self.used + size <= min(self.quota, self.used + free_of(os.fstatvfs(place)))
        if (found := slots.take(key, grow=grow)) is None:
            return False
        slot, lost = found
        self.used += (slots.count - before) * size
        if lost is not None:
            self.pages.discard(lost)
        try:
            header = self.seal.header(self.model, key, contents)
            if os.pwritev(place, [header, contents], slot * size) != len(header) + len(contents):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            slots.drop(key)
            raise
        self.pages.add(key)
        return True

    def touch(self, keys: Sequence[bytes]) -> None:
        for _, slots in self._files.values():
            slots.touch(keys)

    def close(self) -> None:
        self.pages.clear()
        while self._files:
            os.close(self._files.popitem()[1][0])


def _open_unnamed(folder: Path) -> int:
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.dup(file.fileno())
