"""Writing to a stdout that cannot show every character, or that nobody reads any more."""

import errno
import io
import json
import os
import subprocess
import sys
import threading

import pytest

from tokenwright.cli.terminal.output import (
    Descriptor,
    GuardedText,
    lost_output,
    remark,
    show_anything,
    write,
    write_json,
)


def stdout(monkeypatch: pytest.MonkeyPatch, encoding: str) -> io.BytesIO:
    """A stdout in this encoding. Not a fixture: pytest puts its own in place before the test begins."""
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding=encoding))
    return raw


def test_characters_that_the_encoding_lacks_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = stdout(monkeypatch, "ascii")
    show_anything()
    assert write("é and 漢")
    assert raw.getvalue() == b"? and ?"


def test_json_escapes_what_the_encoding_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = stdout(monkeypatch, "ascii")
    write_json({"text": "é 漢"})
    assert json.loads(raw.getvalue()) == {"text": "é 漢"}


def test_json_keeps_characters_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = stdout(monkeypatch, "utf-8")
    write_json({"text": "漢"})
    assert "漢" in raw.getvalue().decode()


def guarded(descriptor: int) -> GuardedText:
    return GuardedText(Descriptor(descriptor), None)


def test_a_closed_pipe_is_told_and_what_follows_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    monkeypatch.setattr("sys.stdout", guarded(writing))
    assert write("read")
    assert os.read(reading, 10) == b"read"
    os.close(reading)
    assert not write("unread")
    assert not write("what comes after")
    assert lost_output() is None, "a reader that went away is no error"
    os.close(writing)


def test_a_full_disk_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    monkeypatch.setattr("sys.stdout", guarded(full))
    assert not write("lost")
    error = lost_output()
    assert error is not None and error.errno == errno.ENOSPC
    os.close(full)


def test_a_full_stderr_costs_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    reading, writing = os.pipe()
    monkeypatch.setattr("sys.stderr", guarded(full))
    monkeypatch.setattr("sys.stdout", guarded(writing))
    remark("a status line")
    assert write("the text")
    assert os.read(reading, 100) == b"the text"
    assert lost_output() is None
    for descriptor in (full, reading, writing):
        os.close(descriptor)


def test_a_pipe_that_is_full_for_a_while_gets_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    text = "0123456789" * 50_000
    got: list[bytes] = []

    def read() -> None:
        while sum(map(len, got)) < len(text):
            got.append(os.read(reading, 1 << 16))

    reader = threading.Thread(target=read)
    monkeypatch.setattr("sys.stdout", guarded(writing))
    reader.start()
    assert write(text)
    reader.join()
    assert b"".join(got).decode() == text
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize(
    ("redirected", "code", "told"),
    [
        (">/dev/full", 1, "tokenwright: standard output cannot be written (No space left on device); text was lost\n"),
        (">&-", 1, "tokenwright: standard output cannot be written (Bad file descriptor); text was lost\n"),
        ("2>/dev/full", 0, ""),
        ("<&- >&- 2>&-", 1, ""),
    ],
)
def test_streams_of_a_process(redirected: str, code: int, told: str) -> None:
    command = f'"$0" -m tokenwright --version {redirected}'
    done = subprocess.run(["sh", "-c", command, sys.executable], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, told)
    assert done.stdout.startswith("tokenwright ") == (code == 0)
