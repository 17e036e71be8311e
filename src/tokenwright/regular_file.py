"""Files that another user or process may have prepared: of a model, of a cache, of a user's settings.

Opening a pipe waits for its writer, perhaps for ever, and a device may never end. Here the opening never waits, and
anything but a regular file is an OSError, which each reader turns into the named error of its kind. A lock that another
process keeps is an OSError as well, after a while.
"""

import errno
import logging
import os
import stat
import time
from io import BufferedReader, TextIOWrapper
from pathlib import Path

LOCK_S = 10.0  # seconds that a process waits for another one's lock
TOLD_S = 2.0  # after which the log says that it waits
_PAUSE_S = 0.005

log = logging.getLogger(__name__)


def open_regular(path: Path, *, links: bool = True) -> BufferedReader:
    """A regular file to read. Raises OSError for anything else; without `links` for a symbolic link as well."""
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
    """The content of a regular file. Raises OSError for anything else."""
    with open_regular(path) as stream:
        return stream.read()


def read_regular_text(path: Path) -> str:
    """The text of a regular file in UTF-8. Raises OSError for anything else, UnicodeDecodeError for other bytes."""
    with open_regular(path) as stream, TextIOWrapper(stream, encoding="utf-8") as text:
        return text.read()


def kind_of(mode: int) -> str:
    """The kind of file that is not a regular one, in words; `mode` is that of its stat."""
    kinds = {stat.S_ISLNK: "a symbolic link", stat.S_ISDIR: "a folder"}
    return next((words for test, words in kinds.items() if test(mode)), "a device or a pipe")


def why_not_private(folder: Path) -> str:
    """Why other users may have prepared what a folder holds, in words; "" if none but its owner and group can."""
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
    import fcntl  # here: not every platform that reads models has locks

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
    """Release the lock of an open file."""
    import fcntl

    fcntl.flock(place, fcntl.LOCK_UN)
