"""The interface that `LLM` and the server use of an engine, in this process or as replicas in others."""

from collections.abc import Mapping
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tokenwright.config import EngineConfig
from tokenwright.engine.page_pool import PagePool
from tokenwright.engine.request import Request, Sequence
from tokenwright.engine.step import Event


class RequestHandle(Protocol):
    """A client's view of its request. Any thread may call its methods, which never wait."""

    sequence: Sequence  # its first; the counts may be read at any time
    submitted: float  # in seconds of the engine's clock, as `started`
    started: float | None
    ended: bool  # its last event is delivered
    moves: int  # how often another replica took over

    def cancel(self) -> None:
        """End the request in any state; its last event says ABORTED."""

    def pause(self) -> None:
        """Pause all of its sequences after the current step. They keep their pages until others need them."""

    def resume(self) -> None: ...

    def let_write(self, tokens: int) -> None:
        """Let each of its sequences write `tokens` more, then pause it. Raises RequestError over replicas."""


class Delivery(NamedTuple):
    """The events of one request from one step, in order; `time` is in seconds of the engine's clock."""

    handle: RequestHandle
    events: list[Event]
    time: float
    ended: bool


class Listener(Protocol):
    """Receives the deliveries of its requests, in the engine's thread, once per step: it must not block."""

    def deliver(self, deliveries: list[Delivery]) -> None: ...


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Counts of a KV cache's pages: requests can take the `available` ones, of which `cached` hold prefixes."""

    pages: int
    available: int
    cached: int


class EnginePort(Protocol):
    """An engine over one model. context: the most tokens of one text. Thread-safe."""

    options: EngineConfig
    context: int

    @property
    def pool(self) -> PagePool:
        """The page pool of the engine or of a replica. Other threads may read only its sizes, which never change."""

    @property
    def weight_bytes(self) -> int: ...

    @property
    def kv_memory(self) -> int: ...

    @property
    def kv_format(self) -> str:
        """The storage format of K and V, and the attention window, for display."""

    @property
    def replicas(self) -> int: ...

    @property
    def occupancy(self) -> Occupancy: ...

    @property
    def expert_counts(self) -> Mapping[str, int]:
        """Counts of reads of experts from the file, by name; empty if all experts are in memory."""

    def submit(
        self, requests: ListLike[Request], listener: Listener, *, paused: bool = False
    ) -> ListLike[RequestHandle]:
        """Queue requests; the engine's thread calls `listener` with their events. `paused` ones wait until resumed.

        Raises ContextError or CapacityError for one that cannot be served, RequestError for what this engine cannot do,
        EngineError if the engine has ended.
        """

    def check(self) -> None:
        """Raises EngineError if the engine has failed, RequestError if it is closed."""

    def close(self) -> None:
        """Free the memory. Unfinished requests fail; the engine cannot be used afterwards."""
