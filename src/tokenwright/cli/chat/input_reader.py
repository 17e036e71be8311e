"""Input of `tokenwright chat`, from a person or a pipe: lines, messages of several lines, and answers to questions.

On a terminal GNU readline edits lines and keeps a paste together; with another line editor, the lines of a paste arrive
without a pause and are joined here. In a pipe a line is a message. Three quotes enclose a message of several lines.
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
SETTLED_S = 0.5  # after Ctrl-C: until then an end of the terminal's input is none


@dataclass(frozen=True, slots=True)
class Typed:
    """verbatim: the text is a message even if it begins with a slash."""

    text: str
    verbatim: bool = False


class _Resumed(Exception):
    """The process was stopped at the prompt (Ctrl-Z) and goes on; `text` is what had been typed."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


class InputReader:
    def __init__(self, terminal: bool | None = None) -> None:
        self.terminal = sys.stdin.isatty() and sys.stdout.isatty() if terminal is None else terminal
        self._editor: ModuleType | None = _line_editor() if self.terminal else None
        self._keeps_pastes = self._editor is not None and _keep_pastes(self._editor)

    def read(self, text: str = "") -> Typed | None:
        """The next message or command; None at the end of the input. text: typed already for the person.

        Ctrl-C drops a line that is half typed (the text is empty then), else it raises KeyboardInterrupt. Raises
        RequestError for three quotes that are not closed and for input that is not UTF-8, after which nothing more can
        be read.
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
            if not self.terminal or (first is None and not self._half_a_line()):
                raise
            write("\n")
            return Typed("")
        whole = "\n".join(lines)
        return Typed(whole, verbatim="\n" in whole)

    def _half_a_line(self) -> bool:
        """Whether something is typed at the prompt; unknown without a line editor, as the terminal drops it."""
        return self._editor is not None and bool(self._editor.get_line_buffer())

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
                raise RequestError(f"the message that {QUOTES} opens is not closed by {QUOTES}") from None
        lines.append(line.rstrip().removesuffix(QUOTES))
        return "\n".join(lines).removeprefix("\n").removesuffix("\n")

    def _pasted(self) -> Iterator[str]:
        """Further lines of a paste: those that are there already, if the editor does not keep a paste together."""
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
                time.sleep(0.02)  # Ctrl-C dropped what the editor was about to read, and it took that for an end
            except _Resumed as resumed:
                text = resumed.text
                write("\r")

    @contextmanager
    def _resumed(self, text: str) -> Iterator[None]:
        """Start with `text` typed already; when the process goes on after a stop, leave with what was typed by then."""
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
    """Block SIGCONT for threads that start from here on: only in this thread does it interrupt input() after `fg`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _CONTINUED)


def _line_editor() -> ModuleType | None:
    try:
        import readline
    except ImportError:  # a Python without it: input() reads plain lines
        return None
    return readline


def _keep_pastes(editor: ModuleType) -> bool:
    """Python switches that off at first."""
    from rich.console import Console

    if "libedit" in (editor.__doc__ or "") or Console().is_dumb_terminal:
        return False
    editor.parse_and_bind("set enable-bracketed-paste on")
    return True


@contextmanager
def exits_when_asked() -> Iterator[None]:
    """Run a block; if the terminal is closed or the process is asked to end, leave it by SystemExit."""

    def leave(number: int, _: object) -> NoReturn:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGHUP, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
