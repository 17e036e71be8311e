"""Files and folders while they are written: hidden beside their target, and renamed to it when they are complete.

The writer of a draft holds a lock on it (flock), which the system releases when the process ends, however it ends. So a
process that gets the lock knows that the draft has no writer any more, and may remove it. Where a file system has no
locks, drafts are written without, and never removed by others.
"""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import get_ident

from tokenwright.regular_file import lock as wait_for_lock

_NAME = re.compile(r"\.(?P<target>.+)\.draft-\d+-\d+", re.DOTALL)


@contextmanager
def draft_file(target: Path) -> Iterator[Path]:
    """A new empty file beside `target`, which becomes `target` if the block ends well. Raises OSError."""
    with _draft(target, folder=False) as draft:
        yield draft


@contextmanager
def draft_folder(target: Path) -> Iterator[Path]:
    """A new empty folder beside `target`, which becomes `target` if the block ends well. Raises OSError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with _draft(target, folder=True) as draft:
        yield draft


def abandoned(folder: Path, target: str | None = None) -> list[Path]:
    """The drafts in a folder (of the file or folder named `target`) that no process writes any more."""
    try:
        found = sorted(folder.iterdir())
    except OSError:
        return []
    matches = ((one, _NAME.fullmatch(one.name)) for one in found)
    drafts = [one for one, match in matches if match and target in (None, match["target"])]
    return [one for one in drafts if not _written(one)]


def remove(path: Path) -> bool:
    """Remove a file or a folder with all that is in it; False if it could not be removed."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def sweep(folder: Path, target: str | None = None) -> None:
    """Remove the drafts that killed writers have left, as `abandoned` finds them."""
    for draft in abandoned(folder, target):
        remove(draft)


@contextmanager
def _draft(target: Path, *, folder: bool) -> Iterator[Path]:
    draft = target.with_name(f".{target.name}.draft-{os.getpid()}-{get_ident()}")
    lock = _locked(draft, folder)
    try:
        yield draft
        draft.replace(target)
    finally:
        remove(draft)
        os.close(lock)


def _locked(draft: Path, folder: bool) -> int:
    """Make the draft and lock it; returns the open descriptor that holds the lock."""
    while True:
        if folder:
            draft.mkdir()
        lock = os.open(draft, os.O_RDONLY if folder else os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        with suppress(OSError):  # a file system without locks
            wait_for_lock(lock, draft)
        try:
            if os.path.samestat(os.fstat(lock), draft.lstat()):
                return lock
        except FileNotFoundError:  # swept between its making and its locking
            pass
        os.close(lock)


def _written(draft: Path) -> bool:
    """Whether a process writes the draft, as far as can be found out."""
    import fcntl

    try:
        lock = os.open(draft, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return not draft.is_symlink()
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # locked, or a file system without locks
        return True
    finally:
        os.close(lock)
    return False
