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
from tests.processes import running
from tokenwright.decode.drafts import step_costs
from tokenwright.llm.drafts import sources
from tokenwright.llm.llm import LLM
from tokenwright.llm.output_processor import Stream

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
    assert re.fullmatch(r"KV cache: [\d,]+ pages of 16 tokens, [\d.]+ [KM]iB \(float32\)", memory)
    assert not end
    prompt_tokens = expected.usage.prompt_tokens
    assert line.startswith(f"{prompt_tokens} prompt + 20 generated tokens · first token after ")
    assert line.endswith(f" · float32 on cpu ({llm.kernels} kernels) · ended by -n")
    assert re.search(r" tok/s · weights [\d.]+ KiB \(float32\) · KV cache [\d.]+ KiB · ", line)


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


def test_an_empty_prompt_begins_a_text(run: Run) -> None:
    result = run("generate", "", "-m", "stories", "-n", 3, *GREEDY)
    assert result.exit_code == 0 and result.stdout.strip()
    assert "\nthe prompt is empty, so the model starts a new text\n" in result.stderr
    assert "\n1 prompt + 3 generated tokens" in result.stderr, "the prompt is the token of the beginning"


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


def test_drafts_change_the_figures_alone(generate: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_costs, "LIKE", {**step_costs.LIKE, "avx2": "wide"})  # a draft model so large pays there
    monkeypatch.setattr(sources, "LEAST_SMALL", 0.2)  # and for a model so small
    asked = ("-n", 200, *GREEDY, "--regex", "(the cat sat on the mat ){3}")
    on, off = (generate(*asked, "--speculate", name, "--json") for name in ("suffix", "off"))
    assert json.loads(on.stdout)["text"] == json.loads(off.stdout)["text"]
    assert 0 < facts_of(on)["accepted_tokens"] <= facts_of(on)["drafted_tokens"]
    assert facts_of(off)["drafted_tokens"] == 0
    guessed = generate(*GREEDY, "-n", 20, "--ignore-eos", "--draft", model, "--draft-weights", "int8", "--json")
    assert (
        json.loads(guessed.stdout)["text"]
        == json.loads(generate("-n", 20, *GREEDY, "--ignore-eos", "--json").stdout)["text"]
    )
    assert facts_of(guessed)["accepted_tokens"] > 0
    assert " drafts kept · " in generate(*asked).stderr
    assert "drafts" not in generate(*asked, "--speculate", "off").stderr


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
    """Nothing is drawn, so there is no seed."""
    result = json.loads(generate("-n", 0, "--json").stdout)
    assert (result["text"], result["token_ids"], result["finish_reason"]) == ("", [], "length")
    assert result["facts"]["ttft_s"] is result["facts"]["seed"] is None
    plain = generate("-n", 0)
    assert (plain.exit_code, plain.stdout) == (0, "\n")
    assert " + 0 generated tokens · weights " in plain.stderr and plain.stderr.endswith(" · ended by -n\n")
    assert not any(word in plain.stderr for word in ("first token", "tok/s", "seed"))


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
    by_input, by_pipe = (run("generate", *dash, *options, input=text.encode() + b"\n") for dash in (("-",), ()))
    assert by_file.exit_code == by_input.exit_code == by_pipe.exit_code == 0
    assert {json.loads(one.stdout)["prompt"] for one in (by_file, by_input, by_pipe)} == {text}


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
    assert result.stderr.endswith(" · interrupted\n")
    assert "Traceback" not in result.stderr


@pytest.mark.usefixtures("interrupt")
def test_ctrl_c_leaves_whole_json(generate: Run) -> None:
    result = generate("-n", 50, *GREEDY, "--ignore-eos", "--json")
    assert result.exit_code == 130
    found = json.loads(result.stdout)
    assert (len(found["token_ids"]), found["finish_reason"]) == (3, "aborted")


def test_a_reader_that_goes_away_ends_it_quietly(model: Path) -> None:
    command = [sys.executable, "-m", "tokenwright", "generate", PROMPT, "--model", str(model), "-n", "400"]
    with running([*command, "--ignore-eos"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
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


def test_a_terminal_sees_the_model_load(generate: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "loading " not in generate("-n", 1, *GREEDY).stderr
    monkeypatch.setattr("tokenwright.cli.options.shared.on_terminal", lambda: True)
    result = generate("-n", 1, *GREEDY, env={"FORCE_COLOR": "1", "COLUMNS": "300"})
    assert "loading " in result.stderr
    assert " KiB" in result.stderr
    assert "loading " not in generate("-n", 1, *GREEDY, "--quiet", env={"FORCE_COLOR": "1"}).stderr


def test_a_cache_file_spares_the_prompt(generate: Run, tmp_path: Path) -> None:
    file = tmp_path / "chat.kv"
    first, second = (
        json.loads(generate("-n", 30, *GREEDY, "--ignore-eos", "--cache-file", file, "--page-size", 4, "--json").stdout)
        for _ in range(2)
    )
    n = first["facts"]["prompt_tokens"]
    assert first["facts"]["reused_tokens"] == 0
    assert second["facts"]["reused_tokens"] == (n - 1) // 4 * 4 > 0
    assert second["facts"]["forward_tokens"] == n + 29 - second["facts"]["reused_tokens"]
    assert second["text"] == first["text"]
    told = generate("-n", 30, *GREEDY, "--ignore-eos", "--cache-file", file, "--page-size", 4).stderr
    assert f" · {second['facts']['reused_tokens']} tokens reused · " in told
    assert f"the K and V of {(n + 29) // 4 * 4} tokens are in {file}" in told


def test_a_cache_file_that_cannot_be_believed_is_refused(generate: Run, tmp_path: Path) -> None:
    file = tmp_path / "chat.kv"
    assert generate("-n", 20, *GREEDY, "--ignore-eos", "--cache-file", file).exit_code == 0
    other = generate("-n", 20, "--cache-file", file, "--kv", "int8")
    assert other.exit_code == 2
    assert "saved with another kv format" in other.stderr
    data = bytearray(file.read_bytes())
    data[-5] ^= 8
    file.write_bytes(data)
    damaged = generate("-n", 20, "--cache-file", file)
    assert (damaged.exit_code, damaged.stdout) == (2, "")
    assert "damaged: its checksum" in damaged.stderr
    assert file.read_bytes() == data, "what is refused is left as it is"
    assert generate("--cache-file", file, "--no-cache").exit_code == 2
    assert "leave one of them out" in generate("--cache-file", file, "--no-cache").stderr


def test_a_short_text_leaves_no_file(generate: Run, tmp_path: Path) -> None:
    told = generate("-n", 1, "--cache-file", tmp_path / "chat.kv", "--page-size", 64).stderr
    assert "nothing was saved" in told
    assert not (tmp_path / "chat.kv").exists()


def test_the_cache_is_shaped_by_options(generate: Run) -> None:
    plain = json.loads(generate("-n", 60, *GREEDY, "--ignore-eos", "--json").stdout)["facts"]
    for options, words in [
        (("--kv", "int8"), "int8"),
        (("--kv", "k=int8,v=int4,first=4"), "k=int8,v=int4,first=4"),
        (("--window", 16, "--sinks", 2), "float32, window 16 and 2 sinks"),
    ]:
        facts = json.loads(generate("-n", 60, *GREEDY, "--ignore-eos", "--json", *options).stdout)["facts"]
        assert facts["kv"] == words
        assert 0 < facts["kv_bytes"] < plain["kv_bytes"]
    refused = generate("--kv", "int3")
    assert refused.exit_code == 2
    assert "kv 'int3' is not known" in refused.stderr


def test_a_cache_file_of_another_text_is_left_alone(generate: Run, tmp_path: Path, run: Run, model: Path) -> None:
    file = tmp_path / "chat.kv"
    assert generate("-n", 40, *GREEDY, "--ignore-eos", "--cache-file", file).exit_code == 0
    before = file.read_bytes()
    other = run("generate", "quite another text", "--model", model, "-n", 30, "--ignore-eos", "--cache-file", file)
    assert other.exit_code == 0
    assert "was not changed" in other.stderr
    assert file.read_bytes() == before


def test_a_cache_file_in_no_folder_is_refused_before_anything_is_written(generate: Run, tmp_path: Path) -> None:
    refused = generate("-n", 4, "--cache-file", tmp_path / "absent" / "chat.kv")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "there is no folder" in refused.stderr


def test_one_answer_of_a_conversation(run: Run) -> None:
    options = ("generate", "Tell me of a cat.", "-n", 8, *GREEDY, "-q")
    answer, told = run(*options, "--chat"), run(*options, "--chat", "--system", "Be brief.")
    with LLM("stories") as llm:
        asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell me of a cat."}]
        for result, messages in ((answer, asked[1:]), (told, asked)):
            expected = llm.chat(messages, llm.sampling(temperature=0, max_tokens=8))
            assert result.stdout == expected.text + "\n"
    assert "give --chat as well" in run(*options, "--system", "Be brief.").stderr


def test_echo_writes_the_prompt_first(generate: Run) -> None:
    plain = generate("-n", 5, *GREEDY, "-q").stdout
    assert generate("-n", 5, *GREEDY, "-q", "--echo").stdout == PROMPT + plain
    assert "leave it or --json out" in generate("--echo", "--json").stderr


def test_verbose_tells_the_phases(generate: Run) -> None:
    told = generate("-n", 5, *GREEDY, "--ignore-eos", "-v").stderr.splitlines()[-1]
    assert re.match(r"imports [\d.]+ m?s · load [\d.]+ m?s · tokenise and submit [\d.]+ m?s · wait ", told)
    assert re.search(r" · prefill of \d+ tokens [\d.]+ m?s \([\d.,e+]+ tok/s\) · decode of 4 tokens ", told)
    found = json.loads(generate("-n", 5, "--json", "-v").stdout)["phases"]
    assert found.keys() == {"imports_s", "load_s", "request_s"}


def test_threads_and_memory_are_options(generate: Run) -> None:
    shown = generate("--max-tokens", 2, "--ignore-eos", "--threads", 1, "--kv-memory", "64KiB")
    assert shown.exit_code == 0, shown.stderr
    assert " + 2 generated tokens" in shown.stderr
    assert re.match(r"KV cache: \d+ pages of 16 tokens, [4-6]\d\.\d KiB", shown.stderr)
    assert "--kv-memory 64 has no unit; write 64GB, 64GiB, or 64B for bytes" in generate("--kv-memory", 64).stderr
    small = generate("--kv-memory", "1KiB").stderr
    assert "--kv-memory" in small and "kv_memory" not in small


def test_the_cache_on_a_disk_is_an_option(generate: Run, tmp_path: Path) -> None:
    def go(*more: object) -> Any:
        return generate("-n", 2, "--kv-disk", tmp_path / "kv", *more, prompt=PROMPT * 12)

    first, again = (facts_of(go("--kv-disk-size", "1MB", "--json")) for _ in range(2))
    assert (first["disk_tokens"], first["reused_tokens"]) == (0, 0)
    assert again["prompt_tokens"] - 16 <= again["disk_tokens"] == again["reused_tokens"] > 0
    found = again["disk_tokens"]
    assert f"{found} tokens reused ({found} from the disk)" in go().stderr
    assert "--kv-disk-size limits --kv-disk" in generate("--kv-disk-size", "1MB").stderr
    assert "--kv-disk-size is 1,024 bytes" in go("--kv-disk-size", "1KiB").stderr


def test_the_memory_is_not_named_where_there_is_no_option(run: Run, model: Path) -> None:
    result = run("race", "x", "--model", model, "-n", 1, "--page-size", 2**31)
    assert result.exit_code == 2
    assert "kv_memory" not in result.stderr and "pages or" not in result.stderr
    assert re.search(r"grant it more memory, at least \d+GiB, or smaller pages \(--page-size\)", result.stderr)


def test_json_tells_the_text_of_tokens(run: Run) -> None:
    told = json.loads(run("generate", PROMPT, "-n", 9, *GREEDY, "--ignore-eos", "--logprobs", 2, "--json").stdout)
    assert "".join(told["tokens"]) == told["text"]
    assert [top[0]["token"] for top in told["top_logprobs"]] == told["tokens"], "greedy takes the most probable"


@pytest.mark.parametrize(
    ("options", "complete"),
    [
        (("--regex", "[a-z]{40}", "-n", 5), False),
        (("--regex", "[a-z]{3,40}", "-n", 5), True),
        (("--regex", "[a-z]{3}"), True),
        (("--regex", "[a-z]{40}", "--stop-id", 3, "--max-seconds", 0), False),
        (("--regex", "x[a-z]{40}", "--stop", "x"), False),
        (("--regex", "[a-z]{40}", "-n", 5, "--texts", 2), False),
        (("--regex", "[a-z]{40}", "-n", 5, "--beams", 2), False),
        (("--choice", "yes", "--beams", 2), True),
    ],
)
def test_a_text_that_was_cut_before_its_grammar_could_end(generate: Run, options: Any, complete: bool) -> None:
    result, told = generate(*options, "-q"), generate(*options, "--json")
    assert result.exit_code == told.exit_code == (0 if complete else 4)
    assert json.loads(told.stdout)["complete"] == complete
    line = "before its grammar ended"
    assert (line in result.stderr, line in told.stderr) == (not complete, not complete)


def test_without_a_grammar_nothing_is_said_of_it(generate: Run) -> None:
    assert "complete" not in json.loads(generate("-n", 2, "--json").stdout)


def test_errors_are_json_too(run: Run, tmp_path: Path) -> None:
    for words in (("generate", "x", "-m", tmp_path / "nothing", "--json"), ("generate", "--wings", "--json")):
        result = run(*words)
        error = json.loads(result.stdout)["error"]
        assert result.exit_code == error["exit_code"] == 2
        assert result.stderr == f"tokenwright: {error['message']}\n"


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenised(
    generate: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tokenised(*_: object, **__: object) -> None:
        raise AssertionError("it was tokenised")

    monkeypatch.setattr("tokenwright.text.tokenizer.Tokenizer.encode", tokenised)
    told = generate(prompt="\0" * 1_000_000).stderr
    assert "the prompt has 1,000,000 characters, so at least " in told
