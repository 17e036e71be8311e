"""What a client asks for (Request) and what becomes of it (Sequence).

A sequence is its `tokens` and a count `computed` of how many of them have their K and V in the cache. Everything
else the engine does follows from letting `computed` catch up with `tokens`.
"""

from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from tokenwright.engine.pages import Chain, Parked, Tables
from tokenwright.errors import RequestError


class FinishReason(StrEnum):
    """Why a sequence ended."""

    EOS = "eos"  # the model wrote an end token
    STOP = "stop"  # a stop string was completed
    LENGTH = "length"  # max_tokens were written
    CONTEXT = "context"  # the model's context is full
    ABORTED = "aborted"  # the client went away


def _shown(value: object) -> str:
    """A value for a message: Python refuses to print an integer of many thousand digits."""
    return "one of thousands of digits" if isinstance(value, int) and value.bit_length() > 10_000 else repr(value)[:80]


def _whole(name: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise RequestError(f"{name} must be a whole number from {least} to {most}, not {_shown(value)}")


def _real(name: str, value: object, least: float, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise RequestError(f"{name} must be a number from {least:g} to {most:g}, not {_shown(value)}")


def _texts(name: str, value: object) -> tuple[str, ...]:
    texts = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not all(isinstance(text, str) and text for text in texts):
        raise RequestError(f"{name} must be a string, or a list of strings, that are not empty; not {value!r}")
    return texts


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop.

    temperature: 0 is greedy (the highest logit, the lowest id on ties); otherwise logits are divided by it.
    top_k: keep the k highest logits (ties with the k-th stay); 0 keeps all.
    top_p: then keep the smallest set of most probable ids whose mass reaches top_p; 1 keeps all.
    seed: fixes the draws, in any batch and after any preemption; None takes a fresh one, told in the usage.
    max_tokens: the most tokens to write; 0 writes none.
    stop: strings (or one string) that end the text when they appear in it; they are not part of the text.
    ignore_eos: go on after an end token, which is then a token like any other.
    Raises RequestError for a value out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _real("temperature", self.temperature, 0.0, 1e6)
        _whole("top_k", self.top_k, 0, 2**31)
        _real("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise RequestError(
                "top_p must be above 0 (it keeps that share of the probability); use temperature 0 for greedy"
            )
        if self.seed is not None:
            _whole("seed", self.seed, 0, 2**64 - 1)
        _whole("max_tokens", self.max_tokens, 0, 2**31)
        object.__setattr__(self, "stop", _texts("stop", self.stop))
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos must be True or False, not {self.ignore_eos!r}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


class Guard(Protocol):
    """Watches one sequence's new tokens, outside the engine: end tokens, stop strings, later grammars."""

    def advance(self, token: int) -> FinishReason | None:
        """Take the token just written; answer why the sequence ends here, or None to go on."""


class NoGuard:
    """Lets a sequence run to its length."""

    def advance(self, token: int) -> FinishReason | None:  # noqa: ARG002  (a guard is told every token)
        return None


@dataclass(frozen=True, slots=True)
class Request:
    """One text to be continued. `cache=False` recomputes everything at every step: the naive loop.

    `prompt_logprobs` asks for the log-probability of every prompt token after the first. `share=False` neither takes
    pages that other texts have left nor leaves any; `salt` parts those who may share from all others.
    """

    prompt: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    guard: Guard = field(default_factory=NoGuard)
    cache: bool = True
    prompt_logprobs: bool = False
    share: bool = True
    salt: bytes = b""

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
    """

    id: int
    request: Request
    limit: int  # most tokens it can hold: prompt + max_tokens, or the context
    tokens: list[int]
    tables: Tables
    chain: Chain
    computed: int = 0
    parked: Parked | None = None
    cache: bool = True  # as the request says, until it is switched
    hold_at: int | None = None  # tokens at which it is held; None: never
    state: State = State.WAITING
    scored: int = 0  # prompt tokens whose log-probability was told
    forwarded: int = 0  # tokens sent through the layers on its behalf, recomputation included
    reused: int = 0  # tokens that were not sent through them, because their K and V were found
    preemptions: int = 0

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
    def scores(self) -> bool:
        """Whether prompt tokens are still to be scored: their rows must be computed."""
        return self.request.prompt_logprobs and self.scored + 1 < len(self.request.prompt)

    @property
    def held(self) -> bool:
        return self.hold_at is not None and len(self.tokens) >= self.hold_at

    @property
    def written(self) -> ListLike[int]:
        return self.tokens[len(self.request.prompt) :]

    def ended(self) -> FinishReason | None:
        """The end that the counts alone demand."""
        if len(self.tokens) - len(self.request.prompt) >= self.request.params.max_tokens:
            return FinishReason.LENGTH
        return FinishReason.CONTEXT if len(self.tokens) >= self.limit else None
