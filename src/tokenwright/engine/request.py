"""What a client asks for (Request) and what becomes of it (Sequence).

A sequence is its `tokens` and a count `computed` of how many of them have their K and V in the cache. Everything
else the engine does follows from letting `computed` catch up with `tokens`.
"""

from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, Self

from tokenwright.engine.page_pool import PrefixHashes, SwappedPages, Tables
from tokenwright.sampling_params import SamplingParams


class FinishReason(StrEnum):
    """Why a sequence ended."""

    EOS = "eos"  # the model wrote an end token
    STOP = "stop"  # a stop string was completed
    STOP_ID = "stop_id"  # a token of stop_ids was written
    GRAMMAR = "grammar"  # the grammar allows nothing more
    LENGTH = "length"  # max_tokens were written
    TIME = "time"  # max_seconds have passed
    CONTEXT = "context"  # the model's context is full
    ABORTED = "aborted"  # the client went away


class StopChecker(Protocol):
    """Watches one sequence's new tokens, outside the engine: end tokens, stop strings, grammars, time; and its text."""

    def advance(self, token: int) -> FinishReason | None:
        """Take the token just written; answer why the sequence ends here, or None to go on."""

    def take_text(self) -> str:
        """The text that can be shown and has not been taken yet."""

    def finish(self) -> str:
        """At the end: the rest of the text, with what was held back."""

    @property
    def stopped(self) -> str | int | None:
        """The stop string or stop id that was found; `finish` may settle which."""

    def finished(self) -> FinishReason | None:
        """Asked before every step, waiting and paused sequences included: why it ends without another token."""

    def fork(self) -> Self:
        """One like it, for a sequence that goes on elsewhere from the same text."""

    def mask(self) -> Any:
        """For the sampler: which ids may come next, as uint32 words [ceil(V / 32)], the lowest bit first; None: all."""


class NoStopChecker:
    """Lets a sequence run to its length, and makes no text."""

    stopped = None

    def advance(self, token: int) -> FinishReason | None:  # noqa: ARG002  (a stop checker sees every token)
        return None

    def take_text(self) -> str:
        return ""

    def finish(self) -> str:
        return ""

    def finished(self) -> FinishReason | None:
        return None

    def fork(self) -> Self:
        return self

    def mask(self) -> None:
        return None


@dataclass(frozen=True, slots=True)
class TokenConstraints:
    """What the texts of SamplingParams are in one vocabulary: the sampler knows ids alone.

    end_ids: what min_tokens keeps from being chosen. bad: the tokens of each bad word. breakers: ids whose text has a
    DRY breaker in it.
    """

    end_ids: frozenset[int] = frozenset()
    bad: tuple[tuple[int, ...], ...] = ()
    breakers: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Request:
    """One text to be continued. `cache=False` recomputes everything at every step: the naive loop.

    score_from: the log-probabilities of the prompt's tokens from this position on are asked for; None: of none.
    `share=False` neither takes pages that other texts have left nor leaves any; `salt` parts those who may share from
    all others. width: the most sequences that it comes to beside each other, all of which advance in the same step
    (the beams of a search); 1: each goes its own way. search: the sampler's own, for such a request.
    """

    prompt: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    stop_checker: StopChecker = field(default_factory=NoStopChecker)
    cache: bool = True
    prompt_logprobs_from: int | None = None
    share: bool = True
    salt: bytes = b""
    constraints: TokenConstraints = TokenConstraints()
    width: int = 1
    search: Any = None

    def limit(self, context: int) -> int:
        """The most tokens that this sequence can come to hold, the last of which is never computed."""
        return min(len(self.prompt) + self.params.max_tokens, context)


class State(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """A request on its way. Owned and changed by the scheduler alone.

    tokens   [ prompt ............... | written ...... ]
    computed [ K, V in the pages .........]              <- falls back to 0 on preemption,
    tables   [ p3 ][ p0 ][ p7 ][ p4 ...     ]               and after each token without the cache

    Preempted with room to park what its pages held, it keeps `computed`, and `parked` until it has pages again.

    A held sequence is passed over by the scheduler until its hold is moved. It keeps its pages as long as nobody
    needs them; when somebody does, they are taken, and it is recomputed once it goes on.

    Sequences of one request have its first one's id as `root`. The beams of a search are a `team`: they wait, run and
    take their next token together. All others are teams of one.
    """

    id: int
    root: int
    request: Request
    limit: int  # most tokens it can hold: prompt + max_tokens, or the context
    tokens: list[int]
    tables: Tables
    chain: PrefixHashes
    stop_checker: StopChecker
    choices: tuple[int, ...]  # numbers of the texts that go on from it
    team: "list[Sequence]" = field(default_factory=list)
    computed: int = 0
    parked: SwappedPages | None = None
    cache: bool = True  # as the request says, until it is switched
    hold_at: int | None = None  # tokens at which it is held; None: never
    state: State = State.WAITING
    scored: int = 0  # prompt tokens whose log-probability was told
    forwarded: int = 0  # tokens sent through the layers on its behalf, recomputation included
    reused: int = 0  # tokens that were not sent through them, because their K and V were found
    preemptions: int = 0

    def __post_init__(self) -> None:
        self.team = self.team or [self]

    @property
    def pages(self) -> int:
        """Pages that it holds."""
        return sum(map(len, self.tables))

    @property
    def shares(self) -> bool:
        """Whether it leaves its pages to others, and takes theirs."""
        return self.cache and self.request.share

    @property
    def slots(self) -> int:
        """The most tokens whose K and V it can come to hold: the last one that is written is never computed."""
        return max(len(self.request.prompt), self.limit - 1)

    @property
    def pending(self) -> int:
        """Tokens that the cache has yet to catch up with."""
        return len(self.tokens) - self.computed

    @property
    def score_at(self) -> int:
        """The position of the next prompt token whose log-probability is to be told."""
        return max(1, self.request.prompt_logprobs_from or 1) + self.scored

    @property
    def scores(self) -> bool:
        """Whether prompt tokens are still to be scored: their rows must be computed."""
        return self.request.prompt_logprobs_from is not None and self.score_at < len(self.request.prompt)

    @property
    def held(self) -> bool:
        return self.hold_at is not None and len(self.tokens) >= self.hold_at

    @property
    def written(self) -> ListLike[int]:
        return self.tokens[len(self.request.prompt) :]

    def ended(self) -> FinishReason | None:
        """The end that the counts alone demand."""
        if len(self.tokens) < self.limit:
            return None
        written = len(self.tokens) - len(self.request.prompt)
        return FinishReason.LENGTH if written >= self.request.params.max_tokens else FinishReason.CONTEXT
