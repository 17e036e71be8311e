"""Frameworks of npm and PyPI, unchanged, against a server whose model calls their tool twice and then answers."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.packages import npm_programs, pypi_programs
from tests.clients.scripted import Turn, scripted
from tests.clients.test_agents import MOST_S

HERE = Path(__file__).parent
ANSWER = "It is warm in both."
CALLED = ["warm in Oslo", "warm in Rome", ANSWER]
LED = ["Successfully transferred to forecaster", "Successfully transferred back to supervisor", ANSWER]
TURNS: list[Turn] = [{"weather": {"city": "Oslo"}, "transfer_to_forecaster": {}}, {"weather": {"city": "Rome"}}, ANSWER]
NPM = (
    "ai@6.0.326",
    "@ai-sdk/anthropic@3.0.140",
    "@ai-sdk/openai@3.0.141",
    "@ai-sdk/openai-compatible@2.0.92",
    "@langchain/core@1.4.0",
    "@langchain/langgraph@1.7.3",
    "@langchain/langgraph-supervisor@1.1.3",
    "@langchain/openai@1.5.8",
    "langchain@1.5.14",
    "zod@4.6.7",
)
PYPI = ("strands-agents[anthropic,ollama,openai]==1.62.0",)

pytestmark = pytest.mark.sweep


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with scripted(TURNS, tmp_path_factory.mktemp("scripted")) as (talker, _):
        yield talker.url


def answers(command: list[str | Path], folder: Path) -> dict[str, list[str]]:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=MOST_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.skipif(not (shutil.which("node") and shutil.which("npm")), reason="there is no Node with npm here")
def test_frameworks_of_npm_call_their_tool(url: str, tmp_path: Path) -> None:
    npm_programs(tmp_path, *NPM)
    shutil.copy(HERE / "frameworks.mjs", tmp_path)
    found = answers(["node", "frameworks.mjs", url], tmp_path)
    assert len(found) == 7
    for name, told in found.items():
        assert told == (LED if "supervisor" in name else CALLED), name


def test_strands_calls_its_tool(url: str, tmp_path: Path) -> None:
    python = pypi_programs(tmp_path, *PYPI) / "python"
    found = answers([python, HERE / "strands_agents.py", url], tmp_path)
    assert found == dict.fromkeys(found, CALLED) and len(found) == 4
