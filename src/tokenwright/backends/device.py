"""A model's device and dtype, the free memory of a device, and how many threads compute."""

import threading
from typing import cast, get_args

import torch

from tokenwright.backends.ram import free_ram
from tokenwright.errors import RequestError
from tokenwright.formats import DType


class KernelThreads(threading.local):
    """`own`: how many threads native kernels use that this thread calls; 0: as many as torch."""

    own = 0

    @property
    def count(self) -> int:
        return self.own or torch.get_num_threads()


kernel_threads = KernelThreads()


def resolve_device(name: str) -> torch.device:
    """A torch device for auto, cpu, cuda, cuda:1, mps. Raises RequestError for an unknown or unavailable device."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise RequestError(f"device {name!r} is not known; use auto, cpu, cuda, cuda:N or mps", "device") from None
    there = {
        "cpu": True,
        "cuda": torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count(),
        "mps": torch.backends.mps.is_available(),
    }
    if not there.get(device.type, False):
        raise RequestError(f"device {name!r} is not usable with this torch on this machine; use auto or cpu", "device")
    return device


def resolve_dtype(name: str, stored: DType, device: torch.device, native: bool = False) -> DType:
    """The dtype of weights and cache. `auto`: the checkpoint's dtype, but float32 for the reference kernels on the CPU.

    The reference kernels round 16-bit products differently for one row and for many, so cached and naive output could
    diverge; widened to float32, which is exact, they agree. The native kernels compute in float32 for every stored
    dtype. Raises RequestError for an unknown name.
    """
    if name == "auto":
        return "float32" if device.type == "cpu" and not native else stored
    for dtype in get_args(DType):
        if name == dtype:
            return cast(DType, dtype)
    raise RequestError(f"dtype {name!r} is not known; use auto, {', '.join(get_args(DType))}", "dtype")


def free_memory(device: torch.device) -> int | None:
    """Bytes on the device that this process may still use; None if the system does not report them."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return free_ram()


def compute_with(threads: int) -> None:
    """Set the number of compute threads, of this thread and of threads that start later."""
    torch.set_num_threads(threads)


def compute_beside_kernels(threads: int) -> None:
    """Native kernels use `threads` threads here, and torch one; in threads that start later torch uses `threads`.

    After an operation, torch's threads wait for the next one at full speed, for milliseconds in which they hold the
    cores that the kernels of the next step need: with two cores and 151,936 ids a sampled step took half as long again.
    """
    kernel_threads.own = threads
    torch.get_num_threads()  # torch sets a thread's number at its first call, and would set it over ours
    torch.set_num_threads(1)
    # The last call in any thread decides for threads that start later.
    later = threading.Thread(target=torch.set_num_threads, args=[threads])
    later.start()
    later.join()


def leave_a_core() -> None:
    """Compute with one thread fewer, in this thread and in threads that start later, to leave a core to others.

    Threads that share a product wait for each other: if one waits for the core that a browser uses, all wait. Native
    kernels beside a mere event loop lose less by that than by a thread fewer.
    """
    torch.set_num_threads(max(1, torch.get_num_threads() - 1))
