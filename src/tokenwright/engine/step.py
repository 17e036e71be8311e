"""Plain values that the scheduler, the runner and the sampler exchange. None outlives its step.

A runner answers a step with an Output, the sampler turns it into results, the scheduler commits them and answers with
events. Classes with an instance for every token are not frozen: making a frozen one takes five times as long.
"""

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar

from tokenwright.engine.request import FinishReason, Request, Sequence

T = TypeVar("T")


class LogitsNeeded(Enum):
    """The rows of a chunk whose logits are needed, or HIDDEN for the hidden states of all its rows."""

    NONE = 0
    LAST = 1
    ALL = 2
    HIDDEN = 3


NONE, LAST, ALL, HIDDEN = LogitsNeeded  # global names, which are faster than attributes of an enumeration


@dataclass(slots=True)
class Chunk:
    """The tokens at positions [start, stop) of a sequence, to be computed now. Valid until the step is committed."""

    sequence: Sequence
    start: int
    stop: int
    logits_needed: LogitsNeeded
    drafts: tuple[int, ...] = ()  # its last tokens, if the sequence does not have them yet (`with_drafts`)

    @property
    def tokens(self) -> list[int]:
        return [*self.sequence.tokens[self.start : self.stop], *self.drafts]

    @property
    def following(self) -> list[int]:
        """The known tokens at [start + 1, stop + 1), whose logprobs the rows give; the last row may have none."""
        return self.sequence.tokens[self.start + 1 : self.stop + 1]

    @property
    def request(self) -> Request:
        return self.sequence.request

    @property
    def picks(self) -> bool:
        """Whether a token is chosen after the last row: all tokens are computed, and the limit is not reached."""
        sequence, stop = self.sequence, self.stop
        return self.logits_needed is not NONE and len(sequence.tokens) <= stop < sequence.group.limit


def chunk_of(sequence: Sequence, length: int) -> Chunk:
    start = sequence.computed
    stop = start + length
    if sequence.request.hidden:
        return Chunk(sequence, start, stop, HIDDEN)
    logits_needed = LAST if stop == len(sequence.tokens) else NONE
    asked = sequence.request.prompt_logprobs_from is not None
    if asked and sequence.needs_logprobs and stop >= sequence.next_logprob:
        logits_needed = ALL
    return Chunk(sequence, start, stop, logits_needed)  # positional: keywords take nearly three times as long


@dataclass(frozen=True, slots=True)
class Step:
    chunks: tuple[Chunk, ...]

    @property
    def size(self) -> int:
        return sum(chunk.stop - chunk.start for chunk in self.chunks)


@dataclass(slots=True)
class Output(Generic[T]):
    """The results of the runner. `rows[i]` are chunk i's rows of `logits`, or of `hidden` if it needs hidden states."""

    rows: tuple[range, ...]
    logits: T  # [rows, vocabulary]
    best: tuple[int, ...] = ()  # the lowest index of each row's largest logit, if the kernels computed it
    log_totals: tuple[float, ...] = ()  # likewise log(sum(exp)) of each row; NaN if a logit is not finite
    hidden: T | None = None  # [rows, width], after the final norm
    faults: Mapping[int, Exception] = field(default_factory=dict)  # of chunks without results, by index


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """A token with two natural log-probabilities, the model's and the sampler's."""

    token: int
    logprob: float  # over all ids at temperature 1
    sampler_logprob: float  # of the distribution it drew from: -inf for a token that was cut, 0 for the only one left


@dataclass(slots=True)
class Pick:
    """The sampler's choice for a sequence. Several picks for one fork it; a beam without a pick ends."""

    sequence: int
    tokens: tuple[int, ...]  # the drafts that the sampler accepted, and one more
    logprobs: tuple[float, ...]  # of each token, the model's
    sampler_logprobs: tuple[float, ...] = (0.0,)
    tops: tuple[tuple[TopLogprob, ...], ...] = ((),)  # as many for each token as the request asks for
    choice: int = 0  # the number of the text that they continue


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of known tokens from position `start` on, as a result and as an event; `tops` as in Pick."""

    sequence: int
    start: int
    logprobs: tuple[float, ...]
    tops: tuple[tuple[TopLogprob, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """Hidden states of known tokens, as a result and an event: rows [n, width] in fp32 from position `start` on."""

    sequence: int
    start: int
    rows: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """A sequence cannot go on, and the others do: a result; and the last event of one that ended with an error."""

    sequence: int
    error: Exception


@dataclass(frozen=True, slots=True)
class Finish:
    """The sampler ends a sequence without another token: its search is over."""

    sequence: int
    reason: FinishReason


Result = Pick | PromptLogprobs | HiddenStates | Failed | Finish


def with_faults(faults: Mapping[int, Exception], step: "Step", results: list[Result]) -> list[Result]:
    """The results of a step, with a Failed in place of the results of each chunk in `faults`, by its index."""
    failed = {step.chunks[index].sequence.id: error for index, error in faults.items()}
    return [*map(Failed, failed, failed.values()), *(one for one in results if one.sequence not in failed)]


@dataclass(frozen=True, slots=True)
class Forked:
    """The new `sequence` continues the text of `parent`, which goes on as well. `branch` is the new sequence itself."""

    sequence: int
    parent: int
    branch: Sequence


@dataclass(slots=True)
class Token:
    """A token was written, with the log-probabilities of its Pick. `text` can be shown now, and may be empty."""

    sequence: int
    token: int
    logprob: float
    sampler_logprob: float = 0.0
    top: tuple[TopLogprob, ...] = ()
    text: str = ""


def reported(sequence: Sequence, found: PromptLogprobs | HiddenStates) -> list["Event"]:
    """The event for known tokens that were not reported before: a preempted sequence computes some twice."""
    if isinstance(found, HiddenStates):
        at = sequence.counts.hidden
        rows = found.rows[max(0, at - found.start) :]
        sequence.counts.hidden += len(rows)
        return [HiddenStates(sequence.id, at, rows)] if len(rows) else []
    at = sequence.next_logprob
    known = max(0, at - found.start)
    fresh = found.logprobs[known:]
    sequence.counts.logprobs += len(fresh)
    return [PromptLogprobs(sequence.id, at, fresh, found.tops[known:])] if fresh else []


@dataclass(frozen=True, slots=True)
class Dropped:
    """The last event of a beam without a pick; its search goes on without it."""

    sequence: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a sequence that ended well, with the text held back until now, and what stopped it."""

    sequence: int
    reason: FinishReason
    text: str = ""
    stopped: str | int | None = None


def finished(sequence: Sequence, reason: FinishReason) -> "Finished | Failed":
    """The last event of a sequence that ends well, with the rest of its text; Failed if its stop checker fails."""
    checker = sequence.stop_checker
    try:
        text = checker.finish()
    except Exception as error:  # of this request's stop checker: others must not fail with it
        return Failed(sequence.id, error)
    stopped = checker.stopped
    return Finished(sequence.id, FinishReason.STOP if isinstance(stopped, str) else reason, text, stopped)


Event = Forked | Token | PromptLogprobs | HiddenStates | Dropped | Finished | Failed


class Proposer(Protocol):
    def propose(self, sequences: ListLike[Sequence], most: ListLike[int], step: Step) -> ListLike[ListLike[int]]:
        """The drafts of each sequence, at most `most`; none where the rows would cost more than they save.

        `step` is computed in any case, and contains a chunk of each sequence. Equal calls have equal answers.
        """

    def end(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended, well or not. `propose` may never have had it."""


Reserve = Callable[[Sequence, int, int], bool]  # pages for the tokens [start, stop) of a chunk with drafts


def with_drafts(step: Step, proposer: Proposer, reserve: Reserve, budget: int) -> Step:
    """Speculation: add drafts to a step's chunks, at most `budget` rows. `Scheduler._write` keeps the accepted ones.

        text      [ ........... t ]             t is pending: a plain chunk computes only its row
        chunk                 [ t a b c ]       with drafts a, b, c
        picked                  a b x           by `Sampler.pick` at these rows, in order, to the first that differs
        computed  [ ........... t a b ]         x is pending; K and V of c stay in the cache, where no row reads them

    A row depends only on its own text, and a draw on the row, the seed, the position and the choice: drafts change how
    many tokens a step writes, and nothing else. No sequence is preempted for a draft.

    A recurrent state cannot drop a token, so the chunk rewrites a copy of it. If a draft is rejected, the next chunk,
    without drafts, starts from the state before this chunk, or from the state of a full page after t.

        computed  [ ........... ]
        chunk                   [ t a b x ]
    """
    open_to_drafts = [(place, most) for place, chunk in enumerate(step.chunks) if (most := most_drafts(chunk)) > 0]
    if not open_to_drafts or budget <= 0:
        return step
    asked = [step.chunks[place].sequence for place, _ in open_to_drafts]
    proposed = proposer.propose(asked, [min(most, budget) for _, most in open_to_drafts], step)
    if not any(proposed):
        return step
    chunks = list(step.chunks)
    for place, drafts in _granted(step, open_to_drafts, proposed, reserve, budget):
        plain = chunks[place]
        chunks[place] = Chunk(plain.sequence, plain.start, plain.stop + len(drafts), ALL, drafts)
    return Step(tuple(chunks))


def _granted(
    step: Step,
    open_to_drafts: ListLike[tuple[int, int]],
    proposed: ListLike[ListLike[int]],
    reserve: Reserve,
    budget: int,
) -> Iterator[tuple[int, tuple[int, ...]]]:
    for (place, most), drafts in zip(open_to_drafts, proposed, strict=True):
        granted = tuple(drafts[: min(most, budget)])
        chunk = step.chunks[place]
        stop = chunk.stop + len(granted)
        if granted and reserve(chunk.sequence, chunk.start, stop):
            budget -= len(granted)
            yield place, granted


def most_drafts(chunk: Chunk) -> int:
    """The most drafts that a chunk may have: 0 unless it decodes one text with the cache, token by token.

    The token after the last draft must still lie below the text's limit and before its pause.
    """
    sequence = chunk.sequence
    group, length = sequence.group, len(sequence.tokens)
    decodes = chunk.logits_needed is LAST and chunk.stop == length == chunk.start + 1
    if not (decodes and group.cache and sequence.request.speculate and group.width == len(sequence.choices) == 1):
        return 0
    stop = group.limit if group.pause_at is None else min(group.limit, group.pause_at)
    return stop - length - 1
