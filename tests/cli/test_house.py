"""Rules for every command: help without torch, versions, errors as messages."""

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import tokenwright
from tests.cli.conftest import Run
from tokenwright.bench.shapes import SHAPES
from tokenwright.cli import CommandGroup, app, main, version_text
from tokenwright.errors import CapacityError, EngineError, RequestError


def test_help_is_as_wide_as_the_terminal_and_names_types_of_values_alone(run: Run) -> None:
    shown = run("generate", "--help").output
    assert "[OPTIONS] [PROMPT] " in shown
    assert "that are not given come from the user's settings, else from the model's generation_config.json" in shown
    assert "<int>" in shown and "<bool>" not in shown + run("--help").output
    assert "[OPTIONS] [MODEL] FOLDER " in run("quantize", "--help").output


def test_help_has_no_markup_and_names_every_shape() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    options = [(name, one) for name, command in commands.items() for one in command.params]
    assert [(name, one.help) for name, one in options if "[" in (one.help or "")] == [], "rich would leave it out"
    [shape] = [one.help for _, one in options if one.name == "shape"]
    assert all(name in shape for name in SHAPES)


def test_every_command_takes_a_model_alike() -> None:
    """By -m, and as an argument where that is not text."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    taking = {name for name, command in commands.items() if any("-m" in one.opts for one in command.params)}
    assert taking == commands.keys() - {"models", "pull", "rm", "cache", "verify"}
    for name in taking:
        [option] = [one for one in commands[name].params if "-m" in one.opts]
        [argument] = [one for one in commands[name].params if one.param_type_name == "argument"]
        assert option.opts == ["--model", "-m"]
        assert argument.metavar.startswith("[MODEL]") == (name not in ("generate", "race", "chat")), name


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("tokenwright ge", ["generate"]),
        ("tokenwright generate --kv", ["--kv", "--kv-memory", "--kv-disk", "--kv-disk-size"]),
        ("tokenwright generate -m stor", ["stories"]),
        ("tokenwright plan Qwen/Qwen3-0", ["Qwen/Qwen3-0.6B"]),
        ("tokenwright inspect beside/m", ["beside/model"]),
    ],
)
def test_the_shell_completes_commands_options_and_models(
    run: Run, typed: str, offered: list[str], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "model").symlink_to(model)
    monkeypatch.chdir(tmp_path)
    asked = {"_TOKENWRIGHT_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    assert run(prog_name="tokenwright", env=asked).stdout.split() == offered


def test_no_command_shows_the_commands(run: Run) -> None:
    shown = run().output
    assert all(command in shown for command in ("generate", "inspect", "plan", "race"))


REFUSED = (
    ("generate", "x", "-n", "-1"),
    ("generate", "x", "-m", "nowhere"),
    ("generate", "x", "--beams", 2, "--seed", 3),
    ("generate", "x", "--kv", "int3"),
    ("generate", "x", "--device", "toaster"),
    ("generate", "\udcff"),
    ("generate", "--file", "nowhere"),
    ("chat", "--load", "nowhere"),
    ("chat", " "),
    ("race", "x", "-n", 0),
    ("bench", "--shape", "tiny", "-m", "stories"),
    ("bench", "--shape", "huge"),
    ("bench", "nowhere"),
    ("plan", "nowhere"),
    ("plan", "gpt2", "--memory", 24),
    ("plan", "gpt2", "--batch", 0),
    ("quantize", "stories"),
    ("quantize", "stories", "q", "--weights", "int2"),
    ("inspect", "nowhere"),
    ("explore", "nowhere"),
    ("serve", "nowhere"),
    ("serve", "--max-queue", -1),
    ("serve", "--host", "0.0.0.0"),
    ("pull", "stories"),
    ("rm", "nowhere"),
)


def test_help_loads_no_numpy_and_what_needs_no_model_no_torch() -> None:
    """The help of every command, and each refusal, one after the other in one process."""
    helps = [(*command, "--help") for command in ((), *((name,) for name in typer.main.get_command(app).commands))]  # type: ignore[attr-defined]
    code = (
        "import json, sys; from typer.testing import CliRunner; from tokenwright.cli import app; "
        "print(json.dumps([(CliRunner().invoke(app, words).exit_code, [one for one in ('torch', 'numpy') "
        "if sys.modules.get(one)]) for words in json.loads(sys.argv[1])]))"
    )
    words = json.dumps([[str(word) for word in line] for line in (*helps, *REFUSED)])
    done = subprocess.run([sys.executable, "-c", code, words], capture_output=True, text=True, check=True)
    found = dict(zip((*helps, *REFUSED), json.loads(done.stdout), strict=True))
    assert {line: told for line, told in found.items() if line in helps and told != [0, []]} == {}
    refused = {line: told for line, told in found.items() if line in REFUSED}
    assert {line: told for line, told in refused.items() if told[0] != 2 or "torch" in told[1]} == {}


def test_version(run: Run) -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"tokenwright {tokenwright.__version__}\nPython 3.")
    assert ", torch 2." in result.stdout


@pytest.mark.parametrize(
    ("build", "told", "untold"),
    [
        (
            {"cxx": "GNU 12.2.0", "web": "9 files, built with Node v20.19.0"},
            ["native kernels, built with GNU 12.2.0\n", "the web page: 9 files, built with Node v20.19.0"],
            ["without"],
        ),
        (
            {"cxx": "", "web": "9 files, built with Node v20.19.0"},
            ["without a C++ compiler: ", "the web page: 9 files"],
            ["without the web page"],
        ),
        (
            {"cxx": "GNU 12.2.0", "web": "", "web_missing": "no Node; install it"},
            ["native kernels, built with GNU 12.2.0\n", "built without the web page: no Node; install it"],
            ["C++"],
        ),
        # as builds before the page left it
        ({"cxx": "GNU 12.2.0", "node": "v20.19.0"}, ["without the web page: it was not built"], ["C++"]),
    ],
)
def test_version_says_what_the_build_lacked(
    tmp_path: Path, build: dict[str, str], told: list[str], untold: list[str]
) -> None:
    (tmp_path / "_build.json").write_text(json.dumps(build))
    text = version_text([str(tmp_path / "nothing"), str(tmp_path)])
    assert all(words in text for words in told)
    assert not any(words in text for words in untold)


def test_version_without_an_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", absent)
    text = version_text([str(tmp_path)])
    assert "torch is not installed (an optional extra)" in text
    assert "running from a folder of sources" in text


ANY_DEFECT = (
    "tokenwright: this is a defect of Tokenwright (ZeroDivisionError: x); please report it with what "
    "TOKENWRIGHT_DEBUG=1 shows\n"
)


def failing(error: BaseException) -> typer.Typer:
    app = typer.Typer(cls=CommandGroup)

    @app.command()
    def fail() -> None:
        raise error

    @app.command()
    def other() -> None: ...

    return app


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (RequestError("the prompt is odd"), 2, "tokenwright: the prompt is odd\n"),
        (CapacityError("no memory"), 2, "tokenwright: no memory\n"),
        (EngineError("a step failed"), 1, "tokenwright: a step failed\n"),
        (KeyboardInterrupt(), 130, ""),
        (OSError(36, "File name too long", "aaa"), 2, "tokenwright: aaa cannot be used: File name too long\n"),
        (ZeroDivisionError("x"), 1, ANY_DEFECT),
    ],
)
def test_errors_become_messages(error: BaseException, code: int, message: str) -> None:
    result = CliRunner().invoke(failing(error), ["fail"])
    assert result.exit_code == code
    assert result.stderr == message
    assert result.stdout == ""


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENWRIGHT_DEBUG", "1")
    error = RequestError("the prompt is odd")
    assert CliRunner().invoke(failing(error), ["fail"]).exception is error


def test_a_malformed_variable_is_refused(monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]) -> None:
    monkeypatch.setattr(
        "tokenwright.environment.Environment.read.__func__.__defaults__", ({"TOKENWRIGHT_DEBUG": "yes"},)
    )
    assert "TOKENWRIGHT_DEBUG must be 0 or 1, not 'yes'" in refused("inspect", "nowhere")


def test_main_is_the_entry_point(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    for stream in ("stdout", "stderr"):  # which main replaces
        monkeypatch.setattr(f"sys.{stream}", getattr(sys, stream))
    monkeypatch.setattr("sys.argv", ["tokenwright", "--version"])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    assert "tokenwright" in capfd.readouterr().out


def test_the_end_waits_for_no_thread() -> None:
    """Such as one that imports torch when `serve` is interrupted."""
    script = (
        "import sys, threading, time; threading.Thread(target=time.sleep, args=(3600,)).start(); "
        "sys.argv = ['tokenwright', 'generate', '--wings']; from tokenwright.__main__ import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2 and "no such option: --wings" in done.stderr


def test_module_runs() -> None:
    command = [sys.executable, "-m", "tokenwright", "generate", "--temperature", "nan", "x"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("tokenwright: --temperature must be a number from 0 to 1e+06, not nan")
