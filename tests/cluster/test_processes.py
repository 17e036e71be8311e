"""What the processes of replicas are given to open."""

import asyncio
import fcntl
import gc
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.processes import running
from tokenwright.backends.device import compute_with, kernel_threads
from tokenwright.checkpoints.packing.shared_weights import new_shared_file
from tokenwright.cluster.cluster_llm import ReplicatedModel
from tokenwright.cluster.processes import Processes, divided
from tokenwright.cluster.replica import _opened, messages_of
from tokenwright.cluster.replica_messages import LENGTH, Ping, ReplicaOpened, ReplicaOptions, framed, unframed
from tokenwright.errors import RequestError
from tokenwright.formats import WeightFormat


@pytest.fixture
def divide(monkeypatch: pytest.MonkeyPatch):
    """`divided`, as the frames of the options of two replicas."""
    taken: list[ReplicaOptions] = []
    monkeypatch.setattr(Processes, "__init__", lambda self, options, shared: taken.extend(options))
    monkeypatch.setattr("tokenwright.cluster.processes.new_shared_file", lambda: 7)

    def frames(model, loading, engine):
        divided(ReplicatedModel(model, loading, engine, 1, b"\xff\0"), 2)
        return taken, [framed([one]) for one in taken]

    return frames


def test_options_are_sent_as_plain_values(divide):
    loading = {"revision": None, "weights": WeightFormat.parse("int8:32"), "lora": [Path("a/b")]}
    sent, frames = divide("stories", loading | {"adapters": {"one": Path("c")}}, {"kv_memory": 100, "sinks": 0})
    got = [unframed(frame[LENGTH:]) for frame in frames]
    assert got == sent
    assert got[0].loading == {
        "revision": None,
        "weights": "int8:32",
        "lora": ("a/b",),
        "adapters": {"one": "c"},
        "shared": 7,
    }
    assert got[0].engine == {"kv_memory": 50, "sinks": 0} and got[0].secret == b"\xff\0"


@pytest.mark.parametrize(
    ("model", "loading", "name"),
    [("\udcff", {}, "model"), ("a", {"lora": ["\udcff"]}, "lora"), ("a", {"adapters": {"x": "\udcff"}}, "adapters")],
)
def test_names_that_are_not_utf_8_are_refused(divide, model, loading, name):
    with pytest.raises(RequestError, match=f"{name} is not UTF-8"):
        divide(model, loading, {"kv_memory": 100})


@pytest.mark.parametrize(("asked", "found"), [(None, 2), (3, 3)])
def test_a_replica_of_a_quick_model_leaves_a_core_to_the_router(monkeypatch, asked, found):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    launcher = divided(ReplicatedModel("stories", {}, {"kv_memory": 1 << 20}, asked, b""), 1)
    before, frozen, sent = kernel_threads.count, gc.get_freeze_count(), []
    try:
        with _opened(launcher._options[0], SimpleNamespace(put=sent.append))._llm:
            assert isinstance(sent[-1], ReplicaOpened)
            assert kernel_threads.count == found
            assert gc.get_freeze_count() > frozen
    finally:
        compute_with(before)
        gc.unfreeze()
        launcher.close()


def test_a_replica_that_opens_its_model_ends_with_its_router():
    ours, its = socket.socketpair()
    shared = new_shared_file()
    fcntl.lockf(shared, fcntl.LOCK_EX)  # it waits for weights that never come
    options = ReplicaOptions("stories", {"shared": shared}, {"kv_memory": 1 << 20}, 1, frozenset(), b"")
    command = [sys.executable, "-m", "tokenwright.cluster.replica", str(its.fileno())]
    with running(command, pass_fds=[its.fileno(), shared]) as process:
        its.close()
        ours.sendall(framed([options]))
        ours.close()
        assert process.wait(300) == 0
    os.close(shared)


def test_the_messages_of_a_router_that_is_killed_end_without_an_error():
    ours, its = socket.socketpair()
    its.sendall(b"a report that the router does not read any more")  # so its end resets the connection
    ours.sendall(framed([Ping()]))
    with its:
        messages = messages_of(its)
        assert next(messages) == Ping()
        ours.close()
        assert list(messages) == []


def test_a_replica_whose_start_is_cancelled_leaves_no_process(monkeypatch: pytest.MonkeyPatch):
    started: list[subprocess.Popen] = []
    made = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **more: started.append(made(*args, **more)) or started[-1])
    launcher = divided(ReplicatedModel("stories", {}, {"kv_memory": 1 << 20}, 1, b""), 1)

    async def test():
        connecting = asyncio.Event()

        async def connect(sock):
            connecting.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(asyncio, "open_connection", connect)
        starting = asyncio.create_task(launcher.start(0))
        await connecting.wait()
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        assert starting.cancelled() and started[0].returncode is not None

    try:
        asyncio.run(test())
    finally:
        started[0].kill()
        started[0].wait()
        launcher.close()
