"""Starts replicas as processes, among which it divides the machine's cores and memory."""

import asyncio
import os
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from tokenwright.backends.ram import free_ram
from tokenwright.checkpoints.folder import Report
from tokenwright.checkpoints.packing.shared_weights import new_shared_file
from tokenwright.cluster.cluster_llm import EXPERTS, ReplicatedModel, cluster_of, plain
from tokenwright.cluster.replica_messages import LENGTH, End, ReplicaOptions, framed, unframed
from tokenwright.cluster.served_replica import CHALLENGE, WELCOME, proof_of
from tokenwright.llm.llm import LLM
from tokenwright.sampling_params import check_unicode

MOST_UNREAD = 2**28  # bytes; a replica that leaves more unread hangs


class _StreamLink(ABC):
    def __init__(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.name = name
        self._reader = reader
        self._writer = writer

    def send(self, message: object) -> None:
        if self._writer.transport.is_closing():  # it has died; uvloop raises on a write
            return
        if self._writer.transport.get_write_buffer_size() > MOST_UNREAD:
            self.kill()
        self._writer.write(framed([message]))

    async def messages(self) -> AsyncIterator[Any]:
        with suppress(asyncio.IncompleteReadError, OSError):  # OSError: a network may time out, or have no route
            while True:
                size = int.from_bytes(await self._reader.readexactly(LENGTH), "little")
                yield unframed(await self._reader.readexactly(size))

    @abstractmethod
    def kill(self) -> None: ...


class ProcessLink(_StreamLink):
    def __init__(self, process: subprocess.Popen[bytes], *streams: Any) -> None:
        super().__init__(str(process.pid), *streams)
        self._process = process

    def kill(self) -> None:
        self._process.kill()

    async def close(self) -> None:
        self.kill()
        self._writer.close()
        await asyncio.to_thread(self._process.wait)


class RemoteLink(_StreamLink):
    """The connection to a replica of another program. forget: called by `close`."""

    def __init__(self, forget: Callable[[], object], name: str, *streams: Any) -> None:
        super().__init__(name, *streams)
        self._forget = forget

    def kill(self) -> None:
        """Ask the replica to end, and read no more."""
        if not self._writer.is_closing():
            self._writer.write(framed([End()]))
            self._writer.close()
        self._reader.feed_eof()

    async def close(self) -> None:
        """Disconnect; it may have other routers."""
        self._writer.close()
        self._forget()


async def linked(address: tuple[str, int], secret: bytes, forget: Callable[[], object]) -> RemoteLink | None:
    """Connect to a replica; returns None if it does not know the secret. Raises OSError, EOFError."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        challenge = await reader.readexactly(CHALLENGE)
        writer.write(proof_of(secret, challenge))
        welcome = await reader.read(len(WELCOME))
    except BaseException:
        writer.close()
        raise
    if welcome != WELCOME:
        writer.close()
        return None
    return RemoteLink(forget, f"{address[0]}:{address[1]}", reader, writer)


Load = Callable[[Report], LLM]

MOST_KV = 4 * 2**30  # bytes of all replicas' KV cache by default, as in `LLM`


class Processes:
    def __init__(self, options: list[ReplicaOptions], shared: int) -> None:  # shared: the weights' file
        self._options = options
        self._shared = shared

    def __len__(self) -> int:
        return len(self._options)

    def close(self) -> None:
        os.close(self._shared)

    async def start(self, number: int) -> ProcessLink:
        ours, its = socket.socketpair()
        with its:
            command = [sys.executable, "-m", "tokenwright.cluster.replica", str(its.fileno())]
            process = subprocess.Popen(
                command, pass_fds=[its.fileno(), self._shared], stdin=subprocess.DEVNULL, start_new_session=True
            )
        try:
            reader, writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            process.kill()
            ours.close()
            await asyncio.to_thread(process.wait)
            raise
        link = ProcessLink(process, reader, writer)
        link.send(self._options[number])
        return link


@dataclass(frozen=True, slots=True)
class Share:
    cores: frozenset[int]
    threads: int


def shares(replicas: int, cores: list[int], threads: int | None = None) -> list[Share]:
    """Divide cores among replicas, neighbours together; with fewer cores than replicas, each uses all."""
    if len(cores) < replicas:
        return [Share(frozenset(), threads or 1)] * replicas
    bounds = [len(cores) * at // replicas for at in range(replicas + 1)]
    own = [frozenset(cores[start:stop]) for start, stop in pairwise(bounds)]
    return [Share(one, threads or len(one)) for one in own]


def kv_memory_of(engine: Mapping[str, Any]) -> int:
    return engine.get("kv_memory") or min((free_ram() or 8 * MOST_KV) // 8, MOST_KV)


def divided(wanted: ReplicatedModel, replicas: int) -> Processes:
    check_unicode("model", wanted.model)
    own = plain(wanted.engine) | {"kv_memory": max(1, kv_memory_of(wanted.engine) // replicas)}
    read, threads, shared = wanted.loading_of(replicas), wanted.threads, new_shared_file()
    options = ReplicaOptions(
        model=wanted.model,
        loading=read if EXPERTS in read else read | {"shared": shared},
        engine=own,
        threads=1,
        cores=frozenset(),
        secret=wanted.secret,
        spare=threads is None,
        files=wanted.files,
    )
    each = shares(replicas, sorted(os.sched_getaffinity(0)), threads)
    return Processes([replace(options, cores=one.cores, threads=one.threads) for one in each], shared)


def open_cluster(model: str, replicas: int, options: Mapping[str, Any], **more: Any) -> LLM:
    """options: LLM's, and `threads`. more: of `ReplicatedModel.opened`. Raises CheckpointError."""
    wanted = ReplicatedModel.of(model, options).pinned()
    return wanted.opened(divided(wanted, replicas), **more)


@dataclass(frozen=True, slots=True)
class ReplicaSource:
    load: Load  # all three are slow, and raise the error if the model cannot be opened
    again: Load  # beside the present model, first with one replica
    changed: Callable[[LLM], bool]  # whether `load` would open another model


def processes_of(model: str, replicas: int, options: Mapping[str, Any], **more: Any) -> ReplicaSource:
    memory = kv_memory_of(options)  # computed once: the present model uses free memory
    options = dict(options) | {"kv_memory": memory}

    def changed(llm: LLM) -> bool:
        cluster = cluster_of(llm)
        return cluster is None or ReplicatedModel.of(model, options).pinned().files != cluster.files

    def load(report: Report) -> LLM:
        return open_cluster(model, replicas, options, report=report, **more)

    def again(report: Report) -> LLM:
        return open_cluster(model, replicas, options, report=report, starting=1, **more)

    return ReplicaSource(load, again, changed)
