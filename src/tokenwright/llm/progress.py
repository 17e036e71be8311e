"""A progress bar for many prompts, on stderr."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Report = Callable[[int, int], None]  # texts that have ended, tokens written


@contextmanager
def progress_bar(total: int) -> Iterator[Report]:
    """A bar of `total` prompts; yields the function to call after each step."""
    from rich.console import Console  # takes longer to import than most of this package
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task, began = bar.add_task("prompts", total=total), time.monotonic()

        def report(ended: int, tokens: int) -> None:
            speed = tokens / max(1e-9, time.monotonic() - began)
            bar.update(task, completed=ended, description=f"prompts, {speed:,.0f} tok/s")

        yield report
