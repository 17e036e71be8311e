"""Defaults from a settings file and from variables: which apply, which win, and what is refused."""

import json
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.cli.conftest import Run
from tokenwright.cli import app
from tokenwright.cli.options import defaults as settings
from tokenwright.environment import Environment
from tokenwright.errors import RequestError
from tokenwright.serve.settings import Settings

DOCS = Path(__file__).parents[3] / "docs" / "commands.md"
GREEDY = ("-n", 2, "--ignore-eos")


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Path]:
    """Writes the settings file, and sets variables."""

    def write(text: str = "", **variables: str) -> Path:
        file = tmp_path / "settings.toml"
        file.write_text(text)
        monkeypatch.setattr(
            "tokenwright.environment.Environment.read.__func__.__defaults__",
            (
                {"TOKENWRIGHT_SETTINGS": str(file)}
                | {f"TOKENWRIGHT_{name}": value for name, value in variables.items()},
            ),
        )
        return file

    return write


def facts(run: Run, *arguments: object) -> dict[str, Any]:
    result = run("generate", "x", *GREEDY, "--json", *arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_what_is_typed_wins_over_a_variable_and_that_over_the_file(configured, run: Run, model: Path) -> None:
    configured(f'model = "{model}"\nseed = 1\nkv = "int8"\n')
    assert facts(run)["model"] == str(model)
    assert (facts(run)["facts"]["seed"], facts(run)["facts"]["kv"]) == (1, "int8")
    configured('model = "nowhere"\nseed = 1\nkv = "int8"\n', SEED="2", MODEL=str(model), KV="float32")
    assert (facts(run)["facts"]["seed"], facts(run)["facts"]["kv"]) == (2, "float32")
    assert (facts(run, "--seed", 3)["facts"]["seed"], facts(run, "--kv", "fp8")["facts"]["kv"]) == (3, "fp8")


def test_the_model_of_the_settings_gives_way_to_the_argument(configured, run: Run, model: Path) -> None:
    configured('model = "nowhere"')
    assert "there is no folder nowhere" in run("inspect").stderr
    assert run("inspect", model).exit_code == run("inspect", "-m", model).exit_code == 0
    assert "two models are given" in run("inspect", model, "-m", "stories").stderr


def test_settings_of_drawing_give_way_to_a_beam_search(configured, run: Run, model: Path) -> None:
    configured(f'model = "{model}"\nseed = 1\ntemperature = 0.7\ntop-k = 5\nmax-tokens = 3')
    assert facts(run, "--beams", 2)["facts"]["seed"] is None
    result = run("generate", "x", "--ignore-eos", "--json")
    assert (len(json.loads(result.stdout)["token_ids"]), json.loads(result.stdout)["facts"]["seed"]) == (3, 1)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('modle = "x"', "sets 'modle', which is no setting; did you mean model?"),
        ("zzz = 1", "sets 'zzz', which is no setting; the settings are model, device"),
        ('seed = "x"', "seed in {file} must be a whole number, not 'x'"),
        ("temperature = true", "temperature in {file} must be a number, not True"),
        ("quiet = 1", "quiet in {file} must be true or false, not 1"),
        ("seed = ", "the settings in {file} are not TOML"),
    ],
)
def test_a_wrong_file_is_refused(configured, refused: Callable[..., str], text: str, told: str) -> None:
    file = configured(text)
    assert told.format(file=file) in refused("generate", "x")


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("SEED", "x", "TOKENWRIGHT_SEED must be a whole number, not 'x'"),
        ("QUIET", "yes", "TOKENWRIGHT_QUIET must be 0 or 1, not 'yes'"),
        ("MODLE", "x", "the variable TOKENWRIGHT_MODLE is not known; did you mean TOKENWRIGHT_MODEL?"),
    ],
)
def test_a_wrong_variable_is_refused(configured, refused: Callable[..., str], name: str, value: str, told: str) -> None:
    configured(**{name: value})
    assert told in refused("generate", "x")


def test_a_missing_file_is_refused_where_it_was_named(tmp_path: Path) -> None:
    there = Environment.read({"XDG_CONFIG_HOME": str(tmp_path)})
    assert (there.settings, settings.read(there)) == (tmp_path / "tokenwright" / "settings.toml", {})
    with pytest.raises(RequestError, match=r"TOKENWRIGHT_SETTINGS names .*nowhere, which does not exist"):
        settings.read(Environment.read({"TOKENWRIGHT_SETTINGS": str(tmp_path / "nowhere")}))


def test_the_file_has_the_servers_settings_too(configured, run: Run, model: Path, refused: Callable[..., str]) -> None:
    configured(f'model = "{model}"\n[serve]\nport = 70000\nmax-queue = 3')
    assert facts(run)["model"] == str(model)
    assert settings.of_serve() == {"port": 70000, "max-queue": 3}
    assert "port must be a whole number from 0 to 65,535" in refused("serve")
    file = configured("serve = 1")
    assert f"serve in {file} must be a table, [serve], not 1" in refused("serve")


def test_every_other_variable_is_let_be() -> None:
    others = [one.name.upper() for one in fields(Settings)] + ["DEBUG", "CACHE", "KERNELS", "ISA"]
    assert settings.read(Environment(defaults=dict.fromkeys(others, "1"))) == {}


def test_the_page_has_the_table_and_every_setting_is_an_option() -> None:
    kinds = {str: "text", int: "whole number", float: "number", bool: "true or false; 1 or 0 in the variable"}
    rows = re.findall(
        r"^\| `([\w-]+)` \| `TOKENWRIGHT_(\w+)` \| ([^|]+) \|$", DOCS.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert rows == [(key, key.upper().replace("-", "_"), kinds[kind]) for key, kind in settings.COMMON.items()]
    generate: Any = typer.main.get_command(app).commands["generate"]
    flags = {flag for parameter in generate.params for flag in parameter.opts}
    assert {f"--{key}" for key in settings.COMMON} <= flags
