"""What the router and a replica say to each other: dataclasses, pickled, each after its length in four bytes.

    router   Begin, Cancel, Pause, Resume, Ping      ──►  replica
    router   ◄──  Progress, then ReplicaOpened or ReplicaUnopened; then Report, Pong

Both are processes of one user that one of them has started; the socket between them has no name that others could find.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tokenwright.engine import Event, Group, SamplingParams

LENGTH = 4  # bytes


@dataclass(frozen=True, slots=True)
class TextOrder:
    """A text for a replica to write, or to go on with.

    written: what other replicas wrote after the prompt. The rest are fields of `Request`, and the name of an adapter.
    """

    prompt: tuple[int, ...]
    written: tuple[int, ...]
    params: SamplingParams
    salt: bytes
    adapter: str | None
    cache: bool
    share: bool
    hidden: bool
    prompt_logprobs_from: int | None
    choice: int


@dataclass(frozen=True, slots=True)
class Begin:
    """Write a text. number: what both call it. paused: only once it is resumed."""

    number: int
    order: TextOrder
    paused: bool


@dataclass(frozen=True, slots=True)
class Cancel:
    number: int


@dataclass(frozen=True, slots=True)
class Pause:
    number: int


@dataclass(frozen=True, slots=True)
class Resume:
    number: int


@dataclass(frozen=True, slots=True)
class Ping:
    """Answer with `Pong` between two steps of the engine."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Bytes of the model that are read, and all."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class ReplicaShape:
    """What a replica is: its engine's limits and pages, and figures for display. seed: of its page hashes."""

    groups: tuple[Group, ...]
    page_size: int
    seed: bytes
    token_budget: int
    max_sequences: int
    weight_bytes: int
    kv_memory: int
    kv_format: str


@dataclass(frozen=True, slots=True)
class ReplicaOpened:
    """The replica takes texts."""

    shape: ReplicaShape


@dataclass(frozen=True, slots=True)
class ReplicaUnopened:
    """The model cannot be opened."""

    reason: str


@dataclass(frozen=True, slots=True)
class TextNews:
    """What a step says of a text; `events` name sequences of the replica.

    queue_s: seconds until its first step, once that has been. prefix_hit, preemptions: of its sequence so far.
    """

    number: int
    events: list[Event]
    ended: bool
    queue_s: float | None
    prefix_hit: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class Report:
    """What a step has changed. pages: (group, hash, whether it can be found now), in order."""

    pages: list[tuple[int, bytes, bool]]
    texts: list[TextNews]
    available: int
    cached: int


@dataclass(frozen=True, slots=True)
class Pong:
    """The answer to `Ping`."""


def framed(messages: Iterable[object]) -> bytes:
    """The bytes of messages."""
    pieces = [pickle.dumps(message, pickle.HIGHEST_PROTOCOL) for message in messages]
    return b"".join(part for one in pieces for part in (len(one).to_bytes(LENGTH, "little"), one))


def unframed(data: bytes) -> Any:
    """The message of a frame without its length."""
    return pickle.loads(data)
