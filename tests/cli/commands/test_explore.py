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

from tests.processes import running
from tokenwright.errors import RequestError
from tokenwright.serve.transport.sockets import listen

Refused = Callable[..., str]


@contextmanager
def explorer(*arguments: object) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """The address it tells, and the process."""
    command = [sys.executable, "-m", "tokenwright", "explore", "--no-browser", "--port", "0", *map(str, arguments)]
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "COLUMNS": "300"}
    with running(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        told = re.search(r"http://127\.0\.0\.1:\d+", process.stderr.readline())
        assert told, process.stderr.read()
        yield told[0], process


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
            assert "preact" in licences.read().decode(), "what is bundled brings its licence"
        assert ready(address)["phase"] == "ready"
        assert get(f"{address}/model")["layers"] == 3
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0, "Ctrl-C is how it ends"
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


def test_a_site_is_written_without_a_server(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tokenwright", "explore", "--static", str(tmp_path / "site")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "python -m http.server" in done.stderr
    index = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert 'id="site"' in index and 'property="og:image"' in index
    assert {path.stem for path in (tmp_path / "site" / "runs").iterdir()} == {"story", "fact", "code"}


def test_a_site_needs_no_port(refused: Refused, tmp_path: Path) -> None:
    assert "leave out --port" in refused("explore", "--static", tmp_path, "--port", 1)
    assert "needs --static" in refused("explore", "--url", "https://example.org")
    assert "begin with http" in refused("explore", "--static", tmp_path, "--url", "example.org")


def test_a_model_that_is_nowhere_is_refused_and_nothing_is_served(refused: Refused, tmp_path: Path) -> None:
    assert "there is no folder" in refused("explore", tmp_path / "none", "--no-browser", "--port", 0)


def test_a_model_that_cannot_be_read_ends_the_server(tmp_path: Path) -> None:
    with explorer(tmp_path) as (_, process):
        _, said = process.communicate(timeout=240)  # a guard against a server that never ends
        assert process.returncode == 2
    assert said == f"tokenwright: {tmp_path}/config.json is missing; a model folder needs config.json\n"


def test_a_port_that_is_taken_is_told(refused: Refused) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert f"port {port} at 127.0.0.1 cannot be opened" in refused("explore", "--no-browser", "--port", port)


def test_the_usual_port_gives_way_to_a_free_one() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        with listen("127.0.0.1", (taken, 0)) as listener:
            assert listener.getsockname()[1] not in (0, taken)


def test_without_a_page_it_says_what_is_missing(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Path:
        raise RequestError("there is no web page in this installation: no Node")

    monkeypatch.setattr("tokenwright.llm.web_page.page_folder", missing)
    assert "no web page in this installation" in refused("explore", "--no-browser")
