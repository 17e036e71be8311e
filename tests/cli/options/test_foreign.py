"""Options and commands of llama.cpp, vLLM, ollama and transformers: each is refused with the right name of ours."""

from collections.abc import Callable
from typing import Any

import pytest
import typer

from tests.cli.conftest import Run
from tests.profiles import some
from tokenwright.cli import app
from tokenwright.cli.options.foreign import COMMANDS, OPTIONS, hint_of_command, hint_of_option

Refused = Callable[..., str]
GROUP: Any = typer.main.get_command(app)
FLAGS = {name: {flag for one in command.params for flag in one.opts} for name, command in GROUP.commands.items()}


def command_of(ours: str) -> str:
    """A command that has our option: the first of them."""
    return next((name for name, flags in FLAGS.items() if ours in flags), "generate")


@pytest.mark.parametrize("theirs", some(sorted(OPTIONS)))
def test_options(refused: Refused, theirs: str) -> None:
    ours = OPTIONS[theirs]
    command = command_of(ours)
    if theirs in FLAGS[command]:  # a command may have it: explore has -p
        command = "quantize"
    if theirs in FLAGS[command]:
        return
    told = refused(command, theirs, "3")
    assert f"no such option: {theirs}" in told
    assert ours in told


def test_all_options_that_are_advised_exist() -> None:
    flags = set().union(*FLAGS.values())
    assert {ours for ours in OPTIONS.values() if ours.startswith("-")} <= flags


@pytest.mark.parametrize("theirs", sorted(COMMANDS))
def test_commands(run: Run, theirs: str) -> None:
    result = run(theirs, "x")
    assert result.exit_code == 2
    assert f"no such command '{theirs}'" in result.stderr
    assert COMMANDS[theirs] in result.stderr
    assert " " in COMMANDS[theirs] or COMMANDS[theirs] in FLAGS
    assert theirs not in FLAGS


def test_the_tables_are_long() -> None:
    assert len(OPTIONS) + len(COMMANDS) >= 300


def test_help_of_a_command(run: Run) -> None:
    asked, right = run("help", "plan"), run("plan", "--help")
    assert asked.exit_code == 0
    assert asked.stdout == right.stdout != run("help").stdout


def test_the_nearest_begins_alike() -> None:
    flags = ["--stop", "--temperature", "--tempo"]
    assert hint_of_option("--temper", flags) == "; did you mean --temperature?"
    assert hint_of_option("--tem", flags) == "; did you mean --temperature, --tempo?"
    assert hint_of_option("--zzzz", flags) == ""
    assert hint_of_option("--temp", ["--stop"]) == "; --temperature is an option of other commands"
    assert hint_of_command("zzzz", ["chat"]) == ""


def test_one_dash_and_letters_behind_an_option_are_its_value(run: Run) -> None:
    assert "no such option" not in run("generate", "x", "-n", "0", "--stop", "-np").stderr
