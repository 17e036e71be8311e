"""Conversations on the command line: reasoning, tools, the seed, and JSON without white space."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cli.conftest import Run
from tests.serve.talking import make_talker
from tokenwright.backends.device import processors
from tokenwright.cli.options.shared import beyond_processors
from tokenwright.cli.options.talking import CompactJson

WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"hot": {"type": "boolean"}}}}


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_talker(tmp_path_factory.mktemp("talking"))


def test_reasoning_is_switched_and_hidden(run: Run, talker: Path) -> None:
    def prompt(*more: str) -> int:
        done = run("generate", "Hello", "-m", talker, "--chat", "--seed", "1", "-n", "8", "--json", *more)
        assert done.exit_code == 0, done.stderr
        found: int = json.loads(done.stdout)["facts"]["prompt_tokens"]
        return found

    assert prompt("--thinking", "on") == prompt("--thinking", "hide") > prompt() == prompt("--thinking", "off")
    for command in (("generate", "Hello", "--chat"), ("chat", "Hello")):
        told = [run(*command, "-m", talker, "--seed", "1", "-n", "8", "--thinking", how) for how in ("on", "hide")]
        assert [one.exit_code for one in told] == [0, 0]
        assert told[0].stdout.strip()
        assert told[1].stdout.strip() == "", "8 tokens are reasoning"


def test_tools_are_called(run: Run, talker: Path, tmp_path: Path) -> None:
    file = tmp_path / "tools.json"
    file.write_text(json.dumps([WEATHER]))
    plain = run("generate", "Hi", "-m", talker, "--chat", "-n", "1", "--json", "--seed", "1")
    done = run("generate", "Hi", "-m", talker, "--chat", "-n", "1", "--json", "--seed", "1", "--tools", file)
    assert done.exit_code == 0, done.stderr
    counts = [json.loads(one.stdout)["facts"]["prompt_tokens"] for one in (plain, done)]
    assert counts[1] > counts[0], "the prompt has the tools"
    assert json.loads(done.stdout)["tool_calls"] == []
    assert run("chat", "Hi", "-m", talker, "-n", "1", "--tools", file).exit_code == 0
    file.write_text("{")
    assert "is not JSON" in run("chat", "Hi", "-m", talker, "--tools", file).stderr
    assert "cannot be read" in run("chat", "Hi", "-m", talker, "--tools", tmp_path / "no").stderr


def test_what_does_not_go_together(run: Run, talker: Path) -> None:
    assert "give --chat as well" in run("generate", "Hi", "-m", talker, "--thinking", "on").stderr
    assert "--thinking must be on, off or hide, not 'yes'" in run("chat", "Hi", "--thinking", "yes").stderr


def test_the_seed_is_printed(run: Run, talker: Path) -> None:
    assert " · seed 7" in run("chat", "Hi", "-m", talker, "-n", "2", "--seed", "7").stderr
    assert " · seed " in run("generate", "Hi", "-m", talker, "-n", "2").stderr


def test_json_under_a_schema_is_compact(run: Run) -> None:
    properties = {"a": {"enum": ["x  y"]}}
    schema = {"type": "object", "properties": properties, "required": ["a"], "additionalProperties": False}
    done = run("generate", "Hi", "--json-schema", json.dumps(schema), "-n", "60", "-q")
    assert done.stdout == '{"a":"x  y"}\n'


@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    ),
    cuts=st.lists(st.integers(0, 40), max_size=4),
)
def test_compact_json_is_the_same_value_wherever_it_is_cut(value: object, cuts: list[int]) -> None:
    text, compact = json.dumps(value, indent=2, ensure_ascii=False), CompactJson()
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    parts = [compact(text[start:stop]) for start, stop in pairwise(edges)]
    assert "".join(parts) == json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def test_threads_beyond_the_processors_are_warned_of(run: Run) -> None:
    assert beyond_processors(1) == ""
    assert "threads wait for each other" in run("generate", "Hi", "-n", "1", "--threads", len(processors()) + 1).stderr
