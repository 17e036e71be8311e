"""The memory of a server's process."""

import platform
import subprocess
import sys

import pytest

ALLOCATES = """
import ctypes, threading
from tokenwright.cli.commands.serve import _listen
from tokenwright.serve.settings import Settings

libc, all_there = ctypes.CDLL(None), threading.Barrier(13)

def allocate():
    libc.malloc(1000)
    all_there.wait()

def build(*_):
    for _ in range(12):
        threading.Thread(target=allocate).start()
    all_there.wait()
    libc.malloc_stats()
    raise SystemExit(0)

_listen("x", build, Settings(port=0))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the heaps are those of glibc")
def test_the_threads_of_a_server_share_two_heaps() -> None:
    """Without the server they have one each, whose holes made the memory of a server under mixed load grow."""
    done = subprocess.run([sys.executable, "-c", ALLOCATES], capture_output=True, text=True, check=True)
    assert done.stderr.count("Arena ") == 2, done.stderr
