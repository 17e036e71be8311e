"""The settings of a server: one table for flags, file, variables and documents; and the command that takes them."""

import json
import re
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx2
import pytest
from typer.testing import CliRunner

from tests.processes import running
from tokenwright import RequestError
from tokenwright.cli import app
from tokenwright.environment import Environment
from tokenwright.serve.app import hosts_of
from tokenwright.serve.settings import PREFIX, Settings, read_settings

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "commands.md").read_text(encoding="utf-8")
HANGS = 120.0  # seconds


def test_the_documents_have_every_setting() -> None:
    rows = re.findall(r"^\| `--([a-z-]+)` \| `(\w+)` \| [^|]* \| ([^|]*) \|$", PAGE, re.MULTILINE)
    expected = [
        (one.name.replace("_", "-"), PREFIX + one.name.upper(), one.metadata["help"]) for one in fields(Settings)
    ]
    assert rows == expected


def test_every_setting_is_an_option() -> None:
    shown = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"}).output
    assert [one.name for one in fields(Settings) if f"--{one.name.replace('_', '-')} " not in shown] == []


def test_a_flag_wins_over_a_variable_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text('port = 1\nmax_queue = 2\nmax_body = 4096\nserved_model_name = ["a", "b"]\n', encoding="utf-8")
    variables = Environment.read(
        {"TOKENWRIGHT_PORT": "3", "TOKENWRIGHT_MAX_QUEUE": "4", "TOKENWRIGHT_TIMINGS": "1"}
    ).defaults
    found = read_settings(file, variables, {"port": 5, "max_queue": None, "api_key": []})
    assert (found.port, found.max_queue, found.max_body, found.timings) == (5, 4, 4096, True)
    assert found.served_model_name == ("a", "b")
    assert read_settings(None, {}, {}) == Settings()
    user = {"max-queue": 7, "max-body": 5000, "drain-timeout": 3}
    found = read_settings(file, variables, {}, user)
    assert (found.max_queue, found.max_body, found.drain_timeout) == (4, 4096, 3.0)
    with pytest.raises(
        RequestError, match=r"\[serve\] of the settings file has prot, which is no setting of serve; did you mean port"
    ):
        read_settings(None, {}, {}, {"prot": 1})


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("prot = 1", "has prot, which is no setting of serve; did you mean port"),
        ('model = "x"', "has model, which is no setting of serve"),
        ('port = "1"', "port must be a whole number, not '1'"),
        ("port = 70000", "port must be a whole number from 0 to 65,535"),
        ("timings = 1", "timings must be true or false"),
        ("api_key = [1]", "api_key must be a list of strings"),
        ("port", "cannot be read"),
        ('host = "0.0.0.0"', "others can reach this server: give --api-key-file"),
        ('no_key = true\nhost = "0.0.0.0"', r"DNS rebinding\): give --allowed-host"),
        ("retries = 3", "retries needs replicas; give --replicas"),
        ("heartbeat = 3.0", "heartbeat needs replicas; give --replicas"),
        ("replicas = 2\nheartbeat = 1.0", "heartbeat must be from 2 to 3,600 seconds"),
        ('no_key = true\napi_key = "sk-12345678"', "no_key contradicts the API key"),
    ],
)
def test_settings_that_make_no_sense_are_refused(tmp_path: Path, content: str, told: str) -> None:
    file = tmp_path / "server.toml"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(RequestError, match=told):
        read_settings(file, {}, {})
    with pytest.raises(RequestError, match="TOKENWRIGHT_PORT must be a number"):
        read_settings(None, {"PORT": "x"}, {})


def test_how_the_model_is_opened_may_stand_in_a_file_and_in_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: dict[str, Any] = {}
    monkeypatch.setattr("tokenwright.cli.options.shared.loader", lambda _, **options: opened.update(options))
    monkeypatch.setattr(sys.modules["tokenwright.cli.commands.serve"], "_listen", lambda *_: None)
    file = tmp_path / "server.toml"
    file.write_text('revision = "main"\nexplorer = true\nadapter = ["a=A", "b=B"]\nlora = "L"\n', encoding="utf-8")
    variables = {"WINDOW": "64", "SINKS": "4", "PAGE_SIZE": "32", "TOKEN_BUDGET": "256", "REVISION": "v2"}
    command = ["serve", "maker/model", "--config", str(file), "--sinks", "8"]
    result = CliRunner().invoke(app, command, env={PREFIX + name: value for name, value in variables.items()})
    assert result.exit_code == 0, result.output
    engine = ("window", "sinks", "page_size", "token_budget", "revision", "trace")
    assert [opened[name] for name in engine] == [64, 8, 32, 256, "v2", True]
    assert (opened["adapters"], opened["lora"]) == ({"a": "A", "b": "B"}, [Path("L")])


@pytest.mark.parametrize(
    ("given", "answers"),
    [
        ({}, {"localhost", "127.0.0.1", "[::1]"}),
        ({"host": "192.0.2.1", "api_key": ["sk-12345678"]}, None),
        ({"host": "192.0.2.1", "no_key": True}, {"192.0.2.1", "localhost"}),
        ({"host": "2001:db8::1", "no_key": True}, {"[2001:db8::1]"}),
        ({"host": "::", "no_key": True, "allowed_host": ["llm.example"]}, {"llm.example"}),
    ],
)
def test_without_a_key_only_known_hosts_are_answered(given: dict[str, Any], answers: set[str] | None) -> None:
    hosts = hosts_of(read_settings(None, {}, given))
    assert (hosts is None) == (answers is None)
    assert answers is None or answers <= set(hosts or ())
    assert "evil.example" not in (hosts or ())


def test_the_command_serves_until_a_signal() -> None:
    """As a new user would: start it, ask once, end it."""
    command = [sys.executable, "-m", "tokenwright", "serve", "--port", "0"]
    with running(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        address = re.search(r"http://127.0.0.1:\d+", server.stderr.readline())
        assert address is not None
        body = {"model": "stories", "prompt": "Once upon a time", "max_tokens": 4}
        answer = httpx2.post(f"{address[0]}/v1/completions", json=body, timeout=HANGS)
        assert answer.json()["usage"]["completion_tokens"] == 4
        assert httpx2.get(f"{address[0]}/health", timeout=HANGS).json()["status"] == "ok"
        server.send_signal(signal.SIGINT)
        rest = server.stderr.read()
        assert server.wait(HANGS) in (0, 130), rest
        assert "Traceback" not in rest


def test_the_unit_and_the_container_call_the_command_as_it_is() -> None:
    docs = Path(__file__).resolve().parents[2] / "docs"
    unit, image = ((docs / name).read_text(encoding="utf-8") for name in ("tokenwright.service", "Containerfile"))
    [started] = re.findall(r"^ExecStart=(.*)", unit, re.MULTILINE)
    [entry] = re.findall(r"^ENTRYPOINT (.*)", image, re.MULTILINE)
    known = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"}).output
    for words in (started.split(), json.loads(entry)):
        assert [Path(words[0]).name, words[1]] == ["tokenwright", "serve"]
        assert [word for word in words if word.startswith("--") and f"{word} " not in known] == []
    container = dict(zip(json.loads(entry)[2::2], json.loads(entry)[3::2], strict=True))
    settings = read_settings(None, {}, {name[2:].replace("-", "_"): value for name, value in container.items()})
    assert (settings.local, settings.port) == (False, int(re.findall(r"^EXPOSE (\d+)", image, re.MULTILINE)[0]))
    assert int(re.findall(r"^TimeoutStopSec=(\d+)", unit, re.MULTILINE)[0]) > Settings().drain_timeout
