"""`chat` on a terminal of its own, and slowly enough that a signal comes while an answer is written."""

import os
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fcntl import ioctl
from pathlib import Path
from threading import Timer

HANG_S = 240.0  # far more than any session takes

# To wait for a text that it shows, to type, and its process.
Terminal = tuple[Callable[..., str], Callable[[str], None], "subprocess.Popen[bytes]"]

# Ten milliseconds a step: Ctrl-C comes while the answer is being written, also on a busy machine. A test run in the
# background ignores SIGINT, and its children would. SIGCONT is blocked as by the command, before torch has threads.
SLOWLY = """
import signal, time
signal.signal(signal.SIGINT, signal.SIG_DFL)
from tokenwright.cli.chat.input_reader import keep_from_threads
keep_from_threads()
from tokenwright.backends.runner import ModelRunner
forward = ModelRunner.forward
ModelRunner.forward = lambda *given: time.sleep(0.01) or forward(*given)
from tokenwright.cli import main
main()
"""


@contextmanager
def terminal(
    talker: Path, *options: str, kind: str = "dumb", new_tokens: int = 450, echo: bool = False, hang_s: float = HANG_S
) -> Iterator[Terminal]:
    """`chat` on a terminal of its own: to wait for a text that it shows, and to type."""
    own, theirs = os.openpty()
    attributes = termios.tcgetattr(theirs)
    if not echo:  # readline then shows nothing of what is typed either
        attributes[3] &= ~termios.ECHO
    termios.tcsetattr(theirs, termios.TCSANOW, attributes)
    command = [sys.executable, "-c", SLOWLY, "chat", "-m", str(talker), "-n", str(new_tokens), "--temperature", "0"]
    command += options
    environment = os.environ | {"TERM": kind, "COLUMNS": "300", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: ioctl(0, termios.TIOCSCTTY, 0),  # so that its Ctrl-C is a signal to this process
        env=environment,
    )
    os.close(theirs)
    hangs = Timer(hang_s, process.kill)  # then `until` fails
    hangs.start()
    seen = ""

    def until(pattern: str, *, nudge: str = "", sent: int | None = None, ends: bool = False) -> str:
        """What is shown up to a pattern; fails when the program ends before. `ends`: it is to end instead.

        `nudge` is typed and the signal `sent` is sent, both again after a while of silence: input() misses a signal
        that comes just before it waits.
        """
        nonlocal seen

        def act() -> None:
            os.write(own, nudge.encode())
            if sent is not None:
                os.kill(process.pid, sent)

        act()
        while ends or (match := re.search(pattern, seen)) is None:
            if (nudge or sent is not None) and not select.select([own], [], [], 2.0)[0]:
                act()
                continue
            try:
                data = os.read(own, 65_536)
            except OSError:
                data = b""
            if ends and not data:
                return seen
            assert data, f"ended before {pattern!r}: {seen!r}"
            seen += data.decode("utf-8", errors="replace")
        shown, seen = seen[: match.end()], seen[match.end() :]
        return shown

    try:
        yield until, lambda text: void(os.write(own, text.encode())), process
    finally:
        hangs.cancel()
        process.kill()
        process.wait()
        os.close(own)


def wait_for_input(process: "subprocess.Popen[bytes]") -> None:
    """Return once the main thread sleeps: what it showed last was not the end of its work on what was typed."""
    stat = Path(f"/proc/{process.pid}/task/{process.pid}/stat")
    while stat.read_text().rpartition(")")[2].split()[0] != "S":
        time.sleep(0.01)


def void(_: object) -> None:
    """For a lambda that returns nothing."""
