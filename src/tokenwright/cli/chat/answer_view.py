"""Shows an answer of `tokenwright chat` while it grows: as plain text, or as Markdown on a terminal.

Complete Markdown blocks are printed once. Of the growing one, the last lines that fit the terminal are redrawn.
"""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from types import TracebackType
from typing import Protocol, Self

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment

from tokenwright.cli.terminal.output import write

PAUSE = 0.08  # seconds between two drawings of the growing block
_MARKDOWN = MarkdownIt().enable("table")  # as rich reads it


class AnswerView(AbstractContextManager["AnswerView"], Protocol):
    """Called with each piece of text; returns False once the reader is gone."""

    def __call__(self, text: str) -> bool: ...


class PlainAnswer(AnswerView):
    def __call__(self, text: str) -> bool:
        return write(text)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        write("\n")


class MarkdownAnswer(AnswerView):
    def __init__(self, console: Console) -> None:
        self._console = console
        self._growing = ""  # the unfinished block
        self._blocks = 0
        self._drawn = 0.0
        self._live = Live(
            console=console, transient=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )

    def __call__(self, text: str) -> bool:
        done, self._growing = complete_blocks(self._growing + text)
        for block in done:
            self._print(block)
        now = time.monotonic()
        if done or now - self._drawn >= PAUSE:
            self._live.update(_Block(self._growing, tail=True), refresh=True)
            self._drawn = now
        return True

    def __enter__(self) -> Self:
        self._live.start()
        self._console.show_cursor(True)  # a shell that takes over (Ctrl-Z) needs one
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._live.update("", refresh=True)
        self._live.stop()
        if self._growing.strip() or not self._blocks:
            self._print(self._growing)

    def _print(self, block: str) -> None:
        if self._blocks:
            self._console.print()
        self._console.print(_Block(block))
        self._blocks += 1


class _Block:
    def __init__(self, text: str, *, tail: bool = False) -> None:
        self._text = text
        self._tail = tail

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(Markdown(self._text), options.update(height=None), pad=False)
        while lines and _is_blank(lines[0]):
            del lines[0]
        while lines and _is_blank(lines[-1]):
            del lines[-1]
        for line in lines[-max(1, console.height - 2) :] if self._tail else lines:
            yield from line
            yield Segment.line()


def _is_blank(line: Sequence[Segment]) -> bool:
    return all(not segment.text.strip() and (segment.style is None or not segment.style.bgcolor) for segment in line)


def complete_blocks(text: str) -> tuple[list[str], str]:
    """The complete Markdown blocks of a growing text, and the rest. A block is complete once another has a line.

    >>> complete_blocks("One\\ntwo\\n\\nThree\\nfour")
    (['One\\ntwo'], 'Three\\nfour')
    """
    finished = text[: text.rfind("\n") + 1]
    blocks = [one for one in _MARKDOWN.parse(finished) if one.level == 0 and one.map and one.nesting >= 0]
    starts = [0, *(one.map[0] for one in blocks[1:] if one.map)]
    lines = text.split("\n")
    return ["\n".join(lines[a:b]).strip("\n") for a, b in pairwise(starts)], "\n".join(lines[starts[-1] :])
