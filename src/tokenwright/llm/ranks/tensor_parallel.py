"""Tensor parallel: starts and watches the processes (`llm/ranks/rank.py`) that compute one model together.

This process is rank 0. It puts each rank's part of the weights into a file in memory that only that rank maps, so the
weights are in memory once. The ranks end with it.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from socket import socket, socketpair
from weakref import WeakMethod, finalize

from tokenwright.backends.device import cores
from tokenwright.backends.layout import Weights, cut_weights, nbytes
from tokenwright.backends.native.compile import compiles
from tokenwright.backends.native.native_kernels import NativeKernels
from tokenwright.backends.native.rank_messages import packed, register, send
from tokenwright.backends.native.ranks import PAGES, Gathering, SplitDecoder, Team
from tokenwright.backends.packed import LANES
from tokenwright.cache import LayerSpec
from tokenwright.cache.spec import group_layers
from tokenwright.checkpoints.packing.shared_weights import load_shared, new_shared_file
from tokenwright.config import EngineConfig
from tokenwright.errors import RequestError
from tokenwright.models.graph import Graph
from tokenwright.models.split import RankPlace, cut_graph

DEGREES = (1, 2, 4, 8)
PATIENT = 5  # seconds in which a process should end by itself


@dataclass(frozen=True, slots=True)
class RankOptions:
    """The first message to a rank. weights, gathering: descriptors that it inherits. parent: the process of rank 0."""

    graph: Graph
    rank: int
    ranks: int
    isa: str
    weights: int
    gathering: int
    parent: int
    spins: bool


register(RankOptions)


class Workers:
    def __init__(self, graph: Graph, isa: str, weights: list[int], gathering: int) -> None:
        self._graph, self._isa, self._files, self._gathering = graph, isa, weights, gathering
        self._processes: list[tuple[subprocess.Popen[bytes], socket]] = []
        self._ended: Callable[[], Callable[[str], None] | None] = lambda: None
        self._closing = False
        self._lock = threading.Lock()

    @property
    def processes(self) -> list[int]:
        return [process.pid for process, _ in self._processes]

    def watch(self, ended: Callable[[str], None]) -> None:
        """Call `ended`, of which this keeps a weak reference, with a sentence when a process ends by itself."""
        self._ended = WeakMethod(ended)

    def start(self) -> None:
        self._closing = False
        ranks, spins = len(self._files), cores() >= len(self._files)
        for rank in range(1, ranks):
            process, connection = self._started(rank)
            self._processes.append((process, connection))
            shared = (self._files[rank], self._gathering, os.getpid(), spins)
            send(connection, packed(RankOptions(self._graph, rank, ranks, self._isa, *shared)))
            threading.Thread(target=self._wait, args=(rank, process), name=f"rank {rank}", daemon=True).start()

    def send(self, message: bytes) -> None:
        """Send a message to all. Raises OSError if one has ended."""
        for _, connection in self._processes:
            send(connection, message)

    def _started(self, rank: int) -> tuple[subprocess.Popen[bytes], socket]:
        ours, theirs = socketpair()
        with theirs:
            inherited = [theirs.fileno(), self._files[rank], self._gathering]
            command = [sys.executable, "-m", "tokenwright.llm.ranks.rank", str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=inherited, stdin=subprocess.DEVNULL, start_new_session=True)
        return process, ours

    def _wait(self, rank: int, process: "subprocess.Popen[bytes]") -> None:
        code = process.wait()
        ended = self._ended()
        if ended is not None and not self._closing:
            how = f"signal {-code}" if code < 0 else f"exit status {code}"
            ended(
                f"process {rank + 1} of the {len(self._files)} that compute the model has ended ({how}), so the engine "
                "has; open the model again"
            )

    def stop(self) -> None:
        """End the processes and wait for them. `start` may be called again."""
        with self._lock:
            self._closing = True
            processes, self._processes = self._processes, []
        for _, connection in processes:
            connection.close()
        for process, _ in processes:
            try:
                process.wait(PATIENT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def close(self) -> None:
        self.stop()
        for descriptor in (*self._files, self._gathering):
            os.close(descriptor)


def check_degree(ranks: object) -> None:
    if ranks not in DEGREES or isinstance(ranks, bool):
        raise RequestError(f"tensor_parallel is a number of processes: 1, 2, 4 or 8, not {ranks!r}", "tensor_parallel")


def refuse_files(ranks: int) -> None:
    """Raises RequestError for cache files if K and V are divided among processes."""
    if ranks > 1:
        raise RequestError(PAGES, "tensor_parallel")


def refuse_undivided(options: EngineConfig, specs: Sequence[LayerSpec], own: Sequence[LayerSpec]) -> None:
    """Raises RequestError for options that need one process. specs, own: cache specs of the model, and of rank 0."""
    if [group.layers for group in group_layers(specs)] != [group.layers for group in group_layers(own)]:
        raise RequestError(
            "the layers of this model have different numbers of heads, which so many processes cannot divide; use "
            "fewer (tensor_parallel)",
            "tensor_parallel",
        )
    for name in ("kv_disk", "draft"):
        if getattr(options, name):
            raise RequestError(f"{name} needs a model that one process computes; leave it or tensor_parallel out", name)


def rank_kernels(graph: Graph, kernels: NativeKernels | None, adapters: Mapping[int, object]) -> NativeKernels:
    """The kernels for a part of a model. Raises RequestError without them, and for adapters kept beside the weights."""
    if not hasattr(os, "memfd_create"):
        raise RequestError("tensor_parallel shares memory as only Linux does; leave it out", "tensor_parallel")
    if kernels is None or not compiles(graph):
        raise RequestError("tensor_parallel needs the native kernels; leave it out", "tensor_parallel")
    if adapters:
        raise RequestError(
            "adapters are kept beside the weights of one process; merge one (lora), or leave tensor_parallel out",
            *("adapters", "tensor_parallel"),
        )
    return kernels


def split_decoder(graph: Graph, kernels: NativeKernels, load: Callable[[], Weights], ranks: int) -> SplitDecoder:
    """Rank 0's decoder over a team of processes, which start with its first store."""
    weights, files = load(), [new_shared_file() for _ in range(ranks)]
    sizes, parts = [], []
    for rank, file in enumerate(files):
        _, cuts = cut_graph(graph, RankPlace(rank, ranks, LANES))
        parts.append(load_shared(file, partial(cut_weights, weights, cuts)))
        sizes.append(nbytes(parts[-1]))
        del parts[1:]
    del weights
    gathering = Gathering.new_file()
    workers = Workers(graph, kernels.isa, files, gathering)
    team = Team(Gathering(gathering, 0, ranks, spins=cores() >= ranks), sizes, workers)
    workers.watch(team.end)
    decoder = SplitDecoder(graph, kernels, parts[0], team)
    finalize(team, workers.close)
    return decoder
