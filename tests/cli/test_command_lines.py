"""Random command lines, drawn from the options' own grammar, with wrong values, streams that fail, and Ctrl-C.

Whatever is typed: the exit code is one that docs/commands.md lists, nothing is a traceback, and no file appears that
was not asked for.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.cli.fork_server import ForkServer
from tests.profiles import examples
from tokenwright.cli import app

CODES = {0, 1, 2, 4, 130}
GROUP: Any = typer.main.get_command(app)
LONG = ("bench", "explore", "serve")  # they run for long, or until Ctrl-C
WRITES = {"out", "cache_file", "folder", "save"}  # parameters whose value is a file or folder to write

WHOLE = st.sampled_from(["-1", "0", "1", "2", "3", "16", "4097", "2147483649", "9" * 40, "1.5", "x", ""])
NUMBER = st.sampled_from(["-1", "0", "0.5", "1", "2", "1e9", "nan", "inf", "1e400", "x", ""])
TEXT = st.sampled_from(["x", "once upon", "", "\udcff", "é 漢 🙂", "@nowhere", "7:1", "-", "--", "a" * 3000, "null"])
PLACE = st.sampled_from(["new", "new.svg", "there.txt", "there", "no/new", "/dev/full", "", "a" * 300, "."])
NAMED = {
    "model": st.sampled_from(["{model}", "{model}", "{model}", "stories", "nowhere", "no/where", "there.txt", ""]),
    "prompt": st.sampled_from(["once", "x y z", "", "-", "\udcff", "a" * 3000]),
    "device": st.sampled_from(["auto", "cpu", "cuda", "cuda:9", "toaster", ""]),
    "dtype": st.sampled_from(["auto", "float32", "bfloat16", "int3"]),
    "weights": st.sampled_from(["native", "int8", "int4:64", "int8:7", "x"]),
    "kv": st.sampled_from(["native", "int8", "k=int8,v=int4,first=3", "fp8", "native=0+-1", "x", "first=x"]),
    "kv_memory": st.sampled_from(["64MiB", "1KiB", "64", "0", "9TB", "x"]),
    "memory": st.sampled_from(["24GB", "24", "x"]),
    "context": st.sampled_from(["128", "8k", "0", "x"]),
    "bandwidth": st.sampled_from(["30GB/s", "30", "x"]),
    "json_schema": st.sampled_from(['{"type": "null"}', '{"type": "string"}', "{", "@nowhere", '{"type": 3}']),
    "regex": st.sampled_from(["[0-9]+", "[a-z]{300}", "(", ""]),
    "lark": st.sampled_from(['start: "a"', "start:", "@there.txt"]),
    "threads": st.sampled_from(["1", "2", "0", "x"]),
    "port": st.sampled_from(["0", "99999", "x"]),
    "shape": st.sampled_from(["tiny", "huge"]),
    "max_tokens": st.sampled_from(["0", "1", "5", "30", "-1", "x"]),
    "new_tokens": st.sampled_from(["0", "1", "5", "30", "-1", "x"]),
    "beams": st.sampled_from(["1", "2", "4", "0", "257"]),
    "n": st.sampled_from(["1", "2", "0", "257"]),
    "best_of": st.sampled_from(["1", "2", "0", "257"]),
    "max_seconds": st.sampled_from(["0", "0.01", "60", "-1"]),
    "window": st.sampled_from(["16", "0", "-3", "4k", "x"]),
}  # fmt: skip


def value(parameter: Any) -> st.SearchStrategy[str]:
    """Values of an option or argument, by its name and its type: good ones and wrong ones."""
    kind = str(parameter.type)
    if parameter.name == "named" or (parameter.name == "folder" and "[MODEL]" in (parameter.metavar or "")):
        return st.one_of(NAMED["model"], PLACE)
    usual = WHOLE if kind == "INT" else NUMBER if kind == "FLOAT" else PLACE if "Path" in kind else TEXT
    return NAMED.get(parameter.name, usual)


@st.composite
def lines(draw: st.DrawFn, names: tuple[str, ...]) -> tuple[list[str], set[str]]:
    """A command line, and the names of files that it asks for."""
    command = GROUP.commands[draw(st.sampled_from(names))]
    words, asked = [command.name], set()
    options = [one for one in command.params if one.param_type_name == "option" and one.name != "help"]
    chosen = draw(st.lists(st.sampled_from(options), max_size=5, unique_by=lambda one: one.name))
    usual = [one for one in options if one.name in ("model", "max_tokens", "new_tokens") and one not in chosen]
    for one in [*usual, *chosen]:
        words.append(draw(st.sampled_from(one.opts)))
        if not one.is_flag:
            text = draw(value(one) if one in chosen else good(one))
            words.append(text)
            asked |= {text} if one.name in WRITES else set()
    for one in command.params:
        if one.param_type_name == "argument":
            for _ in range(draw(st.integers(0, 2 if one.nargs == -1 else 1))):
                words.append(draw(value(one)))
                asked |= {words[-1]} if one.name in WRITES else set()
    if draw(st.integers(0, 19)) == 0:
        words.append(draw(st.sampled_from(["--wings", "-", "--", "extra", "--help"])))
        asked |= {words[-1]} if command.name == "quantize" else set()
    return words, asked


def good(parameter: Any) -> st.SearchStrategy[str]:
    """A value with which most commands go on."""
    return st.just("{model}" if parameter.name == "model" else "5")


STREAM = st.sampled_from(["out", "out", "out", "closed", "full", "gone"])
INPUT = st.sampled_from(["typed", "typed", "/dev/null", "closed", "binary"])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    with ForkServer(tmp_path_factory.mktemp("home")) as running:
        yield running


def check(server: ForkServer, model: Path, place: Path, drawn: tuple[list[str], set[str]], **streams: Any) -> None:
    """Run one line in a fresh folder, and check how it ended and what it left."""
    folder = place / "work"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "there").mkdir(parents=True)
    (folder / "there.txt").write_text("once upon a time")
    words, asked = [word.replace("{model}", str(model)) for word in drawn[0]], drawn[1]
    for name in ("out", "err"):
        (place / name).unlink(missing_ok=True)
    (place / "typed").write_text("Hello\n/save talk\nonce upon a time\n")
    (place / "binary").write_bytes(b"\xff\xfe\0")
    opened = {
        name: str(place / {"out": "err" if name == "stderr" else "out"}.get(kind, kind))
        if kind in ("out", "typed", "binary")
        else kind
        for name, kind in streams.items()
        if name != "interrupt"
    }
    ended = server.run(words, folder, interrupt=streams["interrupt"], **opened)
    written = "".join((place / name).read_text(errors="replace") for name in ("out", "err") if (place / name).exists())
    assert ended.code in CODES, (ended, words, streams, written)
    assert "Traceback" not in written and "defect of Tokenwright" not in written, (words, streams, written)
    left = {file.name for file in folder.iterdir()} - {"there", "there.txt"}
    wanted = {first for name in asked for first in Path(name).parts[:1]}  # of "" and "." there is none
    assert left <= wanted | ({"talk"} if words[0] == "chat" else set()), (
        words,
        left,
    )


@examples(48, deadline=None)
@given(
    lines(tuple(sorted(set(GROUP.commands) - set(LONG)))), INPUT, STREAM, STREAM,
    st.one_of(st.none(), st.floats(0.0, 1.0)),
)  # fmt: skip
def test_a_command_line_ends_well(
    server: ForkServer,
    model: Path,
    tmp_path_factory: pytest.TempPathFactory,
    line: tuple[list[str], set[str]],
    stdin: str,
    stdout: str,
    stderr: str,
    interrupt: float | None,
) -> None:
    place = tmp_path_factory.getbasetemp()
    check(server, model, place, line, stdin=stdin, stdout=stdout, stderr=stderr, interrupt=interrupt)


@pytest.mark.sweep
@settings(max_examples=500, deadline=None, derandomize=False, phases=[Phase.explicit, Phase.generate])
@given(lines(tuple(sorted(GROUP.commands))), INPUT, STREAM, STREAM, st.one_of(st.none(), st.floats(0.0, 3.0)))
def test_500_command_lines_end_well(
    server: ForkServer,
    model: Path,
    tmp_path_factory: pytest.TempPathFactory,
    line: tuple[list[str], set[str]],
    stdin: str,
    stdout: str,
    stderr: str,
    interrupt: float | None,
) -> None:
    moment = 2.0 if interrupt is None and line[0][0] in LONG else interrupt
    place = tmp_path_factory.getbasetemp()
    check(server, model, place, line, stdin=stdin, stdout=stdout, stderr=stderr, interrupt=moment)
