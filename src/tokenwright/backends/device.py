"""Where and in which precision a model runs, and how much memory there is for it."""

from pathlib import Path
from typing import cast, get_args

import torch

from tokenwright.config import DType
from tokenwright.errors import RequestError


def resolve_device(name: str) -> torch.device:
    """A torch device for auto, cpu, cuda, cuda:1, mps. Raises RequestError for one that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise RequestError(f"device {name!r} is not known; use auto, cpu, cuda, cuda:N or mps") from None
    there = {
        "cpu": True,
        "cuda": torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count(),
        "mps": torch.backends.mps.is_available(),
    }
    if not there.get(device.type, False):
        raise RequestError(f"device {name!r} is not usable with this torch on this machine; use auto or cpu")
    return device


def resolve_dtype(name: str, stored: DType, device: torch.device, native: bool = False) -> DType:
    """The dtype of weights and cache. `auto` is the checkpoint's; with the reference kernels on the CPU float32.

    Those round 16-bit products differently for one row and for many, so cached and naive text could part; widened to
    float32, which is exact, they agree. The native ones compute in float32 whatever is stored.
    """
    if name == "auto":
        return "float32" if device.type == "cpu" and not native else stored
    for dtype in get_args(DType):
        if name == dtype:
            return cast(DType, dtype)
    raise RequestError(f"dtype {name!r} is not known; use auto, {', '.join(get_args(DType))}")


def free_memory(device: torch.device) -> int | None:
    """Bytes that can be taken on the device now; None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def leave_a_core() -> None:
    """Compute with one thread fewer, here and in threads that begin later: for when something else must run beside it.

    Threads that share a product wait for each other; where one waits for a core that a browser draws on, all do.
    """
    torch.set_num_threads(max(1, torch.get_num_threads() - 1))
