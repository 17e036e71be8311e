"""How fast this machine reads memory, by a clock: the one measured figure of a plan."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from tokenwright.models.device import free_memory, resolve_device

_LEAST, _MOST = 1 << 28, 1 << 32  # bytes of the buffer
_SECONDS = 0.3


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes read per second; `kind` says whether a clock said so here, or a person."""

    bytes_per_second: float
    kind: Literal["measured", "given"]
    place: str  # the device it is about


def measure(device: str = "auto", seconds: float = _SECONDS) -> Bandwidth:
    """The best of several sums over a buffer that is larger than the caches, with torch's threads.

    A sum reads every byte once and writes nothing. The best pass is taken, because whatever else the machine does can
    only slow one down.
    """
    place = resolve_device(device)
    buffer = torch.ones(_buffer_bytes(place) // 4, dtype=torch.float32, device=place)
    buffer.sum().item()  # the first pass pays for what comes only once
    best, end = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < end:
        start = time.perf_counter()
        buffer.sum().item()  # item() waits for the device
        best = min(best, time.perf_counter() - start)
    return Bandwidth(buffer.nbytes / best, "measured", str(place))


def _buffer_bytes(place: torch.device) -> int:
    """Four times the largest cache at least, but no more than a quarter of the free memory."""
    wanted = _MOST if place.type != "cpu" else max(_LEAST, 4 * _largest_cache())
    return max(4, min(wanted, _MOST, (free_memory(place) or _MOST) // 4))


def _largest_cache(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Bytes of the processor's largest cache; 0 where the system does not tell."""
    sizes = [0]
    for file in folder.glob("index*/size"):
        text = file.read_text().strip()
        if text.endswith("K") and text[:-1].isdigit():
            sizes.append(int(text[:-1]) << 10)
    return max(sizes)
