"""Tests for tests/processes.py: a test that fails ends, with all that it has started."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path

from tests.processes import running

TESTS = Path(__file__).parent
# Each of these ends its processes itself: they are not started and ended in one block.
OTHERS = {"cli/chat/terminal.py", "cli/fork_server.py", "cluster/test_cluster.py", "fuzz/watch.py", "without_torch.py"}
# Its child has left its session, and is stopped: it holds the pipe for ever.
HOLDING = """
import os, signal, time
if os.fork() == 0:
    os.setsid()
    os.kill(os.getpid(), signal.SIGSTOP)
print("stopped", flush=True)
time.sleep(600)
"""


def test_a_process_ends_with_all_that_hold_its_pipe() -> None:
    with running([sys.executable, "-c", HOLDING], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "stopped\n"
        reading = threading.Thread(target=process.stdout.read)
        reading.start()
    reading.join()
    assert process.returncode is not None


def test_no_test_starts_a_process_that_may_outlast_it() -> None:
    starts = re.compile(r"(?<!\.)\bsubprocess\.Popen\(")
    found = {str(file.relative_to(TESTS)) for file in TESTS.rglob("*.py") if starts.search(file.read_text("utf-8"))}
    assert found - {"processes.py", "test_processes.py"} == OTHERS
