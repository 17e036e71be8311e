"""Computes one model by several processes with native kernels: rank 0's side, and the messages to the others.

    rank 0     engine -> SplitBackend -> Team.tell(Compute) ; Program ----+
    rank 1     receives Compute -> Program -------------------------------+ gather in shared memory, op by op

Only rank 0 schedules and samples. The others repeat, in order, what it does to its KV store (`SplitStore`).
"""

import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Protocol, Self
from weakref import finalize

import numpy as np

from tokenwright.arrays import Array, place_of
from tokenwright.backends import Logits
from tokenwright.backends.adapters import NO_ADAPTERS, Beside
from tokenwright.backends.device import kernel_threads
from tokenwright.backends.layout import Weights
from tokenwright.backends.native import structs
from tokenwright.backends.native.native_kernels import NativeKernels
from tokenwright.backends.native.program import NativeBackend, NativeDecoder
from tokenwright.backends.native.rank_messages import packed, register
from tokenwright.backends.observation import Observed, Watched
from tokenwright.backends.packed import LANES
from tokenwright.cache import KVStore, LayerSpec
from tokenwright.engine import Batch
from tokenwright.errors import CapacityError, RequestError, WorkerError
from tokenwright.models.graph import Graph
from tokenwright.models.split import Cuts, RankPlace, cut_graph

if TYPE_CHECKING:
    from tokenwright.backends.torch.decoder import Decoder

PATIENCE = 50_000  # nanoseconds that a rank spins, if each has a processor
HALF = 4 << 30  # the most bytes of one gather; steps allocate as many as they need
_HEAD = mmap.PAGESIZE  # bytes before the halves, where ranks synchronise


class Gathering:
    """The file mapping through which ranks gather. parent: the process of rank 0, in others."""

    def __init__(self, descriptor: int, rank: int, ranks: int, parent: int = 0, spins: bool = True) -> None:
        try:
            self._memory = mmap.mmap(descriptor, _HEAD + 2 * HALF)
        except OSError as error:
            raise CapacityError(f"the ranks' shared memory cannot be mapped ({error.strerror})") from error
        self.words = np.frombuffer(self._memory, np.uint32, 4)  # a `Meeting` of ranks.h
        at, patience = place_of(self.words), PATIENCE if spins else 0
        self.struct = structs.CRanks(rank, ranks, parent, patience, at, at + _HEAD, HALF // 4, 0)

    @staticmethod
    def new_file() -> int:
        """The descriptor of an unnamed file for all ranks to inherit."""
        descriptor = os.memfd_create("tokenwright ranks")
        os.ftruncate(descriptor, _HEAD + 2 * HALF)
        return descriptor

    def begin(self) -> None:
        self.words[:], self.struct.gathers = 0, 0


@dataclass(frozen=True, slots=True)
class Open:
    """Open a KV store under a key. specs: rank 0's."""

    key: int
    specs: tuple[LayerSpec, ...]
    pages: tuple[int, ...]
    page_size: int

    def run(self, rank_state: "RankState") -> None:
        layouts = (layer.layout for layer in rank_state.decoder.graph.kv)
        own = [replace(spec, layout=layout) for spec, layout in zip(self.specs, layouts, strict=True)]
        rank_state.backends[self.key] = NativeBackend(rank_state.decoder, KVStore(own, self.pages, self.page_size))


@dataclass(frozen=True, slots=True)
class Drop:
    key: int

    def run(self, rank_state: "RankState") -> None:
        rank_state.backends.pop(self.key, None)


@dataclass(frozen=True, slots=True)
class CopyPage:
    key: int
    group: int
    source: int
    target: int

    def run(self, rank_state: "RankState") -> None:
        rank_state.backends[self.key].store.copy(self.group, self.source, self.target)


@dataclass(frozen=True, slots=True)
class Take:
    key: int
    other: int

    def run(self, rank_state: "RankState") -> None:
        rank_state.backends[self.key].store.take(rank_state.backends[self.other].store)


@dataclass(frozen=True, slots=True)
class Compute:
    key: int
    batch: Batch
    threads: int

    def run(self, rank_state: "RankState") -> None:
        kernel_threads.count = self.threads
        rank_state.backends[self.key](self.batch)


Message = Open | Drop | CopyPage | Take | Compute
register(Open, Drop, CopyPage, Take, Compute)


@dataclass
class RankState:
    """The state of another rank: its part of the model and a backend over each store."""

    decoder: NativeDecoder
    backends: dict[int, NativeBackend] = field(default_factory=dict)


def rank_state(graph: Graph, kernels: NativeKernels, weights: Weights, gathering: Gathering) -> RankState:
    return RankState(NativeDecoder(*_part(graph, kernels, weights, gathering)))


def _part(
    graph: Graph, kernels: NativeKernels, weights: Weights, gathering: Gathering
) -> tuple[Graph, NativeKernels, Weights, Beside, Cuts, structs.CRanks]:
    struct = gathering.struct
    own, cuts = cut_graph(graph, RankPlace(struct.rank, struct.count, LANES))
    return own, kernels, weights, NO_ADAPTERS, cuts, struct


class Others(Protocol):
    def start(self) -> None: ...
    def send(self, message: bytes) -> None:
        """Send to all. Raises OSError if one has ended."""

    def stop(self) -> None:
        """End the ranks and wait for them. `start` may then start new ones."""


class Team:
    """The other ranks, as rank 0 sees them; they start with the first store. weight_bytes: of each rank."""

    def __init__(self, gathering: Gathering, weight_bytes: Sequence[int], others: Others) -> None:
        self.gathering = gathering
        self.weight_bytes = tuple(weight_bytes)
        self.turn = threading.RLock()  # locks a message and its work
        self.dropped: deque[int] = deque()  # keys of stores that were garbage-collected
        self.keys = count()
        self.watched: list[Callable[[WorkerError], None]] = []  # called with an error if a rank has ended
        self._why: str | None = None
        self.others = others
        self._started = False

    @property
    def count(self) -> int:
        return len(self.weight_bytes)

    def tell(self, message: Message) -> None:
        """Send a message to all. Raises WorkerError if one has ended."""
        with self.turn:
            self.check()
            if not self._started:
                if not isinstance(message, Open):
                    raise WorkerError("the processes that compute the model were ended; open the model again")
                self.gathering.begin()
                self.others.start()
                self._started = True
            try:
                while self.dropped:
                    self.others.send(packed(Drop(self.dropped.popleft())))
                self.others.send(packed(message))
            except OSError:
                self.end("a process that computes the model has ended, so the engine has; open the model again")
                self.check()

    def check(self) -> None:
        if self._why is not None:
            raise WorkerError(self._why)

    def end(self, why: str) -> None:
        self._why = self._why or why
        self.gathering.words[3] = 1  # ends the waits of all ranks
        for call in self.watched:
            call(WorkerError(self._why))

    def stop(self) -> None:
        """End the other ranks; the next store starts them anew."""
        with self.turn:
            self.others.stop()
            self._started, self._why = False, None
            self.watched.clear()


class SplitDecoder(NativeDecoder):
    """Rank 0's part of a model. `weight_bytes` counts all ranks."""

    def __init__(self, graph: Graph, kernels: NativeKernels, weights: Weights, team: Team) -> None:
        super().__init__(*_part(graph, kernels, weights, team.gathering))
        self.weight_bytes = sum(team.weight_bytes)
        self.team = team
        self._whole = graph, kernels, weights, team

    def again(self) -> Self:
        return type(self)(*self._whole)

    @property
    def over_arrays(self) -> "Decoder":
        raise RequestError(WHOLE, "tensor_parallel")


WHOLE = "this looks into a model that one process computes; open it without tensor_parallel"


class SplitStore(KVStore):
    """Rank 0's KV store of its own heads; the others have theirs."""

    def __init__(self, team: Team, specs: Sequence[LayerSpec], pages: int | Sequence[int], page_size: int) -> None:
        super().__init__(specs, pages, page_size)
        self.team, self.key = team, next(team.keys)
        team.tell(Open(self.key, self.specs, self.pages, page_size))
        finalize(self, team.dropped.append, self.key).atexit = False

    def copy(self, group: int, source: int, target: int) -> None:
        super().copy(group, source, target)
        self.team.tell(CopyPage(self.key, group, source, target))

    def take(self, other: KVStore) -> None:
        assert isinstance(other, SplitStore), "both are split"
        super().take(other)
        self.team.tell(Take(self.key, other.key))

    def read(self, group: int, pages: Sequence[int]) -> tuple[Array, ...]:  # noqa: ARG002
        raise RequestError(PAGES, "tensor_parallel")

    def write(self, group: int, pages: Sequence[int], contents: Sequence[Array]) -> None:  # noqa: ARG002
        raise RequestError(PAGES, "tensor_parallel")


PAGES = "K and V are divided among processes, so they cannot be saved or loaded; open the model without tensor_parallel"


class SplitBackend(NativeBackend):
    def __init__(self, decoder: SplitDecoder, store: SplitStore) -> None:
        super().__init__(decoder, store)
        self._team, self._key = decoder.team, store.key

    def __call__(self, batch: Batch) -> Logits:
        if batch.pictures:
            raise RequestError(WHOLE, "tensor_parallel")
        team = self._team
        with team.turn:
            team.tell(Compute(self._key, batch, kernel_threads.count))
            try:
                return super().__call__(batch)
            except BaseException as error:
                team.check()  # raises a clearer error
                team.end(f"the first process that computes the model has failed ({error}), so the engine has")
                raise

    def observe(self, batch: Batch, watched: Sequence[Watched]) -> tuple[Logits, Observed]:  # noqa: ARG002
        raise RequestError(WHOLE, "tensor_parallel")
