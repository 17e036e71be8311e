"""docs/clients.md: its lines work as they are written, and its tables are those of the schemas."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve import tables
from tests.serve.talking import Talker, talking
from tokenwright.serve.app import Served

PAGE = tables.PAGE.read_text(encoding="utf-8")
HEAVY = ("langchain_openai", "litellm")  # their packages are not among the tests' own
BLOCKS = re.findall(r"^```py\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def package(block: str) -> str:
    """The package of a block's client."""
    return block.split(" ", 2)[1]


@pytest.fixture(scope="module")
def stories() -> Iterator[Talker]:
    with talking("stories", name="stories") as talker:
        yield talker


@pytest.mark.parametrize(
    "block",
    [pytest.param(one, marks=[pytest.mark.sweep] if package(one) in HEAVY else []) for one in BLOCKS],
    ids=package,
)
def test_the_lines_work_as_they_are_written(stories: Talker, block: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(package(block))
    names: dict[str, Any] = {}
    exec(block.replace("http://127.0.0.1:8000", stories.url), names)
    if "client" in names:
        names["client"].close()
    assert len(capsys.readouterr().out.split()) > 5


NPM = ("openai@6.49.0", "@anthropic-ai/sdk@1.12.0", "ollama@0.6.4")


@pytest.mark.skipif(not (shutil.which("node") and shutil.which("npm")), reason="there is no Node with npm here")
def test_the_clients_of_npm(stories: Talker, tmp_path: Path) -> None:
    quiet = ("--no-audit", "--no-fund", "--ignore-scripts", "--prefer-offline", "--fetch-retries=1", "--prefix")
    installed = subprocess.run(
        ["npm", "install", *quiet, str(tmp_path), *NPM], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    if installed.returncode:
        code = re.search(r"code (E\w+)", installed.stderr)
        assert code is not None and code[1] in OFFLINE, installed.stderr
        pytest.skip(f"npm's registry cannot be reached ({code[1]})")
    shutil.copy(Path(__file__).with_name("clients.mjs"), tmp_path)
    command = ["node", "clients.mjs", stories.url]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "all is as it should be\n"


OFFLINE = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ECONNRESET", "ETIMEDOUT", "ENETUNREACH", "ENOTCACHED")
MESSAGES = [{"role": "user", "content": "Tell me a story."}]
REQUESTS = {
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 8},
    "/v1/responses": {"input": MESSAGES, "max_output_tokens": 8},
    "/api/chat": {"messages": MESSAGES, "options": {"num_predict": 8}},
}


@pytest.fixture(scope="module")
def timed() -> Iterator[Talker]:
    with talking("stories", name="stories", served=Served(timings=True)) as talker:
        yield talker


@pytest.mark.parametrize("path", REQUESTS)
def test_a_reply_says_where_the_time_went_if_the_server_is_told_to(stories: Talker, timed: Talker, path: str) -> None:
    def replies(
        talker: Talker, streamed: bool, headers: dict[str, str] | None = None
    ) -> tuple[httpx.Response, dict[str, Any]]:
        body = REQUESTS[path] | {"model": "stories", "stream": streamed}
        answer = httpx.post(talker.url + path, json=body, headers=headers).raise_for_status()
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if "{" in line]
        whole = [json.loads(line) for line in lines]
        return answer, next((one for line in whole for one in (line, line.get("response", {})) if "timings" in one), {})

    answer, reply = replies(timed, False)
    assert "prefill;dur=" in answer.headers["server-timing"]
    assert reply["timings"]["completion_tokens"] == 8
    assert replies(timed, True)[1]["timings"]["completion_tokens"] == 8
    for streamed in (False, True):
        assert replies(stories, streamed, {"X-Timings": "1"})[1]["timings"]["completion_tokens"] == 8
    for streamed in (False, True):
        answer, reply = replies(stories, streamed)
        assert reply == {}
        assert "server-timing" not in answer.headers


def test_the_tables_are_those_of_the_schemas() -> None:
    assert len(re.findall("<!-- fields: ", PAGE)) == 2 * len(tables.BODIES)
    assert tables.written(PAGE) == PAGE, "run python -m tests.serve.tables"
