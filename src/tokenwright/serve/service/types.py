"""The types between APIs, which only translate, and the service: requests (`GenerationRequest`), deltas, errors."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from tokenwright import errors
from tokenwright.checks import shown
from tokenwright.llm.chat.chat_options import ChatRequest
from tokenwright.llm.chat.chat_options import Tool as Tool
from tokenwright.llm.chat.chat_options import ToolMode as ToolMode
from tokenwright.llm.chat.chat_options import distinct as distinct
from tokenwright.llm.chat.output_parser import Delta as Delta
from tokenwright.llm.chat.output_parser import Finish as Finish
from tokenwright.llm.chat.output_parser import ToolCallDelta as ToolCallDelta
from tokenwright.llm.outputs import ToolCall as ToolCall
from tokenwright.llm.prompts.report import CacheReport

MOST_NAME = 256  # characters compared
HOUR_S = 3600.0
MOST_NAMED = 32  # models that an error compares and names
ALIKE = 0.5  # likeness from which a name is probably meant
PRIORITIES = range(-8, 9)  # within a key; lower ones go first

Kind = Literal["invalid", "key", "forbidden", "missing", "size", "busy", "unavailable", "engine"]


@dataclass(frozen=True, slots=True)
class Caller:
    key: str = ""  # the name of its API key; "" without keys
    salt: str = ""  # derived from the key, so that keys never share cached pages
    models: frozenset[str] = frozenset()  # names that the key may use; none: all

    def may_use(self, *names: str) -> bool:
        return not self.models or not self.models.isdisjoint(names)


NOBODY = Caller()  # no keys are in use


@dataclass(frozen=True, slots=True)
class ListedModel:
    name: str
    root: str  # the model's own name
    context: int | None  # known once it is loaded


@dataclass(frozen=True, slots=True)
class Gap:
    suffix: str  # the text behind the gap
    files: tuple[tuple[str, str], ...] = ()  # name and text of others
    begun: str = ""  # how the text of the gap begins


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest(ChatRequest):
    """One request to generate text, by any API. Exactly one of `prompt` (text or token ids) and `messages` is given."""

    prompt: str | Sequence[int] | None = None
    gap: Gap | None = None  # the prompt stands before a gap, which the answer fills
    add_special: bool = True  # the tokenizer adds its own tokens to text
    overrides: Mapping[str, Any] = field(default_factory=dict)  # fields of SamplingParams; else the defaults
    json_object: bool = False  # the answer is any JSON object (other grammars: overrides["grammar"])
    context: int | None = None  # the most tokens of prompt and answer, where that is less than the model's context
    prediction: str = ""  # a likely answer, such as a file that it edits
    speculate: bool = True  # allow drafts
    drop_oldest: bool = False  # leave out the oldest messages, but for the system's, where the prompt is too long
    caller: Caller = NOBODY
    request_id: str = ""
    deadline_s: float | None = None  # seconds from now, waiting included
    priority: int = 0  # one of PRIORITIES, within a key
    truncate_prompt_tokens: int | None = None  # keep only this number of last tokens of a longer prompt
    embed: bool = False  # generate nothing; read `Generation.embedding`
    streamed: bool = False  # the client reads deltas as they come, so best_of and beam search are refused
    model: str = ""  # as the client named it; it may choose an adapter
    together: int = 1  # the number of requests of one reply
    cache_marks: tuple[tuple[int, int | None, float], ...] = ()  # message (-1: tools), place (None: end), seconds
    cache_marked_only: bool = False  # nothing behind the last mark is cached
    arrival: float | None = None  # of the reply's HTTP request, in all but its first: the queue's limit spares these
    identity: str = ""  # of the answer, as its client will know it
    session: str = ""  # a client's name, which can release its pins
    session_shared: bool = False  # other conversations may have it
    session_ends: bool = False  # its pins end with the last of its requests that run
    compared: str = ""  # the earlier answer with whose prompt this one is compared
    edited: bool = False  # the conversation was shortened


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens of a request."""

    prompt: int
    completion: int  # of all its texts
    cached: int  # prompt tokens whose K and V were found
    reasoning: int = 0  # between think tags
    truncated: int = 0  # cut off by `truncate_prompt_tokens`
    drafted: int = 0  # computed ahead of the texts
    accepted: int = 0  # of these, kept by the texts
    disk: int = 0  # cached tokens that were read from a disk
    kept: int = 0  # prompt tokens computed and cached
    pinned: int = 0  # prompt tokens kept for the client
    pinned_hour: int = 0  # of these, for an hour at least
    unpinned: int = 0  # breakpoints without room


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time of a reply went, and counts; of several requests as `timings_of_all` says."""

    queue_s: float  # until its first step
    prefill_s: float  # from there to its first token
    decode_s: float  # from there to its last
    prompt_tokens: int
    cached_tokens: int
    disk_tokens: int
    completion_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    preemptions: int
    moves: int  # how often another replica took a text over
    cache: CacheReport | None = None  # on the (first) prompt
    experts: Mapping[str, int] | None = None  # counts of the pool of experts in a file meanwhile, for all texts


class ServerError(errors.TokenwrightError):
    """The server's own reasons to refuse a request."""


class Busy(ServerError):
    """The queue is full. retry_after_s: seconds until another attempt is reasonable."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


ENDING = "the server is shutting down; send the request to another one"


class NotReady(ServerError):
    """The model is still loading, could not be loaded, or the server is shutting down."""

    def __init__(self, message: str = "the model is still being read; ask /ready") -> None:
        super().__init__(message)


class Late(ServerError):
    """The request's deadline passed before anything was computed for it."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """The time by which a request must have begun: `seconds` (None: no limit) after `start` (time.perf_counter)."""

    seconds: float | None
    start: float = field(default_factory=time.perf_counter)

    def left_s(self) -> float | None:
        left = None if self.seconds is None else self.start + self.seconds - time.perf_counter()
        if left is not None and left <= 0:
            raise self.late()
        return left

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Raises Late if the block runs beyond the deadline."""
        try:
            async with asyncio.timeout(self.left_s()):
                yield
        except TimeoutError:
            raise self.late() from None

    def late(self) -> Late:
        return Late(f"the request waited for {self.seconds:g} s, which is its deadline")


class Unread(ServerError):
    """The client's slow reading paused the request for longer than the settings allow."""

    def __init__(self) -> None:
        super().__init__("this stream was read too slowly, and so its text was ended")


class Missing(ServerError):
    """The model, or another thing that the request names, does not exist here."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def no_model(name: str, known: Sequence[str]) -> Missing:
    first, wanted = known[:MOST_NAMED], _pairs(name)
    near = max(first, key=lambda one: _likeness(_pairs(one), wanted), default="") if len(known) > 1 else ""
    hint = f"did you mean {near}? " if near and _likeness(_pairs(near), wanted) >= ALIKE else ""
    served = ", ".join(first) + (f" and {len(known) - MOST_NAMED:,} more" if len(known) > MOST_NAMED else "")
    return Missing(f"the model {shown(name)} does not exist here; {hint}this server has {served}", "model")


def _pairs(name: str) -> frozenset[str]:
    """The pairs of neighbouring characters of a name, in lower case."""
    lower = f"^{name[:MOST_NAME].lower()}$"
    return frozenset(lower[at : at + 2] for at in range(len(lower) - 1))


def _likeness(one: frozenset[str], other: frozenset[str]) -> float:
    """The share of pairs that two names have in common (Dice's coefficient)."""
    return 2 * len(one & other) / (len(one) + len(other))


@dataclass(frozen=True, slots=True)
class Problem:
    """An error as a client may see it."""

    status: int
    kind: Kind
    message: str
    param: str | None = None  # the field at fault, if known
    retry_after_s: int | None = None
    code: str | None = None  # a finer kind, where an API has one
    allow: str | None = None  # the methods that the path has, where another was used
    lengths: tuple[int, int] | None = None  # tokens of too long a prompt, and the context

    @property
    def headers(self) -> dict[str, str]:
        found = {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}
        found |= {} if self.allow is None else {"allow": self.allow}
        return found | ({"www-authenticate": 'Bearer, Basic realm="tokenwright"'} if self.status == 401 else {})


FAULT = "the server has failed on this request; its log says more"


def problem_of(error: Exception) -> Problem:
    """The problem of an error; the text of an error that is not ours stays inside the server."""
    match error:
        case errors.ContextError():
            code, lengths = "context_length_exceeded", (error.tokens, error.context)
            return Problem(400, "invalid", _too_long(error), "messages", code=code, lengths=lengths)
        case errors.RequestError():
            return Problem(400, "invalid", str(error), parameter_of(error))
        case errors.GrammarError():
            return Problem(400, "invalid", str(error))
        case errors.CapacityError():
            return Problem(400, "invalid", str(error), "max_tokens")
        case Busy():
            return Problem(429, "busy", str(error), retry_after_s=error.retry_after_s)
        case NotReady():
            return Problem(503, "unavailable", str(error), retry_after_s=1)
        case Late():
            return Problem(503, "unavailable", str(error), retry_after_s=1)
        case Unread():
            return Problem(408, "invalid", str(error))
        case Missing():
            return Problem(404, "missing", str(error), error.param)
        case errors.ReplicaError() | errors.WorkerError():  # others take their place
            return Problem(503, "unavailable", str(error), retry_after_s=1)
        case errors.EngineError():
            return Problem(500, "engine", FAULT)
        case _:
            return Problem(500, "engine", FAULT)


def without_folders(text: str) -> str:
    """A message with file names in place of paths: clients need not know this machine's folders."""
    return _PATH.sub(lambda found: found[0].rpartition("/")[2], text)


_PATH = re.compile(r"(?<![\w:/.])(?:/[^/\s:;,'\"]+){2,}")


def _too_long(error: errors.ContextError) -> str:
    """Clients look for these words of the published APIs, and then shorten the conversation."""
    tokens, most = error.tokens, error.context
    limit = f"this model's maximum context length is {most} tokens"
    return f"prompt is too long: {tokens} tokens, {tokens - most} more than fit; {limit}"


def parameter_of(error: errors.RequestError) -> str | None:
    """The field that a RequestError names by the first word of its message, if it does; a picture is in messages."""
    word = str(error).split(" ", 1)[0].split(".", 1)[0].strip("\"':,")
    if word == "picture":
        return "messages"
    return word if word.isidentifier() and (("_" in word) or word in _FIELDS) else None


_FIELDS = frozenset(("n", "seed", "stop", "temperature", "tools", "messages", "prompt", "logprobs", "priority", "user"))
