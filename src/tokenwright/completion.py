"""What a client gets back: pieces while the text is written, and a completion with its usage at the end."""

from dataclasses import dataclass
from typing import NamedTuple

from tokenwright.engine import FinishReason, TopLogprob


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request cost. Tokens and bytes are counted by the engine; seconds are of the monotonic clock.

    forward_tokens: tokens sent through the layers, recomputation included; with the cache prompt + new - 1, without
    those reused.
    reused_tokens: tokens that were not sent through them because their K and V were found: left by another text that
    begins alike, read from a file, or left or parked by this one when it was put off; added up over all its
    admissions, so a text that was put off often may have more than it has tokens.
    layer_tokens: the same, times the layers of the model.
    kv_bytes: K and V held for this text at its end; 0 without the cache, which keeps nothing between steps.
    token_s: seconds from the request to each token. queue_s: until its first step began.
    """

    prompt_tokens: int
    completion_tokens: int
    forward_tokens: int
    layer_tokens: int
    reused_tokens: int
    kv_bytes: int
    preemptions: int
    seed: int | None
    queue_s: float
    token_s: tuple[float, ...]

    @property
    def ttft_s(self) -> float | None:
        """Time to first token in seconds; None if there was none."""
        return self.token_s[0] if self.token_s else None

    @property
    def total_s(self) -> float:
        """Seconds from the request to the last token."""
        return self.token_s[-1] if self.token_s else 0.0

    @property
    def step_s(self) -> tuple[float, ...]:
        """Seconds of each token: the first is the time to first token, the others since the one before."""
        return tuple(now - before for now, before in zip(self.token_s, (0.0, *self.token_s), strict=False))

    @property
    def tokens_per_second(self) -> float | None:
        """Decode speed, 1 / TPOT: tokens after the first over the time since the first; None below two tokens."""
        if len(self.token_s) < 2 or self.token_s[-1] <= self.token_s[0]:
            return None
        return (len(self.token_s) - 1) / (self.token_s[-1] - self.token_s[0])


class Piece(NamedTuple):
    """One token as it is written. `text` may be empty while a character or a stop string is undecided.

    logprob: the model's, natural logarithm, over the whole vocabulary at temperature 1. sampler_logprob: that of the
    distribution it was drawn from; 0 where there was no choice. top: the model's likeliest ids, as many as were asked
    for. choice: the number of the text that it belongs to, of a request for several. token_id None: no token, but text
    that was held back until the end.
    """

    text: str
    token_id: int | None
    logprob: float
    sampler_logprob: float = 0.0
    top: tuple[TopLogprob, ...] = ()
    choice: int = 0


@dataclass(frozen=True, slots=True)
class TreeToken:
    """A token that a beam search has kept for a while. `parent`: the place in the tree of the one before it, or None.

    score: the sum of log-probabilities from the prompt on, as the search adds them up. reason: why a text ended here.
    """

    parent: int | None
    token_id: int
    logprob: float
    score: float
    reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class Completion:
    """A text that was continued: `text` and `token_ids` are what was added, an end token included in the ids.

    logprobs, sampler_logprobs, top_logprobs: as in Piece, one for each token. stopped: the stop string or the stop id
    that ended it. score: of beam search, the sum of log-probabilities divided by length ** length_penalty.
    prompt_logprobs, prompt_top_logprobs: of the prompt's tokens after the first, where they were asked for. others:
    the request's other texts, each of which has its own; of best_of and beam search in the order of their quality.
    tree: all that a beam search has kept, parents before children; ends: where the texts of `choices` end in it.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason | None  # None while it is being written
    usage: Usage
    sampler_logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[tuple[TopLogprob, ...], ...] = ()
    stopped: str | int | None = None
    score: float | None = None
    prompt_logprobs: tuple[float, ...] = ()
    prompt_top_logprobs: tuple[tuple[TopLogprob, ...], ...] = ()
    others: "tuple[Completion, ...]" = ()
    tree: tuple[TreeToken, ...] = ()
    ends: tuple[int, ...] = ()

    @property
    def choices(self) -> "tuple[Completion, ...]":
        """All texts of the request: this one and the others."""
        return (self, *self.others)
