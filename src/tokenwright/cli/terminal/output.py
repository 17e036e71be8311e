"""Output of the commands: streamed text to stdout, remarks to stderr.

The streams of `guard` never raise. After an error, such as a full disk or a closed pipe, they drop further text.
"""

import errno
import io
import json
import os
import select
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from tokenwright.units import binary

LOST = 1
_SIZE = "{task.fields[size]}"


class Descriptor(io.RawIOBase):
    def __init__(self, number: int, failure: OSError | None = None) -> None:
        super().__init__()
        self.number = number
        self.failure = failure  # the first error, after which text is dropped

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        while self.failure is None:
            try:
                return os.write(self.number, view)
            except BlockingIOError:
                select.select((), (self.number,), ())
            except OSError as error:
                self.failure = error
        return len(view)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.number

    def isatty(self) -> bool:
        return self.failure is None and os.isatty(self.number)


class GuardedText(io.TextIOWrapper):
    """A text stream over a Descriptor. failure: its first error."""

    def __init__(self, descriptor: Descriptor, like: TextIO | None, **options: Any) -> None:
        encoding, errors = ("utf-8", "replace") if like is None else (like.encoding, like.errors)
        super().__init__(io.BufferedWriter(descriptor), encoding=encoding, errors=errors, **options)
        self._descriptor = descriptor

    @property
    def failure(self) -> OSError | None:
        return self._descriptor.failure


def guard() -> None:
    """Guard stdin, stdout and stderr. The null device replaces a closed one, or a later file would take its number."""
    closed = {number: _closed(number) for number in (0, 1, 2)}
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - it lives as long as the process
    # As in Python, a terminal gets each line, and a pipe what `write` flushes.
    sys.stdout = GuardedText(Descriptor(1, closed[1]), sys.stdout, line_buffering=closed[1] is None and os.isatty(1))
    sys.stderr = GuardedText(Descriptor(2, closed[2]), sys.stderr, line_buffering=True)


def _closed(number: int) -> OSError | None:
    try:
        os.fstat(number)
    except OSError as error:
        null = os.open(os.devnull, os.O_RDWR)
        if null != number:
            os.dup2(null, number)
            os.close(null)
        return error
    return None


def lost_output() -> OSError | None:
    """Flush, and return why text for stdout was lost; None if it was not, or its reader is gone."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    failure = sys.stdout.failure if isinstance(sys.stdout, GuardedText) else None
    return None if failure is None or failure.errno == errno.EPIPE else failure


def write(text: str) -> bool:
    """Write text to stdout and flush. Returns False if stdout takes no more text, so the command should end."""
    stdout = sys.stdout
    stdout.write(text)
    stdout.flush()
    return not (isinstance(stdout, GuardedText) and stdout.failure)


def write_json(value: dict[str, Any], indent: int | None = None) -> None:
    """Write JSON to stdout; escape non-ASCII characters unless its encoding is a UTF."""
    escaped = not sys.stdout.encoding.lower().startswith("utf")
    show_anything()  # lone surrogates, as in a typed name
    write(json.dumps(value, ensure_ascii=escaped, indent=indent) + "\n")


def show_anything() -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def on_terminal() -> bool:
    return sys.stderr.isatty()


def remark(text: str) -> None:
    """Print to stderr, on a terminal dimmed and wrapped between words."""
    if not on_terminal():  # rich is slow to import
        print(text, file=sys.stderr)
        return
    from rich.text import Text

    shown = console()
    shown.print(Text(text, style="dim"), soft_wrap=not shown.is_terminal)


def complain(text: str) -> None:
    if sys.stderr.isatty():
        text = textwrap.fill(text, shutil.get_terminal_size().columns, break_long_words=False, break_on_hyphens=False)
    print(text, file=sys.stderr)


def console() -> Any:
    """A rich Console on stderr that never hides the cursor, as Ctrl-C may end the process."""
    from rich.console import Console

    class PlainConsole(Console):
        def show_cursor(self, show: bool = True) -> bool:
            return super().show_cursor(True) if show else False

    return PlainConsole(stderr=True)


@contextmanager
def loading(model: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar. Yields a function that takes bytes (done, total)."""
    from rich.progress import BarColumn, Progress, TextColumn

    name, size = (TextColumn(of, style="dim", markup=False) for of in ("loading {task.description}", _SIZE))
    with Progress(name, BarColumn(), size, console=console(), transient=True) as progress:
        task = progress.add_task(model, total=None, size="")
        yield lambda done, total: progress.update(task, completed=done, total=total, size=binary(total))


@contextmanager
def bar(name: str, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on a terminal. Yields a function that takes (done, total)."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    shown = console()
    columns = (TextColumn("{task.description}", style="dim"), BarColumn(), TimeRemainingColumn())
    disabled = quiet or not shown.is_terminal
    with Progress(*columns, console=shown, transient=True, disable=disabled) as progress:
        task = progress.add_task(name, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
