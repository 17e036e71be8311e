"""The words that the scheduler, the runner and the sampler exchange. Plain data, nothing of it lives on.

A step names chunks; the runner answers with an Output; the sampler turns it into results; the scheduler commits
them and answers with events. What every token of every stream has one of is not frozen, though nobody changes it:
that would take five times as long to make.
"""

from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

from tokenwright.engine.page_table import Table
from tokenwright.engine.request import FinishReason, NoStopChecker, Request, Sequence, StopChecker

T = TypeVar("T")


class LogitsNeeded(Enum):
    """The rows of a chunk whose logits are needed."""

    NONE = 0
    LAST = 1
    ALL = 2


NONE, LAST, ALL = LogitsNeeded  # for what asks at each token: to look into an enumeration takes longer than a call


@dataclass(slots=True)
class Chunk:
    """A range of one sequence's tokens, to be computed now.

    `tokens` stand at positions [start, start + len(tokens)). `tables`, one for each group of layers, say which page
    holds which page of the text: {position // page_size: page}. Pages that no row of the chunk reads may be missing.
    They are the sequence's own, to be read until the step is committed.
    `following` are the known tokens at [start + 1, ...), one for each row but perhaps the last: what is scored.
    `choices` are the numbers of the texts that go on from here: several where a request for n texts, or for beams,
    leaves its prompt. `text` is the whole text so far and `guard` what watches it: the sequence's own, to be read.
    """

    sequence: int
    request: Request
    start: int
    tokens: tuple[int, ...]
    tables: ListLike[Table]
    limit: int
    logits_needed: LogitsNeeded
    following: tuple[int, ...] = ()
    choices: tuple[int, ...] = (0,)
    text: ListLike[int] = ()
    stop_checker: StopChecker = field(default_factory=NoStopChecker)

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    @property
    def picks(self) -> bool:
        """Whether a token is to be chosen after this chunk's last row: it has caught up, and may still write."""
        length = len(self.tokens)
        return self.logits_needed is not NONE and len(self.following) < length and self.start + length < self.limit


@dataclass(frozen=True, slots=True)
class Step:
    chunks: tuple[Chunk, ...]

    @property
    def size(self) -> int:
        """Tokens computed in this step."""
        return sum(len(chunk.tokens) for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class Output(Generic[T]):
    """What the runner computed. `rows[i]` are the rows of `logits` [rows, vocabulary] that belong to chunk i.

    Of each row, where the kernels told: `best`, the index of the largest logit, the lowest of equals; `log_totals`,
    log(sum(exp)), NaN where a logit is not finite.
    """

    rows: tuple[range, ...]
    logits: T
    best: tuple[int, ...] = ()
    log_totals: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """A token with its log-probabilities, natural: the model's, over all ids at temperature 1, and the sampler's.

    The sampler's is that of the distribution it drew from: -inf at what was cut, 0 where there was no choice.
    """

    token: int
    logprob: float
    sampler_logprob: float


@dataclass(slots=True)
class Pick:
    """The sampler's choice: `token` continues the sequence `parent`, as the text number `choice`.

    Several picks with one parent fork it. A parent without a pick ends, if it is one of a search's beams.
    `top` are the model's likeliest tokens at this place, as many as were asked for.
    """

    parent: int
    token: int
    logprob: float
    sampler_logprob: float = 0.0
    top: tuple[TopLogprob, ...] = ()
    choice: int = 0


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of known tokens of `parent`, the first of them at position `start`; `tops` as in Pick."""

    parent: int
    start: int
    logprobs: tuple[float, ...]
    tops: tuple[tuple[TopLogprob, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Fault:
    """One sequence whose row cannot be used; its neighbours go on."""

    parent: int
    error: Exception


@dataclass(frozen=True, slots=True)
class Finish:
    """The sampler ends a sequence without another token: its search is over."""

    parent: int
    reason: FinishReason


Result = Pick | PromptLogprobs | Fault | Finish


@dataclass(frozen=True, slots=True)
class Forked:
    """`sequence` goes on from the text of `parent`, which goes on as well.

    `branch` is the sequence itself, as `Engine.submit` returns it: its counts may be read at any time.
    """

    sequence: int
    parent: int
    branch: Sequence


@dataclass(slots=True)
class Token:
    """A token was written, as its Pick says. `text`: what can be shown now, perhaps nothing yet."""

    sequence: int
    token: int
    logprob: float
    sampler_logprob: float = 0.0
    top: tuple[TopLogprob, ...] = ()
    text: str = ""


@dataclass(frozen=True, slots=True)
class PromptLogprobsAdded:
    """Log-probabilities of the prompt's tokens from position `start` on."""

    sequence: int
    start: int
    logprobs: tuple[float, ...]
    tops: tuple[tuple[TopLogprob, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Dropped:
    """The last event of a beam that nothing was picked from; its search goes on without it."""

    sequence: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The sequence's last event, when it ended well.

    text: what was held back until the end. stopped: the stop string or stop id that ended it.
    """

    sequence: int
    reason: FinishReason
    text: str = ""
    stopped: str | int | None = None


def finished(sequence: Sequence, reason: FinishReason) -> "Finished | Failed":
    """The last event of a sequence that ends well, with the rest of its text; Failed where its stop checker fails."""
    checker = sequence.stop_checker
    try:
        text = checker.finish()
    except Exception as error:  # a stop checker is the client's: its fault must not reach the neighbours
        return Failed(sequence.id, error)
    stopped = checker.stopped
    return Finished(sequence.id, FinishReason.STOP if isinstance(stopped, str) else reason, text, stopped)


@dataclass(frozen=True, slots=True)
class Failed:
    """The sequence's last event, when it did not."""

    sequence: int
    error: Exception


Event = Forked | Token | PromptLogprobsAdded | Dropped | Finished | Failed
