"""Reading files of a model, a cache or a user's settings: regular files only.

Opening a pipe waits for its writer, perhaps for ever, and a device may never end. Here the opening never waits, and
anything but a regular file is an OSError, which each reader turns into the named error of its kind.
"""

import errno
import os
import stat
from io import BufferedReader, TextIOWrapper
from pathlib import Path


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
