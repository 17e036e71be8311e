"""Messages to the engine thread, which it runs between two steps: actions, and functions that a client waits for."""

from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

from tokenwright.engine.core import Engine
from tokenwright.engine.driver import Driver
from tokenwright.engine.step import Event
from tokenwright.errors import EngineError

T = TypeVar("T")
Action = Callable[[Engine[Any]], list[Event] | None]  # answers with the events that it caused, for their listeners


class Message(Protocol):
    """Work for the engine thread between two steps: run there, or refused where that thread has ended."""

    def run(self, engine: Engine[Any]) -> list[Event] | None: ...

    def refuse(self, why: EngineError) -> None: ...


class Post:
    def __init__(self, action: Action) -> None:
        self.run = action

    def refuse(self, why: EngineError) -> None: ...


class Call(Generic[T]):
    def __init__(self, function: Callable[[Engine[Any]], T]) -> None:
        self._function = function
        self._answer: SimpleQueue[tuple[bool, Any]] = SimpleQueue()

    def run(self, engine: Engine[Any]) -> None:
        try:
            self._answer.put((True, self._function(engine)))
        except BaseException as error:
            self._answer.put((False, error))

    def refuse(self, why: EngineError) -> None:
        self._answer.put((False, why))

    def result(self, driver: Driver) -> T:
        """Wait for the function's result. Raises what it raises, and the reason of a refusal."""
        done, value = driver.wait(self._answer)
        if not done:
            raise value
        result: T = value
        return result
