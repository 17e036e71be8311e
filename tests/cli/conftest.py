"""The command line on a small random model; stdout and stderr apart."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.models.fixtures import make_checkpoint
from tokenwright.cli import app

Run = Callable[..., Result]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama of 3 layers with a context of 512 tokens; 1 is BOS, 2 is EOS."""
    return make_checkpoint(tmp_path_factory.mktemp("models") / "llama", "llama2").path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command with these arguments, wide enough that no message is wrapped."""
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.delenv("TOKENWRIGHT_DEBUG", raising=False)

    def go(*arguments: object, **options: Any) -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments], **options)

    return go


@pytest.fixture
def refused(run: Run) -> Callable[..., str]:
    """Runs a command that must be refused: exit code 2, nothing on stdout, a message and no traceback."""

    def go(*arguments: object, **options: Any) -> str:
        result = run(*arguments, **options)
        assert result.exit_code == 2, result.output
        assert result.stdout == ""
        assert "Traceback" not in result.stderr
        assert result.stderr.startswith("tokenwright: ")
        assert len(result.stderr.splitlines()) <= 2
        return result.stderr

    return go
