"""Where a prompt comes from, and how numbers are told."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tokenwright.cli.options.shared import given, read_prompt
from tokenwright.cli.terminal.statistics import seconds
from tokenwright.errors import RequestError
from tokenwright.units import binary


def test_the_argument_is_taken_as_it_is() -> None:
    assert read_prompt(" two\nlines\n", None) == " two\nlines\n"
    assert read_prompt("", None) == ""


@pytest.mark.parametrize(
    ("content", "prompt"),
    [
        (b"a line\n", "a line"),
        (b"a line\r\n", "a line"),
        (b"two\n\n", "two\n"),
        (b"none", "none"),
        (b"", ""),
        (b"NUL \0 is text", "NUL \0 is text"),
        (b"\xef\xbb\xbfa byte order mark", "a byte order mark"),
        ("é 🙂".encode(), "é 🙂"),
    ],
)
def test_a_file_loses_one_final_newline(tmp_path: Path, content: bytes, prompt: str) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(content)
    assert read_prompt(None, file) == prompt


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"abc\xff")
    with pytest.raises(RequestError, match=r"prompt\.txt is not UTF-8 text \(byte 3 is wrong\)"):
        read_prompt(None, file)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"cannot be read from .*nothing: No such file"):
        read_prompt(None, tmp_path / "nothing")
    with pytest.raises(RequestError, match="Is a directory"):
        read_prompt(None, tmp_path)


def test_one_prompt_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="two prompts are given; leave out PROMPT or --file"):
        read_prompt("text", Path("file"))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    with pytest.raises(RequestError, match='give a prompt: "TEXT" in quotes'):
        read_prompt(None, None)


@pytest.mark.parametrize("prompt", [(), ("-",)])
def test_standard_input(refused: Callable[..., str], prompt: tuple[str, ...]) -> None:
    assert "the prompt in standard input is not UTF-8" in refused("generate", *prompt, input=b"\xff")
    assert "standard input is empty: no prompt came" in refused("generate", *prompt, input=b"")


def test_an_endless_prompt_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenwright.cli.options.shared.MOST_PROMPT", 1 << 20)
    with pytest.raises(RequestError, match="the prompt in /dev/zero has more than 1 MiB"):
        read_prompt(None, Path("/dev/zero"))


def test_given_leaves_out_none_alone() -> None:
    assert given(a=0, b=None, c=False, d="") == {"a": 0, "c": False, "d": ""}


@pytest.mark.parametrize(
    ("count", "told"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (73728, "72.0 KiB"),
        (2**20, "1.0 MiB"),
        (2**31, "2.0 GiB"),
    ],
)
def test_bytes(count: int, told: str) -> None:
    assert binary(count) == told


@pytest.mark.parametrize(
    ("value", "told"),
    [(0.0, "0 ms"), (0.01234, "12.3 ms"), (0.9994, "999 ms"), (0.9999, "1 s"), (12.3, "12.3 s")],
)
def test_times(value: float, told: str) -> None:
    assert seconds(value) == told
