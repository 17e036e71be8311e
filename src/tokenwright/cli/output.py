"""Output of the commands: streamed text to stdout, remarks to stderr."""

import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def write(text: str) -> bool:
    """Write text to stdout and flush. False if the pipe is closed; the command then ends without an error."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that Python's flush at exit does not fail
        return False
    return True


def write_json(value: dict[str, Any], indent: int | None = None) -> None:
    """Write one JSON object to stdout; escape non-ASCII characters unless stdout's encoding is a UTF."""
    escaped = not sys.stdout.encoding.lower().startswith("utf")
    write(json.dumps(value, ensure_ascii=escaped, indent=indent) + "\n")


def show_anything() -> None:
    """Make stdout replace characters that its encoding lacks, instead of failing on them."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def remark(text: str) -> None:
    """Write one line to stderr, dimmed if that is a terminal."""
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True).print(Text(text, style="dim"), soft_wrap=True)


@contextmanager
def bar(name: str, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr, if that is a terminal and not `quiet`; call the result with (done, total)."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", style="dim"), BarColumn(), TimeRemainingColumn())
    disabled = quiet or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=disabled) as progress:
        task = progress.add_task(name, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
