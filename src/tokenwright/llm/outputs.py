"""The results of a request: the pieces of a stream, and a completion with its usage."""

import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tokenwright.checks import no_attribute, shown
from tokenwright.engine import FinishReason, TopLogprob
from tokenwright.errors import RequestError
from tokenwright.llm.prompts.report import CacheReport
from tokenwright.text.messages import called


@dataclass(frozen=True, slots=True)
class Usage:
    """The cost of a request: tokens and bytes as the engine counts them, seconds of the monotonic clock.

    reused_tokens: not computed because their K and V were cached by another text with the same prefix, read from a
    file, or cached when this text was preempted; summed over all its admissions, so a text that was
    preempted often may have more than its number of tokens.
    """

    prompt_tokens: int
    completion_tokens: int
    forward_tokens: int  # tokens sent through the layers: with the cache prompt + new - 1 - reused + rejected
    layer_tokens: int  # forward_tokens times the model's layers
    reused_tokens: int
    kv_bytes: int  # of this text's K and V at its end; 0 without the cache
    preemptions: int
    seed: int | None
    queue_s: float  # from the request to its first step
    token_s: tuple[float, ...]  # from the request to each token
    drafted_tokens: int = 0  # draft tokens computed
    accepted_tokens: int = 0  # draft tokens accepted
    disk_tokens: int = 0  # reused_tokens whose pages were read from the folder kv_disk

    @property
    def ttft_s(self) -> float | None:
        """Time to first token in seconds; None if there was none."""
        return self.token_s[0] if self.token_s else None

    @property
    def total_s(self) -> float:
        return self.token_s[-1] if self.token_s else 0.0

    @property
    def step_s(self) -> tuple[float, ...]:
        """Seconds of each token: the time to first token, then the time since the previous token."""
        return tuple(now - before for now, before in zip(self.token_s, (0.0, *self.token_s), strict=False))

    @property
    def tokens_per_second(self) -> float | None:
        """Decode speed, 1 / TPOT: tokens after the first over the time since the first; None below two tokens."""
        if len(self.token_s) < 2 or self.token_s[-1] <= self.token_s[0]:
            return None
        return (len(self.token_s) - 1) / (self.token_s[-1] - self.token_s[0])


class Piece(NamedTuple):
    """One token of a stream. `text` may be empty while a character or a stop string is incomplete.

    logprob: the model's, natural logarithm, over the whole vocabulary at temperature 1. sampler_logprob: of the
    distribution that the token was drawn from; 0 if nothing was drawn. top: top logprobs, as many as requested. choice:
    the number of its text. token_id None: text that was held back until the end. content, reasoning: of a chat, what
    `text` shows as the answer and as its reasoning.
    """

    text: str
    token_id: int | None
    logprob: float
    sampler_logprob: float = 0.0
    top: tuple[TopLogprob, ...] = ()
    choice: int = 0
    content: str = ""
    reasoning: str = ""


@dataclass(slots=True)
class ToolCall:
    """A complete tool call. `arguments` is JSON text."""

    id: str
    name: str
    arguments: str

    @property
    def values(self) -> dict[str, Any]:
        """The arguments by name. Raises ValueError for a call that was cut."""
        found: dict[str, Any] = json.loads(self.arguments or "{}")
        return found

    def as_message(self) -> dict[str, Any]:
        return called(self.id, self.name, self.arguments)


@dataclass(frozen=True, slots=True)
class TreeToken:
    parent: int | None  # the preceding token's index in the tree; None after the prompt
    token_id: int
    logprob: float
    score: float  # the sum of adjusted log-probabilities after the prompt
    reason: FinishReason | None  # why a text ended here


@dataclass(frozen=True, slots=True)
class Completion:
    """The continuation of a prompt: `text` and `token_ids` exclude the prompt; the ids include an end token.

    logprobs, sampler_logprobs, top_logprobs: one per token, as in Piece. stopped: the stop string or id that ended the
    text. complete: False for a text that was cut before its grammar could end. score: of beam search, the sum of
    log-probabilities divided by length ** length_penalty. content, reasoning, tool_calls: what a chat's `text` says; of
    other texts the content is the text. parsed: the content as `response_format` asks; None where it was cut. observed:
    an ObservedText, if `observe` asks for one. prompt_logprobs, prompt_top_logprobs: of the prompt's tokens after the
    first, if requested. others: the request's other texts; with best_of and beam search the best first. tree: all nodes
    of a beam search, parents before children; ends: index in `tree` of the last token of each of `choices`. cache: what
    the prefix cache found of the prompt, and why not more.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason | None  # None while the text is being generated
    usage: Usage
    sampler_logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[tuple[TopLogprob, ...], ...] = ()
    stopped: str | int | None = None
    complete: bool = True
    score: float | None = None
    prompt_logprobs: tuple[float, ...] = ()
    prompt_top_logprobs: tuple[tuple[TopLogprob, ...], ...] = ()
    others: "tuple[Completion, ...]" = ()
    tree: tuple[TreeToken, ...] = ()
    ends: tuple[int, ...] = ()
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    parsed: Any = None
    observed: Any = None
    cache: CacheReport | None = field(default=None, compare=False)

    def __getattr__(self, name: str) -> Any:
        raise no_attribute("a Completion", name, "completion")

    def __getitem__(self, name: object) -> Any:
        raise RequestError(f"a Completion has attributes, such as completion.text; {shown(name)} is no index of it")

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message, to go on with the conversation."""
        found: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            found["reasoning_content"] = self.reasoning
        if self.tool_calls:
            found["tool_calls"] = [call.as_message() for call in self.tool_calls]
        return found

    @property
    def choices(self) -> "tuple[Completion, ...]":
        return (self, *self.others)
