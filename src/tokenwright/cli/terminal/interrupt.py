"""Ctrl-C ends every command within half a second, whatever it computes.

Work that must clean up runs inside `interruptible`; elsewhere SIGINT ends the process at once.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130  # a shell's exit code for a process that SIGINT ended
GRACE = 0.2  # seconds


class _Last:
    at = -60.0  # time.monotonic() of the last KeyboardInterrupt


@contextmanager
def interruptible(*, ends: bool = True) -> Iterator[None]:
    """Raise KeyboardInterrupt for Ctrl-C; if `ends`, end the process GRACE seconds later. Main thread only."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        yield
        return
    with _watched() if ends else nullcontext():
        signal.signal(signal.SIGINT, _raise)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


def _raise(number: int, frame: FrameType | None) -> None:
    _Last.at = time.monotonic()
    signal.default_int_handler(number, frame)


def since_interrupt() -> float:
    return time.monotonic() - _Last.at


@contextmanager
def _watched() -> Iterator[None]:
    """Start a thread that ends the process GRACE seconds after SIGINT."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    threading.Thread(target=_end_later, args=(reading,), name="tokenwright interrupt", daemon=True).start()
    other = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(other)
        os.close(writing)


def _end_later(reading: int) -> None:
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        while signals := pipe.read(1):
            if signals[0] == signal.SIGINT:
                time.sleep(GRACE)
                os._exit(INTERRUPTED)


def die() -> NoReturn:
    """End the process by SIGINT, so that a shell's loop stops too."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
    os._exit(INTERRUPTED)  # where SIGINT is blocked
