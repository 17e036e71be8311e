"""`chat` as a person meets it: pastes, a stop and its end at the prompt, Markdown, questions before a file is lost."""

import os
import signal
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tests.cli.chat.terminal import terminal, wait_for_input
from tokenwright.cli.chat.answer_view import MarkdownAnswer, complete_blocks
from tokenwright.cli.chat.input_reader import InputReader, Typed
from tokenwright.errors import RequestError


def test_a_session_on_a_terminal(talker: Path, tmp_path: Path) -> None:
    """One process, because each takes seconds: a paste, Ctrl-Z and fg, /edit, a file that exists, --save at the end."""
    taken, saved = tmp_path / "taken.json", tmp_path / "saved.json"
    taken.write_text("mine")
    options = ("--save", str(saved))
    with terminal(talker, *options, kind="xterm", new_tokens=3, echo=True) as (until, type_, process):
        until("Ctrl-D leaves")
        until("> ")
        type_("\x1b[200~first line\nsecond line\x1b[201~")
        until("second line")
        wait_for_input(process)  # a signal that comes before that is seen at the next key
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        os.kill(process.pid, signal.SIGCONT)  # once, as a shell sends it: no other thread may take it
        until("> first line")  # the prompt again, with what was typed
        type_("\n")
        until("prompt tokens: ")
        until("> ")
        type_("/prompt\n")
        until("user: first line\r\nsecond line</s>")
        until("> ")
        type_("/edit\n")
        until("> first line")
        type_(" edited\n")
        until("prompt tokens: ")
        until("> ")
        type_("/prompt\n")
        until("user: first line\r\nsecond line edited</s>")
        until("> ")
        type_(f"/save {taken}\n")
        until(r"exists; overwrite it\? \[y/N\] ")
        type_("n\n")
        until("exists and is not overwritten")
        assert taken.read_text() == "mine"
        until("> ")
        type_(f"/save {taken}\n")
        until(r"overwrite it\? \[y/N\] ")
        type_("y\n")
        until("2 messages saved to")
        until("> ")
        type_("/bye\n")
        until("2 messages saved to", ends=True)
        assert process.wait() == 0
    assert saved.read_text() == taken.read_text() != "mine"


def test_ctrl_c_drops_what_is_typed_and_at_an_empty_line_leaves(talker: Path) -> None:
    """The second of two at an empty line leaves; a line in between, dropped or not, begins to count anew."""
    with terminal(talker, kind="xterm", new_tokens=3, echo=True) as (until, type_, process):
        until("Ctrl-D leaves")
        until("> ")
        for typed in ("half a line", '"""one\nhalf a message'):
            until("Ctrl-C again leaves", nudge="\x03")
            until("> ")
            type_(typed)
            until(typed[-8:])
            assert "leaves" not in until("> ", nudge="\x03")
        type_("/system short\n")
        until("the system message is set")
        until("> ")
        type_("/prompt\n")
        until("there is no message yet|system: short")
        until("> ")
        until("Ctrl-C again leaves", nudge="\x03")
        until("> ")
        until("", nudge="\x03", ends=True)
        assert process.wait() in (0, -signal.SIGINT)


def test_a_terminal_that_is_closed_saves(talker: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    with terminal(talker, "--save", str(saved), new_tokens=2) as (until, type_, process):
        until("> ")
        type_("Hello\n")
        until("prompt tokens: ")
        until("> ")
        until("", sent=signal.SIGHUP, ends=True)
        assert process.wait() in (128 + signal.SIGHUP, -signal.SIGHUP)  # a further one may meet its end
    assert "Hello" in saved.read_text()


def lines(*texts: str) -> Callable[[str], str]:
    """An input() that gives these lines."""
    left: Iterator[str] = iter(texts)

    def read(prompt: str = "") -> str:
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    return read


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        (("/help",), Typed("/help")),
        (('"""', "/one", "", " two ", '"""'), Typed("/one\n\n two ", verbatim=True)),
        (('"""one"""',), Typed("one", verbatim=True)),
        (('  """one', 'two"""  '), Typed("one\ntwo", verbatim=True)),
        (("/bye\r",), Typed("/bye")),
        (('"""one\r', '"""\r'), Typed("one", verbatim=True)),
        ((), None),
    ],
)
def test_three_quotes_hold_several_lines(
    monkeypatch: pytest.MonkeyPatch, typed: tuple[str, ...], found: Typed | None
) -> None:
    monkeypatch.setattr("builtins.input", lines(*typed))
    assert InputReader(terminal=False).read() == found


def test_quotes_that_stay_open_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lines('"""one', "two"))
    with pytest.raises(RequestError, match="opens is not closed"):
        InputReader(terminal=False).read()


def test_lines_that_come_at_once_are_one_message_without_gnu_readline(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where Python has libedit, which knows no pastes."""
    reader = InputReader(terminal=False)
    reader.terminal = True
    monkeypatch.setattr("builtins.input", lines("one", "two", "three"))
    waiting = iter([True, True, False, False])
    monkeypatch.setattr("select.select", lambda *_: ([0] if next(waiting) else [], [], []))
    assert reader.read() == Typed("one\ntwo\nthree", verbatim=True)


def drawn(text: str, cut: int, height: int = 12) -> str:
    """What stays on a terminal after an answer in pieces of `cut` characters."""
    out = StringIO()
    console = Console(file=out, force_terminal=True, width=40, height=height, color_system=None, legacy_windows=False)
    with MarkdownAnswer(console) as show:
        for at in range(0, len(text), cut):
            assert show(text[at : at + cut])
    return screen(out.getvalue())


def screen(output: str) -> str:
    """A terminal's screen after this output, as far as rich writes it: up, erase, return, newline."""
    rows, row, column = [""], 0, 0
    at = 0
    while at < len(output):
        if output[at] == "\x1b":
            end = next(i for i in range(at + 2, len(output)) if output[i].isalpha())
            code, kind = output[at + 2 : end], output[end]
            row -= int(code or 1) if kind == "A" else 0
            if kind == "K":
                rows[row] = ""
            at = end + 1
            continue
        if output[at] == "\n":
            row, column = row + 1, 0
            rows += [""] * (row + 1 - len(rows))
        elif output[at] == "\r":
            column = 0
        else:
            rows[row] = rows[row].ljust(column)[:column] + output[at] + rows[row][column + 1 :]
            column += 1
        at += 1
    return "\n".join(line.rstrip() for line in rows).rstrip("\n")


ANSWER = "# Title\n\nOne **bold** word.\n\n- a\n- b\n\n- c\n\n```python\nx = 1\n\ny = 2\n```\n\n1. one\n2. two\n\nEnd."


@pytest.mark.parametrize("cut", [1, 3, len(ANSWER)])
def test_markdown_stays_as_if_it_were_drawn_at_once(cut: int) -> None:
    shown = drawn(ANSWER, cut)
    assert [words for words in ("Title", "One bold word.", "• c", "y = 2", "2 two", "End.") if words not in shown] == []
    assert "**" not in shown and "```" not in shown
    assert shown == drawn(ANSWER, 7)


def test_a_block_taller_than_the_terminal_is_printed_whole() -> None:
    text = "\n".join(f"- item {at}" for at in range(30))
    shown = drawn(text, 5, height=8)
    assert [line.strip() for line in shown.splitlines() if line.strip()] == [f"• item {at}" for at in range(30)]


def test_blocks_are_complete_when_the_next_one_begins() -> None:
    assert complete_blocks("a\n\n") == ([], "a\n\n")
    assert complete_blocks("a\n\nb") == ([], "a\n\nb")  # which may become the item of a list
    assert complete_blocks("- a\n\n  more\n\nb\n") == (["- a\n\n  more"], "b\n")
    assert complete_blocks("1. a\n\n2") == ([], "1. a\n\n2")
    assert complete_blocks("```\na\n\nb\n") == ([], "```\na\n\nb\n")
    assert complete_blocks("```\na\n\nb\n```\n\nc\n\nd\n\ne") == (["```\na\n\nb\n```", "c"], "d\n\ne")
    assert complete_blocks("- a\n\n- b\n\nc\n") == (["- a\n\n- b"], "c\n")
    assert complete_blocks("[a]: /b\n\na\n\n- b\n") == (["[a]: /b\n\na"], "- b\n")
    assert complete_blocks("~~~~\n```\n\n~~~\n~~~~\n\nc\n") == (["~~~~\n```\n\n~~~\n~~~~"], "c\n")
