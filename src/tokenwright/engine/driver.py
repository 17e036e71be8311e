"""The drivers of an engine loop: what calls its turns.

`EngineThread` is a thread of its own, which all clients may wait for. `CallersThread` is for a single client, as in a
web page: whatever it waits for, the wait itself computes, turn by turn.
"""

import os
import signal
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol, TypeVar

T = TypeVar("T")


class Driver(Protocol):
    """Calls the turns of an engine loop until one returns False: then the loop has ended."""

    def wait(self, queue: "SimpleQueue[T]") -> T:
        """The next item of a queue that the loop's turns fill."""

    def join(self) -> None:
        """Return once the loop has ended, or at once within a turn."""


class EngineThread:
    """A thread that calls the turns from now on. It blocks all signals."""

    def __init__(self, turn: Callable[[], bool]) -> None:
        self._turn = turn
        self.thread = threading.Thread(target=self._run, name="tokenwright engine", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        if os.name == "posix":
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # kernel threads inherit it
        while self._turn():
            pass

    def wait(self, queue: "SimpleQueue[T]") -> T:
        return queue.get()

    def join(self) -> None:
        if threading.current_thread() is not self.thread:
            self.thread.join()


class CallersThread:
    """The thread of the one client, which calls turns while it waits. An interrupt within a step ends the engine."""

    def __init__(self, turn: Callable[[], bool]) -> None:
        self._turn = turn
        self._turning = False

    def _turned(self) -> bool:
        assert not self._turning, "a listener must not wait for the engine that calls it"
        self._turning = True
        try:
            return self._turn()
        finally:
            self._turning = False

    def wait(self, queue: "SimpleQueue[T]") -> T:
        while queue.empty():
            going_on = self._turned()
            assert going_on or not queue.empty(), "a loop that ends answers every request and call"
        return queue.get()

    def join(self) -> None:
        while not self._turning and self._turned():
            pass
