"""Programs of PyPI, unchanged, in sessions of five turns against a model that writes what a script says."""

import json
import os
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.packages import pypi_programs
from tests.clients.scripted import Turn, scripted
from tests.clients.test_agents import DONE, MOST_S, WORDS, cached, found_again
from tests.engines import until
from tests.processes import running

AIDER = "aider-chat==0.86.2"
AIDERS = ("--no-git", "--yes-always", "--no-analytics", "--no-check-update", "--no-show-release-notes", "--no-pretty")
KNOWN = {"max_input_tokens": 131_072, "max_output_tokens": 8_192, "litellm_provider": "openai", "mode": "chat"}

WEBUI = "open-webui==0.12.4"
HEAVY = (
    *("accelerate", "azure-", "chromadb", "einops", "faster-whisper", "google-cloud-", "onnxruntime", "opencv-"),
    *("opensearch-py", "psycopg", "pyarrow", "pymysql", "rapidocr", "sentence-transformers", "sentencepiece"),
    "transformers",
)
TOOL = """
class Tools:
    def say(self, word: str) -> str:
        \"\"\"
        Say a word.
        :param word: The word.
        \"\"\"
        return "said " + word
"""

pytestmark = pytest.mark.sweep


def edited(words: tuple[str, ...]) -> str:
    """An answer of aider's `diff` form that appends the last of these lines to a file that has the others."""
    *_, before, added = ("zero", *words)
    return f"words.txt\n```\n<<<<<<< SEARCH\n{before}\n=======\n{before}\n{added}\n>>>>>>> REPLACE\n```\n"


def test_aider_edits_a_file_five_times(tmp_path: Path) -> None:
    programs = pypi_programs(tmp_path, AIDER)
    home = tmp_path / "home"
    home.mkdir()
    (home / "words.txt").write_text("zero\n", encoding="utf-8")
    (home / ".aider.model.metadata.json").write_text(json.dumps({"openai/tiny": KNOWN}), encoding="utf-8")
    answers = {f"Append {word}.": edited(WORDS[: at + 1]) for at, word in enumerate(WORDS)}
    with scripted([], tmp_path, answers=answers) as (talker, script):
        kept = {key: value for key, value in os.environ.items() if key in ("PATH", "LANG")}
        done = subprocess.run(
            [programs / "aider", *AIDERS, "--model", "openai/tiny", "--edit-format", "diff", "words.txt"],
            cwd=home,
            env={
                **kept,
                "HOME": str(home),
                "TERM": "dumb",
                "OPENAI_API_BASE": f"{talker.url}/v1",
                "OPENAI_API_KEY": "none",
            },
            input="".join(f"{asked}\n" for asked in [*answers, "/exit"]),
            capture_output=True,
            text=True,
            timeout=MOST_S,
            check=False,
        )
        found = cached(talker.url)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (home / "words.txt").read_text(encoding="utf-8").split() == ["zero", *WORDS], done.stdout
    prompts = [one.prompt for one in script.log]
    assert len(prompts) == len(WORDS)
    assert all(one < two for one, two in pairwise(prompts))
    # each prompt ends with the file, the request and a reminder, which move on
    assert found_again("aider", prompts, found) > 0.5, prompts


def webui_requirements(programs: Path) -> list[str]:
    """What Open WebUI needs, without the packages that its slim mode leaves out."""
    code = "from importlib.metadata import requires; print(*requires('open-webui'), sep='\\n')"
    done = subprocess.run([programs / "python", "-c", code], capture_output=True, text=True, check=True)
    needed = [line for line in done.stdout.splitlines() if ";" not in line]
    return ["typer", *(line for line in needed if not line.startswith(HEAVY))]


@contextmanager
def open_webui(programs: Path, home: Path, url: str) -> Iterator[httpx.Client]:
    """A running Open WebUI whose one connection is to this address; its client is signed in."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    variables = {
        "DATA_DIR": str(home),
        "ENABLE_OLLAMA_API": "False",
        "HOME": str(home),
        "OFFLINE_MODE": "True",
        "OPENAI_API_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": "none",
        "USE_SLIM_DOCKER": "True",
        "WEBUI_AUTH": "False",
        "WEBUI_SECRET_KEY": "none",
    }
    kept = {key: value for key, value in os.environ.items() if key in ("PATH", "LANG")}
    with (home / "log.txt").open("w", encoding="utf-8") as log:
        command = [programs / "open-webui", "serve", "--host", "127.0.0.1", "--port", port]
        with (
            running(command, cwd=home, env=kept | variables, stdout=log, stderr=log) as process,
            httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=MOST_S) as http,
        ):
            until(lambda: process.poll() is not None or answers(http), MOST_S)
            assert process.poll() is None, (home / "log.txt").read_text(encoding="utf-8")[-4000:]
            signed = http.post("/api/v1/auths/signin", json={"email": "", "password": ""}).json()
            http.headers["Authorization"] = f"Bearer {signed['token']}"
            yield http


def answers(http: httpx.Client) -> bool:
    with suppress(httpx.TransportError):
        return http.get("/health").is_success
    return False


def test_open_webui_calls_a_tool_five_times(tmp_path: Path) -> None:
    """One question in a chat that is kept, with a tool that Open WebUI itself runs."""
    programs = pypi_programs(tmp_path, "--no-deps", WEBUI)
    pypi_programs(tmp_path, *webui_requirements(programs))
    home = tmp_path / "home"
    home.mkdir()
    turns: list[Turn] = [*({"say": {"word": word}} for word in WORDS), DONE]
    with scripted(turns, tmp_path) as (talker, script), open_webui(programs, home, talker.url) as http:
        assert "tiny" in [one["id"] for one in http.get("/api/models").json()["data"]]
        made = {"id": "say", "name": "Say", "content": TOOL, "meta": {"description": "Says a word."}}
        http.post("/api/v1/tools/create", json=made).raise_for_status()
        asked = {"id": "question", "role": "user", "content": "Say five words."}
        body = {"model": "tiny", "stream": True, "messages": [asked], "user_message": asked, "parent_id": None}
        body |= {"id": "reply", "session_id": "one", "tool_ids": ["say"]}
        begun = http.post("/api/chat/completions", json=body).raise_for_status().json()
        place = f"/api/v1/chats/{begun['chat_id']}"
        until(lambda: reply_in(http.get(place).json()).get("done"), MOST_S)
        reply, found = reply_in(http.get(place).json()), cached(talker.url)
    assert DONE in reply["content"], reply
    results = script.log[-1].results
    assert all(f"said {word}" in result for word, result in zip(WORDS, results, strict=True)), results
    prompts = [one.prompt for one in script.log]
    assert len(prompts) == len(turns)
    assert found_again("Open WebUI", prompts, found) > 0.9, prompts


def reply_in(chat: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = chat["chat"]["history"]["messages"]["reply"]
    return found
