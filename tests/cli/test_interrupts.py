"""Ctrl-C ends every command within half a second, at any moment of its work, and leaves no file behind."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cli.chat.terminal import terminal
from tests.processes import end, running
from tokenwright import LLM

MOMENTS = 20
IN_ONE_TERMINAL = 300
LIMIT = 0.5  # seconds from the signal to the end of the process
# The file tells when our own code runs: before, Python's own start prints a traceback that nobody can prevent. A test
# run in the background ignores SIGINT, and its children would.
STARTED = """
import signal
signal.signal(signal.SIGINT, signal.SIG_DFL)
import sys
from pathlib import Path
from tokenwright.__main__ import main
Path(sys.argv.pop(1)).touch()
main()
"""


class Command(NamedTuple):
    """A command line, with {model}, {long} and {new} for paths; the seconds it takes; and what is piped to it."""

    words: str
    span: float = 8.0
    typed: bytes | None = None


COMMANDS = {
    "generate": Command("generate once -n 100000 --ignore-eos --window 64 -m {model}"),
    "generate-quiet": Command("generate once -n 100000 --ignore-eos --window 64 -q --json -m {model}"),
    "generate-long-prompt": Command("generate --file {long} --window 64 -m {model}"),
    "generate-beams": Command("generate once -n 400 --beams 16 -m {model}"),
    "generate-grammar": Command("generate once -n 400 --regex [a-z]{{1,4000}} -m {model}"),
    "chat": Command("chat -n 100000 --ignore-eos --window 64 -m stories", 8.0, b"Hello\n" * 1000),
    "inspect": Command("inspect {model}", 3.0),
    "models": Command("models", 3.0),
    "cache": Command("cache", 2.0),
    "plan": Command("plan llama-3.1-8b --memory 24GB", 3.0),
    "quantize": Command("quantize {model} {new} --weights int8", 4.0),
    "race": Command("race once -n 400 -m {model} -o {new}.svg", 12.0),
    "bench": Command("bench -m {model}", 12.0),
    "bench-shape": Command("bench --shape gpt2"),
    "explore": Command("explore {model} --no-browser --port 0"),
    "serve": Command("serve {model} --port 0"),
    "help": Command("generate --help", 0.8),
}


class Ended(NamedTuple):
    """How a command ended after a signal: seconds from the signal, exit code, stderr, and files that appeared."""

    seconds: float
    code: int
    errors: str
    files: list[str]


@pytest.fixture
def interrupted(tmp_path: Path, model: Path) -> Callable[[str, float | None], Ended]:
    """Runs a command, sends Ctrl-C after so many seconds of its own code, and tells how it ended; None: sends none."""

    def run(name: str, moment: float | None) -> Ended:
        folder = tmp_path / f"{name}-{moment}"
        folder.mkdir()
        long = tmp_path / "long.txt"
        long.write_text("once upon a time " * 20_000)
        words = COMMANDS[name].words.format(model=model, long=long, new=folder / "new").split()
        command = [sys.executable, "-c", STARTED, str(tmp_path / "started"), *words]
        (tmp_path / "started").unlink(missing_ok=True)
        environment = os.environ | {"TOKENWRIGHT_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
        with running(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        ) as process:
            assert process.stdin is not None and process.stderr is not None
            process.stdin.write(COMMANDS[name].typed or b"")
            process.stdin.flush()
            while not (tmp_path / "started").exists():
                assert process.poll() is None, process.stderr.read()
                time.sleep(0.002)
            began = time.monotonic()
            if moment is not None:
                time.sleep(moment)
                began = time.monotonic()
                process.send_signal(signal.SIGINT)
                while name == "chat" and process.poll() is None:  # the first stops an answer, the second leaves
                    time.sleep(0.05)
                    process.send_signal(signal.SIGINT)
            code = process.wait(120)
            took = time.monotonic() - began
            end(process)
            errors = process.stderr.read().decode()
        left = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
        return Ended(took, code, errors, left)

    return run


def check(name: str, ended: Ended) -> None:
    assert ended.code in (0, -signal.SIGINT, 130), ended
    assert "Traceback" not in ended.errors and "Exception" not in ended.errors, ended.errors
    hidden = [file for file in ended.files if any(part.startswith(".") for part in file.split("/"))]
    assert not hidden, f"{name} left a draft"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "moment"), [("generate", 3.0), ("bench", 4.0)])
def test_ctrl_c_ends_a_command(name: str, moment: float, interrupted: Callable[..., Ended]) -> None:
    """Two moments; without a limit on the time, which belongs to the machine as much as to us."""
    check(name, interrupted(name, moment))


@pytest.mark.sweep
@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_ends_every_command_within_half_a_second(
    name: str, interrupted: Callable[..., Ended], record_property: Callable[[str, object], None]
) -> None:
    """At MOMENTS random moments of the whole run, imports included."""
    draw = random.Random(name)
    times = []
    for _ in range(MOMENTS):
        ended = interrupted(name, draw.uniform(0.0, COMMANDS[name].span))
        check(name, ended)
        times.append(ended.seconds)
    record_property("seconds", sorted(times))
    print(f"{name}: worst {max(times):.3f} s, median {sorted(times)[MOMENTS // 2]:.3f} s")
    assert max(times) <= LIMIT


@pytest.mark.sweep
def test_300_ctrl_c_in_one_terminal() -> None:
    """At random moments of answers, over half a line and at an empty prompt; then the chat still answers correctly."""
    question, tokens = "Tell me of a cat.", 40
    with LLM("stories") as llm:
        expected = llm.chat([{"role": "user", "content": question}], temperature=0, max_tokens=tokens).text
    asked = f"{question}\n"
    moments = ((asked, True, 0.4), (asked, True, 0.4), (asked, False, 0.2), ("half a li", False, 0.1), ("", False, 0.0))
    draw, shown = random.Random("one terminal"), []
    with terminal(Path("stories"), "--shift", new_tokens=tokens, hang_s=1800) as (until, type_, process):
        until("Ctrl-D leaves")
        for at in range(IN_ONE_TERMINAL):
            typed, begun, longest = draw.choice(moments)
            type_(typed)
            if begun:
                until("[^\r\n> ]")  # the answer has begun
            time.sleep(draw.uniform(0.0, longest))
            type_("\x03")
            shown.append(until(f"not 'x{at}'", nudge=f"/shift x{at}\n"))  # whose error shows that it reads again
            until("> ")
            assert process.poll() is None
        until("messages? dropped", nudge="/reset\n")
        type_(f"{question}\n")
        answer = until("prompt tokens: ").replace("\r\n", "\n")
    assert expected.strip() in answer
    words = {"answers": "interrupted", "prompts": "Ctrl-C again leaves"}  # half a line is a prompt: no line editor
    met = {name: sum(word in one for one in shown) for name, word in words.items()}
    print(f"{IN_ONE_TERMINAL} Ctrl-C in one terminal: {met}")
    assert sum(met.values()) == IN_ONE_TERMINAL
    assert min(met.values()) >= IN_ONE_TERMINAL // 20
