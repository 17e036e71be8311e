"""The kernels' threads: late ones, missing ones, those of a fork; how many are used, and the memory they compute in."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from ctypes import byref
from pathlib import Path

import pytest
import torch

from tests.backends.native import KERNELS, WEIGHTS, needs_native, noise, packed, threads
from tests.processes import running
from tokenwright.backends.device import kernel_threads, threads_of
from tokenwright.backends.native.native_kernels import NativeKernels
from tokenwright.backends.native.struct_builders import matrix
from tokenwright.errors import CapacityError

NATIVE = Path(__file__).parents[2] / "src" / "tokenwright" / "backends" / "native" / "cpp"
COMPILER = shutil.which("g++")
pytestmark = needs_native


def any_kernels() -> NativeKernels:
    return next(iter(KERNELS.values()))


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """With so many other processes that always compute."""
    with ExitStack() as busy:
        for _ in range(count):
            busy.enter_context(running([sys.executable, "-c", "while 1: pass"]))
        yield


# It has not started a kernel thread nor counted the processors when it forks, and neither have its children then.
FORKING = """
import json, os, resource, sys, traceback
import torch
from tokenwright.backends.device import kernel_threads
from tests.backends.native import KERNELS, noise, packed
kernel_threads.count = 1
kernels, weight, x = next(iter(KERNELS.values())), packed('int8', 100, 150), noise(20, 150)
library, right = kernels.library, kernels.linear(x, weight)
kernel_threads.count = 8
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        try:
            exec(json.loads(line))
        except BaseException:
            print(traceback.format_exc(), flush=True)
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)
    print(f"ended {os.waitpid(child, 0)[1]}", flush=True)
"""


@pytest.fixture(scope="module")
def in_a_process() -> Iterator[Callable[[str], str]]:
    """What code prints in a process of its own. One process imports what all of them need, and forks for each."""
    command = [sys.executable, "-c", FORKING]
    with running(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as forking:
        assert forking.stdin is not None and forking.stdout is not None
        asked, told = forking.stdin, forking.stdout

        def run(code: str) -> str:
            asked.write(json.dumps(code) + "\n")
            asked.flush()
            said = list[str]()
            while not (line := told.readline()).startswith("ended "):
                assert line, "the process that forks has ended"
                said.append(line)
            assert line == "ended 0\n", "".join(said)
            return "".join(said).strip()

        yield run


# ---- What is computed ----


@pytest.mark.parametrize("form", WEIGHTS)
def test_any_number_of_threads(form: str) -> None:
    """More and fewer in turn, also more than there is work for."""
    kernels, weight, x = any_kernels(), packed(form, 50, 40), noise(3, 40)
    right = kernels.linear(x, weight)
    for count in (1, 4, 2, 3, 8, 1, 4):
        with threads(count):
            assert torch.equal(kernels.linear(x, weight), right)
            assert count == 1 or kernels.library.tw_last_team() == count


def test_threads_that_are_kept_waiting_change_nothing() -> None:
    """Eight threads, and two other processes that want each processor."""
    kernels, weight, x, logits = any_kernels(), packed("int8", 600, 300), noise(40, 300), noise(3, 50_000)
    right, summary = kernels.linear(x, weight), kernels.summarise(logits)
    with neighbours(2 * (os.cpu_count() or 1)), threads(8):
        until = time.monotonic() + 2
        while time.monotonic() < until:
            assert torch.equal(kernels.linear(x, weight), right)
            assert kernels.summarise(logits) == summary


@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_torch_computes_alone_beside_native_kernels(kernels: str, in_a_process: Callable[[str], str]) -> None:
    """torch's other threads would hold the cores for which the kernels of the next step wait."""
    code = (
        f"os.environ['TOKENWRIGHT_KERNELS'] = '{kernels}'\n"
        "import threading\n"
        "from tokenwright import LLM\n"
        "from tokenwright.backends.device import asked_threads, kernel_threads\n"
        f"seen = lambda *_: (torch.get_num_threads(), asked_threads({kernels == 'native'}))\n"
        "with LLM('stories', pages=64) as llm:\n"
        "    for count in (3, 2):\n"
        "        kernel_threads.count = count\n        torch.set_num_threads(count)\n"
        "        llm.generate('Once', max_tokens=1)\n"
        "        print(*llm.llm_engine.loop.call(seen), *seen(), end=' ')\n"
        "        other = threading.Thread(target=lambda: print(torch.get_num_threads()))\n"
        "        other.start()\n"
        "        other.join()\n"
    )
    alone = kernels == "native"
    assert in_a_process(code).splitlines() == [
        f"{1 if alone else count} {count} {count} {count} {count}" for count in (3, 2)
    ]


def test_callers_take_turns() -> None:
    """Calls from several threads of Python at once, each on several of the pool: all get what is theirs."""
    kernels = any_kernels()
    weights = [packed("int8", 100, 150, seed=seed) for seed in range(4)]
    x = [noise(1 + 7 * seed, 150, seed=seed) for seed in range(4)]
    right = [kernels.linear(*pair) for pair in zip(x, weights, strict=True)]

    def many(caller: int) -> bool:
        kernel_threads.count = 1 + caller % 3  # of this thread alone
        return all(torch.equal(kernels.linear(x[caller], weights[caller]), right[caller]) for _ in range(50))

    with threads(3), ThreadPoolExecutor(4) as pool:
        assert all(pool.map(many, range(4)))


def thread_sanitized(folder: Path, check: str, *sources: str) -> Callable[..., None]:
    """Compile a check with some of the kernels' sources; returns what runs it."""
    assert COMPILER is not None
    every = [Path(__file__).parent / "cpp" / check, *(NATIVE / one for one in sources)]
    options = ["-std=gnu++17", "-O1", "-g1", "-fsanitize=thread", "-pthread"]
    command = [COMPILER, *options, f"-I{NATIVE}", "-o", str(folder / "check"), *map(str, every)]
    subprocess.run(command, check=True, timeout=300)

    def run(*arguments: str) -> None:
        command = [str(folder / "check"), *arguments]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr[-4000:]

    return run


@pytest.mark.skipif(COMPILER is None, reason="g++ compiles the pool for this test")
def test_the_pool_under_the_thread_sanitizer(tmp_path: Path) -> None:
    """Every piece once and in its phase, with threads that come late, stay away or hold a piece for long."""
    run = thread_sanitized(tmp_path, "check_pool.cpp", "threads/pool.cpp", "threads/processors.cpp")
    for exact in ("0", "2", "3", "8"):
        run(exact, "60")


@pytest.mark.skipif(COMPILER is None, reason="g++ compiles the pool for this test")
def test_the_pool_of_experts_under_the_thread_sanitizer(tmp_path: Path) -> None:
    """Passes in several threads get the file's bytes, or errors where it is cut, and all of them end."""
    thread_sanitized(tmp_path, "check_experts.cpp", "step/expert_pool.cpp")()


# ---- How many threads are used ----


def team_sizes(seconds: float) -> list[int]:
    """Of linears for so long, one after another: how many threads each was split for."""
    kernels, weight, x = any_kernels(), packed("int8", 2000, 600), noise(16, 600)
    sizes, until = list[int](), time.monotonic() + seconds
    with threads_of(2):
        while time.monotonic() < until:
            kernels.linear(x, weight)
            sizes.append(kernels.library.tw_last_team())
    return sizes


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two processors")
def test_fewer_threads_beside_busy_neighbours() -> None:
    """And again and again it is tried whether there is room for all: else they would never come back."""
    with neighbours(2 * (os.cpu_count() or 1)):
        team_sizes(0.5)
        sizes = team_sizes(3)
    assert sizes.count(1) > 0.7 * len(sizes)
    assert sizes.count(2) > 0


def test_no_more_threads_than_processors(in_a_process: Callable[[str], str]) -> None:
    code = (
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "library.tw_exact_threads(0)\n"
        "assert torch.equal(kernels.linear(x, weight), right)\n"
        "print(library.tw_last_team())"
    )
    assert in_a_process(code) == "1"


@pytest.mark.parametrize("allowed", [0, 2])
def test_a_thread_that_cannot_be_started_means_fewer(allowed: int, in_a_process: Callable[[str], str]) -> None:
    """As under `ulimit -u` and in containers with a limit of processes. root knows no such limit: it becomes nobody."""
    code = (
        f"library.tw_exact_threads(1 + {allowed})\n"
        "assert torch.equal(kernels.linear(x, weight), right)\n"  # these could be started
        "if os.getuid() == 0: os.setuid(65534)\n"
        "resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))\n"
        "library.tw_exact_threads(8)\n"
        "assert all(torch.equal(kernels.linear(x, weight), right) for _ in range(100))\n"
        "print(library.tw_last_team())"
    )
    assert in_a_process(code) == str(1 + allowed)


# ---- Forks ----


def exit_code(child: int, seconds: float) -> int | None:
    """Of a child that has ended by then; one that has not is ended, and has none."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return None


def test_a_forked_process_computes_on_threads_of_its_own() -> None:
    kernels, weight, x = any_kernels(), packed("int8", 100, 150), noise(20, 150)
    with threads(3):
        right = kernels.linear(x, weight)  # now the pool has threads, which a fork does not take along
        child = os.fork()
        if child == 0:
            same = all(torch.equal(kernels.linear(x, weight), right) for _ in range(3))
            os._exit(0 if same else 7)
        assert torch.equal(kernels.linear(x, weight), right)
    assert exit_code(child, 60) == 0


def test_a_fork_in_the_midst_of_a_step_of_another_thread(in_a_process: Callable[[str], str]) -> None:
    """The child has the pool's lock as it was, taken, and must not wait for it.

    In a process of its own: a fork beside the threads of a test runner may hang for reasons that are not ours.
    """
    code = (
        "import threading\n"
        "weight, x, stopped = packed('int8', 1000, 600), noise(64, 600), threading.Event()\n"
        "kernel_threads.count = 3\n"
        "library.tw_exact_threads(3)\n"
        "right = kernels.linear(x, weight).numpy()\n"
        "def compute():\n"
        "    kernel_threads.count = 3\n"
        "    while not stopped.is_set(): kernels.linear(x, weight)\n"
        "thread = threading.Thread(target=compute)\n"
        "thread.start()\n"
        "codes = []\n"
        "for _ in range(20):\n"
        "    child = os.fork()\n"
        "    if not child: os._exit(0 if (kernels.linear(x, weight).numpy() == right).all() else 7)\n"
        "    codes.append(os.waitpid(child, 0)[1])\n"
        "stopped.set()\n"
        "thread.join()\n"
        "print(codes == [0] * 20)"
    )
    assert in_a_process(code) == "True"


# ---- The memory that is computed in ----


def workspaces() -> int:
    return int(any_kernels().library.tw_workspaces())


def test_idle_threads_keep_no_workspace() -> None:
    kernels, weight, x = any_kernels(), packed("int8", 100, 150), noise(20, 150)
    kernels.linear(x, weight)
    before, all_have_computed = workspaces(), threading.Barrier(25)

    def client() -> None:
        kernels.linear(x, weight)
        all_have_computed.wait()
        all_have_computed.wait()

    clients = [threading.Thread(target=client) for _ in range(24)]
    for one in clients:
        one.start()
    all_have_computed.wait()
    try:
        assert workspaces() == before
    finally:
        all_have_computed.wait()
        for one in clients:
            one.join()


def test_a_workspace_goes_with_its_owner() -> None:
    before = workspaces()
    kernels, weight, x = NativeKernels(any_kernels().library, "portable"), packed("int8", 100, 150), noise(20, 150)
    kernels.linear(x, weight)
    kernels.linear(noise(40, 150), weight)
    assert workspaces() == before + 1
    del kernels
    assert workspaces() == before


def test_calls_at_once_compute_in_memory_of_their_own() -> None:
    kernels, weight, before = any_kernels(), packed("int8", 300, 600), workspaces()
    xs = [noise(200, 600, seed=seed) for seed in range(4)]
    right = [kernels.linear(x, weight) for x in xs]
    together = threading.Barrier(len(xs))

    def client(x: torch.Tensor) -> list[torch.Tensor]:
        kernel_threads.count = 1  # several threads of the pool would take turns
        together.wait()
        return [kernels.linear(x, weight) for _ in range(40)]

    with ThreadPoolExecutor(len(xs)) as clients:
        for of_one, alone in zip(clients.map(client, xs), right, strict=True):
            assert all(torch.equal(y, alone) for y in of_one)
    assert workspaces() == before


def test_a_call_that_lacks_memory_raises_and_the_next_one_computes() -> None:
    kernels, weight, x = any_kernels(), packed("int8", 100, 150), noise(20, 150)
    right, before = kernels.linear(x, weight), workspaces()
    for _ in range(2):
        with pytest.raises(CapacityError, match="token_budget"):
            kernels.compute(kernels.library.tw_linear, byref(matrix(weight)), 1 << 50, None, None, 1)
    assert torch.equal(kernels.linear(x, weight), right)
    assert workspaces() == before
