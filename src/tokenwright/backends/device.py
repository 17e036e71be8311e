"""Chooses a model's device, dtype and number of threads, and measures a device's free memory."""

import importlib.util
import os
import platform
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast, get_args

from tokenwright.backends.ram import free_ram
from tokenwright.checks import check_device
from tokenwright.environment import Environment
from tokenwright.errors import RequestError
from tokenwright.formats import DType

if TYPE_CHECKING:
    from tokenwright.backends.torch.border import TorchDevice
    from tokenwright.backends.wgpu.gpu_memory import GpuMemory

T = TypeVar("T")

QUICK = 64 * 2**20  # bytes of weights, read in some 3 ms


@dataclass(frozen=True, slots=True)
class Device:
    """A model's device: cpu, gpu or gpu:1 (backends/wgpu), or one of torch's, such as cuda:1 or mps."""

    type: str = "cpu"
    index: int | None = None

    @classmethod
    def named(cls, name: str) -> "Device":
        kind, _, index = name.partition(":")
        return cls(kind, int(index) if index else None)

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"


CPU = Device()


class KernelThreads(threading.local):
    """`count` is the number of threads that this thread asked for, or the one set by `compute_with`."""

    count: int

    def __getattr__(self, name: str) -> int:
        """Set one thread for each core, as no number was set."""
        if name != "count":
            raise AttributeError(name)
        KernelThreads.count = cores()
        return self.count


kernel_threads = KernelThreads()


@cache
def cores() -> int:
    """OMP_NUM_THREADS, or the cores of this process: two threads of one core compute no faster than one."""
    if given := Environment.read().threads:
        return given
    return len({_core(processor) for processor in processors()}) or 1


def processors() -> Collection[int]:
    return os.sched_getaffinity(0) if sys.platform == "linux" else range(os.cpu_count() or 1)


def _core(processor: int) -> str:
    try:
        return Path(f"/sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(processor)


def torch_is_there() -> bool:
    return importlib.util.find_spec("torch") is not None


def needs_torch(what: str, *options: str) -> None:
    if not torch_is_there():
        raise RequestError(f"{what} needs torch, which is not installed; run: pip install torch", *options)


def resolve_device(name: str) -> Device:
    """A device for auto, cpu, gpu, gpu:1, cuda, cuda:1, mps. Raises RequestError."""
    if name == "cpu" or (name == "auto" and not (_accelerated() and torch_is_there())):  # importing torch takes seconds
        return CPU
    check_device(name)
    if name.startswith("gpu"):
        if importlib.util.find_spec("wgpu") is None:
            raise RequestError(f"device {name!r} needs wgpu, which is not installed; run: pip install wgpu", "device")
        from tokenwright.backends.wgpu.gpu import open_gpu

        open_gpu(Device.named(name).index)
        return Device.named(name)
    needs_torch(f"device {name!r}", "device")
    from tokenwright.backends.torch import border

    return border.usable_device(border.accelerator() if name == "auto" else name)


def _accelerated() -> bool:
    apple = sys.platform == "darwin" and platform.machine() == "arm64"
    return apple or any(map(os.path.exists, ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")))


def resolve_dtype(name: str, stored: DType, device: Device, native: bool = False) -> DType:
    """The dtype of weights and cache. `auto`: the stored one, but float32 for the reference kernels on the CPU.

    In 16 bits these round one row and many differently, so cached output could diverge from naive output.
    """
    if name == "auto":
        return "float32" if device.type == "cpu" and not native else stored
    for dtype in get_args(DType):
        if name == dtype:
            return cast(DType, dtype)
    raise RequestError(f"dtype {name!r} is not known; use auto, {', '.join(get_args(DType))}", "dtype")


def on_torch(device: Device) -> "TorchDevice":
    from tokenwright.backends.torch.border import TorchDevice

    return TorchDevice(device)


def accelerator_of(device: Device) -> "TorchDevice | GpuMemory":
    if device.type == "gpu":
        from tokenwright.backends.wgpu.gpu import open_gpu
        from tokenwright.backends.wgpu.gpu_memory import GpuMemory

        return GpuMemory(open_gpu(device.index))
    return on_torch(device)


def free_memory(device: Device) -> int | None:
    """Bytes on the device that this process may still use; None if unknown."""
    if device.type == "gpu":  # WebGPU does not report it
        return None
    return on_torch(device).free_bytes() if device.type == "cuda" else free_ram()


def compute_with(threads: int) -> None:
    """Set the number of threads for all threads that ask for no other."""
    KernelThreads.count = threads
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(threads)


def leave_a_core() -> None:
    """Leave one core to other work: threads that share a product would all wait for one without a core."""
    compute_with(max(1, kernel_threads.count - 1))  # beside only an event loop native kernels lose less by waiting


def leave_a_core_if_quick(kernels: str, weight_bytes: int) -> None:
    """`leave_a_core` if native kernels read the weights faster than a server handles a step's tokens."""
    if kernels != "reference" and weight_bytes < QUICK:
        leave_a_core()


def asked_threads(native: bool) -> int:
    torch = sys.modules.get("torch")
    return kernel_threads.count if native or torch is None else torch.get_num_threads()


def compute_here(threads: int, native: bool) -> None:
    """Compute with this number of threads in this thread, but with one in torch if native kernels compute."""
    torch = sys.modules.get("torch")
    if native:
        kernel_threads.count = threads
    if torch is None:
        return
    torch.get_num_threads()  # later it would overwrite our number
    torch.set_num_threads(1 if native else threads)  # else torch's threads spin on the kernels' cores
    # The last call in any thread sets the number for later threads.
    later = threading.Thread(target=torch.set_num_threads, args=[threads])
    later.start()
    later.join()


def each_done(jobs: Iterable[Callable[[], T]], threads: int, name: str) -> Iterator[T]:
    """The results of jobs in `threads` threads as they end; with one thread the caller runs them."""
    if min(threads, kernel_threads.count) == 1:
        yield from (job() for job in jobs)
        return
    pool = ThreadPoolExecutor(threads, f"tokenwright-{name}")
    try:
        yield from (ended.result() for ended in as_completed([pool.submit(job) for job in jobs]))
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def threads_of(count: int) -> Iterator[None]:
    """A block in which this thread computes with `count` threads, also in torch."""
    torch = sys.modules.get("torch")
    own, before = vars(kernel_threads).get("count"), 0 if torch is None else torch.get_num_threads()
    kernel_threads.count = count
    if torch is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        del kernel_threads.count
        if own is not None:
            kernel_threads.count = own
        if torch is not None:
            torch.set_num_threads(before)
