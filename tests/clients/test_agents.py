"""Agents of npm, unchanged, against a server whose model calls their tools: five calls, then an answer.

Claude Code, Codex and opencode are programs of some 200 MB, so CI runs the two that are JavaScript.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from tests.clients.packages import npm_programs
from tests.clients.scripted import Script, Turn, scripted
from tests.serve.talking import Talker

WORDS = ("one", "two", "three", "four", "five")
DONE = "All five are done."
ASKED = "Run five commands."
MOST_S = 600


def call_of(word: str) -> Turn:
    """A call of the tool that runs commands, as each agent names it."""
    command = f"echo {word}"
    return {
        "Bash": {"command": command, "description": word},
        "bash": {"command": command, "description": word},
        "exec_command": {"cmd": command},
        "run_shell_command": {"command": command, "description": word, "is_background": False},
    }


@dataclass(frozen=True)
class Agent:
    """package: of npm, with its version; command: its program and options. settings: files of its home, by name."""

    package: str
    command: tuple[str, ...]
    settings: Callable[[str], Mapping[str, str]] = lambda _: {}
    variables: Callable[[str], Mapping[str, str]] = lambda _: {}


AGENTS = {
    "claude-code": Agent(
        "@anthropic-ai/claude-code@2.1.197",
        ("claude", "-p", ASKED, "--model", "tiny", "--dangerously-skip-permissions"),
        variables=lambda url: {
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_AUTH_TOKEN": "none",
            "IS_SANDBOX": "1",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
    ),
    "codex": Agent(
        "@openai/codex@0.169.0",
        ("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", ASKED),
        settings=lambda url: {
            ".codex/config.toml": 'model = "tiny"\nmodel_provider = "own"\n[model_providers.own]\n'
            f'name = "Tokenwright"\nbase_url = "{url}/v1"\nwire_api = "responses"\n'
        },
    ),
    "opencode": Agent(
        "opencode-ai@1.18.33",
        ("opencode", "run", ASKED, "--model", "own/tiny"),
        settings=lambda url: {
            ".config/opencode/opencode.json": json.dumps(
                {
                    "permission": {"bash": "allow"},
                    "small_model": "own/tiny",
                    "provider": {
                        "own": {
                            "npm": "@ai-sdk/openai-compatible",
                            "name": "Tokenwright",
                            "models": {"tiny": {}},
                            "options": {"baseURL": f"{url}/v1"},
                        }
                    },
                }
            )
        },
    ),
    "qwen-code": Agent(
        "@qwen-code/qwen-code@0.15.10",
        ("qwen", "-p", ASKED, "--yolo", "--auth-type", "openai"),
        variables=lambda url: {"OPENAI_API_KEY": "none", "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_MODEL": "tiny"},
    ),
    "continue": Agent(
        "@continuedev/cli@1.5.47",
        ("cn", "-p", ASKED, "--config", "continue.yaml", "--auto"),
        settings=lambda url: {
            "continue.yaml": "name: own\nversion: 0.0.1\nschema: v1\nmodels:\n  - name: tiny\n    provider: openai\n"
            f"    model: tiny\n    apiBase: {url}/v1\n    apiKey: none\n    capabilities: [tool_use]\n"
        },
    ),
}
HEAVY = ("claude-code", "codex", "opencode", "qwen-code")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Talker, Script]]:
    turns = [*map(call_of, WORDS), DONE]
    with scripted(turns, tmp_path_factory.mktemp("scripted")) as running:
        yield running


def cached(url: str) -> float:
    """The prompt tokens so far whose K and V were found again."""
    found = re.search(r"^tokenwright_cached_tokens_total (\S+)$", httpx.get(f"{url}/metrics").text, re.MULTILINE)
    assert found is not None
    return float(found[1])


def found_again(name: str, prompts: list[int], tokens: float) -> float:
    """The share of later prompts that was found in the cache, printed."""
    share = tokens / sum(prompts[1:])
    print(
        f"{name}: {len(prompts)} turns, {prompts[-1]:,} tokens at the end, {share:.1%} of the later prompts found again"
    )
    return share


@pytest.mark.skipif(not (shutil.which("node") and shutil.which("npm")), reason="there is no Node with npm here")
@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.sweep] * (one in HEAVY)) for one in AGENTS])
def test_an_agent_calls_its_tools_five_times(server: tuple[Talker, Script], tmp_path: Path, name: str) -> None:
    talker, script = server
    agent, home, before = AGENTS[name], tmp_path / "home", cached(talker.url)
    programs = npm_programs(tmp_path, agent.package)
    script.log.clear()
    for file, text in agent.settings(talker.url).items():
        (home / file).parent.mkdir(parents=True, exist_ok=True)
        (home / file).write_text(text, encoding="utf-8")
    home.mkdir(exist_ok=True)
    kept = {key: value for key, value in os.environ.items() if key in ("PATH", "LANG")}
    done = subprocess.run(
        [programs / agent.command[0], *agent.command[1:]],
        cwd=home,
        env={**kept, **agent.variables(talker.url), "HOME": str(home)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=MOST_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert DONE in done.stdout
    last = script.log[-1]
    own = WORDS[len(WORDS) - len(last.results) :]  # Qwen Code begins with an answer of its own
    assert len(own) >= 4
    assert all(word in result for word, result in zip(own, last.results, strict=True)), last.results
    prompts = [one.prompt for one in script.log]
    assert all(one <= two for one, two in pairwise(prompts))
    assert found_again(name, prompts, cached(talker.url) - before) > 0.9, prompts
