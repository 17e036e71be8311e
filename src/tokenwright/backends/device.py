"""Resolve a model's device and dtype, and measure the free memory of a device."""

from typing import cast, get_args

import torch

from tokenwright.backends.ram import free_ram
from tokenwright.config import DType
from tokenwright.errors import RequestError


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
    """Compute with so many threads, in this thread and in threads that start later."""
    torch.set_num_threads(threads)


def leave_a_core() -> None:
    """Compute with one thread fewer, in this thread and in threads that start later, to leave a core to a browser.

    Threads that share a product wait for each other: if one waits for the core that the browser uses, all wait.
    """
    torch.set_num_threads(max(1, torch.get_num_threads() - 1))
