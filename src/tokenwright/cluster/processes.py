"""Starts replicas as processes of this machine, and divides its cores and memory among them."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from secrets import token_bytes
from typing import Any

from tokenwright.backends.ram import free_ram
from tokenwright.cache.page_folder import folder_secret
from tokenwright.checkpoints.packing.shared_weights import new_shared_file
from tokenwright.cluster.cluster_llm import ClusterLLM
from tokenwright.cluster.replica_messages import LENGTH, OptionValue, ReplicaOptions, framed, unframed
from tokenwright.sampling_params import check_unicode

OF_LOADING = ("revision", "device", "dtype", "weights", "lora", "adapters")  # options of LoadedModel
MOST_KV = 4 * 2**30  # bytes of the KV cache of all replicas where nothing is said, as `LLM` has it
UNSENT = 2**28  # bytes that a replica may leave unread; then it hangs


class ProcessLink:
    """The way to a replica that is a process. `messages` ends when the process does."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @property
    def name(self) -> str:
        """The process's number."""
        return str(self._process.pid)

    def send(self, message: object) -> None:
        if self._writer.transport.get_write_buffer_size() > UNSENT:
            self.kill()
        self._writer.write(framed([message]))

    async def messages(self) -> AsyncIterator[Any]:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                size = int.from_bytes(await self._reader.readexactly(LENGTH), "little")
                yield unframed(await self._reader.readexactly(size))

    def kill(self) -> None:
        """End the process now."""
        self._process.kill()

    async def close(self) -> None:
        """End the process, unless it has ended, and free what it held."""
        self.kill()
        self._writer.close()
        await asyncio.to_thread(self._process.wait)


class Processes:
    """Starts replicas of one model. options: for each, by its number. shared: the file of their weights."""

    def __init__(self, options: list[ReplicaOptions], shared: int) -> None:
        self._options = options
        self._shared = shared

    def __len__(self) -> int:
        return len(self._options)

    def close(self) -> None:
        os.close(self._shared)

    async def start(self, number: int) -> ProcessLink:
        """A process that begins to open the model."""
        ours, its = socket.socketpair()
        with its:
            command = [sys.executable, "-m", "tokenwright.cluster.replica", str(its.fileno())]
            process = subprocess.Popen(
                command, pass_fds=[its.fileno(), self._shared], stdin=subprocess.DEVNULL, start_new_session=True
            )
        reader, writer = await asyncio.open_connection(sock=ours)
        link = ProcessLink(process, reader, writer)
        link.send(self._options[number])
        return link


@dataclass(frozen=True, slots=True)
class Share:
    """The part of the machine that one replica may use."""

    cores: frozenset[int]
    threads: int


def shares(replicas: int, cores: list[int], threads: int | None = None) -> list[Share]:
    """The cores of each replica, neighbours together; with fewer cores than replicas, all may use all.

    threads: that each computes with; None: one for each of its cores.
    """
    if len(cores) < replicas:
        return [Share(frozenset(), threads or 1)] * replicas
    bounds = [len(cores) * at // replicas for at in range(replicas + 1)]
    own = [frozenset(cores[start:stop]) for start, stop in pairwise(bounds)]
    return [Share(one, threads or len(one)) for one in own]


def divided(
    model: str, replicas: int, loading: Mapping[str, Any], engine: Mapping[str, Any], threads: int | None, secret: bytes
) -> Processes:
    """Replicas that share this machine. loading, engine: as ClusterLLM has them; kv_memory is that of all replicas."""
    memory = engine.get("kv_memory") or min((free_ram() or 8 * MOST_KV) // 8, MOST_KV)
    check_unicode("model", model)
    own = {name: _plain(name, value) for name, value in engine.items()} | {"kv_memory": max(1, memory // replicas)}
    read = {name: _plain(name, value) for name, value in loading.items()}
    shared = new_shared_file()
    options = ReplicaOptions(model, read | {"shared": shared}, own, 1, frozenset(), secret)
    each = shares(replicas, sorted(os.sched_getaffinity(0)), threads)
    return Processes([replace(options, cores=one.cores, threads=one.threads) for one in each], shared)


def _plain(name: str, value: object) -> OptionValue:
    """An option's value as a message can hold it: paths and formats as text. Raises RequestError for broken text."""
    match value:
        case None | bool() | int():
            return value
        case Mapping():
            return {_text(name, key): _text(name, one) for key, one in value.items()}
        case list() | tuple():
            return tuple(_text(name, one) for one in value)
    return _text(name, value)


def _text(name: str, value: object) -> str:
    check_unicode(name, text := str(value))
    return text


def open_cluster(model: str, replicas: int, options: Mapping[str, Any], **more: Any) -> ClusterLLM:
    """An LLM over replicas on this machine. options: LLM's, and `threads`. more: keywords of ClusterLLM."""
    engine, disk = dict(options), options.get("kv_disk")
    secret = token_bytes(32) if disk is None else folder_secret(Path(disk).expanduser())  # as the pages there have it
    threads = engine.pop("threads", None)
    loading = {name: engine.pop(name) for name in OF_LOADING if name in engine}
    launcher = divided(model, replicas, loading, engine, threads, secret)
    return ClusterLLM(model, launcher, secret, loading, engine, **more)
