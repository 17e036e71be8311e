"""Where the commands write: text to stdout as it comes, remarks about it to stderr."""

import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def write(text: str) -> bool:
    """Text to stdout, at once. False if its reader has gone (a closed pipe); a command then ends quietly."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing complains when Python closes it
        return False
    return True


def write_json(value: dict[str, Any], indent: int | None = None) -> None:
    """One object to stdout; characters as they are where the encoding has them all, escaped where not."""
    escaped = not sys.stdout.encoding.lower().startswith("utf")
    write(json.dumps(value, ensure_ascii=escaped, indent=indent) + "\n")


def show_anything() -> None:
    """Let stdout replace the characters that its encoding lacks, rather than fail on them."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def remark(text: str) -> None:
    """One quiet line on stderr; dim where that is a terminal."""
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True).print(Text(text, style="dim"), soft_wrap=True)


@contextmanager
def bar(name: str, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr, where that is a terminal and not `quiet`; to be called with (done, in all)."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", style="dim"), BarColumn(), TimeRemainingColumn())
    disabled = quiet or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=disabled) as progress:
        task = progress.add_task(name, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
