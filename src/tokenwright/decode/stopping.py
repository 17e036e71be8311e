"""The stop checker decides when a text ends, apart from its length, and decodes it. The engine calls it per token."""

import time
from collections.abc import Callable, Collection, Sequence
from copy import copy
from typing import Any, Protocol, Self

from tokenwright.engine import FinishReason


class TextSink(Protocol):
    """Decodes a sequence's tokens, such as `text.TextStream`."""

    def push(self, token: int, armed: bool = True) -> str: ...

    def finish(self) -> str: ...

    def fork(self) -> Self: ...

    @property
    def stopped(self) -> str | None: ...


class Constraint(Protocol):
    """Allows or forbids the next token according to the text so far, such as a grammar."""

    def mask(self) -> Any: ...

    def forced(self) -> Sequence[int]: ...

    def advance(self, token: int) -> bool:
        """Advance by the token just written. True: nothing may follow it."""

    def fork(self) -> Self: ...

    @property
    def accepting(self) -> bool:
        """Whether the text so far may end here."""

    @property
    def answering(self) -> bool:
        """Whether the reasoning is over, so that stop strings may end the text."""


class TextStopChecker:
    """Ends a text at an end token, a stop id, a stop string, the end of a grammar or a deadline; collects its text.

    An end token adds no text, a stop id only if `include_stop`. Only a grammar or the deadline, in seconds of `clock`,
    ends the first `min_tokens` tokens.
    """

    def __init__(
        self,
        stream: TextSink,
        eos_ids: Collection[int],
        stop_ids: Collection[int] = (),
        *,
        min_tokens: int = 0,
        include_stop: bool = False,
        deadline: float | None = None,
        constraint: Constraint | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stream = stream
        self.eos_ids = frozenset(eos_ids)
        self.stop_ids = frozenset(stop_ids)
        self.min_tokens = min_tokens
        self.include_stop = include_stop
        self.deadline = deadline
        self.constraint = constraint
        self.clock = clock
        self.written = 0
        self._stop_id: int | None = None
        self._fresh: list[str] = []

    def advance(self, token: int) -> FinishReason | None:
        self.written += 1
        armed = self.written > self.min_tokens
        if token in self.eos_ids and armed:
            return FinishReason.EOS
        if token in self.stop_ids and armed:
            self._stop_id = token
            if self.include_stop:
                self._fresh.append(self.stream.push(token, armed))
            return FinishReason.STOP_ID
        answering = self.constraint is None or self.constraint.answering
        self._fresh.append(self.stream.push(token, armed and answering))
        complete = self.constraint is not None and self.constraint.advance(token)
        if self.stream.stopped is not None:
            return FinishReason.STOP
        return FinishReason.GRAMMAR if complete else None

    def finished(self) -> FinishReason | None:
        late = self.deadline is not None and self.clock() >= self.deadline
        return FinishReason.TIME if late else None

    def fork(self) -> Self:
        other = copy(self)
        other.stream = self.stream.fork()
        other.constraint = None if self.constraint is None else self.constraint.fork()
        other._fresh = list(self._fresh)
        return other

    def mask(self) -> Any:
        return None if self.constraint is None else self.constraint.mask()

    @property
    def constrained(self) -> bool:
        return self.constraint is not None

    def forced(self) -> Sequence[int]:
        return () if self.constraint is None else self.constraint.forced()

    def take_text(self) -> str:
        text = "".join(self._fresh)
        self._fresh.clear()
        return text

    def finish(self) -> str:
        """Returns the rest of the text, with what was held back for a stop string."""
        return self.take_text() + self.stream.finish()

    def complete(self, reason: FinishReason | None) -> bool:
        """Whether a text that ended for `reason` fits its constraint. One cut at a stop string was not checked."""
        if self.constraint is None or reason in (FinishReason.GRAMMAR, FinishReason.EOS):
            return True
        return (reason is not FinishReason.STOP or self.include_stop) and self.constraint.accepting

    @property
    def stopped(self) -> str | int | None:
        return self._stop_id if self._stop_id is not None else self.stream.stopped
