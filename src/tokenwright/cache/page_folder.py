"""A folder of page files under a quota, which several processes may use at once. It survives the kill of any.

    FOLDER/secret                        32 random bytes, from which all page hashes follow
    FOLDER/lock                          held to write or remove; its content counts the changes of the folder
    FOLDER/<model>/<hash>.<group>        a page; <model> is a hash of all that its bits depend on except the tokens
    FOLDER/<model>/.draft                a page that is being written, renamed when it is whole

A page file never changes: a header with the page's names, a MAC over header and contents under the folder's secret, the
contents. A reader verifies them without a lock. No link is followed, and a folder that all users may write to is
refused. A process raises the count, under the lock, before it changes the folder: an equal count means that it knows
all files. Room is made before a file is written, so the quota always holds. The file used longest ago, by its mtime, is
removed first.
"""

import errno
import heapq
import hmac
import logging
import os
import re
import secrets
import stat
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b, shake_256
from pathlib import Path
from typing import Any

import numpy as np

from tokenwright.arrays import Array
from tokenwright.errors import RequestError
from tokenwright.regular_file import lock, open_regular, unlock, why_not_private

BLOCK = 4096
_MAGIC = b"tokenwright page 3\n"  # 1 and 2 had checksums without a key
_KEY = struct.Struct(">32sH")
OVERHEAD = 128  # bytes of a file before its contents, which are aligned if the file's bytes are
_MAC = 16
_HEADER = struct.Struct(f"<{len(_MAGIC)}s32s{OVERHEAD - len(_MAGIC) - 32 - _MAC}s")
_PAGE = re.compile(r"[0-9a-f]{64}\.\d{1,5}")
_MODEL = re.compile(r"[0-9a-f]{32}")
_DRAFT = ".draft"
_SECRET = 32
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
ROW = 4096  # bytes that are hashed together
_HASHES = 2  # words of 64 bits for each row

# The sums of a page's contents under the keys of rows, as in `sums_of`.
HashRows = Callable[[Any, Array], Array]

log = logging.getLogger(__name__)


def folder_secret(folder: Path) -> bytes:
    """The secret of a folder; both are made if missing. Raises RequestError for a folder that cannot be used."""
    path = folder / "secret"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if why := why_not_private(folder.resolve()):
            raise _unusable(folder, why)
        place = _open_lock(folder)
        try:
            lock(place, folder / "lock")
            if not os.path.lexists(path):
                draft = folder / f"{_DRAFT}-secret"
                _write_new(draft, [secrets.token_bytes(_SECRET)])
                draft.rename(path)
        finally:
            os.close(place)
        with open_regular(path, links=False) as file:
            status, found = os.fstat(file.fileno()), file.read(_SECRET + 1)
    except OSError as error:
        raise _unusable(folder, error.strerror or str(error)) from error
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o077:
        raise _unusable(folder, "other users can read its file secret; empty the folder")
    if len(found) != _SECRET:
        raise _unusable(folder, "its file secret is damaged; empty the folder")
    return found


def _write_new(path: Path, data: Sequence[bytes]) -> None:
    """Write a file that only its owner can read, in place of a draft that a killed process may have left."""
    path.unlink(missing_ok=True)
    place = os.open(path, _NEW, 0o600)
    try:
        if os.writev(place, data) != sum(map(len, data)):  # a full disk may take a part
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(place)


def _open_lock(folder: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    place = os.open(folder / "lock", flags, 0o600)
    if stat.S_ISREG(os.fstat(place).st_mode):
        return place
    os.close(place)
    raise OSError(errno.EINVAL, "its lock is not a file; empty the folder")


def _unusable(folder: Path, why: str) -> RequestError:
    return RequestError(f"kv_disk: the folder {folder} cannot be used: {why}", "kv_disk")


def taken(nbytes: int) -> int:
    return -(-nbytes // BLOCK) * BLOCK


def page_key(page_hash: bytes, group: int) -> bytes:
    return _KEY.pack(page_hash, group)


def row_keys(secret: bytes) -> Array:
    """The keys [2, 1024] with which rows are hashed, as words of 32 bits."""
    drawn = shake_256(b"tokenwright rows of a page" + secret).digest(_HASHES * ROW)
    return np.frombuffer(drawn, "<u4").reshape(_HASHES, ROW // 4)


def sums_of(contents: bytes | memoryview, keys: Array) -> Array:
    """The hashes [rows, 2] of the whole rows of a page's contents, as words of 64 bits.

    Add the key to the row's words of 32 bits, and sum the products of each two (NH of UMAC, RFC 4418). Two different
    rows have equal hashes with one key in 2^64.
    """
    count = len(contents) // ROW
    words = np.frombuffer(contents, "<u4", count * (ROW // 4)).reshape(count, ROW // 4)
    keyed = [words + key for key in keys]
    products = [one[:, ::2].astype(np.uint64) * one[:, 1::2] for one in keyed]
    return np.stack([np.add.reduce(one, 1) for one in products], 1)


class PageSeal:
    """The MAC of pages under a folder's secret. hash_rows: `sums_of`, or a faster one."""

    def __init__(self, secret: bytes) -> None:
        self.secret = secret
        self.hash_rows: HashRows = sums_of
        self._keys = row_keys(secret)

    def mac(self, header: bytes | memoryview, contents: bytes | memoryview, hash_rows: HashRows | None = None) -> bytes:
        """BLAKE2b of a page's header, of the hashes of its rows, and of the bytes behind the last whole row."""
        found = blake2b(header, digest_size=_MAC, key=self.secret, person=b"tokenwright page")
        found.update(np.ascontiguousarray((hash_rows or self.hash_rows)(contents, self._keys)).data)
        found.update(contents[len(contents) // ROW * ROW :])
        return found.digest()

    def header(self, model: bytes, key: bytes, contents: bytes) -> bytes:
        return (header := _HEADER.pack(_MAGIC, model, key)) + self.mac(header, contents)

    def holds(self, model: bytes, key: bytes, page: memoryview, hash_rows: HashRows | None = None) -> bool:
        """Whether these bytes are a model's page. hash_rows: may copy the contents in the same pass."""
        header, mac, contents = page[: _HEADER.size], page[_HEADER.size : OVERHEAD], page[OVERHEAD:]
        right = header == _HEADER.pack(_MAGIC, model, key)
        return right and hmac.compare_digest(mac, self.mac(header, contents, hash_rows))


class PageFolder:
    """The page files of one model in a folder; it removes files of other models, too, when it needs room.

    model: sha256 of all that pages depend on except the tokens. pages: known keys. used: bytes of all files. One thread
    may write and remove, and others read. Raises RequestError for a folder that cannot be used.
    """

    lasts = True  # other processes find the pages, also later

    def __init__(self, folder: Path, quota: int, model: bytes) -> None:
        self.folder = folder
        self.quota = quota
        self.model = model
        self.seal = PageSeal(folder_secret(folder))
        self.pages: set[bytes] = set()
        self.used = 0
        self._own = folder / model.hex()[:32]
        self._oldest: list[tuple[int, str]] = []  # a heap of (mtime, name) of every file
        self._skipped: set[str] = set()
        self._seen = -1  # the count of changes when all files were known
        self._doubted = False  # whether files may differ from what is known here
        try:
            self._lock = _open_lock(folder)
            try:
                self._own.mkdir(mode=0o700, exist_ok=True)
                if why := why_not_private(self._own):
                    raise _unusable(self._own, why)
                with self._locked():
                    self._make_room(0)
            except BaseException:
                os.close(self._lock)
                raise
        except OSError as error:
            raise _unusable(folder, error.strerror or str(error)) from error

    def _name(self, key: bytes) -> str:
        page_hash, group = _KEY.unpack(key)
        return f"{self._own.name}/{page_hash.hex()}.{group}"

    def _key(self, name: str) -> bytes | None:
        model, _, rest = name.partition("/")
        page_hash, _, group = rest.partition(".")
        return page_key(bytes.fromhex(page_hash), int(group)) if model == self._own.name else None

    @property
    def changed(self) -> bool:
        return self._count() != self._seen

    def held(self, keys: Sequence[bytes]) -> list[bool]:
        """Which pages there are, also of other processes, if the disk can be read."""
        known = self.pages
        found = [key in known for key in keys]
        with suppress(OSError):
            if not all(found) and self.changed:
                return [there or self._exists(self._name(key)) for there, key in zip(found, keys, strict=True)]
        return found

    def _exists(self, name: str) -> bool:
        return name not in self._skipped and (self.folder / name).exists()

    def read(self, key: bytes, whole: memoryview, hash_rows: HashRows | None = None) -> bool:
        """Read a page's file into `whole`; False: it is gone or damaged, which is logged. Several threads may.

        `whole` has a byte more than the file, to notice one that is too long. hash_rows: may copy the contents in the
        same pass.
        """
        try:
            place = os.open(f"{self.folder}/{self._name(key)}", _READ)
            try:
                length = os.readv(place, [whole])
            finally:
                os.close(place)
        except FileNotFoundError:  # removed for its room, here or by another process
            self.pages.discard(key)
            return False
        except OSError as error:
            self._skip(key, error.strerror or str(error))
            return False
        if length == len(whole) - 1 and self.seal.holds(self.model, key, whole[:-1], hash_rows):
            return True
        self._skip(key, "it is damaged, or not this page of this model")
        return False

    def _skip(self, key: bytes, why: str) -> None:
        """Forget a page that cannot be read. Its file is replaced when the page is computed."""
        self._doubted = True
        self.pages.discard(key)
        self._tell(self._name(key), why)

    def _tell(self, name: str, why: str) -> None:
        if name not in self._skipped:
            self._skipped.add(name)
            log.warning("%s is skipped: %s", self.folder / name, why)

    def write(self, pages: Sequence[tuple[bytes, bytes]]) -> int:
        """Write pages that the folder lacks, by key; returns their count. Raises OSError, as on a full disk."""
        count = 0
        with self._locked():
            for key, contents in pages:
                if key not in self.pages and self._make_room(taken(OVERHEAD + len(contents))):
                    count += self._write(key, contents)
        return count

    def _write(self, key: bytes, contents: bytes) -> bool:
        name = self._name(key)
        path, draft = self.folder / name, self._own / _DRAFT
        with suppress(FileNotFoundError):
            before = path.lstat()  # of a file that could not be read
            if not stat.S_ISREG(before.st_mode):
                return False
            self._remove(path, before.st_size)
        self._announce()
        try:
            _write_new(draft, [self.seal.header(self.model, key, contents), contents])
            draft.rename(path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
        self.used += taken(OVERHEAD + len(contents))
        self.pages.add(key)
        self._skipped.discard(name)
        heapq.heappush(self._oldest, (time.time_ns(), name))
        return True

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark pages as used now, the first one last; and learn of pages of other processes."""
        with self._locked():
            now, known = time.time_ns(), self.pages
            for index, key in enumerate(reversed(keys)):
                if key in known:
                    with suppress(OSError):
                        os.utime(self.folder / self._name(key), ns=(now + index, now + index))

    def _make_room(self, nbytes: int) -> bool:
        """Remove files until `nbytes` more fit. False: they are more than the quota."""
        while self.used + nbytes > self.quota and self._oldest:
            recorded, name = heapq.heappop(self._oldest)
            try:
                status = (self.folder / name).lstat()
            except FileNotFoundError:  # replaced, or removed without the lock
                continue
            if status.st_mtime_ns > recorded:
                heapq.heappush(self._oldest, (status.st_mtime_ns, name))
                continue
            self._remove(self.folder / name, status.st_size)
            if (key := self._key(name)) is not None:
                self.pages.discard(key)
        return self.used + nbytes <= self.quota

    def _remove(self, path: Path, length: int) -> None:
        self._announce()
        path.unlink()
        self.used -= taken(length)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        lock(self._lock, self.folder / "lock")
        try:
            if self.changed or self._doubted:
                self._refresh()
            yield
        except BaseException:
            self._doubted = True  # look at all files again after an unfinished change
            raise
        finally:
            unlock(self._lock)

    def _count(self) -> int:
        return int.from_bytes(os.pread(self._lock, 8, 0), "little")

    def _announce(self) -> None:
        """Count a change before it is made; the lock is held, and all files are known."""
        self._seen = self._count() + 1
        os.pwrite(self._lock, self._seen.to_bytes(8, "little"), 0)

    def _refresh(self) -> None:
        """Look at all files. The lock is held, so drafts are of killed processes."""
        count, self._doubted = self._count(), False
        self.used = 2 * BLOCK
        pages, self._oldest = set(), []
        for name, entry in self._entries():
            if entry.name == _DRAFT:
                Path(entry.path).unlink()
            elif _PAGE.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                status = entry.stat(follow_symlinks=False)
                self.used += taken(status.st_size)
                self._oldest.append((status.st_mtime_ns, name))
                if (key := self._key(name)) is not None and name not in self._skipped:
                    pages.add(key)
            else:
                self._tell(name, "it is no KV page")
        heapq.heapify(self._oldest)
        self.pages, self._seen = pages, count

    def _entries(self) -> Iterator[tuple[str, os.DirEntry[str]]]:
        with os.scandir(self.folder) as models:
            for model in models:
                if _MODEL.fullmatch(model.name) and model.is_dir(follow_symlinks=False):
                    with os.scandir(model.path) as entries:
                        yield from ((f"{model.name}/{entry.name}", entry) for entry in entries)
                elif model.name not in ("secret", "lock"):
                    self._tell(model.name, "it is no folder of KV pages")

    def close(self) -> None:
        os.close(self._lock)
