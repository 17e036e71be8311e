"""A client's request (Request), its state in the engine (Sequence), and sequences that advance together.

A sequence is its `tokens` and a count `computed` of how many of them have their K and V in the cache; the engine lets
`computed` catch up with `tokens`. The sequences of a SequenceGroup, one or the beams of a search, are admitted, paused,
preempted and ended together: else the beams of two searches could wait for each other's pages for ever.
"""

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, Self

from tokenwright.engine.layer_group import PageTables
from tokenwright.engine.page_pool import PagePool
from tokenwright.engine.pictures import Spans
from tokenwright.engine.pins import NO_RETENTION, Mark, Retention
from tokenwright.engine.prefix_index import PrefixHashes
from tokenwright.sampling_params import SamplingParams


class FinishReason(StrEnum):
    EOS = "eos"
    STOP = "stop"  # a stop string was completed
    STOP_ID = "stop_id"  # a token of stop_ids was written
    GRAMMAR = "grammar"
    LENGTH = "length"
    TIME = "time"  # max_seconds have passed
    CONTEXT = "context"
    ABORTED = "aborted"


class StopChecker(Protocol):
    """Decides when a sequence ends (end tokens, stop strings, grammars, time), and decodes its text.

    A method that a class leaves out ends nothing, forbids nothing and decodes nothing.
    """

    def advance(self, token: int) -> FinishReason | None:  # noqa: ARG002
        """Take the token just written; return why the sequence ends here, or None to go on."""
        return None

    def take_text(self) -> str:
        """The text that can be shown and has not been taken yet."""
        return ""

    def finish(self) -> str:
        """End the text; return what was held back of it."""
        return ""

    @property
    def stopped(self) -> str | int | None:
        """The stop string or stop id that was found; final after `finish`."""
        return None

    def finished(self) -> FinishReason | None:
        """Why to end without another token; called after every step, also for waiting and paused sequences."""
        return None

    def fork(self) -> Self:
        return self

    def mask(self) -> Any:
        """Ids that may come next, for the sampler: uint32 words [ceil(V / 32)], the lowest bit first; None: all."""
        return None

    @property
    def constrained(self) -> bool:
        """Whether `mask` may forbid an id, now or later."""
        return False

    def forced(self) -> ListLike[int]:
        """Next tokens for the proposer: the likely spelling of bytes that the grammar forces."""
        return ()


class NoStopChecker(StopChecker):
    pass


@dataclass(frozen=True, slots=True)
class TokenConstraints:
    """The texts of SamplingParams as token ids, since the sampler knows no text."""

    end_ids: frozenset[int] = frozenset()  # which min_tokens bans
    bad: tuple[tuple[int, ...], ...] = ()  # the tokens of each bad word
    breakers: frozenset[int] = frozenset()  # whose texts have a DRY breaker


@dataclass(frozen=True, slots=True)
class Thoughts:
    """The tags between which a text may reason before its answer, to which grammar and stop strings apply."""

    start: str
    end: str
    opened: bool = False  # the prompt ends inside the tags
    budget: int | None = None  # the most tokens of reasoning


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to continue."""

    prompt: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    stop_checker: StopChecker = field(default_factory=NoStopChecker)
    cache: bool = True  # False recomputes everything at every step: the naive loop
    prompt_logprobs_from: int | None = None  # report log-probabilities of the prompt's tokens from this position on
    share: bool = True  # attach and cache pages
    salt: bytes = b""  # requests of different salts share no pages; that of an adapter must be its own
    constraints: TokenConstraints = TokenConstraints()
    width: int = 1  # the most sequences that advance in the same step (the beams of a search)
    search: Any = None  # for the sampler
    hidden: bool = False  # report the hidden states of the prompt's tokens, and write nothing (max_tokens is 0)
    parent: "Sequence | None" = field(default=None, repr=False, compare=False)  # whose pages are reused, ended or not
    shared: int = 0  # the first tokens of the prompt, which are those of the parent
    adapter: int = 0  # the number of the model's adapter; 0: none
    continued: int = 0  # last tokens of the prompt that count as written, for limits, Mirostat and penalties
    continued_logprob: float = 0.0  # the sum of their sampler logprobs
    thoughts: Thoughts | None = None
    speculate: bool = True  # drafts are allowed (`with_drafts`)
    prediction: tuple[int, ...] = ()  # tokens that the client expects the answer to have, for drafts
    choice: int = 0  # the number of its first text, on which draws depend
    retention: Retention = NO_RETENTION
    pictures: Spans = ()
    argmax: bool = field(init=False, repr=False, compare=False)  # greedy: the sampler takes the argmax of unmasked rows
    prompt_length: int = field(init=False, repr=False, compare=False)  # without `continued` tokens

    def __post_init__(self) -> None:
        params = self.params
        object.__setattr__(self, "argmax", params.greedy and not params.adjusts and not self.constraints.bad)
        object.__setattr__(self, "prompt_length", len(self.prompt) - self.continued)

    def limit(self, context: int) -> int:
        """The most tokens that a sequence of this request can have. The last is never computed."""
        return min(max(len(self.prompt), self.prompt_length + self.params.max_tokens), context)


class State(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True)
class SequenceCounts:
    forwarded: int = 0  # tokens sent through the layers, recomputation included
    reused: int = 0  # tokens whose K and V were found instead
    prefix_hit: int = 0  # tokens of the prompt that were cached when it was first admitted
    restored: int = 0  # tokens whose K and V came from the page tier
    declined: int = 0  # tokens left in the page tier, since computing them is faster
    preemptions: int = 0
    logprobs: int = 0  # prompt tokens whose log-probability was reported
    hidden: int = 0  # prompt tokens whose hidden states were reported
    sampler_logprob: float = 0.0  # the sum of the sampler's log-probabilities of the tokens written so far
    drafted: int = 0  # draft tokens sent through the layers
    accepted: int = 0  # of these, those written and kept in the cache
    pinned: list[int] = field(default_factory=list)  # tokens pinned before each mark that was passed; 0: none granted


@dataclass(slots=True, eq=False)
class Sequence:
    """A text in the engine. Only the scheduler owns and changes it.

    tokens   [ prompt ............... | written ...... ]
    computed [ K, V in the pages .........]              <- falls back to 0 on preemption,
    tables   [ p3 ][ p0 ][ p7 ][ p4 ...     ]               and after each token without the cache
    """

    id: int
    request: Request
    tokens: list[int]
    tables: PageTables
    prefix_hashes: PrefixHashes
    stop_checker: StopChecker
    choices: tuple[int, ...]  # numbers of the texts that go on from it: several at the end of a prompt of n texts
    group: "SequenceGroup"
    computed: int = 0
    state: State = State.WAITING
    counts: SequenceCounts = field(default_factory=SequenceCounts)

    @property
    def mark(self) -> Mark | None:
        marks, passed = self.request.retention.marks, len(self.counts.pinned)
        return marks[passed] if passed < len(marks) else None

    def cacheable(self, stop: int) -> int:
        """How many of its first `stop` tokens may be cached for other requests."""
        asked = self.request.retention
        if not asked.explicit:
            return stop
        return min(stop, asked.marks[-1].at) if asked.marks else 0

    @property
    def limit(self) -> int:
        return self.group.limit

    @property
    def cache(self) -> bool:
        return self.group.cache

    @property
    def pages(self) -> int:
        return sum(map(len, self.tables))

    @property
    def shares(self) -> bool:
        return self.cache and self.request.share

    @property
    def max_computed(self) -> int:
        """The most tokens that are ever computed: without the last one written."""
        return max(len(self.request.prompt), self.limit - 1)

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def next_logprob(self) -> int:
        return max(1, self.request.prompt_logprobs_from or 1) + self.counts.logprobs

    @property
    def needs_logprobs(self) -> bool:
        return self.request.prompt_logprobs_from is not None and self.next_logprob < len(self.request.prompt)

    @property
    def needs_rows(self) -> bool:
        """Whether rows of known tokens are still to be reported, so it is computed even if it writes nothing."""
        return self.needs_logprobs or (self.request.hidden and self.counts.hidden < len(self.request.prompt))

    @property
    def skippable(self) -> int:
        """The most tokens that need not be computed if their K and V are cached: later rows are needed."""
        last = len(self.tokens) - 1
        if self.request.hidden:
            return min(last, self.counts.hidden)
        return min(last, self.next_logprob - 1) if self.needs_logprobs else last

    @property
    def paused(self) -> bool:
        at = self.group.pause_at
        return at is not None and len(self.tokens) >= at

    @property
    def written(self) -> ListLike[int]:
        return self.tokens[len(self.request.prompt) :]

    def fork(self, identity: int, tables: PageTables, choice: int) -> "Sequence":
        """A copy for the text `choice`, without pages and not yet in its group."""
        return Sequence(
            id=identity,
            request=self.request,
            tokens=list(self.tokens),
            tables=tables,
            prefix_hashes=self.prefix_hashes.fork(),
            stop_checker=self.stop_checker.fork(),
            choices=(choice,),
            group=self.group.branch(),
            counts=SequenceCounts(logprobs=self.counts.logprobs, sampler_logprob=self.counts.sampler_logprob),
        )

    def exhausted(self) -> FinishReason | None:
        if len(self.tokens) < self.limit:
            return None
        written = len(self.tokens) - self.request.prompt_length
        return FinishReason.LENGTH if written >= self.request.params.max_tokens else FinishReason.CONTEXT


class SequenceGroup:
    """One sequence, or (BeamSequences) several that advance together, at most `width`.

    A sequence has at most `limit` tokens; the group is paused once its first has `pause_at`.
    """

    __slots__ = ("cache", "limit", "pause_at", "sequences", "width")

    def __init__(self, limit: int, *, cache: bool = True, pause_at: int | None = None, width: int = 1) -> None:
        self.sequences: list[Sequence] = []
        self.limit = limit
        self.cache = cache
        self.pause_at = pause_at
        self.width = width

    def add(self, sequence: Sequence, after: Sequence | None = None) -> None:
        at = len(self.sequences) if after is None else self.sequences.index(after) + 1
        self.sequences.insert(at, sequence)

    @property
    def first(self) -> Sequence:
        return self.sequences[0]

    @property
    def paused(self) -> bool:
        return self.pause_at is not None and len(self.sequences[0].tokens) >= self.pause_at

    def plan(
        self, budget: int, attach: Callable[[Sequence], None], ready: Callable[[Sequence], bool]
    ) -> Iterable[tuple[Sequence, int]]:
        """The sequences to compute in a step, each with its number of tokens, at most `budget` > 0 in all.

        All compute their last token in one step, once all pending ones fit the budget and are `ready`. `attach` gives a
        sequence its cached pages.
        """
        recomputed = [beam for beam in self.sequences if beam.shares and not beam.computed]
        fits = not recomputed and sum(beam.pending for beam in self.sequences) <= budget
        if fits and all(map(ready, self.sequences)):
            return [(beam, beam.pending) for beam in self.sequences]
        return self._catch_up(budget, attach, recomputed)

    def _catch_up(
        self, budget: int, attach: Callable[[Sequence], None], recomputed: list[Sequence]
    ) -> Iterator[tuple[Sequence, int]]:
        for place, beam in enumerate(self.sequences):
            if not budget:
                return
            if beam in recomputed:  # it shares pages of earlier beams, once they are computed
                if any(other.pending > 1 for other in self.sequences[:place]):
                    continue
                if not beam.pages:  # a step that was never committed may have attached some
                    attach(beam)
            if length := min(beam.pending - 1, budget):
                yield beam, length
                budget -= length

    def branch(self) -> "SequenceGroup":
        return SequenceGroup(self.limit, cache=self.cache, pause_at=self.pause_at, width=self.width)


class BeamSequences(SequenceGroup):
    """The beams of a search, in the order of their choices."""

    __slots__ = ()

    def branch(self) -> SequenceGroup:
        return self


def group_for(request: Request, limit: int) -> SequenceGroup:
    made = BeamSequences if request.width > 1 else SequenceGroup
    return made(limit, cache=request.cache, width=request.width)


def pages_of(pool: PagePool, sequence: Sequence, count: int, tokens: int, chunk: int) -> list[int]:
    """The most pages of each group that `count` sequences with this one's prompt use, with `tokens` each."""
    own = pool.max_pages(tokens, chunk)
    if count == 1:
        return own
    common = pool.shareable_pages(len(sequence.request.prompt) if sequence.shares else 0)
    return [count * pages - (count - 1) * shared for pages, shared in zip(own, common, strict=True)]
