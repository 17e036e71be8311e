"""`explore --tty`: the engine's figures as lines, and a session on a terminal of its own with keys and Ctrl-C."""

import os
import re
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fcntl import ioctl
from pathlib import Path
from threading import Timer

import pytest

from tests.cli.conftest import Run
from tokenwright import LLM
from tokenwright.cli.terminal.explore_tty import AGAIN, EMPTY, FRESH, KEPT, cell, line
from tokenwright.cli.terminal.interrupt import INTERRUPTED

HANG_S = 240.0
STEP = re.compile(r"step (\d+) \| SEQ_LEN (\d+) \| computed (\d+)")


def steps(output: str) -> list[tuple[str, ...]]:
    return [match.groups() for match in STEP.finditer(output)]


def test_without_a_terminal_each_step_is_a_line_of_its_frame(run: Run) -> None:
    result = run("explore", "--tty", "--prompt", "Once upon", "-n", 3, "--seed", 4)
    assert result.exit_code == 0, result.stderr
    with LLM("stories", trace=True) as llm, llm.run("Once upon", max_tokens=3, seed=4) as own:
        while not own.ended:
            own.step()
        timeless = [re.sub(r"\| [\d.,]+ m?s \|", "|", text) for text in (result.stdout, *map(line, own.frames))]
        assert timeless[0].splitlines() == timeless[1:]


def test_options_of_the_page_and_of_the_terminal_do_not_mix(refused: Callable[..., str]) -> None:
    assert "-n needs --tty" in refused("explore", "-n", 3)
    assert "--prompt needs --tty" in refused("explore", "--prompt", "x")
    assert "--port is for the page" in refused("explore", "--tty", "--port", 1)


def test_cells_say_what_the_step_did(model: Path) -> None:
    with LLM(model, trace=True) as llm, llm.run([5, 6, 7], max_tokens=3, ignore_eos=True) as run:
        looks = []
        for cache in (True, True, False):
            run.cache = cache
            [frame] = run.step()
            looks.append("".join(cell(frame, at, len(run.tokens)) for at in range(len(run.tokens))))
    assert looks == [FRESH * 3 + EMPTY, KEPT * 3 + FRESH + EMPTY, AGAIN * 4 + FRESH + EMPTY]


class Session:
    """The command on a terminal of its own."""

    def __init__(self, *options: str, command: Sequence[str] = ("-m", "tokenwright", "explore", "--tty")) -> None:
        self.own, theirs = os.openpty()
        self.before = termios.tcgetattr(self.own)
        self.process = subprocess.Popen(
            [sys.executable, *command, *options],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: ioctl(0, termios.TIOCSCTTY, 0),  # so that its Ctrl-C is a signal to this process
            env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40", "OMP_NUM_THREADS": "1"},
        )
        os.close(theirs)  # so that reading fails once the command has ended
        self.seen = ""

    def until(self, pattern: str) -> "re.Match[str]":
        while (match := re.search(pattern, self.seen)) is None:
            try:
                self.seen += os.read(self.own, 65_536).decode("utf-8", errors="replace")
            except OSError:
                pytest.fail(f"ended before {pattern!r}: {self.seen!r}")
        self.seen = self.seen[match.end() :]
        return match

    def press(self, keys: str) -> None:
        self.seen = ""
        os.write(self.own, keys.encode())

    @contextmanager
    def ended(self) -> Iterator["Session"]:
        """It has ended afterwards; one that hangs is killed, so that reading from it fails."""
        hangs = Timer(HANG_S, self.process.kill)
        hangs.start()
        try:
            yield self
        finally:
            hangs.cancel()
            self.process.kill()
            self.process.wait()
            os.close(self.own)


@pytest.fixture
def session(model: Path) -> Iterator[Session]:
    with Session(str(model), "-n", "400", "--seed", "1").ended() as session:
        yield session


def test_keys_play_step_switch_and_leave(session: Session) -> None:
    session.until(r"KV_CACHE.* kept")
    session.press(" ")
    session.until("paused ")
    session.press("\x1b[C")
    generated = int(session.until(r"generated (\d+)")[1])
    session.press("n")
    session.until("cache off")
    session.press("\x1b[C")
    assert int(session.until(r"generated (\d+)")[1]) == generated + 1
    session.until("of them again")
    session.press("q")
    last = session.until(STEP.pattern + r".*cache off")
    assert int(last[1]) == generated + 1, "steps count from 1"
    assert session.process.wait() == 0
    assert termios.tcgetattr(session.own)[3] == session.before[3], "the terminal echoes again"


def test_ctrl_c_leaves_the_terminal_as_it_was(session: Session) -> None:
    session.until(r"KV_CACHE.* kept")
    session.press("\x03")
    session.until(r"\x1b\[\?1049l")  # the screen of before is back
    assert session.process.wait() == 0
    assert termios.tcgetattr(session.own)[3] == session.before[3]


STUCK = """
import signal
import time
from rich.console import Console
from tokenwright.cli.terminal.explore_tty import screen
from tokenwright.cli.terminal.interrupt import interruptible

with interruptible(), screen(Console()) as live:
    signal.signal(signal.SIGINT, lambda *_: None)  # nothing that is raised, as in a native call that does not end
    live.update("here", refresh=True)
    time.sleep(1000)
"""


def test_ctrl_c_leaves_the_terminal_as_it_was_even_by_force() -> None:
    session = Session(command=["-c", STUCK])
    with session.ended():
        session.until("here")
        session.press("\x03")
        session.until(r"\x1b\[\?1049l\x1b\[\?25h")
        assert session.process.wait() == INTERRUPTED
        assert termios.tcgetattr(session.own)[3] == session.before[3]
