"""`generate`: text to stdout, facts to stderr, and every way that a run can end."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from tokenwright.llm import LLM, Stream

PROMPT = "the sun and the other"
GREEDY = ("--temperature", 0)


@pytest.fixture
def generate(run: Run, model: Path) -> Callable[..., Any]:
    def go(*arguments: object, prompt: str = PROMPT, **options: Any) -> Any:
        return run("generate", prompt, "--model", model, *arguments, **options)

    return go


def facts_of(result: Any) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["facts"]


def test_text_and_facts(generate: Run, model: Path) -> None:
    result = generate("-n", 20, *GREEDY, "--ignore-eos")
    with LLM(model) as llm:
        [expected] = llm.generate([PROMPT], llm.sampling(temperature=0, max_tokens=20, ignore_eos=True))
    assert result.stdout == expected.text + "\n"
    memory, line, end = result.stderr.split("\n")
    assert re.fullmatch(r"KV cache: [\d,]+ pages of 16 tokens, [\d.]+ MiB \(float32\)", memory)
    assert not end
    prompt_tokens = expected.usage.prompt_tokens
    assert line.startswith(f"{prompt_tokens} prompt + 20 generated tokens · TTFT ")
    assert f" · {3 * (prompt_tokens + 19)} layer-tokens · float32 on cpu · length" in line
    assert re.search(r" tok/s · KV cache [\d.]+ KiB · ", line)


def test_without_the_cache_the_text_is_the_same_and_the_work_is_not(generate: Run) -> None:
    cached, naive = (
        json.loads(generate("-n", 16, *GREEDY, "--ignore-eos", "--json", *more).stdout)
        for more in ((), ("--no-cache",))
    )
    n, t = cached["facts"]["prompt_tokens"], 16
    assert naive["token_ids"] == cached["token_ids"]
    assert naive["text"] == cached["text"]
    assert cached["facts"]["forward_tokens"] == n + t - 1
    assert naive["facts"]["forward_tokens"] == sum(range(n, n + t))
    assert (cached["facts"]["kv_bytes"] > 0, naive["facts"]["kv_bytes"]) == (True, 0)


@pytest.mark.parametrize("options", [("--page-size", 1), ("--page-size", 64), ("--token-budget", 3)])
def test_pages_and_chunks_change_nothing(generate: Run, options: tuple[object, ...]) -> None:
    plain = generate("-n", 12, *GREEDY, "-q").stdout
    assert generate("-n", 12, *GREEDY, "-q", *options).stdout == plain


def test_json(generate: Run) -> None:
    result = generate("-n", 5, "--json", "--seed", 7, "--top-k", 50, "--top-p", 0.9, "--ignore-eos")
    assert result.stderr == ""
    found = json.loads(result.stdout)
    assert found.keys() == {"model", "prompt", "text", "token_ids", "finish_reason", "facts"}
    assert found["prompt"] == PROMPT
    assert (len(found["token_ids"]), found["finish_reason"]) == (5, "length")
    facts = found["facts"]
    assert (facts["generated_tokens"], facts["seed"], facts["device"], facts["dtype"]) == (
        5,
        7,
        "cpu",
        "float32",
    )
    assert facts["layer_tokens"] == 3 * facts["forward_tokens"]
    assert 0 < facts["ttft_s"] <= facts["total_s"]


def test_quiet_is_the_text_alone(generate: Run) -> None:
    result = generate("-n", 5, *GREEDY, "--quiet")
    assert result.stderr == ""
    assert generate("-n", 5, *GREEDY).stdout == result.stdout


def test_a_seed_fixes_the_text_and_is_told_where_none_was_given(generate: Run) -> None:
    told = facts_of(generate("-n", 8, "--json"))["seed"]
    again = [generate("-n", 8, "-q", "--seed", told).stdout for _ in range(2)]
    assert again[0] == again[1]


def test_stop_strings(generate: Run) -> None:
    text = json.loads(generate("-n", 40, *GREEDY, "--ignore-eos", "--json").stdout)["text"]
    stop = text[len(text) // 2 :][:2]
    result = json.loads(
        generate("-n", 40, *GREEDY, "--ignore-eos", "--json", "--stop", "never there", "--stop", stop).stdout
    )
    assert result["text"] == text[: text.index(stop)]
    assert result["finish_reason"] == "stop"


def test_no_new_tokens(generate: Run) -> None:
    result = json.loads(generate("-n", 0, "--json").stdout)
    assert (result["text"], result["token_ids"], result["finish_reason"]) == ("", [], "length")
    assert result["facts"]["ttft_s"] is None
    line = generate("-n", 0).stderr
    assert "TTFT" not in line
    assert "tok/s" not in line


def test_the_context_is_a_limit(generate: Run) -> None:
    result = json.loads(generate("-n", 10_000, *GREEDY, "--ignore-eos", "--json", prompt="x").stdout)
    assert result["finish_reason"] == "context"
    assert result["facts"]["prompt_tokens"] + len(result["token_ids"]) == 512


@pytest.mark.parametrize("text", ["a NUL \0 is text", "é 🙂 漢字"])
def test_prompts_from_a_file_and_from_standard_input(run: Run, model: Path, tmp_path: Path, text: str) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(text + "\n", encoding="utf-8")
    options = ("--model", model, "-n", 4, *GREEDY, "--json")
    by_file = run("generate", "--file", file, *options)
    by_input = run("generate", "-", *options, input=text.encode() + b"\n")
    assert by_file.exit_code == by_input.exit_code == 0
    assert json.loads(by_file.stdout)["prompt"] == json.loads(by_input.stdout)["prompt"] == text


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C after three tokens."""
    plain, count = Stream.__next__, iter(range(10_000))

    def after_three(stream: Stream) -> Any:
        if next(count) == 3:
            raise KeyboardInterrupt
        return plain(stream)

    monkeypatch.setattr(Stream, "__next__", after_three)


@pytest.mark.usefixtures("interrupt")
def test_ctrl_c_ends_with_the_facts(generate: Run) -> None:
    result = generate("-n", 50, *GREEDY, "--ignore-eos")
    assert result.exit_code == 130
    assert result.stdout.endswith("\n")
    assert "prompt + 3 generated tokens" in result.stderr
    assert result.stderr.endswith(" · aborted\n")
    assert "Traceback" not in result.stderr


@pytest.mark.usefixtures("interrupt")
def test_ctrl_c_leaves_whole_json(generate: Run) -> None:
    result = generate("-n", 50, *GREEDY, "--ignore-eos", "--json")
    assert result.exit_code == 130
    found = json.loads(result.stdout)
    assert (len(found["token_ids"]), found["finish_reason"]) == (3, "aborted")


def test_a_reader_that_goes_away_ends_it_quietly(model: Path) -> None:
    command = [sys.executable, "-m", "tokenwright", "generate", PROMPT, "--model", str(model), "-n", "400"]
    with subprocess.Popen([*command, "--ignore-eos"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1)
        process.stdout.close()
        words = process.stderr.read()
        assert words.startswith(b"KV cache: ") and words.count(b"\n") == 1, "no word about the pipe"
    assert process.returncode == 0


def test_a_terminal_sees_the_prompt_first(generate: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("typer.testing._NamedTextIOWrapper.isatty", lambda self: True, raising=False)
    result = generate("-n", 4, *GREEDY)
    assert result.exit_code == 0
    assert PROMPT in result.stdout
    assert PROMPT not in generate("-n", 4, *GREEDY, "--quiet").stdout


def test_a_terminal_sees_the_model_load(generate: Run) -> None:
    result = generate("-n", 1, *GREEDY, env={"FORCE_COLOR": "1", "COLUMNS": "300"})
    assert "loading " in result.stderr
    assert " KiB" in result.stderr
    assert "loading " not in generate("-n", 1, *GREEDY, "--quiet", env={"FORCE_COLOR": "1"}).stderr
