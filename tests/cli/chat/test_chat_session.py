"""`chat` beyond plain turns: one message, the commands that change a conversation, a full context, files."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from tests.cli.chat.conftest import GREEDY
from tests.cli.chat.test_chat import turns
from tests.cli.conftest import Run
from tokenwright.cli import app
from tokenwright.cli.chat.slash_commands import NAMES, changed, listed
from tokenwright.cli.options.sampling import COMMON
from tokenwright.errors import RequestError
from tokenwright.llm.llm import LLM
from tokenwright.sampling_params import Grammar, SamplingParams

Refused = Callable[..., str]


def questions(prompt: str) -> list[str]:
    """The user's messages in what /prompt showed last."""
    return re.findall(r"user: (.*?)</s>", prompt[prompt.rindex("<s>") :], re.DOTALL)


def test_one_message_is_answered_once(run: Run, chat: Run, talker: Path) -> None:
    once = run("chat", "Hello", "-m", talker, "-n", 6, *GREEDY, "-q", input="never read\n")
    assert (once.exit_code, once.stderr) == (0, "")
    assert once.stdout == chat("Hello").stdout
    assert run("chat", "-", "-m", talker, "-n", 6, *GREEDY, "-q", input="Hello\n").stdout == once.stdout


def test_an_empty_message_is_refused_before_a_model_is_loaded(refused: Refused) -> None:
    assert "the message is empty" in refused("chat", " ", "-m", "nowhere")


def test_one_message_that_does_not_fit_is_refused(refused: Refused, talker: Path) -> None:
    assert "shorten it" in refused("chat", "word " * 600, "-m", talker)


def test_undo_edit_and_regenerate(chat: Run) -> None:
    result = chat("one", "two", "three", "/undo", "/prompt", "/edit 2", "/prompt", "/regenerate", "/prompt")
    assert result.exit_code == 0, result.output
    prompts = [questions(text) for text in re.findall(r"<s>.*?assistant: \n", result.stdout, re.DOTALL)]
    assert prompts == [["one", "two"], ["one", "2"], ["one", "2"]]
    assert 'removed "three" and its answer; 4 messages left' in result.stderr
    assert "the temperature is 0, so the answer is the same" in result.stderr
    counted = turns(result.stderr)
    assert len(counted) == 5
    assert counted[4][0] == counted[3][0], "the same prompt"
    assert all(again < 16 for *_, again in counted), "full pages of what stays are reused"


def test_the_cache_is_asked_about_the_last_prompt(chat: Run) -> None:
    result = chat("/cache", "one", "/cache", "two", "/system Be very brief.", "three", "/cache")
    assert "there is no prompt yet" in result.stderr
    assert "; nothing to compare with" in result.stderr
    assert re.search(r"computed again.*: system changed at token \d+, ", result.stderr), result.stderr
    assert 'now: "system: Be very brief.' in result.stderr


def test_another_answer_is_drawn_with_another_seed(chat: Run) -> None:
    options = ("--temperature", 3, "--seed", 5)
    result = chat("one", "/regenerate", "/regenerate", options=(*options, "-q"), new_tokens=12)
    answers = result.stdout
    alone = [chat("one", options=("--temperature", 3, "--seed", seed, "-q"), new_tokens=12).stdout for seed in (5, 6)]
    assert answers.startswith("".join(alone))
    assert len(set(alone)) == 2


def test_commands_without_anything_to_act_on_are_told(chat: Run) -> None:
    result = chat("/regenerate", "/undo", "/edit", "/edit x")
    assert result.exit_code == 2
    assert [line.startswith("tokenwright: ") for line in result.stderr.splitlines()] == [True] * 4
    assert "Traceback" not in result.output


def test_commands_confirm(chat: Run) -> None:
    lines = ("/system Be kind.", "Hi", "/system", "/system", "/reset", "/shift", "/shift off")
    told = [line for line in chat(*lines).stderr.splitlines() if "prompt tokens" not in line]
    assert told == [
        "the system message is set",
        "the system message is removed",
        "there is no system message",
        "2 messages dropped",
        "a full context drops the oldest turns",
        "a full context ends the answer",
    ]


def test_what_ollama_calls_the_commands(chat: Run) -> None:
    result = chat("Hi", "/clear", "/set parameter seed 3", "/?", "/bye", "Hi")
    assert result.exit_code == 0, result.output
    assert "2 messages dropped" in result.stderr and "seed is 3" in result.stderr and "/undo" in result.stderr


@pytest.mark.parametrize("word", ["/exit", "/bye", "/quit"])
def test_words_that_leave(chat: Run, word: str) -> None:
    result = chat(word, "Hello")
    assert (result.stdout, result.exit_code) == ("", 0)


def test_options_change_in_the_session(chat: Run, talker: Path) -> None:
    lines = ("Hi", "/set max-tokens 2", "/reset", "Hi", "/set choice yes no", "Hi", "/set temperature 9e9", "/set")
    result = chat(*lines, options=(*GREEDY, "--plain"))
    first, second, third = result.stdout.splitlines()[:3]
    assert first.startswith(second) and first != second
    assert third in ("y", "ye", "yes", "n", "no")
    assert result.exit_code == 2, "a temperature out of range is refused"
    assert re.search(r"set: max-tokens 2, temperature 0.0, choice \[\"yes\", \"no\"\]", result.stderr)


def test_every_sampling_option_can_be_set_and_unset() -> None:
    values = {"bool": ["on"], "int": ["2"], "float": ["1.0"], "logit_bias": ["5:1.5", "7:2"], "regex": ["a+"]}
    values |= {"json_schema": ['{"type": "object"}'], "lark": ['start: "a"']}
    typed = {one.name: one.opts for one in get_command(app).commands["chat"].params if one.name in COMMON}  # type: ignore[attr-defined]
    assert {key: f"--{name}" in typed[key] for name, key in NAMES.items()} == dict.fromkeys(COMMON, True)
    for name, key in NAMES.items():
        kind = str(COMMON[key].__origin__)
        usual = next((values[one] for one in ("bool", "int", "float") if one in kind), ["a b", "c"])
        given = values.get(key, usual)
        chosen, told = changed({}, f"{name} {' '.join(map(json.dumps, given))}")
        [(field, value)] = chosen.items()
        SamplingParams(**chosen)
        assert told.startswith(f"{name} is ") and "default" not in told
        assert isinstance(value, Grammar) if field == "grammar" else value not in (None, ())
        assert changed(chosen, f"--{name} default")[0] == {}
        assert name in listed(chosen)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("temperature hot", "takes a number, not 'hot'"),
        ("top-k 1.5", "takes a whole number"),
        ("top-k 1 2", "takes one value"),
        ("ignore-eos maybe", "takes on or off"),
        ("stop 'a", "cannot be read: No closing quotation"),
        ("logit-bias 3", "ID:NUMBER"),
        ("colour red", "there is no option 'colour'"),
        ("num_predict 5", "there is no option 'num-predict', but max-tokens"),
        ("parameter repeat_penalty 1.1", "there is no option 'repeat-penalty', but repetition-penalty"),
        ("temprature 1", "there is no option 'temprature', but temperature"),
        ("system Be brief", "(/system TEXT sets the system message)"),
    ],
)
def test_what_cannot_be_set_is_told(text: str, told: str) -> None:
    with pytest.raises(RequestError, match=re.escape(told)):
        changed({}, text)


def test_a_full_context_forgets_the_oldest_turns_by_choice(chat: Run) -> None:
    lines = [f"{at} " + "word " * 20 for at in range(8)]
    ends = chat(*lines, "/prompt", options=(*GREEDY, "-s", "Be kind."), new_tokens=9)
    assert "/shift on" in ends.stderr and "/reset" in ends.stderr and "--window" in ends.stderr
    assert ends.exit_code == 2
    goes_on = chat(*lines, "/prompt", options=(*GREEDY, "-s", "Be kind.", "--shift"), new_tokens=9)
    assert goes_on.exit_code == 0, goes_on.stderr
    left = questions(goes_on.stdout)
    assert "system: Be kind." in goes_on.stdout[goes_on.stdout.rindex("<s>") :]
    assert [text.split()[0] for text in left] == [str(at) for at in range(8 - len(left), 8)]
    assert 1 <= len(left) < 8
    assert "oldest turns were dropped" in goes_on.stderr


def test_a_window_goes_on_without_end(chat: Run) -> None:
    result = chat(*(f"{at} " + "word " * 20 for at in range(8)), options=(*GREEDY, "--window", 64))
    assert result.exit_code == 0, result.stderr
    assert turns(result.stderr)[-1][0] > 512


def test_files_are_not_overwritten_unasked(chat: Run, tmp_path: Path) -> None:
    mine, ours = tmp_path / "mine", tmp_path / "ours"
    mine.write_text("mine")
    result = chat("Hi", f"/save {mine}", f"/save {ours}", "Ho", f"/save {ours}")
    assert (result.exit_code, mine.read_text()) == (2, "mine")
    assert f"{mine} exists and is not overwritten" in result.stderr
    assert len(json.loads(ours.read_text())) == 4, "a file of this conversation is its own"
    assert chat("Hi", f"/load {ours}", "Hi", f"/save {ours}").exit_code == 0
    assert len(json.loads(ours.read_text())) == 6
    assert chat("Hi", f"/save --force {mine}").exit_code == 0
    assert len(json.loads(mine.read_text())) == 2


def test_the_conversation_is_saved_on_exit(chat: Run, refused: Refused, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    assert chat(options=("--save", file)).exit_code == 0
    assert not file.exists(), "nothing was said"
    assert "2 messages saved" in chat("Hi", options=(*GREEDY, "--save", file)).stderr
    before = file.read_text()
    assert "exists and is not overwritten" in refused("chat", "-m", "nowhere", "--save", file)
    assert "in a folder that exists" in refused("chat", "-m", "nowhere", "--save", tmp_path / "no" / "file")
    assert file.read_text() == before
    for more in (("--load", file), ("--force",)):
        assert chat("Ho", options=(*GREEDY, "--save", file, *more)).exit_code == 0
    assert json.loads(file.read_text())[0]["content"] == "Ho"


def test_what_a_failure_leaves_is_saved(chat: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, stream = tmp_path / "talk.json", LLM.chat_stream

    def breaking(llm: LLM, *given: Any, **options: Any) -> Any:
        if file.exists() or breaking_now:
            raise ZeroDivisionError
        breaking_now.append(True)
        return stream(llm, *given, **options)

    breaking_now: list[bool] = []
    monkeypatch.setattr(LLM, "chat_stream", breaking)
    result = chat("Hi", "Ho", options=("--save", file))
    assert result.exit_code == 1, result.stderr
    assert "ZeroDivisionError" in result.stderr
    assert json.loads(file.read_text())[0]["content"] == "Hi"
