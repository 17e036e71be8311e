"""The messages of the router and a replica: dataclasses, sent as JSON [kind, fields] after a length of four bytes.

    router   ReplicaOptions; then Begin, Tell, Release, WarmOrder, RouterBusy, KeptAsked, Ping, End ──►  replica
    router   ◄──  Progress, then ReplicaOpened or ReplicaUnopened; then Report, Warmed, KeptFound, Alive, Pong

Reading a message runs no code from it. Bytes are in base64. Numbers keep their bits, except a NaN's sign and payload.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal, get_args

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter

from tokenwright import engine as core
from tokenwright import errors
from tokenwright.checkpoints.fingerprint import ModelFiles
from tokenwright.engine.pictures import Spans
from tokenwright.engine.pins import NO_RETENTION, Retention
from tokenwright.errors import RequestError
from tokenwright.llm.input_processor import InputProcessor, RequestOptions
from tokenwright.llm.prompts.kept import KeptText, KeptTokens

LENGTH = 4  # bytes

TextCommand = Literal["cancel", "pause", "resume"]
OptionValue = None | bool | int | float | str | tuple[str, ...] | dict[str, str]


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    model: str
    loading: dict[str, OptionValue]  # LoadedModel's options
    engine: dict[str, OptionValue]
    threads: int
    cores: frozenset[int]  # empty: all
    secret: bytes  # the router's, for page hashes
    spare: bool = False  # use one thread fewer for a quick model
    files: ModelFiles | None = None


@dataclass(frozen=True, slots=True)
class TextOrder:
    """Fields of `Request`."""

    prompt: tuple[int, ...]
    written: tuple[int, ...]  # by other replicas, after the prompt
    params: core.SamplingParams
    salt: bytes = b""
    adapter: str | None = None  # its name
    cache: bool = True
    share: bool = True
    hidden: bool = False
    prompt_logprobs_from: int | None = None
    choice: int = 0
    speculate: bool = True
    prediction: tuple[int, ...] = ()
    continued_logprob: float = 0.0
    thoughts: core.Thoughts | None = None
    retention: Retention = NO_RETENTION
    pictures: Spans = ()


CARRIED = tuple(one.name for one in fields(TextOrder) if one.name not in ("prompt", "written", "adapter"))


@dataclass(frozen=True, slots=True)
class Begin:
    number: int
    order: TextOrder
    paused: bool  # until a resume


@dataclass(frozen=True, slots=True)
class Tell:
    """Call a method of a text's handle."""

    number: int
    what: TextCommand


@dataclass(frozen=True, slots=True)
class Release:
    """End the pins of a client's session."""

    owner: str
    session: str


@dataclass(frozen=True, slots=True)
class WarmOrder:
    """Compute the prompt of an order ahead. after, spare: as in `WarmRules`."""

    number: int
    order: TextOrder
    after: tuple[int, ...]
    spare: bool


@dataclass(frozen=True, slots=True)
class RouterBusy:
    busy: bool  # the router has texts, so nothing is computed ahead


@dataclass(frozen=True, slots=True)
class KeptAsked:
    number: int
    texts: tuple[KeptText, ...]  # one has its ids, if the replica lacked them
    owner: str


@dataclass(frozen=True, slots=True)
class Ping:
    """Answer with `Alive` at once, and with `Pong` between two steps of the engine."""


@dataclass(frozen=True, slots=True)
class End:
    """End the process."""


@dataclass(frozen=True, slots=True)
class Progress:
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class ReplicaShape:
    groups: tuple[core.Group, ...]
    page_size: int
    seed: bytes
    token_budget: int
    max_sequences: int
    weight_bytes: int
    kv_memory: int
    kv_format: str
    experts: tuple[str, ...] = ()  # names of the expert pool's counts


@dataclass(frozen=True, slots=True)
class ReplicaOpened:
    shape: ReplicaShape


@dataclass(frozen=True, slots=True)
class ReplicaUnopened:
    reason: str


@dataclass(frozen=True, slots=True)
class HiddenRows:
    sequence: int
    start: int
    dtype: str
    shape: tuple[int, ...]
    data: bytes


ErrorKind = Literal[
    "CacheFileError", "CapacityError", "CheckpointError", "ContextError", "EngineError", "GrammarError",
    "ReplicaError", "RequestError", "TokenwrightError", "WorkerError",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class TextFailure:
    sequence: int
    kind: ErrorKind
    arguments: tuple[int | str, ...]


# The first type that fits is taken. No two have the same required fields, and most events are tokens.
TextEvent = Annotated[
    core.Token | core.Finished | core.PromptLogprobs | HiddenRows | TextFailure, Field(union_mode="left_to_right")
]


@dataclass(frozen=True, slots=True)
class TextNews:
    number: int
    events: list[TextEvent]  # with the replica's sequence ids
    ended: bool
    queue_s: float | None  # seconds until the text's first step, once known
    prefix_hit: int
    preemptions: int
    restored: int
    drafted: int = 0
    accepted: int = 0
    declined: int = 0
    pinned: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    pages: list[tuple[int, bytes, bool]]  # group, hash, whether it is cached now; in order
    texts: list[TextNews]
    available: int
    cached: int
    sequences: int = 0  # for all routers
    experts: dict[str, int] = field(default_factory=dict)  # counts of the expert pool since the router connected


@dataclass(frozen=True, slots=True)
class Warmed:
    number: int
    found: int  # these two as `WarmRules.computed` gets them
    tokens: int


@dataclass(frozen=True, slots=True)
class KeptFound:
    number: int
    found: KeptTokens
    lacking: int | None = None  # the first text that must come with its ids


@dataclass(frozen=True, slots=True)
class Alive:
    """The process answers."""


@dataclass(frozen=True, slots=True)
class Pong:
    """The engine ends steps."""


def packed_event(event: core.Event) -> TextEvent:
    """An event as a replica sends it. An error of no type in errors.py becomes an EngineError."""
    match event:
        case core.HiddenStates(sequence=sequence, start=start):
            rows = np.asarray(event.rows)
            return HiddenRows(sequence, start, rows.dtype.str, rows.shape, rows.tobytes())
        case core.Failed(sequence=sequence, error=error):
            return _failure(sequence, error)
        case core.Token() | core.Finished() | core.PromptLogprobs():
            return event
    raise AssertionError("a replica writes one text for an order, without beams")


def unpacked_event(event: TextEvent) -> core.Event:
    match event:
        case HiddenRows():
            rows = np.frombuffer(event.data, event.dtype).reshape(event.shape)
            return core.HiddenStates(event.sequence, event.start, rows)
        case TextFailure():
            return core.Failed(event.sequence, getattr(errors, event.kind)(*event.arguments))
    return event


def _failure(sequence: int, error: Exception) -> TextFailure:
    match error:
        case errors.ContextError():
            return TextFailure(sequence, "ContextError", (error.tokens, error.context))
        case errors.TokenwrightError():
            kind: Any = next(one.__name__ for one in type(error).__mro__ if one.__name__ in get_args(ErrorKind))
            fields = () if isinstance(error, errors.EngineError) else error.fields
            return TextFailure(sequence, kind, (utf8_text(str(error)), *fields))
    return TextFailure(sequence, "EngineError", (utf8_text(f"{type(error).__name__}: {error}"),))


def utf8_text(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode, by ?."""
    return text.encode(errors="replace").decode()


_JSON = ConfigDict(extra="forbid", ser_json_bytes="base64", val_json_bytes="base64", ser_json_inf_nan="constants")
_KINDS = (
    *(ReplicaOptions, Begin, Tell, Release, WarmOrder, RouterBusy, KeptAsked, Ping, End),
    *(Progress, ReplicaOpened, ReplicaUnopened, Report, Warmed, KeptFound, Alive, Pong),
)
_ADAPTERS: dict[str, TypeAdapter[Any]] = {
    kind.__name__: TypeAdapter(tuple[Literal[kind.__name__], kind], config=_JSON)  # type: ignore[name-defined,valid-type]
    for kind in _KINDS
}


def framed(messages: Iterable[object]) -> bytes:
    named = [(type(message).__name__, message) for message in messages]
    pieces = [_ADAPTERS[name].dump_json((name, message)) for name, message in named]
    return b"".join(part for one in pieces for part in (len(one).to_bytes(LENGTH, "little"), one))


def unframed(data: bytes) -> Any:
    """Parse a frame without its length. Raises ValueError for any other bytes."""
    kind = data[2 : data.index(b'"', 2)].decode()  # it begins with ["kind",
    if kind not in _ADAPTERS:
        raise ValueError(f"there is no message {kind[:100]!r}")
    return _ADAPTERS[kind].validate_json(data)[1]


def orders_of(request: core.Request, adapters: Sequence[str]) -> Iterator[TextOrder]:
    """An order for each text; the first has the prompt's log-probabilities. Raises RequestError for beam search."""
    if request.search is not None:
        raise RequestError("beams: replicas have no beam search; leave beams out, or serve without --replicas")
    whole = TextOrder(
        prompt=request.prompt[: request.prompt_length],
        written=request.prompt[request.prompt_length :],
        adapter=adapters[request.adapter - 1] if request.adapter else None,
        **{name: getattr(request, name) for name in CARRIED},
    )
    one = replace(request.params, n=1, best_of=None)
    yield replace(whole, params=one)
    other = replace(whole, params=replace(one, prompt_logprobs=None), prompt_logprobs_from=None)
    for at in range(1, request.params.choices):
        yield replace(other, choice=request.choice + at)


def requested(inputs: InputProcessor, order: TextOrder) -> core.Request:
    options = RequestOptions(adapter=order.adapter, thoughts=order.thoughts)
    request = inputs.build(order.prompt, order.params, options, written=order.written)
    return replace(request, **{name: getattr(order, name) for name in CARRIED if name != "params"})
