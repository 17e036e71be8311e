"""Writing to a stdout that cannot show every character, or that nobody reads any more."""

import io
import json
import os

import pytest

from tokenwright.cli.output import show_anything, write, write_json


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


def test_a_closed_pipe_is_told_and_then_written_to_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w", encoding="utf-8") as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        assert write("read")
        assert os.read(reading, 10) == b"read"
        os.close(reading)
        assert not write("unread")
        assert write("what comes after")
