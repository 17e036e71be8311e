"""The words that the scheduler, the runner and the sampler exchange. Plain data, nothing of it lives on.

A step names chunks; the runner answers with an Output; the sampler turns it into results; the scheduler commits
them and answers with events.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from tokenwright.engine.sequence import FinishReason, Request

T = TypeVar("T")


class Wants(Enum):
    """The rows of a chunk whose logits are needed."""

    NONE = 0
    LAST = 1
    ALL = 2


@dataclass(frozen=True, slots=True)
class Chunk:
    """A range of one sequence's tokens, to be computed now.

    `tokens` stand at positions [start, start + len(tokens)). `tables`, one for each group of layers, say which page
    holds which page of the text: {position // page_size: page}. Pages that no row of the chunk reads may be missing.
    `following` are the known tokens at [start + 1, ...), one for each row but perhaps the last: what is scored.
    """

    sequence: int
    request: Request
    start: int
    tokens: tuple[int, ...]
    tables: tuple[Mapping[int, int], ...]
    limit: int
    wants: Wants
    following: tuple[int, ...] = ()

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    @property
    def picks(self) -> bool:
        """Whether a token is to be chosen after this chunk's last row: it has caught up, and may still write."""
        return self.wants is not Wants.NONE and len(self.following) < len(self.tokens) and self.stop < self.limit


@dataclass(frozen=True, slots=True)
class Step:
    chunks: tuple[Chunk, ...]

    @property
    def size(self) -> int:
        """Tokens computed in this step."""
        return sum(len(chunk.tokens) for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class Output(Generic[T]):
    """What the runner computed. `rows[i]` are the rows of `logits` [rows, vocabulary] that belong to chunk i."""

    rows: tuple[range, ...]
    logits: T


@dataclass(frozen=True, slots=True)
class Pick:
    """The sampler's choice: `token` continues the sequence `parent`; `logprob` is the model's, over all ids."""

    parent: int
    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Score:
    """Log-probabilities of known tokens of `parent`, the first of them at position `start`."""

    parent: int
    start: int
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Fault:
    """One sequence whose row cannot be used; its neighbours go on."""

    parent: int
    error: Exception


Result = Pick | Score | Fault


@dataclass(frozen=True, slots=True)
class Token:
    """A token was written."""

    sequence: int
    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Scored:
    """Log-probabilities of the prompt's tokens from position `start` on."""

    sequence: int
    start: int
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The sequence's last event, when it ended well."""

    sequence: int
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Failed:
    """The sequence's last event, when it did not."""

    sequence: int
    error: Exception


Event = Token | Scored | Finished | Failed
