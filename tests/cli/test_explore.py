"""`tokenwright explore` as a process: it answers at once, reads its model meanwhile, and ends with Ctrl-C."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tokenwright.errors import RequestError

Refused = Callable[..., str]


@contextmanager
def explorer(*arguments: object) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """The address it tells, and the process."""
    command = [sys.executable, "-m", "tokenwright", "explore", "--no-browser", "--port", "0", *map(str, arguments)]
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "COLUMNS": "300"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        try:
            told = re.search(r"http://127\.0\.0\.1:\d+", process.stderr.readline())
            assert told, process.stderr.read()
            yield told[0], process
        finally:
            process.kill()


def get(address: str) -> dict[str, object]:
    with urllib.request.urlopen(address) as answer:
        found: dict[str, object] = json.load(answer)
        return found


def ready(address: str) -> dict[str, object]:
    while (status := get(f"{address}/status"))["phase"] == "loading":
        time.sleep(0.05)
    return status


def test_the_page_and_the_model_are_served_until_ctrl_c(model: Path) -> None:
    with explorer(model) as (address, process):
        with urllib.request.urlopen(address) as page:
            assert "<title>Tokenwright" in page.read().decode()
        with urllib.request.urlopen(f"{address}/licenses.md") as licences:
            assert "three" in licences.read().decode(), "what is bundled brings its licence"
        assert ready(address)["phase"] == "ready"
        assert get(f"{address}/model")["layers"] == 3
        process.send_signal(signal.SIGINT)
        assert process.wait() == -signal.SIGINT, "which a shell shows as 130"
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


def test_a_model_that_cannot_be_read_is_told_on_the_page_and_in_the_terminal(tmp_path: Path) -> None:
    with explorer(tmp_path / "none") as (address, process):
        status = ready(address)
        assert status["phase"] == "failed"
        assert process.stderr is not None
        assert process.stderr.readline().strip() == f"tokenwright: {status['message']}"


def test_a_port_that_is_taken_is_told(refused: Refused) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert f"port {port} cannot be listened on" in refused("explore", "--no-browser", "--port", port)


def test_the_usual_port_gives_way_to_a_free_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        module = sys.modules["tokenwright.cli.explore"]  # the package's own name for it is the command
        monkeypatch.setattr(module, "USUAL_PORT", other.getsockname()[1])
        with module._listen(None) as listener:
            assert listener.getsockname()[1] not in (0, other.getsockname()[1])


def test_without_a_page_it_says_what_is_missing(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Path:
        raise RequestError("there is no web page in this installation: no Node")

    monkeypatch.setattr("tokenwright.serve.page.page_folder", missing)
    assert "no web page in this installation" in refused("explore", "--no-browser")
