"""Guards: what ends a text beside its length. The engine calls them with each token and knows nothing of text."""

from collections.abc import Collection
from typing import Protocol

from tokenwright.engine import FinishReason


class TextSink(Protocol):
    """Where a sequence's tokens become text: `text.TextStream` is one."""

    def push(self, token: int) -> str: ...

    def finish(self) -> str: ...

    @property
    def stopped(self) -> str | None: ...


class TextGuard:
    """Ends at end tokens and at stop strings, and keeps the text that may be shown.

    An end token is not text. What a stop string may still claim is held back until it is decided.
    """

    def __init__(self, stream: TextSink, eos_ids: Collection[int]) -> None:
        self.stream = stream
        self.eos_ids = frozenset(eos_ids)
        self._fresh: list[str] = []

    def advance(self, token: int) -> FinishReason | None:
        if token in self.eos_ids:
            return FinishReason.EOS
        self._fresh.append(self.stream.push(token))
        return FinishReason.STOP if self.stream.stopped is not None else None

    def take(self) -> str:
        """The text that may be shown and has not been taken yet."""
        text = "".join(self._fresh)
        self._fresh.clear()
        return text

    def finish(self) -> str:
        """At the end: what is left to show, with what was held back for a stop string that never came."""
        return self.take() + self.stream.finish()

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found; an overlapping one may be settled only by `finish`."""
        return self.stream.stopped is not None
