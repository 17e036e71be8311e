"""Files that another user or process may have prepared. Opening never waits, as it would for a pipe's writer."""

import errno
import logging
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from threading import get_ident

LOCK_S = 10.0  # seconds: the longest wait for another process's lock
TOLD_S = 2.0  # seconds, after which the log says so
_PAUSE_S = 0.005
_DRAFT = re.compile(r"\.(?P<target>.+)\.draft-\d+-\d+", re.DOTALL)

log = logging.getLogger(__name__)


def open_regular(path: Path, *, links: bool = True) -> BufferedReader:
    """Raises OSError for anything but a regular file; without `links` for a symbolic link as well."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    place = os.open(path, flags if links else flags | os.O_NOFOLLOW)
    try:
        mode = os.fstat(place).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, f"it is {kind_of(mode)}, not a file", str(path))
    except BaseException:
        os.close(place)
        raise
    return os.fdopen(place, "rb")


def read_regular(path: Path) -> bytes:
    """Raises OSError for anything but a regular file."""
    with open_regular(path) as stream:
        return stream.read()


def read_regular_text(path: Path) -> str:
    """As UTF-8. Raises OSError as `read_regular`, UnicodeDecodeError for other bytes."""
    with open_regular(path) as stream, TextIOWrapper(stream, encoding="utf-8") as text:
        return text.read()


def kind_of(mode: int) -> str:
    """The kind of a file that is not regular, in words, from its stat's mode."""
    kinds = {stat.S_ISLNK: "a symbolic link", stat.S_ISDIR: "a folder"}
    return next((words for test, words in kinds.items() if test(mode)), "a device or a pipe")


def why_not_private(folder: Path) -> str:
    """Why other users may have prepared a folder's content, in words; "" if only its owner and group can."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        return f"it is {kind_of(found.st_mode)}, not a folder"
    if found.st_uid not in (os.geteuid(), 0):
        return f"it belongs to another user ({found.st_uid}); give a folder of your own"
    if found.st_mode & stat.S_IWOTH:
        return "all users may write to it; take that right away (chmod o-w), or give another folder"
    return ""


def lock(place: int, name: Path) -> None:
    """Lock an open file for this process (flock). Raises TimeoutError if another one keeps it for LOCK_S seconds."""
    import fcntl  # not every platform that reads models has locks

    began, told = time.monotonic(), False
    while True:
        try:
            fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            waited = time.monotonic() - began
        if waited > LOCK_S:
            raise TimeoutError(errno.ETIMEDOUT, f"another process has held the lock {name} for {LOCK_S:.0f} seconds")
        if waited > TOLD_S and not told:
            told = True
            log.warning("waiting for another process that holds the lock %s", name)
        time.sleep(_PAUSE_S)


def unlock(place: int) -> None:
    import fcntl

    fcntl.flock(place, fcntl.LOCK_UN)


def draft_file(target: Path) -> AbstractContextManager[Path]:
    """A new empty file that becomes `target` if the block ends well. Raises OSError."""
    return _draft(target, folder=False)


def draft_folder(target: Path) -> AbstractContextManager[Path]:
    """As `draft_file`, for a folder. Raises OSError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    return _draft(target, folder=True)


def abandoned(folder: Path, target: str | None = None) -> list[Path]:
    """Drafts (of `target`) that no process writes any more."""
    try:
        found = sorted(folder.iterdir())
    except OSError:
        return []
    matches = ((one, _DRAFT.fullmatch(one.name)) for one in found)
    drafts = [one for one, match in matches if match and (target is None or _short(target) == match["target"])]
    return [one for one in drafts if not _written(one)]


def remove(path: Path) -> bool:
    """Remove a file or a folder's tree; False if that fails."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def sweep(folder: Path, target: str | None = None) -> None:
    for draft in abandoned(folder, target):
        discard(draft)


def discard(draft: Path) -> None:
    """Remove a draft unless it is being written; its lock is held meanwhile, so that none begins."""
    with _locked_by_none(draft) as free:
        if free:
            remove(draft)


def _short(name: str) -> str:
    """Cut to leave room for what a draft's name adds."""
    return os.fsencode(name)[:200].decode(errors="ignore")


@contextmanager
def _draft(target: Path, *, folder: bool) -> Iterator[Path]:
    draft = target.with_name(f".{_short(target.name)}.draft-{os.getpid()}-{get_ident()}")
    place = _locked(draft, folder)
    try:
        yield draft
        draft.replace(target)
    finally:
        remove(draft)
        os.close(place)


def _locked(draft: Path, folder: bool) -> int:
    """Returns the open descriptor that holds the lock."""
    while True:
        if folder:
            draft.mkdir()
        place = os.open(draft, os.O_RDONLY if folder else os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        with suppress(OSError, ImportError):  # a file system or a platform without locks
            lock(place, draft)
        try:
            if os.path.samestat(os.fstat(place), draft.lstat()):
                return place
        except FileNotFoundError:  # swept between its making and its locking
            pass
        os.close(place)


def _written(draft: Path) -> bool:
    with _locked_by_none(draft) as free:
        return not free


@contextmanager
def _locked_by_none(draft: Path) -> Iterator[bool]:
    """Whether a draft could be locked, or is a link; it stays locked meanwhile."""
    import fcntl

    try:
        place = os.open(draft, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        yield draft.is_symlink()
        return
    free = False
    with suppress(OSError):  # locked, or a file system without locks
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
        free = True
    try:
        yield free
    finally:
        os.close(place)
