"""Answers of the table's functions (table.py) beside messages: a file, and a stream."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Download:
    content: dict[str, Any]
    name: str


@dataclass(frozen=True, slots=True)
class MessageStream:
    """Messages, each made when the page can take it. close: ends them; a second call does nothing."""

    messages: Iterator[object]
    close: Callable[[], object]
