"""The drivers of an engine loop, which call its turns, and the messages that a turn runs between two steps.

`EngineThread` starts a thread for the turns. `CallersThread` is for a process that cannot (a web page): a client that
waits for a result calls the turns itself. A message is an action, or a function whose result a client waits for.
"""

import atexit
import os
import signal
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from tokenwright.engine.core import Engine
from tokenwright.engine.step import Event
from tokenwright.errors import EngineError

T = TypeVar("T")
Action = Callable[[Engine], list[Event] | None]  # returns the events that it caused


class Driver(Protocol):
    """Calls the turns of an engine loop until one returns False."""

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
    """Calls the turns in a waiting client's thread, one at a time. An interrupt within a step ends the engine."""

    def __init__(self, turn: Callable[[], bool]) -> None:
        self._turn = turn
        self._turning = False
        self._lock = threading.RLock()

    def _run_turn(self) -> bool:
        assert not self._turning, "a listener must not wait for the engine that calls it"
        self._turning = True
        try:
            return self._turn()
        finally:
            self._turning = False

    def wait(self, queue: "SimpleQueue[T]") -> T:
        while queue.empty():
            with self._lock:
                live = not queue.empty() or self._run_turn()
            assert live or not queue.empty(), "a loop that ends answers every request and call"
        return queue.get()

    def join(self) -> None:
        with self._lock:
            while not self._turning and self._run_turn():
                pass


class Message(NamedTuple):
    """Work that the engine thread runs between two steps, or refuses once the loop has ended."""

    run: Action
    refuse: Callable[[EngineError], object] = lambda _: None


class Call(Generic[T]):
    def __init__(self, function: Callable[[Engine], T]) -> None:
        self._function = function
        self._answer: SimpleQueue[tuple[bool, Any]] = SimpleQueue()

    def run(self, engine: Engine) -> None:
        try:
            self._answer.put((True, self._function(engine)))
        except BaseException as error:
            self._answer.put((False, error))

    def refuse(self, why: EngineError) -> None:
        self._answer.put((False, why))

    def result(self, driver: Driver) -> T:
        """Wait for the function's result. Raises what the function raises, or why the loop has refused it."""
        done, value = driver.wait(self._answer)
        if not done:
            raise value
        result: T = value
        return result


def close_at_exit(close: Callable[[], None]) -> None:
    """Call a method when the interpreter ends, unless its object is gone by then."""
    method = weakref.WeakMethod(close)
    atexit.register(lambda: None if (found := method()) is None else found())
