"""Reads messages of `tokenwright chat` from a terminal or a pipe: a line, or lines enclosed in three quotes.

GNU readline keeps a paste together; with other line editors its lines are joined here.
"""

import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import NoReturn

from tokenwright.cli.terminal.interrupt import since_interrupt
from tokenwright.cli.terminal.output import write
from tokenwright.errors import RequestError

QUOTES = '"""'
PROMPT, MORE = "> ", ". "
_CONTINUED = (signal.SIGCONT,)
SETTLED_S = 0.5  # after Ctrl-C, during which a terminal's input may seem to end


@dataclass(frozen=True, slots=True)
class Typed:
    text: str
    verbatim: bool = False  # the text is a message even if it begins with a slash


class _Resumed(Exception):
    """The process continues after Ctrl-Z at the prompt. text: what was typed before."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


class InputReader:
    def __init__(self, terminal: bool | None = None) -> None:
        self.terminal = sys.stdin.isatty() and sys.stdout.isatty() if terminal is None else terminal
        self._editor: ModuleType | None = _line_editor() if self.terminal else None
        self._keeps_pastes = self._editor is not None and _keep_pastes(self._editor)

    def read(self, text: str = "") -> Typed | None:
        """Read the next message or command; None at the end of input. text: what the line starts with.

        Ctrl-C drops a half-typed line, else raises KeyboardInterrupt. Raises RequestError for unclosed quotes, and for
        input that is not UTF-8.
        """
        first = None
        try:
            first = self._line(PROMPT, text)
            if first.lstrip().startswith(QUOTES):
                return Typed(self._quoted(first.lstrip()[len(QUOTES) :]), verbatim=True)
            lines = [first, *self._pasted()]
        except EOFError:
            if self.terminal:
                write("\n")
            return None
        except UnicodeDecodeError as error:
            raise RequestError(f"a line of the input is not UTF-8 text: {error.reason}") from error
        except KeyboardInterrupt:
            if not self.terminal or (first is None and not (self._editor and self._editor.get_line_buffer())):
                raise
            write("\n")
            return Typed("")
        whole = "\n".join(lines)
        return Typed(whole, verbatim="\n" in whole)

    def agrees(self, question: str) -> bool:
        if not self.terminal:
            return False
        try:
            return self._line(f"{question} [y/N] ").strip().lower() in ("y", "yes")
        except EOFError:
            write("\n")
            return False

    def _quoted(self, line: str) -> str:
        lines = []
        while not line.rstrip().endswith(QUOTES):
            lines.append(line)
            try:
                line = self._line(MORE)
            except EOFError:
                raise RequestError(f"the message that {QUOTES} opens is not closed; end it by {QUOTES}") from None
        lines.append(line.rstrip().removesuffix(QUOTES))
        return "\n".join(lines).removeprefix("\n").removesuffix("\n")

    def _pasted(self) -> Iterator[str]:
        if self.terminal and not self._keeps_pastes:
            while select.select([sys.stdin], [], [], 0)[0]:
                yield self._line("")

    def _line(self, prompt: str, text: str = "") -> str:
        if not self.terminal:
            return input().removesuffix("\r")  # a line that ends as on Windows
        while True:
            try:
                with self._resumed(text):
                    return input(prompt)
            except EOFError:
                if since_interrupt() > SETTLED_S:
                    raise
                time.sleep(0.02)  # Ctrl-C emptied the input, which looks like its end
            except _Resumed as resumed:
                text = resumed.text
                write("\r")

    @contextmanager
    def _resumed(self, text: str) -> Iterator[None]:
        """Start the line with `text`; raise `_Resumed` when the process continues after a stop."""
        editor = self._editor
        if editor is not None:
            editor.set_startup_hook((lambda: editor.insert_text(text)) if text else None)

        def resume(*_: object) -> NoReturn:
            raise _Resumed(editor.get_line_buffer() if editor is not None else "")

        before = signal.signal(signal.SIGCONT, signal.SIG_IGN)  # drops one that came during an answer
        signal.signal(signal.SIGCONT, resume)
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _CONTINUED)
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_BLOCK, _CONTINUED)
            signal.signal(signal.SIGCONT, before)
            if editor is not None:
                editor.set_startup_hook(None)


def keep_from_threads() -> None:
    """Block SIGCONT in threads that start later, so that it interrupts input() after `fg`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _CONTINUED)


def _line_editor() -> ModuleType | None:
    try:
        import readline
    except ImportError:  # a Python without it: input() reads plain lines
        return None
    return readline


def _keep_pastes(editor: ModuleType) -> bool:
    from rich.console import Console

    if "libedit" in (editor.__doc__ or "") or Console().is_dumb_terminal:
        return False
    editor.parse_and_bind("set enable-bracketed-paste on")
    return True


@contextmanager
def exits_when_asked() -> Iterator[None]:
    """Raise SystemExit in the block on SIGHUP and SIGTERM."""

    def leave(number: int, _: object) -> NoReturn:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGHUP, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
