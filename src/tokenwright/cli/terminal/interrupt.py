"""Ctrl-C: every command ends within half a second, whatever it is computing.

`__main__` sets SIGINT to the system's default, so that imports, loading and tokenising die at once. Work that must say
or clean up something runs inside `interruptible`, where Ctrl-C raises KeyboardInterrupt in the main thread. A native
call may keep that thread from noticing, so a second thread, which the signal wakes, ends the process GRACE seconds
later. `undone_if_killed` restores what must not stay behind then, such as a terminal without echo.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from queue import SimpleQueue
from types import FrameType
from typing import NoReturn, TypeVar

INTERRUPTED = 130  # the exit code that shells show for a process that SIGINT ended
GRACE = 0.2  # seconds

T = TypeVar("T")


class _Last:
    at = -60.0  # when Ctrl-C last raised KeyboardInterrupt (time.monotonic)


@contextmanager
def interruptible(*, ends: bool = True) -> Iterator[None]:
    """Raise KeyboardInterrupt for Ctrl-C inside; if it `ends` the command, within GRACE seconds at the latest.

    An ignored SIGINT stays ignored. Only the main thread may enter.
    """
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
    """Seconds since Ctrl-C last raised KeyboardInterrupt in `interruptible`."""
    return time.monotonic() - _Last.at


_undos: list[Callable[[], object]] = []


@contextmanager
def undone_if_killed(undo: Callable[[], object]) -> Iterator[None]:
    """Inside the block, call `undo` just before Ctrl-C ends the process by force. It runs in another thread."""
    _undos.append(undo)
    try:
        yield
    finally:
        _undos.remove(undo)


@contextmanager
def _watched() -> Iterator[None]:
    """Have a thread that ends the process GRACE seconds after a SIGINT, even one that arrives just before the end."""
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
                undoing = threading.Thread(target=_undo, daemon=True)
                undoing.start()
                undoing.join(GRACE)  # a terminal that takes no output keeps it from ending
                os._exit(INTERRUPTED)


def _undo() -> None:
    for undo in reversed(_undos):
        with suppress(Exception):  # one that fails keeps no other from being called
            undo()


def die() -> NoReturn:
    """End the process by SIGINT, as a shell expects of a command that Ctrl-C ended: it stops its own loop then."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
    os._exit(INTERRUPTED)  # where SIGINT is blocked


def in_thread(compute: Callable[[], T]) -> T:
    """The result of `compute`, run in a thread, so that Ctrl-C reaches the caller during one long native call.

    After a KeyboardInterrupt the thread goes on, and its result is dropped. Raises the errors of `compute`.
    """
    done: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()

    def work() -> None:
        try:
            done.put((compute(), None))
        except BaseException as error:
            done.put((None, error))

    threading.Thread(target=work, daemon=True).start()
    result, error = done.get()
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # T may itself have None
