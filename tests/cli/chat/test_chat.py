"""`chat`: turns, commands, what a turn costs, and Ctrl-C; piped, on a terminal, and line by line."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.chat.conftest import APPENDS, GREEDY, with_template
from tests.cli.chat.terminal import SLOWLY, terminal
from tests.cli.conftest import Run
from tests.processes import running
from tokenwright.cli.chat.conversation import Conversation, save
from tokenwright.cli.chat.conversation import load as loaded
from tokenwright.errors import EngineError, RequestError
from tokenwright.llm.llm import LLM
from tokenwright.llm.output_processor import Stream

FORGETS = """\
{{ bos_token }}{% for m in messages %}{% if m.role != 'assistant' or loop.index0 == messages | length - 2 %}
{{ m.role ~ ': ' ~ m.content ~ eos_token }}{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}
"""
FACTS = re.compile(r"^([\d,]+) prompt tokens: ([\d,]+) reused, ([\d,]+) computed, ([\d,]+) of them again · .*?(\w+)$")


def turns(stderr: str) -> list[tuple[int, ...]]:
    """What the facts lines say: prompt tokens, reused, computed, computed again."""
    found = [FACTS.match(line) for line in stderr.splitlines()]
    return [tuple(int(match[at].replace(",", "")) for at in range(1, 5)) for match in found if match]


def test_ten_turns_compute_no_earlier_turn(chat: Run, talker: Path) -> None:
    result = chat(*(f"This is message {at}." for at in range(10)), new_tokens=9)
    assert result.exit_code == 0, result.output
    counted = turns(result.stderr)
    assert len(counted) == 10
    held = 0
    for prompt, reused, computed, again in counted:
        assert (reused, computed, again) == (held, prompt - held, 0)
        held = prompt + 9 - 1  # the last token of an answer was written, not read
    assert counted[-1][2] < 40, "a turn costs its own tokens"


def test_the_answers_are_those_of_an_empty_cache(chat: Run, talker: Path, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    assert chat(*(f"Message {at}." for at in range(4)), f"/save {file}").exit_code == 0
    messages = json.loads(file.read_text())
    answers: dict[int, tuple[int, ...]] = {}
    for at in range(0, len(messages), 2):
        with LLM(talker) as llm:
            prompt = llm.template.render(messages[: at + 1], answers=answers).ids
            [completion] = llm.generate([prompt], llm.sampling(temperature=0, max_tokens=6), cache=False)
        assert messages[at + 1] == {"role": "assistant", "content": completion.text}
        answers[at + 1] = completion.token_ids


def test_what_a_template_does_not_keep_is_computed_again_and_counted(run: Run, model: Path, tmp_path: Path) -> None:
    folder = with_template(model, tmp_path / "forgets", FORGETS)
    lines = "The first message is longer than a page.\ntwo\nthree\nfour\n"
    counted = turns(run("chat", "-m", folder, "-n", 6, *GREEDY, input=lines).stderr)
    assert len(counted) == 4
    assert counted[0][3] == counted[1][3] == 0  # the answer before is kept for one more turn
    for _, reused, computed, again in counted[2:]:
        assert 0 < again < computed
        assert reused > 0


def test_stdout_has_the_answers_alone(chat: Run, talker: Path) -> None:
    result = chat("Hello", "", "   ")
    with LLM(talker) as llm:
        answer = llm.chat([{"role": "user", "content": "Hello"}], llm.sampling(temperature=0, max_tokens=6))
    assert result.stdout == answer.text + "\n"
    assert len(turns(result.stderr)) == 1
    assert chat("Hello", options=(*GREEDY, "-q")).stderr == ""


def test_the_end_of_the_template_ends_a_text(model: Path, tmp_path: Path) -> None:
    source = "{% for m in messages %}{{ m.content ~ '<unk>' }}{% endfor %}"
    with LLM(with_template(model, tmp_path / "ends", source)) as llm:
        assert llm.eos_ids == {2, llm.tokenizer._library.token_to_id("<unk>")}


def test_control_tokens_that_are_typed_are_text(chat: Run, talker: Path) -> None:
    assert "user: a</s>b</s>" in chat("a</s>b", "/prompt").stdout
    plain, marked = (chat("a</s>b", options=(*GREEDY, *more)).stderr for more in ((), ("--markup",)))
    assert turns(plain)[0][0] > turns(marked)[0][0]


def test_the_system_message(chat: Run) -> None:
    shown = chat(
        "Hi", "/system Be  brief.", "/prompt", "/reset", "/system", "/prompt", options=(*GREEDY, "-s", "Be kind.")
    )
    assert "<s>system: Be  brief.</s>user: Hi</s>assistant: " in shown.stdout
    assert "there is no message yet" in shown.stderr
    assert shown.exit_code == 2
    assert "<s>system: Be kind.</s>user: Hi</s>" in chat("Hi", "/prompt", options=("-s", "Be kind.")).stdout


def test_reset_keeps_the_system_message(chat: Run) -> None:
    shown = chat("Hi", "/reset", "Ho", "/prompt", options=(*GREEDY, "-s", "Be kind.")).stdout
    assert "<s>system: Be kind.</s>user: Ho</s>" in shown
    assert "Hi</s>" not in shown


def test_help_names_every_command(chat: Run) -> None:
    shown = chat("/help").stderr
    assert all(f"/{name}" in shown for name in ("help", "reset", "system", "save", "load", "prompt", "quit"))


def test_two_slashes_are_one(chat: Run) -> None:
    assert "user: /etc is a folder</s>" in chat("//etc is a folder", "/prompt").stdout


def test_saved_conversations_go_on(chat: Run, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    file.write_text("old")
    assert chat("One é 🙂", f"/save --force {file}").exit_code == 0
    assert [message["role"] for message in json.loads(file.read_text())] == ["user", "assistant"]
    assert list(tmp_path.iterdir()) == [file]
    for shown in (
        chat(f"/load {file}", "Two", "/prompt").stdout,
        chat("Two", "/prompt", options=(*GREEDY, "--load", file)).stdout,
    ):
        assert "<s>user: One é 🙂</s>assistant: " in shown
        assert "</s>user: Two</s>" in shown


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "cannot be read from .*: No such file"),
        (b"{", "is no conversation: it is not JSON"),
        (b"\xff", "it is not JSON"),
        (b"[" * 100_000, "it is not JSON"),
        (b"{}", "messages must be a list"),
        (b"[]", "there are 0 messages"),
        (b'[{"role": "user"}]', "message 0 must have"),
        (b'[{"role": "user", "content": 3}]', "must be text, not int"),
        (b'[{"role": "user", "content": "\\ud800"}]', "surrogate"),
    ],
)
def test_files_that_hold_no_conversation(tmp_path: Path, content: bytes | None, told: str) -> None:
    file = tmp_path / "talk.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(RequestError, match=told):
        loaded(file)


FAILING = ("/load", "/save", "/save /nowhere/at/all", "/save .", "/load .", "/load a\0b", "/foo bar", "/shift maybe")


def test_commands_that_fail_leave_the_conversation(chat: Run) -> None:
    lines = (*FAILING, "/set nothing 3")
    result = chat("Hello", *(line for failing in lines for line in (failing, "/prompt")))
    assert result.exit_code == 2
    assert result.stdout.count("user: Hello</s>") == len(lines)
    assert len([words for words in result.stderr.splitlines() if words.startswith("tokenwright: ")]) == len(lines)
    assert "Traceback" not in result.output


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "talk.json"
    file.write_text("old")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(json, "dump", full)
    with pytest.raises(RequestError, match=r"cannot be saved to .*No space left"):
        save(Conversation([{"role": "user", "content": "a"}]), file)
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_conversation_that_no_longer_fits(chat: Run) -> None:
    result = chat("Hello", "word " * 600, "Hi", "/prompt")
    assert result.exit_code == 2
    [told] = [line for line in result.stderr.splitlines() if line.startswith("tokenwright: ")]
    assert re.search(r"has [\d,]+ tokens, and the model's context 512; it was not added: .*/save.*/reset", told)
    assert len(turns(result.stderr)) == 2
    assert re.search("user: Hello</s>assistant: .*</s>user: Hi</s>", result.stdout, re.DOTALL)


def test_an_answer_that_fills_the_context(chat: Run) -> None:
    result = chat("Hello", new_tokens=600)
    assert (
        "the context of 512 tokens is full, so the answer ends here: " in result.stderr
        or "the model ended it" in result.stderr
    )


def test_a_model_without_a_template_is_refused(refused: Callable[..., str], model: Path, tmp_path: Path) -> None:
    folder = with_template(model, tmp_path / "mute", "")
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert "this model has no chat template" in refused("chat", "--model", folder, input="Hello\n")


def test_an_option_out_of_range_is_refused_before_a_model_is_loaded(refused: Callable[..., str]) -> None:
    assert "temperature" in refused("chat", "--model", "nowhere", "--temperature", "nan")
    assert "cannot be read" in refused("chat", "--model", "nowhere", "--load", "nowhere.json")


def test_input_that_is_no_text(run: Run, talker: Path) -> None:
    result = run("chat", "-m", talker, "-n", 3, input=b"Hello\n\xff\xfe\n")
    assert result.exit_code == 2
    assert "a line of the input is not UTF-8 text" in result.stderr


def test_tokens_that_the_vocabulary_lacks_are_told(run: Run, model: Path, tmp_path: Path) -> None:
    folder = with_template(model, tmp_path / "odd", APPENDS + "<|odd|>")
    assert "the chat template writes <|odd|>, which the vocabulary lacks" in run("chat", "-m", folder, input="").stderr


def test_an_engine_that_fails_is_told_and_the_conversation_goes_on(chat: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch, count = Stream.__next__, iter(range(100))

    def failing(self: Stream) -> Any:
        if next(count) == 2:
            raise EngineError("a step failed")
        return fetch(self)

    monkeypatch.setattr(Stream, "__next__", failing)
    result = chat("Hello", "Hi", "/prompt")
    assert "tokenwright: a step failed" in result.stderr
    assert result.exit_code == 1
    assert "user: Hi</s>" in result.stdout
    assert "user: Hello" not in result.stdout


def test_ctrl_c_keeps_what_was_written(chat: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch, count = Stream.__next__, iter(range(100))

    def interrupted(self: Stream) -> Any:
        if next(count) == 3:
            raise KeyboardInterrupt
        return fetch(self)

    monkeypatch.setattr(Stream, "__next__", interrupted)
    result = chat("Hello", "Hi", "/prompt")
    assert result.exit_code == 0
    assert " · interrupted\n" in result.stderr
    counted = turns(result.stderr)
    assert len(counted) == 2
    read = counted[0][0] + 2  # three tokens were read, two of them computed; the engine may have been ahead by one
    assert read // 16 * 16 <= counted[1][1] <= read + 1


def test_ctrl_c_on_a_terminal_stops_the_answer_and_a_second_one_leaves(talker: Path) -> None:
    with terminal(talker) as (until, type_, process):
        until("Ctrl-D leaves")
        until("> ")
        type_("Hello\n")
        until("[^\r\n> ]")  # the answer has begun
        type_("\x03")
        assert "prompt tokens: 0 reused" in until(r" · interrupted")
        until("> ")
        type_("/prompt\n")
        assert "user: Hello</s>assistant: " in until("> ")
        until("Ctrl-C again leaves", nudge="\x03")
        until("> ")
        until("", nudge="\x03", ends=True)
        assert process.wait() in (0, -signal.SIGINT)  # a further nudge may meet the end of the process


def test_the_end_of_the_input_leaves(talker: Path) -> None:
    with terminal(talker) as (until, type_, process):
        until("> ")
        type_("\x04")
        assert process.wait() == 0


def test_sigint_on_a_pipe_stops_the_answer(talker: Path) -> None:
    command = [sys.executable, "-c", SLOWLY, "chat", "-m", str(talker), "-n", "450", *map(str, GREEDY)]
    with running(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ
    ) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        process.stdin.write(b"Hello\n")
        process.stdin.flush()
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        line = b""
        while b"prompt tokens" not in line:
            line = process.stderr.readline()
            assert line, "it ended without a word"
        assert line.rstrip().endswith(b"interrupted")
        out, _ = process.communicate(b"/prompt\n")
        assert b"user: Hello</s>assistant: " in out
        assert process.returncode == 0
